"""Fixtures of the tests of rewards."""

import sys
from collections.abc import Iterator

import megaswift.tasks.rewards.load  # noqa: F401  (registers the project's own rewards, once)
import pytest
from megaswift.tasks.rewards import orms
from megaswift.tasks.system import plugins


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Undo the registrations of a test's plugins."""
    before = dict(orms), set(plugins._loaded), list(sys.path), set(sys.modules)
    yield
    orms.clear()
    orms.update(before[0])
    plugins._loaded.clear()
    plugins._loaded.update(before[1])
    sys.path[:] = before[2]
    for name in sys.modules.keys() - before[3]:
        if name.startswith("megaswift_plugin"):
            del sys.modules[name]
