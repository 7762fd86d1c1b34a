"""Every family and layout against transformers: see the package's docstring for what is tested, and how to add one.

pytest tests/bridge/families -k llama          one family (names begin with it: -k 'qwen3 and not moe' ...)
"""

import json
from pathlib import Path

import pytest
from megaswift.bridge.families import FAMILIES

from tests.bridge import families
from tests.torchrun import torchrun

BOUND = 1e-4
SEEN = 1e-2  # what a fault has to move the log-probabilities by
TINIES = families.tinies()
CASES = [(name, "") for name in TINIES] + [(name, layout) for name, tiny in TINIES.items() for layout in tiny.layouts]


def default_layouts() -> dict[str, str]:
    """Return one layout of two processes for the first variant of each family: neighbours have different ones."""
    first = {name.split()[0]: name for name in reversed(TINIES)}
    of_two = {name: [each for each in TINIES[name].layouts if each in families.LAYOUTS[2]] for name in first.values()}
    return {name: layouts[at % len(layouts)] for at, (name, layouts) in enumerate(of_two.items()) if layouts}


DEFAULT = default_layouts()  # beside one process of every variant; the other layouts are long
everywhere = pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name,
            layout,
            marks=pytest.mark.long if layout and layout != DEFAULT.get(name) else (),
            id=f"{name}: {layout or 'one process'}",
        )
        for name, layout in CASES
    ],
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A variant's folder: see reference.make."""
    import torch

    from tests.bridge.families import reference

    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("families"), {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = root / name
            reference.make(made[name], TINIES[name])
        return made[name]

    return make


@pytest.fixture(scope="module")
def one_process():
    """This process as the only one of a job."""
    from tests.bridge.families import worker

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_COMPILE_DISABLE"):
            patch.setenv(name, "")
            patch.delenv(name)
        options = worker.options_of({})
        worker.parallel.initialize(options, seed=1)
        yield options
        worker.close()
        worker.dist.destroy_process_group()


@pytest.fixture(scope="module")
def result_of(request, folder_of, one_process):
    """What worker.check found for a variant in a layout: with several processes, for all that was selected at once."""
    from tests.bridge.families import worker

    done: dict[tuple[str, str], dict] = {}

    def result(name: str, layout: str) -> dict:
        if not layout:
            if (name, layout) not in done:
                done[name, layout] = worker.check(folder_of(name), one_process)
        elif (name, layout) not in done:
            world = next(world for world, layouts in families.LAYOUTS.items() if layout in layouts)
            done.update(launch(world, selected(request.session.items, world), folder_of))
        return done[name, layout]

    return result


def selected(items, world: int) -> list[tuple[str, str]]:
    """The cases of a number of processes among the tests that run, those of a layout after one another."""
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec") and item.path == Path(__file__)]
    chosen = {(found["name"], found.get("layout")) for found in parameters}
    return [(name, layout) for layout in families.LAYOUTS[world] for name in TINIES if (name, layout) in chosen]


def launch(
    world: int, cases: list[tuple[str, str]], folder_of, kernels=None, rounded=False
) -> dict[tuple[str, str], dict]:
    """tests.bridge.families.worker under torchrun; started again behind a case that fails, for those that are left.

    On CPUs, or on GPUs with the flags `kernels`; `rounded`: in bf16, by worker.check_rounded.
    """
    done: dict[tuple[str, str], dict] = {}
    while remaining := [case for case in cases if case not in done]:
        place = folder_of(remaining[0][0]).parent / f"world-{world}-{len(done)}-{rounded}"
        place.mkdir()
        keys = {f"{name}: {layout}": (name, layout) for name, layout in remaining}
        jobs = [
            {
                "name": key,
                "folder": str(folder_of(name)),
                "layout": families.LAYOUTS[world][layout] | (kernels or {}),
                "rounded": rounded,
            }
            for key, (name, layout) in keys.items()
        ]
        (place / "jobs.json").write_text(json.dumps(jobs))
        files = place / "jobs.json", place / "results.json"
        ended = torchrun("tests.bridge.families.worker", *files, processes=world, timeout=900, gpu=kernels is not None)
        for file in sorted(place.glob("results.*")):  # of a rank that failed first
            found = {keys[key]: value for key, value in json.loads(file.read_text()).items()}
            done |= {case: value for case, value in found.items() if "error" in value or case not in done}
        if ended.returncode and remaining[0] not in done:
            done[remaining[0]] = {"error": ended.stdout[-2000:] + ended.stderr[-6000:]}
    return done


@everywhere
def test_computes_as_transformers_does(name, layout, result_of):
    result = result_of(name, layout)
    assert "error" not in result, result.get("error")
    assert result["packed"] < BOUND, "log-probabilities of packed documents"
    assert result["padded"] < BOUND, "log-probabilities of padded rows"
    assert result["gradients"] < BOUND, result["worst gradient"]
    assert result["gradient as a whole"] < BOUND


@everywhere
def test_comes_back_byte_for_byte(name, layout, result_of):
    result = result_of(name, layout)
    assert "error" not in result, result.get("error")
    assert not result["fp32"]
    assert not result["bf16"]


@pytest.mark.parametrize("name", TINIES)
def test_faults_are_seen(name, folder_of, one_process):
    from tests.bridge.families import worker

    found = worker.check_faults(folder_of(name), one_process, dict(TINIES[name].faults))
    assert found
    assert not {fault: distance for fault, distance in found.items() if not distance > SEEN}


def test_every_family_is_tested():
    assert {name.split()[0] for name in TINIES} == {family.name for family in FAMILIES}
