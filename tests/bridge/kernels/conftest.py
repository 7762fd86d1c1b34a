"""The kernels run on a GPU where there is one, else through Triton's interpreter: tests import their files inside."""

import pytest


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor, scope):
        # Bounds of loops are arrays of one number there, which NumPy 2.5 does not turn into a number by itself.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index)
    return "cpu"
