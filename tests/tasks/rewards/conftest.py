"""Fixtures of the tests of rewards."""

import sys
import threading
from collections.abc import Iterator

import megaswift.tasks.rewards.load  # noqa: F401  (registers the project's own rewards, once)
import pytest
from megaswift.tasks.rewards import orms
from megaswift.tasks.system import plugins

from tests.tasks.rewards.fake_judge import Judge


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


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    for name in ("JUDGE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    judge = Judge()
    thread = threading.Thread(target=judge.server.serve_forever, args=(0.05,))
    thread.start()
    yield judge
    judge.server.shutdown()
    thread.join()
    judge.server.server_close()
