"""Thinkers of Omni models beside transformers': log-probabilities through the loss, and every gradient, in layouts.

pytest tests/bridge/omni -k qwen3_omni          families whose names begin with it
"""

from pathlib import Path
from typing import Any

import pytest

from tests.bridge.omni import FAMILIES
from tests.bridge.vision import LAYOUTS
from tests.bridge.vision.test_vision import SEEN, is_right, run

# Beside one process; the others are long.
USUAL = {"qwen3_omni_moe": ("TP2 SP EP2",), "qwen2_5_omni": ("CP2",)}
LANGUAGE = r"^(embedding|decoder|output_layer)"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    import torch

    from tests.bridge.omni import reference

    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("omni"), {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = root / family
            reference.make(made[family], family)
        return made[family]

    return make


CASES = [
    pytest.param(family, processes, layout, id=f"{family}: {layout or 'one process'}",
                 marks=() if not layout or layout in USUAL[family] else pytest.mark.long)
    for family in FAMILIES
    for processes, layouts in LAYOUTS.items()
    for layout in layouts
    # megatron-core refuses experts under TP without SP.
    if not (layout == "TP2" if family.endswith("moe") else "EP" in layout)
]  # fmt: skip


@pytest.mark.parametrize(("family", "processes", "layout"), CASES)
def test_gradients_are_those_of_transformers(family, processes, layout, folder_of):
    jobs = [{"name": layout, "layout": LAYOUTS[processes][layout]}]
    result = run(folder_of(family), jobs, processes)[layout]
    assert result["trained"] == result["of"]
    assert is_right(result), result


@pytest.mark.long
@pytest.mark.parametrize("frozen", [rf"^audio\.|{LANGUAGE}", rf"^vision\.|{LANGUAGE}"], ids=["vision", "audio"])
def test_one_tower_is_trained(frozen, folder_of):
    """In two pipeline stages, with micro batches that have media of the other tower alone."""
    jobs = [{"name": "PP2", "layout": LAYOUTS[2]["PP2"], "settings": {"frozen": frozen}}]
    result = run(folder_of("qwen3_omni_moe"), jobs, 2)["PP2"]
    assert 0 < result["trained"] < result["of"]
    assert is_right(result), result


def _faults(family: str, *names: str) -> list[Any]:
    return [pytest.param(family, name, marks=pytest.mark.long if number else ()) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        *_faults("qwen3_omni_moe", "axes of ropes swapped", "deep levels swapped", "one block for all images",
                 "tower gradient / 2", "one block for all audios", "frames of the next step of time"),
        *_faults("qwen2_5_omni", "axes of ropes swapped", "window order kept", "height and width swapped",
                 "tower gradient / 2", "one block for all audios", "positions of the next step of time"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_seen(family, fault, folder_of):
    jobs = [{"name": fault, "layout": {}, "settings": {"fault": fault}}]
    assert run(folder_of(family), jobs, 1)[fault]["gradients"] > SEEN
