"""What every test shares."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest_plugins = ["tests.selection"]

# Tiny tensors: two threads take a third more time of the processors than one, in each process of pytest-xdist.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("triton") and not Path("/dev/nvidiactl").exists():
    # Without a GPU, tests/bridge/kernels interprets them: so must be triton's own functions, from its first import on.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401

    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True, scope="session")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where rollout servers and runs keep their key."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Iterator[None]:
    """What a module's tests set (a rank, a world size) is not there for the processes that the next ones start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as the only one of a job."""
    import torch
    from megaswift.bridge import parallel
    from megaswift.bridge.options import BuildOptions

    from tests.layouts.worker import close

    parallel.initialize(BuildOptions(), seed=1)
    yield
    close()
    torch.distributed.destroy_process_group()
