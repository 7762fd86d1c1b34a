"""What the tests of GRPO share: runs that several of them look at are made once."""

import pytest

from tests.tasks.rl.runs import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("grpo"))
