"""Losses of tokens, against straightforward formulas."""

import torch
from megaswift.tasks.losses.tokens import cross_entropy, weigh_by_probability


def test_dynamic_fine_tuning() -> None:
    """https://arxiv.org/abs/2508.05629: each token's cross entropy times its probability, which has no gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (2, 7), generator=generator)
    weights = torch.tensor([[0.0, 1, 1, 0.5, 1, 0, 1], [1, 1, 0, 0, 1, 2, 1]], dtype=torch.float64)
    log_probs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    loss = cross_entropy(weigh_by_probability(log_probs), weights)
    probabilities = logits.detach().softmax(-1).gather(-1, labels[..., None])[..., 0]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    wanted = (losses * probabilities * weights).sum()
    torch.testing.assert_close(loss, wanted)
    gradients = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, wanted)]
    torch.testing.assert_close(*gradients)
    # At such a weight a token's gradient is that of its probability: -(d p) = p x (-d log p).
    torch.testing.assert_close(gradients[0], torch.autograd.grad(-(log_probs.exp() * weights).sum(), logits)[0])
