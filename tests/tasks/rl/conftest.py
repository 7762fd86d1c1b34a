"""What the tests of GRPO share: runs that several of them look at are made once."""

import pytest

from tests.tasks.rl.images import add_images
from tests.tasks.rl.runs import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="session")
def images(place: Place) -> Place:
    """The place, with vision-language models and pictures."""
    return add_images(place)
