"""Profiles of some steps (`--profile true`): a trace and a table of kernels in the run's `profile/`.

The trace opens in https://ui.perfetto.dev. Profiled steps are slower, and so are the rates of their log lines.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...bridge import runtime
from ...templates.plural import plural
from ..options.groups import ProfileOptions

ROWS = 30  # in the table


class Profile:
    """Profiler of this rank's steps --profile_step_start to --profile_step_end.

        profile.before(step); train_step(...); profile.after(step)      # in each step

    note: prints a message to the user. paused: context that excludes the profiler's own time from throughput. Raises
    ValueError if the run ends before the first of these steps.
    """

    def __init__(
        self,
        options: ProfileOptions,
        folder: Path,
        max_steps: int,
        note: Callable[[str], None],
        paused: Callable[[], AbstractContextManager[None]],
        first: int = 1,
    ):
        """Choose the steps. `first`: first step of a resumed run."""
        if options.profile and options.profile_step_start > max_steps:
            raise ValueError(
                f"--profile_step_start {options.profile_step_start}: the run has {plural(max_steps, 'step')}. Set an "
                "earlier one"
            )
        is_profiled = options.profile and dist.get_rank() in options.profile_ranks
        end = min(options.profile_step_end, max_steps)
        self.steps = range(max(options.profile_step_start, first), end + 1) if is_profiled else range(0)
        self.folder, self.note, self.paused = folder / "profile", note, paused
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if not self.steps or step != self.steps[0]:
            return
        runtime.synchronize()  # ends the previous step's time
        with self.paused():
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
            self._profiler.start()

    def after(self, step: int) -> None:
        if not self.steps or step != self.steps[-1]:
            return
        runtime.synchronize()
        with self.paused():
            self._write(step)

    def _write(self, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"steps-{self.steps[0]}-{step}-rank-{dist.get_rank()}.json"
        profiler.export_chrome_trace(str(trace))
        on_gpu = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        kernels = [event for event in on_gpu if not event.is_user_annotation]  # annotations are not work
        annotations = [event for event in on_gpu if event.is_user_annotation]
        steps = len(self.steps)
        table = table_of_kernels(kernels, annotations, steps) if kernels else _table_of_operators(profiler, steps)
        trace.with_suffix(".txt").write_text(table)
        self.note(f"profiled steps {self.steps[0]} to {step}: {trace}, with a table in .txt beside it")


def table_of_kernels(kernels: list[Any], annotations: list[Any], steps: int) -> str:
    """Return the device time by kernel (including copies), and the time without any: by the kernel that ends it.

    annotations: named parts of a step on the device, whose times are given too
    """
    rows, waits = _Rows(), _Rows()
    gaps: list[tuple[float, float]] = []
    kernels = sorted(kernels, key=lambda event: event.time_range.start)
    begin = end = kernels[0].time_range.start
    for event in kernels:
        rows.add(event.name, event.time_range.elapsed_us())
        if event.time_range.start > end:
            waits.add(event.name, event.time_range.start - end)
            gaps.append((end, event.time_range.start))
        end = max(end, event.time_range.end)
    idle = sum(stop - start for start, stop in gaps)
    lines = [
        f"{plural(steps, 'step')} of {(end - begin) / steps / 1e3:,.1f} ms; in each no kernel runs for "
        f"{idle / steps / 1e3:,.1f} ms ({idle / (end - begin):.1%}), between the first and the last one"
    ]
    for name in sorted({event.name for event in annotations}):
        spans = [(event.time_range.start, event.time_range.end) for event in annotations if event.name == name]
        duration = sum(stop - start for start, stop in spans)
        idle = sum(max(0.0, min(stop, after) - max(start, before)) for start, stop in spans for before, after in gaps)
        lines.append(f"  {name}: {duration / steps / 1e3:,.1f} ms, without a kernel {idle / steps / 1e3:,.1f} ms")
    text = "\n".join(lines) + "\n" + _table(rows, steps)
    return text + (f"\nTime without a kernel, by the kernel that ends it:\n{_table(waits, steps)}" if waits else "")


class _Rows(dict[str, tuple[int, float]]):
    """Number and microseconds of events by name."""

    def add(self, name: str, microseconds: float) -> None:
        count, total = self.get(name, (0, 0.0))
        self[name] = count + 1, total + microseconds


def _table_of_operators(profiler: torch.profiler.profile, steps: int) -> str:
    """Return the CPU's self time by operator, for a run without a GPU."""
    averages = profiler.key_averages()
    return _table({row.key: (row.count, row.self_cpu_time_total) for row in averages}, steps)


def _table(rows: dict[str, tuple[int, float]], steps: int) -> str:
    total = sum(microseconds for _, microseconds in rows.values())
    lines = [f"{'ms a step':>12} {'share':>7} {'times':>8}"]
    ordered = sorted(rows.items(), key=lambda row: -row[1][1])
    for name, (count, microseconds) in [("all together", (sum(n for n, _ in rows.values()), total)), *ordered[:ROWS]]:
        lines.append(
            f"{microseconds / steps / 1e3:12.3f} {microseconds / total:7.1%} {count / steps:8.0f}  {name[:160]}"
        )
    return "\n".join(lines) + "\n"
