"""The command line in a process that notes what it does, and is killed at an operation that is chosen beforehand.

    python -m tests.resume.killed megatron sft ...      # with WATCH in the environment: JSON, {"output", "notes", "at"}

`output`: operations on files below this folder count: opening for writing, each write, sync, rename, link, removal and
new folder, of Python's files and of `os`, in all threads. `notes`: a folder elsewhere, into which each rank appends its
operations, and its steps (what data it saw, what came of it). `at`: {"rank", "label", "count", "how"}: the count-th
operation of a label (see `normal`), or "step N". how: "kill" all ranks at once before it; "alone": the others find out,
and are killed a second later; "half": all, when half of a write's bytes are written; "full": from there on the disk is
full; "once": for this operation alone. `pause`: seconds that each step takes longer. `apart`: each process is a run of
its own. No curves are drawn.
"""

import builtins
import errno
import hashlib
import io
import itertools
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from megaswift.templates.machine import process_scope

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# audit event -> what it is called here, and where its paths and their folders' descriptors are among its arguments
EVENTS = {
    "os.rename": ("rename", (0, 1), (2, 3)), "os.link": ("link", (0, 1), (2, 3)), "os.symlink": ("symlink", (1,), (2,)),
    "os.remove": ("remove", (0,), (1,)), "os.rmdir": ("rmdir", (0,), (1,)), "os.mkdir": ("mkdir", (0,), (2,)),
    "os.truncate": ("truncate", (0,), (None,)), "open": ("open", (0,), (None,)),
}  # fmt: skip


def normal(label: str) -> str:
    """The same label for the same operation of another run: without times, processes and steps."""
    label = re.sub(r"\bv\d+-\d{8}-\d{6}\b", "v", re.sub(r"checkpoint-\d+", "checkpoint-N", label))
    label = re.sub(r"(\.(partial|probe|replaced|tmp)\b[-.]?)[^/ ]*", r"\1", label.replace(process_scope(), "HOST"))
    return re.sub(r"\b([0-9a-f]{12,}|\d{6,})\b", "*", label)


class Watch:
    """This process's operations: noted, counted, and one of them the last."""

    def __init__(self, output: str, notes: str, at: dict[str, Any] | None = None, pause: float = 0.0):
        self.output, self.notes, self.rank = os.path.realpath(output), Path(notes), int(os.environ.get("RANK", "0"))
        self.at, self.full, self.pause = at if at and at["rank"] == self.rank else None, False, pause
        self.write, self.open, self.lock, self.counts = os.write, io.open, threading.Lock(), Counter()
        self.append("pids", str(os.getpid()))

    def append(self, name: str, line: str) -> None:
        descriptor = os.open(self.notes / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write(descriptor, line.encode() + b"\n")
        os.close(descriptor)

    def path(self, path: Any, folder: int | None = None) -> str:
        """Below the output folder; "" for one elsewhere."""
        if isinstance(path, int):
            found = os.readlink(f"/proc/self/fd/{path}")
        else:
            at = os.readlink(f"/proc/self/fd/{folder}") if folder is not None and folder >= 0 else os.getcwd()
            head, tail = os.path.split(os.path.join(at, os.fsdecode(path)))
            found = os.path.join(os.path.realpath(head), tail)
        return os.path.relpath(found, self.output) if (found + "/").startswith(self.output + "/") else ""

    def see(self, label: str) -> str | None:
        """Note an operation that is about to be done, unless it is the one to end at. "half": do half of it first."""
        with self.lock:
            self.counts[label] += 1
            self.append(f"operations-{self.rank}", label)
            if self.full and label.startswith(("write", "open", "mkdir")):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            at = self.at
            if at is None or at["label"] not in (label, normal(label)) or at["count"] != self.counts[label]:
                return None
            if at["how"] == "half":
                return "half"
            if at["how"] not in ("full", "once"):
                self.die()
            self.full, self.at = at["how"] == "full", None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def die(self) -> None:
        at, mine = self.at or {}, os.getpid()
        others = [int(pid) for pid in (self.notes / "pids").read_text().split() if int(pid) != mine]
        self.append("died", json.dumps(at))
        if at["how"] == "alone" and others:
            end = f"sleep 1; kill -9 {' '.join(map(str, others))}"
            subprocess.Popen(["sh", "-c", end], start_new_session=True, stderr=subprocess.DEVNULL)
        else:
            for pid in others:
                os.kill(pid, signal.SIGKILL)
        os.kill(mine, signal.SIGKILL)
        time.sleep(60)

    def audit(self, event: str, arguments: tuple) -> None:
        if event not in EVENTS or (event == "open" and not arguments[2] & WRITING):
            return
        kind, places, folders = EVENTS[event]
        pairs = zip(places, folders, strict=True)
        paths = [self.path(arguments[at], None if fd is None else arguments[fd]) for at, fd in pairs]
        if any(paths):
            self.see(f"{kind} {' -> '.join(paths)}")

    def wrapped(self, kind: str, function: Any, written: int | None = None) -> Any:
        """`function(descriptor, ...)` of `os`; where it writes, the argument number `written` is what."""

        def call(descriptor: Any, *arguments: Any) -> Any:
            path = self.path(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            if path and self.see(f"{kind} {path}") == "half":
                if written is not None:
                    function(descriptor, memoryview(arguments[written])[: len(arguments[written]) // 2])
                self.die()
            return function(descriptor, *arguments)

        return call

    def opened(self, file: Any, mode: str = "r", buffering: int = -1, encoding=None, errors=None, newline=None,
               closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        """`open`, of files whose every write to the disk is seen."""
        if not set(mode) & set("wax+") or not self.path(file):
            return self.open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _raw(self)(file, mode.translate({ord("b"): None, ord("t"): None}), closefd, opener)
        if buffering == 0:
            return raw
        binary = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        if "b" in mode:
            return binary
        return io.TextIOWrapper(binary, encoding, errors, newline, line_buffering=buffering == 1)

    def step(self, train_step: Any) -> Any:
        """tasks/train/step.py's train_step, with a note of the data that it is given and of what came of them."""
        from megatron.core import parallel_state

        def call(training: Any, batches: list[Any], loss: Any, step: int, *more: Any, **settings: Any) -> Any:
            self.see(f"step {step}")
            metrics, outcome = train_step(training, batches, loss, step, *more, **settings)
            data = hashlib.sha256(repr([(b.lengths, b.loss_tokens) for b in batches]).encode())
            for batch in batches:
                for tensor in (batch.tokens, batch.labels, batch.loss_weights, batch.position_ids):
                    data.update(tensor.numpy().tobytes())
            half = 0.5 * (self.counts[f"step {step}"] > 1)  # the policy's update, after that of the critic
            row = {"step": step + half, "data": data.hexdigest(), "norm": outcome.grad_norm}
            row |= {name: float(value) for name, value in metrics.items()}
            ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
            row["documents"] = _documents(batches) if ranks == (0, 0) else []
            self.append(f"steps-{self.rank}", json.dumps(row))
            time.sleep(self.pause)
            return metrics, outcome

        return call


def _raw(watch: Watch) -> type[io.FileIO]:
    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            if watch.see(f"write {watch.path(self.fileno())}") == "half":
                super().write(memoryview(data).cast("B")[: len(data) // 2])
                watch.die()
            return super().write(data)

    return Raw


def _documents(batches: list[Any]) -> list[str]:
    """A checksum of each document's tokens."""
    found = []
    for batch in batches:
        ends = batch.cu_seqlens.tolist()
        for start, end in itertools.pairwise(ends):
            ids = batch.tokens[0, start:end].numpy()
            if batch.loss_weights[0, start:end].any():  # else padding
                found.append(hashlib.sha256(ids.tobytes()).hexdigest()[:12])
    return found


def main() -> None:
    told = json.loads(os.environ["WATCH"])
    apart = told.pop("apart", False)
    watch = Watch(**told)
    if apart:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    import megaswift.tasks.train.trainer  # noqa: F401
    import numpy
    from megaswift.tasks.observability import curves
    from megaswift.tasks.train import step as train

    curves.draw = lambda *_, **__: []  # takes longer than the training
    step, watched = train.train_step, watch.step(train.train_step)
    for module in list(sys.modules.values()):
        if vars(module).get("train_step") is step:
            module.train_step = watched  # type: ignore[attr-defined]
    for kind, name, written in [("fsync", "fsync", None), ("fsync", "fdatasync", None), ("write", "write", 0),
                                ("write", "pwrite", None), ("write", "writev", None), ("write", "sendfile", None),
                                ("write", "copy_file_range", None), ("truncate", "posix_fallocate", None)]:  # fmt: skip
        setattr(os, name, watch.wrapped(kind, getattr(os, name), written))
    builtins.open = io.open = watch.opened  # type: ignore[assignment]
    sys.addaudithook(watch.audit)
    for seed in (random.seed, numpy.random.seed):  # which a run has in its checkpoints, and does not seed
        seed(1)
    sys.argv = ["main", *sys.argv[1:]]
    runpy.run_module("megaswift.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
