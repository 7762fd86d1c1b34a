"""The kernels run on a GPU where there is one, else through Triton's interpreter: tests import their files inside."""

import pytest

from tests.bridge.kernels.interpreted import with_indices


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_indices(interpreter._patch_lang_tensor))
    return "cpu"


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
