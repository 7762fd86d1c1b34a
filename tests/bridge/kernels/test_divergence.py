"""The fused divergence of a student from a teacher, against torch's kl_div in fp64."""

import pytest
import torch
import torch.nn.functional as F
from megaswift.bridge.layers import divergence as layers
from megaswift.bridge.layers.divergence import divergence
from megaswift.bridge.layers.logprobs import OutputMatrix

TOKENS, SIZES, VOCAB, ROWS = (2, 5), (8, 6), 69, 72  # 3 rows of the matrices are padding, far larger than all else
TEMPERATURES = 0.7, 1.3


@pytest.fixture
def inputs(device, monkeypatch):
    """Hidden states [sequence, batch, hidden size] and matrix of both models, and gradients; blocks of 32 columns."""
    from megaswift.bridge.kernels import divergence as kernels
    from megaswift.bridge.kernels import log_probs

    for module in (kernels, log_probs):
        monkeypatch.setattr(module, "column_blocks", lambda width: {"BLOCK": 32, "num_warps": 1})
    generator = torch.Generator().manual_seed(0)
    models = []
    for size in SIZES:
        hidden, weight = (torch.randn(*shape, size, generator=generator) for shape in (TOKENS[::-1], (ROWS,)))
        weight[VOCAB:] = 1e3
        models += [hidden.to(device), weight.to(device)]
    slopes = torch.randn(TOKENS, generator=generator).to(device)
    slopes[0, 3] = 0.0
    return models[0].requires_grad_(), models[1].requires_grad_(), *models[2:], slopes


def exact(inputs, beta, caps=(None, None)):
    """Divergences, and the gradients of the student's hidden states and matrix."""
    *models, slopes = (x.detach().double() for x in inputs)
    student = [x.requires_grad_() for x in models[:2]]
    logs = []
    for (hidden, weight), temperature, cap in zip((student, models[2:]), TEMPERATURES, caps, strict=True):
        logits = hidden.transpose(0, 1) @ weight[:VOCAB].t()
        logits = logits if cap is None else cap * (logits / cap).tanh()
        logs.append((logits / temperature).log_softmax(-1))
    p, q = logs

    def kl(first, second):
        return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        expected = kl(q, p) if beta == 0 else kl(p, q)
    else:
        shares = torch.tensor([beta, 1 - beta]).log()
        mixture = torch.logaddexp(q + shares[0], p + shares[1])
        expected = beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    return expected, *torch.autograd.grad(expected, student, slopes)


def close(computed, expected):
    for mine, reference in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("caps", [(None, None), (3.0, None), (None, 2.0)])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_kept_and_computed_again(alone, inputs, beta, caps, monkeypatch):
    """The numbers are the same however many chunks are kept, and for a second backward pass."""
    from megaswift.bridge.kernels import logits

    *models, slopes = inputs
    output = OutputMatrix(models[1], VOCAB, alone, cap=caps[0])
    settings = {"beta": beta, "temperatures": TEMPERATURES, "teacher_cap": caps[1]}
    monkeypatch.setattr(layers, "FUSED_CHUNK_LOGITS", 4 * ROWS)
    several = []
    for room, kept in ((0, 0), (2 * 4 * 128 * 4, 1), (2**20, 3)):
        monkeypatch.setattr(logits, "max_kept_bytes", lambda device, room=room: room)
        computed = divergence(models[0], output, *models[2:], **settings)
        for again in (True, False):
            assert sum(len(each.chunks) for each in logits.KeptLogits.instances) == (kept if again else 0)
            gradients = torch.autograd.grad(computed, models[:2], slopes, retain_graph=again)
            several.append((computed.detach(), *gradients))
    close(several[0], exact(inputs, beta, caps))
    for other in several[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, several[0], strict=True))
    with torch.no_grad():
        assert torch.equal(divergence(models[0], output, *models[2:], **settings), several[0][0])


def test_far_apart(alone, inputs):
    """Each model is sure of another token: no term overflows, or is 0 times infinity."""
    *models, slopes = inputs
    models = [model.detach() * 60 for model in models[:2]] + [model * 60 for model in models[2:]]
    models = [model.requires_grad_(number < 2) for number, model in enumerate(models)]
    for beta in (0.0, 0.5, 1.0):
        output = OutputMatrix(models[1], VOCAB, alone)
        computed = divergence(models[0], output, *models[2:], beta=beta, temperatures=TEMPERATURES)
        gradients = torch.autograd.grad(computed, models[:2], slopes)
        reference = exact((*models, slopes), beta)
        for mine, theirs in zip((computed, *gradients), reference, strict=True):
            assert mine.isfinite().all()
            assert (mine - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_columns_on_three_ranks(inputs, beta):
    """The second rank has the padding, and the third nothing else."""
    from megaswift.bridge.kernels.divergence import Comparison, FusedDivergence
    from megaswift.bridge.kernels.logits import LogitForm

    hidden, weight, teacher_hidden, teacher_weight, slopes = inputs
    divergences, grad_hidden, grad_weight = exact(inputs, beta)
    flat, teacher_flat = (
        states.detach().transpose(0, 1).reshape(-1, states.shape[-1]) for states in (hidden, teacher_hidden)
    )
    flat.requires_grad_()
    parts, teacher_parts = (
        [part.clone() for part in torch.cat((matrix, matrix.new_full((36, matrix.shape[1]), 1e3))).chunk(3)]
        for matrix in (weight.detach(), teacher_weight)
    )
    held_sums, held_totals = [], []

    def call(rank, over_ranks, sum_over_ranks):
        columns = min(36, max(0, VOCAB - 36 * rank))
        forms = [LogitForm(36 * rank, columns, 1 / temperature) for temperature in TEMPERATURES]
        part = parts[rank].requires_grad_()
        models = flat, part, teacher_flat, teacher_parts[rank]
        return FusedDivergence.apply(
            *models, Comparison(*forms, beta), (slice(0, 10),), over_ranks, sum_over_ranks, True, False
        )

    def hold(held):
        return lambda values: held.append(values.clone()) or values

    for rank in range(3):
        call(rank, hold(held_sums), lambda totals: totals)
    log_sums = torch.stack(held_sums).logsumexp(0)
    for rank in range(3):
        call(rank, lambda _: log_sums, hold(held_totals))
    totals = torch.stack(held_totals).sum(0)
    for rank in range(3):
        computed = call(rank, lambda _: log_sums, lambda _: totals)
        close([computed], [divergences.flatten()])
        computed.backward(slopes.flatten())  # the ranks' parts of the hidden states' gradient are summed here
    close([flat.grad], [grad_hidden.transpose(0, 1).reshape(-1, SIZES[0])])
    close([torch.cat([part.grad for part in parts])[:ROWS]], [grad_weight])
    assert not parts[2].grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_of_what_is_frozen_no_gradient_is_made(alone, inputs, frozen):
    hidden, weight, *teacher, slopes = inputs
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    output = OutputMatrix(weight, VOCAB, alone)
    divergence(hidden, output, *teacher, beta=0.5, temperatures=TEMPERATURES).backward(slopes)
    _, *expected = exact(inputs, 0.5)
    assert (hidden.grad is None, weight.grad is None) == (frozen == "hidden", frozen == "weight")
    close([weight.grad if frozen == "hidden" else hidden.grad], [expected[frozen == "hidden"]])


def test_gradients_are_added_in_the_product(alone, inputs):
    hidden, weight, *teacher, slopes = inputs
    before = torch.randn_like(weight)
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = before.clone(), False, True
    output = OutputMatrix(weight, VOCAB, alone, accumulate=True)
    divergence(hidden, output, *teacher, beta=0.5, temperatures=TEMPERATURES).backward(slopes)
    _, grad_hidden, grad_weight = exact(inputs, 0.5)
    close([hidden.grad, weight.main_grad], [grad_hidden, grad_weight + before])
    assert weight.grad_added_to_main_grad


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_half_precision(alone, beta):
    """An odd vocabulary of more than a block, and more logits than 32 bits can number."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, size, tokens, vocab = 50_259, 64, 43_008, 50_257

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    models = [random(tokens, 1, size), random(rows, size) / 4, random(tokens, 1, size), random(rows, size) / 4]
    student = [model.requires_grad_() for model in models[:2]]
    slopes = random(1, tokens).float()
    computed = divergence(student[0], OutputMatrix(student[1], vocab, alone), *models[2:], beta=beta)
    gradients = torch.autograd.grad(computed, student, slopes)
    wholes = [x.detach().float() for x in models]
    for whole in wholes[:2]:
        whole.requires_grad_()
    for part in torch.arange(tokens, device="cuda").split(2048):
        p, q = ((states[part, 0] @ matrix[:vocab].t()).log_softmax(-1) for states, matrix in (wholes[:2], wholes[2:]))
        mixture = torch.logsumexp(torch.stack((p, q)), 0) - torch.log(torch.tensor(2.0))
        first, second = {0.0: (q, p), 1.0: (p, q), 0.5: (p, mixture)}[beta]
        expected = F.kl_div(second, first, reduction="none", log_target=True).sum(-1)
        if beta == 0.5:
            expected = (expected + F.kl_div(mixture, q, reduction="none", log_target=True).sum(-1)) / 2
        torch.testing.assert_close(computed[0, part], expected, rtol=2e-2, atol=2e-2)
        expected.backward(slopes[0, part])
    for mine, whole in zip(gradients, wholes[:2], strict=True):
        assert (mine.float() - whole.grad).norm() < 2e-2 * whole.grad.norm()
