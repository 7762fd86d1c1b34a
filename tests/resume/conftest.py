import pytest

from tests.resume.harness import make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("resume"))
