"""fp32 values that are stored as distances from their bf16 copies. Scaled types: test_hybrid_adamw.py."""

import pytest
import torch
from megaswift.tasks.train.state_tensor import StateTensor
from torch import Tensor


def stored(values: Tensor) -> StateTensor:
    state = StateTensor(torch.zeros(len(values), dtype=torch.int16), copy=torch.zeros(len(values)).bfloat16())
    state.write(values)
    return state


def read(state: StateTensor) -> Tensor:
    target = torch.empty(len(state.values))
    state.read(target)
    return target


def values_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def test_values_of_any_size_return_and_keep_the_copy_that_torch_rounds():
    generator = torch.Generator().manual_seed(0)
    values = values_of(torch.randint(-(2**31), 2**31, (2**18,), generator=generator))
    values = values[values.isfinite()]
    state = stored(values)
    assert state.copy is not None
    assert torch.equal(state.copy, values.bfloat16())
    lost = read(state).view(torch.int32) - values.view(torch.int32)
    assert set(lost.tolist()) <= {0, -1}
    assert lost.abs().sum() < 20  # 2 expected
    again = stored(read(state))
    assert torch.equal(again.values, state.values)
    assert torch.equal(again.copy, state.copy)


@pytest.mark.parametrize(
    ("bits", "lost"),
    [
        (0x3F80_8000, 1),  # between two bf16 values, rounded down to the even one: 2^15 above its copy
        (0x3F81_8000, 0),  # rounded up: 2^15 below
        (0x3F80_7FFF, 0),
        (0x3F80_8001, 0),
        (0x0000_0001, 0),  # subnormal
        (0x7F7F_FFFF, 0),  # the largest: its copy is infinite
        (0x7F80_0000, 0),  # infinity
    ],
)
@pytest.mark.parametrize("sign", [0, -(2**31)])
def test_a_value_halfway_above_its_copy_loses_one_unit(bits, lost, sign):
    value = values_of(torch.tensor([bits + sign]))
    found = read(stored(value))
    assert (value.view(torch.int32) - found.view(torch.int32)).item() == lost
    assert torch.equal(found.bfloat16(), value.bfloat16())


def test_a_part_reads_its_own_copy():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    state = stored(values)
    assert torch.equal(read(state.part(256, 700)), read(state)[256:700])
