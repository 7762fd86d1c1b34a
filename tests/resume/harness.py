"""Runs that are killed and started again, and compared with one that never was.

    case = Case(place, "TP2", LAYOUTS["TP2"])       # what is run; `case.reference` is the run that was left alone
    output = Output(case)                           # an output folder, and the runs into it
    output.run({"rank": 0, "label": "fsync v/checkpoint-N/...", "count": 1, "how": "kill"})
    output.run()
    output.compare()

After each run, killed or not, `run` looks at what is there: every checkpoint whole, its tensors those of the reference,
the newest not older than before; each step, also of killed runs, with the data, loss and norm of the reference; the run
gone on from the newest whole checkpoint. What is found otherwise is an AssertionError.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from tests import prepared, tiny
from tests.resume.killed import normal

COMMON = (
    "--packing true --max_length 128 --micro_batch_size 1 --global_batch_size 4 --lr 1e-3 "
    "--logging_steps 1 --dataloader_num_workers 0 --save_steps 2 --report_to none"
)
DROPOUT = "--attention_dropout 0.1 --hidden_dropout 0.1"  # so that the state of random numbers counts
LORA = "--tuner_type lora"
BEST = "--val_dataset val.jsonl --eval_steps 2"
LAYOUTS = {
    "DP2": "--use_distributed_optimizer true",
    "TP2": "--tensor_model_parallel_size 2 --sequence_parallel true",
    "PP2": "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2",
    "PP2 by letters": "--pipeline_model_parallel_size 2 --pipeline_model_parallel_layout E|tt|t|tL",
    "EP2": "--expert_model_parallel_size 2",
}
# What may differ in the log of two runs of the same steps.
TIMES = {"tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "memory_gib", "data_wait", "elapsed", "eta"}
TIMES |= {"seconds_per_step", "save_wait", "weight_sync/gb_per_s", "vision_share"}
Harm = Callable[[prepared.Running, Path], None]


def add_predicting(place: Path) -> str:
    """Write the tiny model with a layer of multi-token prediction to a place once, and return its name."""
    from tests.bridge.families import test_prediction

    name = "predicting"
    if not (place / name).is_dir():
        test_prediction.make(place / name, "Qwen3Next tied")
        tiny.save_tokenizer(place / name)
    return name


def make_place(place: Path) -> Path:
    """A folder with tiny models and data, in which runs are started. An epoch is about four steps."""
    for family in ("qwen3", "qwen3_moe"):
        tiny.save_tokenizer(tiny.save(place / family, family))
    pairs = [(a, b) for a in range(3, 11) for b in range(2, 9)]
    sums = [{"query": f"What is {a} + {b}?", "response": f"It is {a + b}. " * (1 + a * b % 3)} for a, b in pairs]
    pairs = [row | {"rejected_response": "I do not know."[: 3 + number % 11]} for number, row in enumerate(sums)]
    labelled = [row | {"label": number % 3 > 0} for number, row in enumerate(sums)]
    classes = [row | {"label": number % 3} for number, row in enumerate(sums)]
    named = {"train": sums[:44], "val": sums[44:], "pairs": pairs, "labelled": labelled, "classes": classes}
    said = [
        [[{"role": "user", "content": row[key][:12]}] for key in ("query", "response", "rejected_response")]
        for row in pairs
    ]
    named["texts"] = [{"messages": a, "positive_messages": [b], "negative_messages": [c]} for a, b, c in said]
    for name, rows in named.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@dataclass
class Case:
    """A command line and its processes."""

    place: Path
    name: str
    flags: str
    model: str = "qwen3"
    processes: int | None = 2
    steps: int = 12
    command: str = "sft --dataset train.jsonl"

    @cached_property
    def reference(self) -> "Output":
        """The run that is never stopped; all of its checkpoints are kept."""
        output = Output(self, flags="")
        output.run()
        return output

    @cached_property
    def operations(self) -> list[dict[str, Any]]:
        """Where a run can be killed: each operation of each rank, those of its saves once."""
        output = Output(self)
        found = output.run().operations
        output.compare()
        return found


@dataclass
class Ended:
    """What is known of a run after its end."""

    code: int
    said: str
    notes: Path

    @property
    def killed(self) -> str:
        """Where; empty: it was not."""
        return (self.notes / "died").read_text() if self.code and (self.notes / "died").exists() else ""

    @cached_property
    def steps(self) -> dict[int, dict[int, dict[str, Any]]]:
        """rank -> step -> what it saw, and what came of it"""
        files = {int(file.name.removeprefix("steps-")): file for file in self.notes.glob("steps-*")}
        rows = {rank: [json.loads(line) for line in file.read_text().splitlines()] for rank, file in files.items()}
        return {rank: {row["step"]: row for row in of_rank} for rank, of_rank in sorted(rows.items())}

    @property
    def resumed(self) -> bool:
        return min(self.steps.get(0, [1])) > 1

    @cached_property
    def operations(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for file in sorted(self.notes.glob("operations-*")):
            counts: Counter[str] = Counter()
            for label in file.read_text().splitlines():
                counts[label] += 1
                again = counts[label] > 2 and "checkpoint-" not in label  # a row of the log is as good as another
                for how in () if again or label.startswith("step") else ("kill", "half"):
                    at = {"rank": int(file.name.split("-")[1]), "label": normal(label), "count": counts[label]}
                    if how == "kill" or label.startswith("write"):
                        found.setdefault(json.dumps(at | {"how": how}), at | {"how": how})
        return list(found.values())


@dataclass
class Output:
    """An output folder."""

    case: Case
    flags: str = "--resume_from_checkpoint auto --save_total_limit 2"
    strict: bool = True  # always the same layout: bit for bit
    runs: list[Ended] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # steps that were done again, after each kill
    _done: int = 0  # steps that had been done at the last kill

    _numbers = count()

    def __post_init__(self) -> None:
        self.folder = self.case.place / f"{self.case.name.replace(' ', '_')}-{next(self._numbers)}"

    def start(self, at: dict[str, Any] | None, case: Case, flags: str, tell: dict[str, Any]):
        notes = self.case.place / "notes" / f"{self.folder.name}-{next(self._numbers)}"
        notes.mkdir(parents=True)
        watch = json.dumps({"output": str(self.folder), "notes": str(notes), "at": at} | tell)
        environment = os.environ | {"HF_HOME": str(case.place / "cache"), "COLUMNS": "200", "WATCH": watch}
        words = ["-m", "tests.resume.killed", "megatron", *case.command.split(), *COMMON.split()]
        words += [] if "--mcore_model" in case.flags else ["--model", case.model]
        words += f"{case.flags} --train_iters {case.steps} --output_dir {self.folder} {self.flags} {flags}".split()
        return prepared.Running(words, processes=case.processes, cwd=case.place, environment=environment), notes

    def run(
        self,
        at: dict[str, Any] | None = None,
        harm: Harm | None = None,
        *,
        case: Case | None = None,
        flags: str = "",
        tell: dict[str, Any] | None = None,
        code: int = 0,
        base: int | None = None,
    ) -> Ended:
        """One run, to its end. `at`: where it is killed (killed.py). `harm`: what is done to it meanwhile. `code`: with
        which it is to end if it is not killed. `base`: the step after which it is to go on; left out: the newest."""
        before = newest(self.folder)
        running, notes = self.start(at, case or self.case, flags, tell or {})
        if harm:
            harm(running, notes)
        done = running.wait(150)
        ended = Ended(done.returncode, done.stdout + done.stderr, notes)
        self.runs.append(ended)
        where = f"{self.folder}, run {len(self.runs)} ({ended.killed or 'to its end'}): "
        assert ended.code == code or ended.killed, f"{where}code {ended.code}: {ended.said[-5000:]}"
        self._look_at_checkpoints(where, before)
        self._look_at_steps(ended, where, before if base is None else base)
        return ended

    def _look_at_checkpoints(self, where: str, before: int) -> None:
        found = whole(self.folder, where)
        assert newest(self.folder) >= before, f"{where}checkpoint-{before} was there before, and is gone"
        for path in found if self.strict and "reference" in self.case.__dict__ else ():
            here, there = tensors(path), tensors(self.case.reference.run_folder / path.name)
            there = there or here  # the reference was not saved there
            different = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
            assert not different, f"{where}{path.name}: {different}"

    def _look_at_steps(self, ended: Ended, where: str, base: int) -> None:
        steps = ended.steps
        if steps.get(0) and "resume" in self.flags:
            assert min(steps[0]) == base + 1, f"{where}went on at step {min(steps[0])}, not after {base}"
            self.lost += [self._done - base] if self._done else []
            self._done = 0
            assert not self.lost or self.lost[-1] <= 5, f"{where}{self.lost[-1]} steps were lost"
        if ended.killed:
            self._done = max([self._done, *(max(rows) for rows in steps.values())])
        if self.strict and "reference" in self.case.__dict__:
            expected = self.case.reference.runs[0].steps
            for rank, rows in steps.items():
                for step, row in rows.items():
                    assert row == expected[rank][step], f"{where}rank {rank}, step {step}: {row} {expected[rank][step]}"

    @property
    def run_folder(self) -> Path:
        return max((newest(folder), folder) for folder in self.folder.glob("v*"))[1]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The log's rows of steps and evaluations, without times."""
        rows = [json.loads(line) for line in (self.run_folder / "logging.jsonl").read_text().splitlines()]
        rows = [row for row in rows if "loss" in row or "eval_loss" in row]
        return [
            {k: v for k, v in row.items() if k not in TIMES and "timing_s/" not in k and "memory/" not in k}
            for row in rows
        ]

    def compare(self) -> None:
        """After a run that ended by itself: nothing is missing, left over, or other than in the reference."""
        where, reference, last = f"{self.folder}: ", self.case.reference, self.case.steps
        if self.strict:
            assert self.rows == reference.rows, f"{where}{self.rows} {reference.rows}"
        expected = {f"checkpoint-{step}" for step in (last - 2, last)}
        scores = {row["step"]: row["eval_loss"] for row in self.rows if "eval_loss" in row}
        if scores:
            best = f"checkpoint-{min(scores, key=lambda step: scores[step])}"
            link = os.readlink(self.run_folder / "best")
            assert link == best, f"{where}best leads to {link}, not to {best}"
            expected.add(best)
        names = {path.name for path in checkpoints(self.run_folder)}
        assert {name for name in names if not name.endswith("-merged")} == expected, f"{where}{names}"
        link = os.readlink(self.run_folder / "last")
        assert link == f"checkpoint-{last}", f"{where}last leads to {link}"
        assert not leftovers(self.run_folder), f"{where}left over: {leftovers(self.run_folder)}"
        here, there = ({p.name for p in output.run_folder.iterdir()} for output in (self, reference))
        assert {name for name in here ^ there if "checkpoint-" not in name} <= {".lock", ".launch", "images"}, (
            f"{where}{here} {there}"
        )

    def remove(self) -> None:
        for folder in (self.folder, *(run.notes for run in self.runs)):
            shutil.rmtree(folder, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """The folders named checkpoint-N (and merged weights) of an output or run folder, the oldest step first."""
    named = r"(v\d+[^/]*/)?checkpoint-\d+(-merged)?"
    found = [*folder.glob("checkpoint-*"), *folder.glob("v*/checkpoint-*")]
    found = [path for path in found if re.fullmatch(named, path.relative_to(folder).as_posix())]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def leftovers(folder: Path) -> list[str]:
    """What is hidden or half-written in a folder."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    return [path for path in found if re.search(r"(^|/)\.(?!(lock|launch|metadata)$)|partial|tmp", path)]


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0: there is none."""
    return max((int(path.name.split("-")[1]) for path in checkpoints(folder) if "merged" not in path.name), default=0)


def whole(folder: Path, where: str) -> list[Path]:
    """The checkpoints, each of which has the files of its manifest and no other; links lead to one of them."""
    found = checkpoints(folder)
    for path in found:
        assert (path / "manifest.json").exists(), f"{where}{path.name} has no manifest"
        read_manifest = json.loads((path / "manifest.json").read_text())["files"]
        there = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
        del there["manifest.json"]
        assert there.keys() == read_manifest.keys(), f"{where}{path.name}: {there.keys() ^ read_manifest.keys()}"
        for name, entry in read_manifest.items():
            data = there[name].read_bytes()
            same = (len(data), hashlib.sha256(data).hexdigest()) == (entry["size"], entry["sha256"])
            assert same, f"{where}{path.name}/{name} is not what the manifest says"
    for link in [*folder.glob("v*/last"), *folder.glob("v*/best")]:
        assert link.resolve() in found, f"{where}{link} leads to {os.readlink(link)}"
    return found


def tensors(folder: Path) -> dict[tuple[str, str], tuple[str, list[int], str]]:
    """Of each tensor of a checkpoint, weights and training state, by file and name: type, shape, checksum."""
    found = {}
    for file in folder.rglob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, at in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = (start + offset for offset in at["data_offsets"])
                checksum = hashlib.sha256(data[first:last]).hexdigest()
                found[str(file.relative_to(folder)), name] = at["dtype"], at["shape"], checksum
    return found


def killed_after(step: int, seconds: float, ranks: list[int]) -> Harm:
    """SIGKILL to these ranks, so long after the run's `step`-th step, and to the others a second later."""

    def harm(running: prepared.Running, notes: Path) -> None:
        with _descriptors(running) as descriptors:
            _wait_for_step(step, notes)
            time.sleep(seconds)
            (notes / "died").write_text(f"ranks {ranks}, {seconds:.3f} s after step {step}")
            for wait, several in ((0.0, [descriptors[rank] for rank in ranks]), (1.0, descriptors)):
                time.sleep(wait)
                _send(several, signal.SIGKILL)

    return harm


def signalled(number: signal.Signals, step: int, ranks: list[int]) -> Harm:
    """A signal to these ranks once a step is done."""

    def harm(running: prepared.Running, notes: Path) -> None:
        with _descriptors(running) as descriptors:
            _wait_for_step(step, notes)
            _send([descriptors[rank] for rank in ranks], number)

    return harm


def tells(said: str, *texts: str) -> None:
    """What a user read has these texts, and no traceback."""
    for text in texts:
        assert text in said, said
    assert "Traceback" not in said, said


@contextmanager
def _descriptors(running: prepared.Running) -> Iterator[list[int]]:
    """Of the processes: they stand for no other process, also after these have ended."""
    descriptors = [os.pidfd_open(pid) for pid in running.pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _send(descriptors: list[int], number: signal.Signals) -> None:
    for descriptor in descriptors:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)


def _wait_for_step(step: int, notes: Path) -> None:
    file, limit = notes / "steps-0", time.monotonic() + 300
    while time.monotonic() < limit and not (file.exists() and len(file.read_text().splitlines()) >= step):
        time.sleep(0.01)
