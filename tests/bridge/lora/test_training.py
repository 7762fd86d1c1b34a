"""Adapters train as PEFT's do, in every layout: loss, gradient norm, every tensor."""

import pytest
import torch
from megaswift.bridge.lora.layers import LinearAdapter, MatrixSharding
from torch.distributed import ProcessGroup

from tests.bridge.lora.launched import DROPPING, FAULTS, ROUNDED, TRAINED, TRAINED_LONG
from tests.bridge.lora.reference import ALPHA, RANK, adapt_by_hand, distance, load_base, log_probs_of

BOUND = 1e-5  # relative to the largest value

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "layout"), [*TRAINED, *(pytest.param(*case, marks=pytest.mark.long) for case in TRAINED_LONG)]
)
def test_trains_as_peft_does(case, layout, launched):
    result, expected = launched.result(case, layout), launched.reference(case)
    assert result["losses"] == pytest.approx(expected.losses, rel=BOUND)
    assert result["grad_norms"] == pytest.approx(expected.grad_norms, rel=BOUND)
    saved = launched.tensors(case, layout)
    assert saved.keys() == expected.tensors.keys()
    for name, tensor in saved.items():
        assert distance(tensor, expected.tensors[name]) < BOUND, name
    assert result["base"], "weights of the base have changed"
    assert result["alike"], "ranks that hold the same tensors hold different ones"


@pytest.mark.parametrize("layout", DROPPING)
def test_dropout_is_what_recomputing_does_again(layout, launched):
    found, others = (launched.result("qwen3", where, "dropout") for where in (layout, "one process"))
    without = launched.reference("qwen3")
    assert found["alike"]
    assert all(abs(a / b - 1) > 1e-4 for a, b in zip(found["losses"], without.losses, strict=True))
    assert found["losses"] == pytest.approx(without.losses, rel=0.2)
    if layout == "recompute":
        assert found["losses"] == pytest.approx(others["losses"], rel=BOUND)
        assert found["grad_norms"] == pytest.approx(others["grad_norms"], rel=BOUND)


@pytest.mark.parametrize(("case", "layout"), ROUNDED)
@pytest.mark.parametrize(("way", "dtype"), [("bf16", torch.bfloat16), ("bf16 beside fp32", torch.float32)])
def test_trains_in_bf16(case, layout, way, dtype, launched):
    result, expected = launched.result(case, layout, way), launched.reference(case)
    assert result["losses"] == pytest.approx(expected.losses, rel=0.02)
    assert result["grad_norms"] == pytest.approx(expected.grad_norms, rel=0.1)
    assert result["base"]
    assert result["alike"]
    assert {tensor.dtype for tensor in launched.tensors(case, layout, way).values()} == {dtype}


@pytest.mark.parametrize("fault", FAULTS)
def test_sees_a_fault(fault, launched):
    found, expected = launched.result("qwen3", "TP2 SP", fault), launched.reference("qwen3")
    assert abs(found["losses"][0] / expected.losses[0] - 1) > 10 * BOUND


def test_matrices_by_hand_are_what_peft_has(launched):
    """The reference for experts is right where PEFT can say so."""
    by_peft, by_hand = launched.reference("qwen3"), load_base(launched.base("qwen3"))
    adapt_by_hand(by_hand, by_peft.tensors, ALPHA / RANK)
    assert distance(log_probs_of(by_hand), by_peft.log_probs) < BOUND


def test_dora_takes_an_empty_bias_for_none():
    """Transformer Engine's modules without a bias have an empty one."""
    weight, x = torch.randn(5, 4), torch.randn(3, 4)
    place = MatrixSharding(None, ProcessGroup, sequence_parallel=False, communicates=True)  # pyright: ignore[reportArgumentType]
    adapter = LinearAdapter(
        weight, torch.ones(5, 1, dtype=torch.bool), 2, 1.0, torch.float32, place, dropout=0.0, dora=True,
        bias=torch.Tensor(),
    )  # fmt: skip
    for parameter in adapter.parameters():
        torch.nn.init.uniform_(parameter)
    whole = weight + adapter.lora_B @ adapter.lora_A
    expected = x @ (whole * (adapter.magnitude / whole.norm(dim=1)).unsqueeze(1)).t()
    found, later = adapter(x, (x @ weight.t(), None))
    torch.testing.assert_close(found, expected)
    assert later is None
