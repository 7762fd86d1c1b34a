"""Changes to modules while they are imported, and imports without garbage collection."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from megaswift.bridge.imports import change, without_collection


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    """Leave other tests what they had."""
    yield
    gc.unfreeze()
    gc.enable()


def test_collects_nothing_within_and_exempts_what_is_there() -> None:
    gc.unfreeze()
    with without_collection():
        assert not gc.isenabled()
        objects = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(objects)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_leaves_collection_as_it_was_also_after_an_error(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    with pytest.raises(ImportError), without_collection():
        raise ImportError
    assert gc.isenabled() == is_enabled


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a package that notes what the context around it did, and has a file."""
    name = "changed_package"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("import sys\nseen = list(sys.changes)\nloader = __spec__.loader\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "changes", [], raising=False)
    yield name
    sys.modules.pop(name, None)


def test_runs_a_module_within_the_context_once(package: str) -> None:
    changes: list[str] = sys.changes  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        changes.append(f"before {module.__name__}")
        yield
        changes.append(f"after {len(vars(module)['seen'])}")

    finders = len(sys.meta_path)
    change(package, around)
    module = importlib.import_module(package)
    assert module.seen == [f"before {package}"]
    assert changes == [f"before {package}", "after 1"]
    assert len(sys.meta_path) == finders
    # Packages read their own files by their loader.
    assert module.loader is module.__loader__
    assert module.__loader__.get_source(package).startswith("import sys")  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    change(package, around)  # is imported
    assert len(sys.meta_path) == finders


def test_a_module_that_does_not_exist_stays_unknown() -> None:
    finders = len(sys.meta_path)
    change("no_such_package", lambda module: pytest.fail("ran"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")
    assert len(sys.meta_path) == finders
