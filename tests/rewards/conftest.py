"""What tests of rewards share."""

import sys
from collections.abc import Iterator

import pytest
from megaswift.tasks.rewards import load, orms


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """What a test's plugins register is gone after it."""
    before = dict(orms), set(load._loaded), list(sys.path), set(sys.modules)
    yield
    orms.clear()
    orms.update(before[0])
    load._loaded.clear()
    load._loaded.update(before[1])
    sys.path[:] = before[2]
    for name in sys.modules.keys() - before[3]:
        if name.startswith("megaswift_plugin"):
            del sys.modules[name]
