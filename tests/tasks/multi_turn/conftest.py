"""What tests of turns share."""

from collections.abc import Iterator

import pytest
from megaswift.tasks.multi_turn.registry import multi_turns, registered_tools

from tests.tasks.rewards.conftest import own_registry  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def own_turns() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(multi_turns), dict(registered_tools)
    yield
    for registry, entries in zip((multi_turns, registered_tools), before, strict=True):
        registry.clear()
        registry.update(entries)
