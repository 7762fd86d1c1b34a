"""What every test shares."""

import pytest


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` skip where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
