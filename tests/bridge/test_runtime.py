"""megatron-core on a CPU."""

import pytest
import torch
from megaswift.bridge import runtime
from megaswift.bridge.model import build


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_nothing_is_compiled():
    """megatron-core's own functions were decorated when `build` was imported."""

    def refuse(*_):
        raise AssertionError("compiled")

    assert build.GPTModel
    compiled = torch.compile(torch.nn.functional.silu, backend=refuse)
    runtime.enable()
    assert torch.equal(compiled(torch.ones(1)), torch.nn.functional.silu(torch.ones(1)))
