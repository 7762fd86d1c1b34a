"""Kernels that are wrong on a machine, or fail, are not used, and the user is told."""

from functools import partial

import pytest
import torch
from megaswift.bridge.layers import fla_check
from megaswift.bridge.layers.delta_rule import make_delta_layout

from tests.bridge.layers.linear_attention import KERNEL, cases
from tests.bridge.layers.test_fla_kernels import STANDINS

MIXERS = cases(groups=3, heads=2, dim=6, state=5)
CPU = torch.device("cpu")


def wrong_in_the_second_document(run, *inputs):
    """A kernel that does not reset its state at a document's start."""
    layout = inputs[-1]
    return run(*inputs[:-1], make_delta_layout([0, int(layout.cu_seqlens[-1])], 1, 1, KERNEL, CPU))


def wrong_gradient(run, *inputs):
    output = run(*inputs)
    return 2 * output - output.detach()


def not_numbers(run, *inputs):
    return run(*inputs) * torch.nan


def failing(run, *inputs):
    raise RuntimeError("out of shared memory\nand more")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(fla_check, "_results", {})


def check(name: str, change=None, tokens: int = 400) -> bool:
    torch.manual_seed(0)
    layer, inputs = MIXERS[name].layer, MIXERS[name].inputs(tokens, torch.float32)
    run = partial(layer._run_fla, STANDINS)
    layout, rows = make_delta_layout([0, 30, tokens], 1, 1, KERNEL, CPU), layer.token_inputs
    assert all(len(x) == tokens for x in inputs[:rows])
    run = partial(change, run) if change else run
    return fla_check.is_right(name, run, layer._run_torch, inputs[:rows], inputs[rows:], layout)


@pytest.mark.parametrize("name", MIXERS)
def test_right_kernels_are_used(name, caplog):
    assert check(name)
    assert not caplog.text


@pytest.mark.parametrize("tokens", [31, 70, 71])
def test_short_micro_batches_are_enough(tokens):
    assert check("lightning attention", tokens=tokens)


def test_fixed_decays_need_no_gradient():
    """fla's kernel has none for a decay that all tokens share."""
    assert check("lightning attention", lambda run, qkv, decay, layout: run(qkv, decay.detach(), layout))


@pytest.mark.parametrize("name", MIXERS)
def test_as_many_tokens_as_channels(name):
    """Parameters are not taken for rows of tokens."""
    channels = {len(x) for x in MIXERS[name].inputs(400, torch.float32)} - {400, 3}
    assert all(check(name, tokens=tokens) for tokens in channels if tokens > 30)


@pytest.mark.parametrize("change", [wrong_in_the_second_document, wrong_gradient, not_numbers, failing])
@pytest.mark.parametrize("name", MIXERS)
def test_wrong_kernels_are_named(name, change, caplog):
    assert not check(name, change)
    assert not check(name)  # the result is kept
    assert caplog.text.count(f"flash-linear-attention's kernels of {name}") == 1
    assert ("RuntimeError: out of shared memory" in caplog.text) == (change is failing)


def test_does_not_reach_hooks_of_the_caller():
    """Activation recomputation counts the tensors that are saved: the check must save none there."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert check("lightning attention")
    assert not saved
