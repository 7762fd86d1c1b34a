"""Fixtures of the tests of multi-turn episodes."""

from collections.abc import Iterator

import megaswift.tasks.multi_turn.load  # noqa: F401  (registers the project's own scheduler, once)
import pytest
from megaswift.tasks.multi_turn.registry import multi_turns, registered_tools

from tests.tasks.rewards.conftest import own_registry  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def own_turns() -> Iterator[None]:
    """Undo the registrations of a test."""
    before = dict(multi_turns), dict(registered_tools)
    yield
    for registry, entries in zip((multi_turns, registered_tools), before, strict=True):
        registry.clear()
        registry.update(entries)
