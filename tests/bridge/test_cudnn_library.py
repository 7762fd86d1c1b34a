"""Transformer Engine runs with the cuDNN that PyTorch was installed with."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megaswift.bridge import cudnn_library

KINDS = ["graph", "engines_precompiled", "engines_runtime_compiled", "heuristic", "ops", "cnn", "adv", "later"]
PROGRAM = """
import ctypes
import torch
import megaswift.bridge
torch.cuda.is_available = lambda: True
torch.__file__ = sys.argv[1] + "/torch/__init__.py"
loaded = []
ctypes.CDLL = lambda name, mode: loaded.append((name, mode))
import transformer_engine.common
assert all(mode == ctypes.RTLD_GLOBAL for name, mode in loaded)
print(*(name for name, mode in loaded), sep="\\n")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Folder of packages: a cuDNN without contents, and a Transformer Engine that warns as the real one does."""
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    for kind in ["", *KINDS]:
        (folder / f"libcudnn{kind and '_'}{kind}.so.9").touch()
    engine = tmp_path / "transformer_engine"
    engine.mkdir()
    (engine / "common.py").touch()
    (engine / "__init__.py").write_text("import warnings\nwarnings.warn('Detected a Jax installation', RuntimeWarning)")
    return tmp_path


def test_loads_pytorchs_libraries_before_transformer_engine(site: Path) -> None:
    program = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{PROGRAM}", str(site)]
    result = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    names = [Path(line).name for line in result.stdout.splitlines()]
    assert names == [*(f"libcudnn_{kind}.so.9" for kind in KINDS), "libcudnn.so.9"]
    assert str(site) in result.stdout
    assert "Jax" not in result.stderr


def test_loads_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cudnn_library, "libraries", lambda: pytest.fail("looked for libraries"))
    cudnn_library.load()


def test_other_older_cudnn_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, torch)
    assert cudnn_library.fault() is None

    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility: 9.19 and 9.14. One option is LD_LIBRARY_PATH")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert cudnn_library.fault() == "cuDNN version incompatibility: 9.19 and 9.14"


@pytest.mark.gpu
def test_transformer_engine_has_pytorchs_cudnn() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    import transformer_engine_torch  # pyright: ignore[reportMissingImports]

    assert cudnn_library.fault() is None
    assert transformer_engine_torch.get_cudnn_version() == torch.backends.cudnn.version()
