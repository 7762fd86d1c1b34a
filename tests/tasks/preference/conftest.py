"""What the tests of preference training share: runs that several of them look at are made once."""

import pytest

from tests.tasks.preference.runs import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("preference"))
