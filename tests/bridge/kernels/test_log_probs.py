"""The fused log-probabilities of labels, against torch's log_softmax in fp64."""

import pytest
import torch
from megaswift.bridge.layers.logprobs import OutputMatrix, label_log_probs, log_probs_and_entropies

TOKENS, SIZE, VOCAB, ROWS = (2, 5), 8, 69, 72  # 3 rows of the matrix are padding, far larger than all else


@pytest.fixture
def inputs(device, monkeypatch):
    """hidden [sequence, batch, hidden_size], weight, labels and gradients [batch, sequence]; blocks of 32 columns."""
    from megaswift.bridge.kernels import log_probs

    monkeypatch.setattr(log_probs, "column_blocks", lambda width: {"BLOCK": 32, "num_warps": 1})
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*TOKENS[::-1], SIZE, generator=generator)
    weight = torch.randn(ROWS, SIZE, generator=generator)
    weight[VOCAB:] = 1e3
    labels = torch.randint(0, VOCAB, TOKENS, generator=generator)
    slopes = torch.randn(TOKENS, generator=generator)
    slopes[0, 3] = 0.0
    hidden, weight, labels, slopes = (x.to(device) for x in (hidden, weight, labels, slopes))
    return hidden.requires_grad_(), weight.requires_grad_(), labels, slopes


def exact(hidden, weight, labels, slopes, temperature, cap=None):
    """Log-probabilities, and the gradients of hidden and weight."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden.transpose(0, 1) @ weight[:VOCAB].t()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    found = (logits / temperature).log_softmax(-1).gather(2, labels[..., None]).squeeze(2)
    return found, *torch.autograd.grad(found, (hidden, weight), slopes.double())


def gather_or_raise(found, expected):
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-5)


def waiting(module) -> int:
    """Chunks of logits that are kept."""
    return sum(len(kept.chunks) for kept in module.KeptLogits.instances)


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.7, None), (0.7, 3.0)])
def test_kept_and_computed_again(alone, inputs, temperature, cap, monkeypatch):
    """The numbers are the same however many chunks are kept, and for a second backward pass."""
    from megaswift.bridge.kernels import log_probs, logits

    hidden, weight, labels, slopes = inputs
    output = OutputMatrix(weight, VOCAB, alone, cap=cap)
    monkeypatch.setattr(log_probs, "_chunks", lambda hidden, columns: [slice(0, 4), slice(4, 8), slice(8, 10)])
    several = []
    for room, kept in ((0, 0), (4 * 128 * 4, 1), (2**20, 3)):
        monkeypatch.setattr(logits, "max_kept_bytes", lambda device, room=room: room)
        found = label_log_probs(hidden, output, labels, temperature=temperature)
        assert waiting(logits) == kept
        for again in (True, False):
            several.append((found.detach(), *torch.autograd.grad(found, (hidden, weight), slopes, retain_graph=again)))
            assert waiting(logits) == 0
    gather_or_raise(several[0], exact(*inputs, temperature, cap))
    for other in several[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(other, several[0], strict=True))
    with torch.no_grad():
        assert torch.equal(label_log_probs(hidden, output, labels, temperature=temperature), several[0][0])
        assert waiting(logits) == 0


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_entropies(alone, inputs, temperature):
    """From the same reading as the log-probabilities, which stay what they are; also where a token is all but sure."""
    hidden, weight, labels, slopes = inputs
    output = OutputMatrix(weight, VOCAB, alone)
    found, entropies = log_probs_and_entropies(hidden, output, labels, temperature=temperature)
    gather_or_raise((found, *torch.autograd.grad(found, (hidden, weight), slopes)), exact(*inputs, temperature))
    assert torch.equal(found, label_log_probs(hidden, output, labels, temperature=temperature))
    logits = hidden.detach().double().transpose(0, 1) @ weight.detach()[:VOCAB].double().t() / temperature
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert not entropies.requires_grad
    gather_or_raise([entropies], [expected])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_entropies(alone, inputs, temperature):
    """Alone, and with those of the log-probabilities, from logits that were kept."""
    hidden, weight, labels, slopes = inputs
    output = OutputMatrix(weight, VOCAB, alone)
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_probs = (doubles[0].transpose(0, 1) @ doubles[1][:VOCAB].t() / temperature).log_softmax(-1)
    uncertain = -(log_probs.exp() * log_probs).sum(-1)
    for share in (0.0, 0.7):
        settings = {"temperature": temperature, "trains_entropy": True}
        found, entropies = log_probs_and_entropies(hidden, output, labels, **settings)
        mine = torch.autograd.grad(share * found + entropies if share else entropies, (hidden, weight), slopes)
        expected = share * log_probs.gather(2, labels[..., None]).squeeze(2) + uncertain
        theirs = torch.autograd.grad(expected, doubles, slopes.double(), retain_graph=True)
        assert min(slope.abs().max() for slope in theirs) > 1e-2
        gather_or_raise(mine, theirs)


def test_calls_that_wait_share_the_room(alone, inputs, monkeypatch):
    from megaswift.bridge.kernels import logits

    hidden, weight, labels, _ = inputs
    output = OutputMatrix(weight, VOCAB, alone)
    monkeypatch.setattr(logits, "max_kept_bytes", lambda device: 2 * 10 * 128 * 4)
    calls = [label_log_probs(hidden, output, labels) for _ in range(3)]
    assert waiting(logits) == 2
    del calls[0]
    assert waiting(logits) == 1


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_of_what_is_frozen_no_gradient_is_made(alone, inputs, frozen):
    hidden, weight, labels, slopes = inputs
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    label_log_probs(hidden, OutputMatrix(weight, VOCAB, alone), labels).backward(slopes)
    _, *expected = exact(*inputs, 1.0)
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")
    found, reference = (weight.grad, expected[1]) if frozen == "hidden" else (hidden.grad, expected[0])
    gather_or_raise([found], [reference])


def test_columns_on_three_ranks(inputs):
    """Labels are on one rank of three; the second has the padding, and the third nothing else."""
    from megaswift.bridge.kernels.log_probs import LabelLogProbs
    from megaswift.bridge.kernels.logits import LogitForm

    hidden, weight, labels, slopes = inputs
    log_probs, grad_hidden, grad_weight = exact(*inputs, 0.7)
    flat = hidden.detach().transpose(0, 1).reshape(-1, SIZE).requires_grad_()
    padded = torch.cat((weight.detach(), torch.full((36, SIZE), 1e3, device=weight.device)))
    parts = [part.clone().requires_grad_() for part in padded.chunk(3)]
    held = []

    def call(rank, over_ranks):
        form = LogitForm(36 * rank, min(36, max(0, VOCAB - 36 * rank)), 1 / 0.7)
        return LabelLogProbs.apply(flat, parts[rank], labels.reshape(-1), form, over_ranks, True, False, False)[0]

    for rank in range(3):
        call(rank, lambda sums, chosen, _: (held.append((sums, chosen)), (sums, chosen, None))[1])
    sums, chosen = (torch.stack(each) for each in zip(*held, strict=True))
    whole = sums.logsumexp(0), chosen.sum(0), None
    for rank in range(3):
        found = call(rank, lambda *_: whole)
        gather_or_raise([found], [log_probs.flatten()])
        found.backward(slopes.flatten())  # the ranks' parts of the hidden states' gradient are summed here
    gather_or_raise([flat.grad], [grad_hidden.transpose(0, 1).reshape(-1, SIZE)])
    gather_or_raise([torch.cat([part.grad for part in parts])[:ROWS]], [grad_weight])
    assert not parts[2].grad.any()


def test_gradients_are_added_in_the_product(alone, inputs):
    """Of two calls of a micro batch, with a matrix that is the embedding's as well."""
    hidden, weight, labels, slopes = inputs
    before = torch.randn_like(weight)
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = before.clone(), False, True
    output = OutputMatrix(weight, VOCAB, alone, accumulate=True)
    calls = [label_log_probs(hidden, output, labels) for _ in range(2)]
    (sum((found * slopes).sum() for found in calls) + weight[3].sum()).backward()
    _, grad_hidden, grad_weight = exact(*inputs, 1.0)
    gather_or_raise([hidden.grad, weight.main_grad], [2 * grad_hidden, 2 * grad_weight + before])
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.grad.nonzero().unique(), torch.tensor([*range(SIZE)], device=weight.device))


def test_sums_that_are_not_in_fp32_get_no_gradient_by_chunks(alone, inputs):
    hidden, weight, labels, slopes = inputs
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.bfloat16), False
    found = label_log_probs(hidden, OutputMatrix(weight, VOCAB, alone, accumulate=True), labels)
    found.backward(slopes)
    gather_or_raise([weight.grad], [exact(*inputs, 1.0)[2]])
    assert not weight.main_grad.any()
    assert not weight.grad_added_to_main_grad


def test_chunks_are_equal_and_fit(monkeypatch):
    from megaswift.bridge.kernels import log_probs

    monkeypatch.setattr(log_probs, "max_kept_bytes", lambda device: 9_000_000_000)
    for tokens, sizes in ((16_384, [8_192] * 2), (8_192, [8_192]), (20_001, [6_784] * 2 + [6_433]), (0, [])):
        chunks = log_probs._chunks(torch.empty(tokens, 1, dtype=torch.bfloat16, device="meta"), 151_936)
        assert [part.stop - part.start for part in chunks] == sizes
        assert [part.start for part in chunks] == [0, *(part.stop for part in chunks[:-1])][: len(sizes)]
    assert log_probs._chunks(torch.empty(7, 1), 0) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(alone, dtype):
    """An odd vocabulary of more than a block, and more logits than 32 bits can number."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, size, tokens, vocab = 50_259, 64, 43_008, 50_257

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    hidden, weight = random(tokens, 1, size).requires_grad_(), (random(rows, size) / 4).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), generator=generator, device="cuda")
    slopes = random(1, tokens).float()
    weight.main_grad = torch.ones(rows, size, device="cuda")  # pyright: ignore[reportAttributeAccessIssue]
    weight.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
    output = OutputMatrix(weight, vocab, alone, accumulate=True)
    found, entropies = log_probs_and_entropies(hidden, output, labels, trains_entropy=True)
    (found + entropies).backward(slopes)
    wholes = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    for part in torch.arange(tokens, device="cuda").split(2048):
        logits = wholes[0][part, 0] @ wholes[1][:vocab].t()
        expected = logits.log_softmax(-1).gather(1, labels[0, part, None]).squeeze(1)
        torch.testing.assert_close(found[0, part], expected, rtol=1e-2, atol=1e-2)
        uncertain = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
        torch.testing.assert_close(entropies[0, part], uncertain, rtol=1e-2, atol=1e-2)
        (expected + uncertain).backward(slopes[0, part])
    for mine, reference in ((hidden.grad, wholes[0].grad), (weight.main_grad - 1, wholes[1].grad)):
        assert (mine.float() - reference).norm() < 1e-2 * reference.norm()
