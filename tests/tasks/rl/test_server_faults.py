"""A rollout server that is killed in the midst of a run: named within seconds, or waited for, with the same numbers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.prepared import ON_CPU, ROOT, free_port
from tests.tasks.rl.runs import Place, assert_same_steps

pytestmark = [pytest.mark.slow, pytest.mark.long]
ONE = "--steps_per_generation 1"


@contextmanager
def served(place: Place, **how: Any) -> Iterator[tuple[str, Path]]:
    """The address of a server that dies, and the file that it leaves."""
    import os

    port = free_port()
    url, mark = f"http://127.0.0.1:{port}", place.folder / f"died-{port}"
    options = {"model": str(place.folder / "qwen3"), "port": port, "infer_backend": "transformers"}
    words = [sys.executable, "-m", "tests.tasks.rollout.dying_worker", json.dumps(options)]
    process = subprocess.Popen([*words, json.dumps(how | {"mark": str(mark)})], cwd=ROOT, env=os.environ | ON_CPU)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                if httpx.get(f"{url}/health").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url, mark
    finally:
        process.kill()
        process.wait()


def flags(url: str, more: str = "") -> str:
    served = f"--use_vllm true --vllm_mode server --vllm_server_base_url {url} --vllm_server_timeout 120"
    return f"{ONE} {served} {more}".strip()


@pytest.mark.parametrize("during", ["generate", "weights"])
@pytest.mark.parametrize("beside", ["", "--async_generate true"])
def test_gone(during: str, beside: str, place: Place) -> None:
    """In the second generation: the run ends, and says what to do."""
    with served(place, during=during, call=2, again=False) as (url, mark):
        name = f"gone-{during}-{len(beside)}"
        printed = place.megatron(place.line(flags(url, f"{beside} --train_iters 6"), name), code=1)
        ended = time.time()
    assert f"The rollout server {url} is gone: " in printed
    assert (
        "restart it and resume the run; with --server_reconnect_timeout SECONDS a run waits for it instead." in printed
    )
    assert "Traceback" not in printed
    assert ended - float(mark.read_text()) < 40


@pytest.mark.parametrize("during", ["generate", "weights"])
def test_waited_for(during: str, place: Place) -> None:
    """It is given the weights that the other had, draws the same, and the run is as one in which nothing happened."""
    with served(place, during=during, call=2, again=True) as (url, mark):
        found = place.run(flags(url, "--server_reconnect_timeout 120"))
        assert mark.exists()
    assert_same_steps(found, place.run(ONE))


def test_waited_for_while_training_goes_on(place: Place) -> None:
    with served(place, during="generate", call=2, again=True) as (url, mark):
        found = place.run(flags(url, "--server_reconnect_timeout 120 --async_generate true --train_iters 5"))
        assert mark.exists()
    assert [row["step"] for row in found.steps] == [1, 2, 3, 4, 5]
    first, again, behind, *_ = (row["sampling/sampling_logp_difference/mean"] for row in found.steps)
    assert max(first, again) < 1e-4 < behind  # what was lost was drawn anew, by the weights as they were then
