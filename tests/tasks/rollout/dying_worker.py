"""`swift rollout` that is killed in the midst of its work: python -m tests.tasks.rollout.dying_worker OPTIONS HOW

OPTIONS, HOW: JSON. HOW: {"during": "generate" or "weights", "call": which of them, "again": whether another is started
in its place, "mark": a file that is written when it dies}.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megaswift.tasks.options.rollout import RolloutOptions
from megaswift.tasks.rollout import transformers_engine
from megaswift.tasks.rollout.hf_replica import Replica
from megaswift.tasks.rollout.serve import run
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: F401

AFTER = 3  # tokens of each completion, or tensors


def dies(how: dict[str, Any]) -> None:
    """Have this process die."""
    calls = 0

    def die() -> None:
        Path(how["mark"]).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if how["during"] == "weights":
        update = Replica.update

        def some(weights):
            for number, weight in enumerate(weights):
                if number == AFTER:
                    die()
                yield weight

        def broken(self, weights):
            nonlocal calls
            calls += 1
            update(self, some(weights) if calls == how["call"] else weights)

        Replica.update = broken
        return
    draw, make = transformers_engine._Sampler.__call__, transformers_engine._Sampler.__init__

    def made(self, *arguments):
        nonlocal calls
        calls += 1
        self.number = calls
        make(self, *arguments)

    def drawn(self, *arguments):
        if self.number == how["call"] and len(self._tokens) == AFTER:
            die()
        return draw(self, *arguments)

    transformers_engine._Sampler.__init__, transformers_engine._Sampler.__call__ = made, drawn


def serve(options: RolloutOptions, how: dict[str, Any] | None) -> int:
    """Serve in a child process that ends with this one, and return its id."""
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if how:
        dies(how)
    run(options)
    os._exit(0)


if __name__ == "__main__":
    told, way = (json.loads(word) for word in sys.argv[1:])
    os.waitpid(serve(RolloutOptions(**told), way), 0)
    if way["again"]:
        time.sleep(3)
        os.waitpid(serve(RolloutOptions(**told), None), 0)
