"""The table of a profile, of kernels whose times are known."""

from types import SimpleNamespace

from megaswift.tasks.profile import table_of_kernels


def kernel(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start))


def test_kernels_and_gaps():
    # Two at the same time, a gap of 2 ms, and one inside another: 10 ms, of which 2 have none.
    kernels = [kernel("b", 0, 4e3), kernel("a", 1e3, 5e3), kernel("a", 7e3, 10e3), kernel("c", 8e3, 9e3)]
    head, _, *rows = table_of_kernels(kernels, 2).splitlines()
    assert head == "2 steps of 5.0 ms; of each 1.0 ms (20.0%) no kernel is at work, from the first one to the last"
    assert [row.split() for row in rows] == [
        ["6.000", "100.0%", "2", "all", "together"],
        ["3.500", "58.3%", "1", "a"],
        ["2.000", "33.3%", "0", "b"],
        ["0.500", "8.3%", "0", "c"],
    ]
