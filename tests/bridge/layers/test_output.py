"""What is made of the output matrix: log-probabilities, entropies, divergences from a teacher, its likeliest tokens.
Against torch's own on whole logits, and TRL's divergence."""

import json
from dataclasses import replace

import pytest
import torch
from megaswift.bridge.layers import divergence

from tests.bridge.layers import output_worker
from tests.bridge.layers.output_worker import BETAS, Sides, compare, jensen_shannon, planted, random
from tests.torchrun import torchrun

BOUND = 5e-6


@pytest.fixture(scope="module")
def group(alone):
    return torch.distributed.group.WORLD


def wrong(found: dict[str, dict[str, float]], bound: float = BOUND) -> list[str]:
    return [
        f"{case}: {what} {value:.1e}"
        for case, values in found.items()
        for what, value in values.items()
        if value > bound
    ]


def test_one_process(group):
    found = compare(group)
    assert len(found) == 15
    assert not wrong(found)


@pytest.mark.parametrize("fault", ["teacher and student swapped", "the other share"])
def test_planted_faults_show(group, fault):
    with planted(fault):
        found = compare(group)
    assert len([case for case in wrong(found, 1e-2) if case.startswith("of_divergence")]) >= 4 * 3


def test_temperatures_are_each_ones_own(group):
    mine = Sides(**output_worker.CASES["all"], group=group)
    found = mine.divergence(temperatures=(1.3, 0.7), beta=0.3)
    expected = jensen_shannon(mine.log_probs(1.3), mine.teachers(0.7), 0.3)
    swapped = jensen_shannon(mine.log_probs(0.7), mine.teachers(1.3), 0.3)
    torch.testing.assert_close(found, expected)
    assert (found - swapped).abs().max() > 0.01


@pytest.mark.parametrize("beta", [*BETAS, 0.5])
def test_divergence_is_trls(group, beta):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    mine = Sides(**output_worker.CASES["all"], group=group)
    found = mine.divergence(beta=beta, temperatures=(0.9, 0.9))
    labels = torch.where(random(*found.shape, seed=9) > 0, mine.labels, -100)
    logits = [mine.log_probs(1.0), mine.teachers(1.0)]  # of which softmax makes the same again
    expected = GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta, temperature=0.9)
    loss = found[labels != -100].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    mean = torch.autograd.grad(loss, tuple(mine.local.values()))
    theirs = torch.autograd.grad(expected, (mine.hidden, mine.weight))
    for one, other in zip(mean, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_all_tokens_are_the_likeliest(group):
    """With k the vocabulary, nothing is left out."""
    mine = Sides(**output_worker.CASES["some"], group=group)
    for beta in BETAS:
        settings = {"beta": beta, "temperatures": (0.7, 1.3)}
        found = mine.top_divergence(*mine.top_log_probs(21), **settings)
        torch.testing.assert_close(found, mine.divergence(**settings))


def test_no_divergence_from_oneself(group):
    mine = Sides(**output_worker.CASES["all"], group=group)
    mine.teacher = {f"teacher_{name}": tensor.detach() for name, tensor in mine.local.items()}
    for beta in BETAS:
        found = mine.divergence(beta=beta)
        assert found.abs().max() < 1e-6
        assert all(slope.abs().max() < 1e-6 for slope in torch.autograd.grad(found.sum(), tuple(mine.local.values())))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_of_what_is_frozen_no_gradient_is_made(group, frozen):
    mine = Sides(**output_worker.CASES["all"], group=group)
    mine.local[frozen].requires_grad_(False)
    for found in (mine.divergence(beta=0.5), mine.top_divergence(*mine.top_log_probs(4), beta=0.5)):
        found.sum().backward()
    assert mine.local[frozen].grad is None
    assert mine.local["weight" if frozen == "hidden" else "hidden"].grad is not None


def test_gradients_are_added_to_the_sum(group):
    """Where the weight has one in fp32 and it is asked for; autograd then gets nothing that is read."""
    mine = Sides(**output_worker.CASES["some"], group=group)
    weight = mine.local["weight"]
    expected = torch.autograd.grad(mine.divergence(beta=0.5).sum(), weight)[0]
    before = torch.randn_like(weight)
    weight.main_grad, weight.grad_added_to_main_grad = before.clone(), False
    for accumulate in (True, False):
        mine.output = replace(mine.output, accumulate=accumulate)
        found = mine.divergence(beta=0.5)
        weight.grad = None
        found.sum().backward()
        torch.testing.assert_close(weight.main_grad - before, expected, rtol=1e-5, atol=1e-5)
        assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.grad, expected)


def test_never_two_full_logits(group, monkeypatch):
    """The largest tensor of either pass is a chunk's logits."""
    mine = Sides(**output_worker.CASES["all"], group=group)
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 3 * output_worker.PADDED)
    whole, logits = divergence.chunk_logits, []

    def watched(*arguments):
        logits.append(whole(*arguments))
        return logits[-1]

    monkeypatch.setattr(divergence, "chunk_logits", watched)
    mine.divergence(beta=0.5).sum().backward()
    assert max(each.numel() for each in logits) == 3 * 21
    assert len(logits) == 2 * 2 * 4  # of both models, forward and backward, 12 tokens by threes


def test_matrices_of_different_vocabularies(group):
    mine = Sides(**output_worker.CASES["all"], group=group)
    mine.teacher |= {"teacher_weight": mine.teacher_weight}
    with pytest.raises(ValueError, match=r"--teacher_model: its output matrix has 26 rows on this rank.*24"):
        mine.divergence(beta=0.5)
    assert divergence.reshard_rows(mine.teacher_weight, 30, group).shape == (30, 5)
    assert not divergence.reshard_rows(mine.teacher_weight, 30, group)[26:].any()
    assert torch.equal(divergence.reshard_rows(mine.teacher_weight, 24, group), mine.teacher_weight[:24])


@pytest.mark.slow
@pytest.mark.parametrize(("is_fused", "bound"), [(False, BOUND), (True, 2e-5)])
def test_two_tensor_parallel_ranks(is_fused, bound, tmp_path, monkeypatch):
    if is_fused:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when Triton is imported
    results = tmp_path / "results.json"
    done = torchrun("tests.bridge.layers.output_worker", results, processes=2, imports=is_fused)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(results.read_text())
    faults = ("each rank by itself", "one rank's entropy")
    right = {case: values for case, values in found.items() if not case.startswith(faults)}
    assert len(right) == 15
    assert not wrong(right, bound)
    for fault in faults:
        of_fault = {case: values for case, values in found.items() if case.startswith(fault)}
        assert any("entropies" in case for case in wrong(of_fault, 1e-2))
    alone = {case: values for case, values in found.items() if case.startswith("each rank by itself: of_divergence")}
    assert len(wrong(alone, 1e-2)) >= 4 * 3
