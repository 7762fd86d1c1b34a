"""Pytest plugin: which tests run, in which process, and what the summary says of the others.

pytest --sample-seed 20261122     beside the tests that -m selects, a few of the long ones, chosen by the seed
pytest -n 2                       in two processes (pytest-xdist): files, and folders of SHARED, stay together
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from megaswift.templates.plural import plural

# Folders whose files share what a fixture has made for the session.
SHARED = ("tests/bridge/lora", "tests/tasks/distillation", "tests/tasks/preference", "tests/tasks/rl")
SAMPLE = 4  # long tests that join a default run, of different files: about a minute together
COUNTS = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample-seed", type=int, metavar="SEED", help=f"run {SAMPLE} of the long tests too, chosen by SEED"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Skip the GPU tests where there is no GPU; put the sample back among the items that -m has left."""
    collected, seed = list(items), config.getoption("--sample-seed")
    skip_gpu_tests(items)
    yield
    selected = set(items)
    left = [item for item in collected if item.get_closest_marker("long") and item not in selected]
    sample = set() if seed is None else choose(left, seed)
    items[:] = [item for item in collected if item in selected | sample]
    config.stash[COUNTS] = {"long": len(left), "sample": len(sample)}


def skip_gpu_tests(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def choose(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return SAMPLE items at most, one of a file: the same ones for the same seed and tests."""
    by_file = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("nosample", "proof", "gpu", "skip", "skipif")):
            by_file[item.nodeid.partition("::")[0]].append(item)
    dice = random.Random(seed)
    files = dice.sample(sorted(by_file), min(SAMPLE, len(by_file)))
    return {dice.choice(by_file[file]) for file in files}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, or whole folders of SHARED."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if folder in SHARED else file

    return ByFile(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under pytest-xdist, have the counts of a worker told to the process that writes the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counts"] = session.config.stash.get(COUNTS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if counts := getattr(node, "workeroutput", {}).get("counts"):
        node.config.stash[COUNTS] = counts


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say why tests were skipped, which long ones were sampled, and how many are left."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped: {count} ({reason})")
    counts, seed = config.stash.get(COUNTS, {}), config.getoption("--sample-seed")
    if counts.get("sample"):
        total = counts["long"]
        said = f"seed {seed}, {counts['sample']} of {total} tests (reproduce with --sample-seed {seed})"
        terminalreporter.write_line(f"long sample: {said}")
    if left := counts.get("long", 0) - counts.get("sample", 0):
        terminalreporter.write_line(f"not run: {plural(left, 'long test')} (scripts/test.sh --long)")


def selected_params(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the parameters of all tests of the requesting file that run in this session."""
    return [
        item.callspec.params  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
