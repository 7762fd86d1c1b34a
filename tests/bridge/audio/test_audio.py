"""Audio-language models beside transformers': log-probabilities through the loss, and every gradient, in every layout.

pytest tests/bridge/audio -k qwen3_asr          families whose names begin with it
"""

from pathlib import Path
from typing import Any

import pytest

from tests.bridge.audio import FAMILIES, LAYOUTS
from tests.bridge.vision.test_vision import MERGERS, SEEN, is_right, run

TOWER = r"^(vision|audio)\.(patch_embed|position_embeddings|layers|convs|linear_conv|final_norm)"
LANGUAGE = r"^(embedding|decoder|output_layer)"
# Beside one process; the others are long.
USUAL = {"qwen3_asr": ("CP2", "TP2 SP CP2")}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    import torch

    from tests.bridge.audio import reference

    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("audio"), {}

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
]  # fmt: skip


@pytest.mark.parametrize(("family", "processes", "layout"), CASES)
def test_gradients_are_those_of_transformers(family, processes, layout, folder_of):
    jobs = [{"name": layout, "layout": LAYOUTS[processes][layout]}]
    result = run(folder_of(family), jobs, processes)[layout]
    assert result["trained"] == result["of"]
    assert is_right(result), result


@pytest.mark.parametrize(
    ("frozen", "recomputes"),
    [
        pytest.param(f"{TOWER}|{LANGUAGE}", True, id="the projector"),
        pytest.param(f"{MERGERS.replace('vision', 'audio')}|{LANGUAGE}", True, id="the tower"),
        pytest.param(LANGUAGE, False, id="tower and projector, activations kept"),
    ],
)
def test_only_what_is_not_frozen_is_trained(frozen, recomputes, folder_of):
    settings = {"frozen": frozen, "recomputes": recomputes}
    jobs = [{"name": "PP2", "layout": LAYOUTS[2]["PP2"], "settings": settings}]
    result = run(folder_of("qwen3_asr"), jobs, 2)["PP2"]
    assert 0 < result["trained"] < result["of"]
    assert is_right(result), result


def test_micro_batches_are_encoded_together_unless_activations_are_kept(folder_of):
    cases: dict[str, dict[str, Any]] = {
        "frozen": {"frozen": r"^audio\."},
        "recomputed": {},
        "kept": {"recomputes": None},
    }
    jobs = [{"name": name, "layout": {}, "settings": settings} for name, settings in cases.items()]
    results = run(folder_of("qwen3_asr"), jobs, 1)
    assert results["frozen"]["encodings"] == results["recomputed"]["encodings"] == 1 < results["kept"]["encodings"]
    assert all(map(is_right, results.values())), results


@pytest.mark.parametrize(
    "fault",
    [
        "tower gradient / 2",
        "one block for all audios",
        "positions of the next step of time",
        "frames of the next step of time",
    ],
)
def test_a_planted_fault_is_seen(fault, folder_of):
    jobs = [{"name": fault, "layout": {}, "settings": {"fault": fault}}]
    assert run(folder_of("qwen3_asr"), jobs, 1)[fault]["gradients"] > SEEN
