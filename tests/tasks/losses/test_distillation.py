"""GKD's loss, against TRL's on the same numbers."""

import torch
from megaswift.bridge.layers.divergence import jensen_shannon
from megaswift.tasks.losses.distillation import distillation_loss
from torch.nn.functional import cross_entropy


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(3, 7, 19, generator=torch.Generator().manual_seed(seed))


def test_micro_batches_are_trls_batch():
    """Shares of two micro batches add up to TRL's loss over all trained tokens; cross entropy is torch's."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = drawn(0).requires_grad_(), drawn(1)
    labels = torch.where(drawn(2)[..., 0] > -0.5, torch.arange(21).view(3, 7) % 19, -100)
    weights = (labels != -100).float()
    for beta, alpha in ((0.0, 0.0), (0.5, 0.3), (1.0, 0.3)):
        log_probs = student.log_softmax(-1)
        divergences = jensen_shannon(log_probs, teacher.log_softmax(-1), beta)
        chosen = log_probs.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
        shares = [
            distillation_loss(
                divergences[part], weights[part], weights.sum().item(), log_probs=chosen[part], sft_alpha=alpha
            )
            for part in (slice(0, 1), slice(1, 3))
        ]
        loss = shares[0][0] + shares[1][0]
        expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
        entropy = cross_entropy(student.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(loss, expected + alpha * entropy, rtol=1e-6, atol=1e-6)
        slopes = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (loss, expected + alpha * entropy)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)
        wanted = {"loss": loss, "jsd": expected} | ({"nll_loss": entropy} if alpha else {})
        for name, value in wanted.items():
            torch.testing.assert_close(
                sum(metrics[name] for _, metrics in shares), value.detach(), rtol=1e-6, atol=1e-6
            )
        assert all(metrics.keys() == wanted.keys() for _, metrics in shares)


def test_nothing_is_trained():
    divergences = torch.ones(1, 4, requires_grad=True)
    loss, _ = distillation_loss(divergences, torch.zeros(1, 4), 0.0)
    loss.backward()
    assert loss == 0
    assert not divergences.grad.any()
