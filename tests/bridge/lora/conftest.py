import pytest

from tests.bridge.lora.launched import Launched


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    return Launched(tmp_path_factory.mktemp("lora"))
