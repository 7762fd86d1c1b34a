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
        table = (
            table_of_kernels(kernels, len(self.steps)) if kernels else _table_of_operators(profiler, len(self.steps))
        )
        trace.with_suffix(".txt").write_text(table)
        self.note(f"profiled steps {self.steps[0]} to {step}: {trace}, with a table in .txt beside it")


def table_of_kernels(kernels: list[Any], steps: int) -> str:
    """Return the device time by kernel (including copies), and the share of time without any."""
    rows: dict[str, tuple[int, float]] = {}
    for event in kernels:
        count, total = rows.get(event.name, (0, 0.0))
        rows[event.name] = count + 1, total + event.time_range.elapsed_us()
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    duration = end - spans[0][0]
    summary = (
        f"{plural(steps, 'step')} of {duration / steps / 1e3:,.1f} ms; in each no kernel runs for "
        f"{(duration - busy) / steps / 1e3:,.1f} ms ({1 - busy / duration:.1%}), between the first and the last one\n"
    )
    return summary + _table(rows, steps)


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
