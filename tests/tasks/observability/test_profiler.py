"""The table of a profile, of kernels whose times are known; and when a profile waits."""

import contextlib
from types import SimpleNamespace

import torch
from megaswift.tasks.observability.profiler import Profile, table_of_kernels
from megaswift.tasks.options.groups import ProfileOptions


def kernel(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start))


def test_kernels_and_gaps():
    # Two at the same time, a gap of 2 ms, and one inside another: 10 ms, of which 2 have none.
    kernels = [kernel("b", 0, 4e3), kernel("a", 1e3, 5e3), kernel("a", 7e3, 10e3), kernel("c", 8e3, 9e3)]
    parts = [kernel("vision tower", 0, 6e3), kernel("vision tower", 6.5e3, 1e4), kernel("data", 9e3, 1e4)]
    table, waits = table_of_kernels(kernels, parts, 2).split("\n\n")
    head, data, tower, _, *rows = table.splitlines()
    assert (data, tower) == (
        "  data: 0.5 ms, without a kernel 0.0 ms",
        "  vision tower: 4.8 ms, without a kernel 0.8 ms",
    )
    assert waits.splitlines()[0] == "Time without a kernel, by the kernel that ends it:"
    assert waits.splitlines()[-1].split() == ["1.000", "100.0%", "0", "a"]
    assert head == "2 steps of 5.0 ms; in each no kernel runs for 1.0 ms (20.0%), between the first and the last one"
    assert [row.split() for row in rows] == [
        ["6.000", "100.0%", "2", "all", "together"],
        ["3.500", "58.3%", "1", "a"],
        ["2.000", "33.3%", "0", "b"],
        ["0.500", "8.3%", "0", "c"],
    ]


def test_what_earlier_steps_take_is_no_pause(tmp_path, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def paused():
        seen.append("pause")
        yield
        seen.append("end")

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("megaswift.tasks.observability.profiler.runtime.synchronize", lambda: seen.append("wait"))
    options = ProfileOptions(profile=True, profile_step_start=2, profile_step_end=2)
    profile = Profile(options, tmp_path, 3, lambda _: None, paused)
    for step in (1, 2, 3):
        profile.before(step)
        torch.ones(2).sum()
        seen.append(step)
        profile.after(step)
    assert seen == [1, "wait", "pause", "end", 2, "wait", "pause", "end", 3]
