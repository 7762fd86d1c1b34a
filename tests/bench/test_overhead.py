"""The Python of a training step stays what it is: as a ratio to a bare loop in PyTorch, in one process."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
pytestmark = pytest.mark.slow
MEASURED = 1.65  # scripts/bench/overhead.py on two cores
BOUND = 1.5 * MEASURED


@pytest.fixture(scope="module")
def steps():
    """Our step and the bare loop's, in this process as the only one of a job."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("of a CPU's time")
    import overhead
    import torch.distributed as dist

    from tests.layouts.worker import close

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
            patch.delenv(name)
        torch.set_num_threads(1)
        yield overhead.ours(), overhead.bare()
        close()
        dist.destroy_process_group()


def test_python_of_a_step(steps):
    from overhead import compare

    ours, bare = steps
    mine, theirs, ratio = compare(ours, bare, rounds=9)
    assert ratio < BOUND, f"{1e3 * mine:.1f} ms a step, {1e3 * theirs:.1f} ms the bare loop's"


def test_a_slower_step_is_seen(steps):
    """One that takes as much longer as four steps of the bare loop."""
    from overhead import compare

    ours, bare = steps
    _, theirs, _ = compare(ours, bare, rounds=3)

    def slower(step: int) -> None:
        end = time.process_time() + 4 * theirs
        while time.process_time() < end:
            pass
        ours(step)

    assert compare(slower, bare, rounds=3)[2] > BOUND
