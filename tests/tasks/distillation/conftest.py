"""What the tests of distillation share: runs that several of them look at are made once."""

import pytest

from tests.tasks.distillation.runs import Distilled


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    return Distilled(tmp_path_factory.mktemp("gkd"))
