"""Vision-language models beside transformers': log-probabilities through the loss, and every gradient, in every layout.

pytest tests/bridge/vision -k qwen3_vl          families whose names begin with it
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.vision import FAMILIES, LAYOUTS
from tests.torchrun import torchrun

BOUND = 1e-4  # of the largest element of each gradient
SEEN = 1e-2  # what a fault has to move a gradient by
TOWER = r"^vision\.(patch_embed|position_embeddings|layers)"
MERGERS = r"^vision\.(merger|deep_mergers)"
LANGUAGE = r"^(embedding|decoder|output_layer)"
# Beside one process, each tower has one layout of each number of processes; the others are long.
USUAL = {
    "qwen2_vl": ("CP2",),
    "qwen2_5_vl": ("TP2 SP", "TP2 SP PP2 recompute"),
    "qwen3_vl": ("PP2 VPP2", "PP2 embedding apart", "TP2 SP CP2"),
    "qwen3_vl_moe": ("TP2 SP EP2",),
    "qwen3_5": ("TP2 SP",),
    "qwen3_5_moe": ("EP2",),
    "glm4v": ("CP2",),
    "glm4v_moe": ("TP2 SP EP2",),
    "mistral3": ("TP2 SP",),
    "ministral3": (),
    "internvl_qwen2": (),
    "internvl_qwen3": ("CP2",),
    "internvl_qwen3_moe": (),
    "internvl_gpt_oss": (),
    "internvl_chat_moe": ("TP2 SP EP2",),
    "kimi_vl": ("CP2",),
    "gemma3": ("CP2",),
    "gemma4": ("TP2 SP",),
    "gemma4_elastic": ("TP2 SP",),
    "gemma4_unified": ("CP2",),
    "llava": (),
    "llama4": ("TP2 SP EP2",),
    "kimi_k25": (),
    "llava_onevision": ("CP2",),
    "ovis2": ("TP2 SP",),
    "ovis2_with_biases": (),
}
FURTHER_FAULTS = (
    ("ovis2", "position embeddings of the next row", ""),
    ("ovis2", "one block for all images", ""),
    ("llava_onevision", "position embeddings of the next row", ""),
    ("llava_onevision", "one block for all images", ""),
    ("kimi_k25", "height and width swapped", ""),
    ("kimi_k25", "position embeddings of the next row", ""),
    ("llama4", "height and width swapped", ""),
    ("llama4", "one block for all images", ""),
    ("llama4", "patches of a square in another order", ""),
    ("llama4", "position embeddings of the next row", ""),
    ("llava", "one block for all images", ""),
    ("llava", "position embeddings of the next row", ""),
    ("gemma3", "images end a token early", ""),
    ("gemma3", "position embeddings of the next row", ""),
    ("gemma4_unified", "position embeddings of the next row", ""),
    ("gemma4", "causal images", ""),
    ("gemma4", "height and width swapped", ""),
    ("gemma4", "position embeddings of the next row", ""),
    ("gemma4", "one block for all images", ""),
    ("kimi_vl", "one block for all images", ""),
    ("kimi_vl", "patches of a square in another order", ""),
    ("kimi_vl", "position embeddings of the next row", ""),
)
EXPERTS = "moe", "gpt_oss", "kimi_vl", "llama4", "kimi_k25"  # ends of the names of families with experts
Jobs = list[dict[str, Any]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    import torch

    from tests.bridge.vision import reference

    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("vision"), {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = root / family
            reference.make(made[family], family)
        return made[family]

    return make


def run(folder: Path, jobs: Jobs, processes: int) -> dict[str, Any]:
    """The result of each job, by its name."""
    (folder / "jobs.json").write_text(json.dumps([{"folder": str(folder)} | job for job in jobs]))
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    done = torchrun("tests.bridge.vision.worker", folder / "jobs.json", results, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


def is_right(result: dict[str, Any]) -> bool:
    assert result.get("saved", []) == []
    assert result["encoded"] == result["patches"]  # each medium once, over all ranks
    return result["gradients"] < BOUND


CASES = [
    pytest.param(family, processes, layout, id=f"{family}: {layout or 'one process'}",
                 marks=() if not layout or layout in USUAL[family] else pytest.mark.long)
    for family in FAMILIES
    for processes, layouts in LAYOUTS.items()
    for layout in layouts
    if not (family.endswith(EXPERTS) and layout == "TP2")  # megatron-core refuses experts under TP without SP
    if not (family == "gemma4_elastic" and "PP2" in layout)  # each layer reads the embeddings
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
        pytest.param(f"{TOWER}|{MERGERS}", True, id="the language model"),
        pytest.param(f"{TOWER}|{LANGUAGE}", True, id="mergers"),
        pytest.param(TOWER, True, id="mergers and language model"),
        pytest.param(f"{MERGERS}|{LANGUAGE}", True, id="the tower"),
        pytest.param(LANGUAGE, False, id="tower and mergers, activations kept"),
    ],
)
def test_only_what_is_not_frozen_is_trained(frozen, recomputes, folder_of):
    """In two pipeline stages, with micro batches without images: their backward passes need a gradient too."""
    settings = {"frozen": frozen, "recomputes": recomputes}
    jobs = [{"name": "PP2", "layout": LAYOUTS[2]["PP2"], "settings": settings}]
    result = run(folder_of("qwen3_vl"), jobs, 2)["PP2"]
    assert 0 < result["trained"] < result["of"]
    assert is_right(result), result


@pytest.mark.parametrize(
    ("family", "processes", "layout", "flags"),
    [
        pytest.param("qwen3_vl", 2, "PP2", {}, id="PP2"),
        pytest.param("qwen3_vl", 4, "PP2 VPP2", {"overlap_grad_reduce": True}, id="DP2 PP2 VPP2"),
        pytest.param("qwen3_vl_moe", 2, "PP2", {"moe_aux_loss_coeff": 0.1}, id="experts", marks=pytest.mark.long),
    ],
)
def test_windows_of_the_schedule_change_nothing(family, processes, layout, flags, folder_of):
    """Two micro batches at a time, whose features take more than a byte."""
    layout = LAYOUTS[2][layout] | flags
    settings = {"whole": {"repeats": 2}, "windows": {"repeats": 2, "feature_bytes": 1}}
    jobs = [{"name": name, "layout": layout, "settings": each} for name, each in settings.items()]
    results = run(folder_of(family), jobs, processes)
    assert results["windows"]["schedules"] > results["whole"]["schedules"] == 1
    if "moe_aux_loss_coeff" in flags:  # not that of transformers
        assert results["windows"]["norm"] == pytest.approx(results["whole"]["norm"], rel=1e-6)
    else:
        assert all(map(is_right, results.values())), results


@pytest.mark.parametrize(("processes", "layout"), [(1, ""), (2, "TP2 SP"), (2, "CP2")])
def test_micro_batches_are_encoded_together(processes, layout, folder_of):
    """As many as the ranks of a replica where activations are kept, or more if they fit into memory; else all."""
    settings = {
        "frozen": {"frozen": f"{TOWER}|{MERGERS}"},
        "mergers": {"frozen": TOWER},
        "recomputed": {"recomputes": True},
        "kept": {"recomputes": None},
        "all kept": {"recomputes": None, "kept_share": 1.0},
        "half kept": {"recomputes": None, "kept_share": 0.5, "repeats": 2},
    }
    jobs = [{"name": name, "layout": LAYOUTS[processes][layout], "settings": s} for name, s in settings.items()]
    results = run(folder_of("qwen3_vl"), jobs, processes)
    micro_batches = 3
    kept = -(-micro_batches // processes)
    encodings = {"frozen": 1, "mergers": 1, "recomputed": 1, "kept": kept, "all kept": 1, "half kept": 2}
    assert {name: result["encodings"] for name, result in results.items()} == encodings
    assert results["recomputed"]["keeps_graph"] == results["mergers"]["keeps_graph"] == [False]
    assert all(all(results[name]["keeps_graph"]) for name in ("kept", "all kept", "half kept"))
    assert all(map(is_right, results.values())), results


@pytest.mark.parametrize(("processes", "layout"), [(2, "PP2 VPP2"), (4, "TP2 SP PP2 recompute")])
def test_pipelines_keep_the_activations_that_fit(processes, layout, folder_of):
    """Those of the first micro batches, and recompute the others."""
    settings = {name: {"recomputes": None, "kept_share": share, "repeats": 2}
                for name, share in (("none", 0.0), ("some", 0.6), ("all", 1.0))}  # fmt: skip
    settings["windows"] = settings["some"] | {"feature_bytes": 1}
    jobs = [{"name": name, "layout": LAYOUTS[processes][layout], "settings": s} for name, s in settings.items()]
    results = run(folder_of("qwen3_vl"), jobs, processes)
    assert results["none"]["keeps_graph"] == [False]
    assert results["some"]["keeps_graph"] == [True, False]
    assert results["all"]["keeps_graph"] == [True]
    assert results["windows"]["schedules"] > 1
    assert all(results["windows"]["keeps_graph"])
    assert all(map(is_right, results.values())), results


@pytest.mark.parametrize(
    ("family", "fault", "layout"),
    [
        ("qwen3_vl", "deep levels swapped", ""),
        ("qwen3_vl", "tower gradient / 2", ""),
        ("qwen3_vl", "deep gradients of one rank", "TP2 SP"),
        ("qwen3_vl", "height and width swapped", ""),
        ("qwen3_vl", "one block for all images", ""),
        ("qwen2_5_vl", "window order kept", ""),
        ("qwen3_5", "axes of ropes swapped", ""),
        ("glm4v", "axes of ropes swapped", ""),
        ("glm4v", "position embeddings of the next row", ""),
        ("mistral3", "height and width swapped", ""),
        ("mistral3", "one block for all images", ""),
        ("mistral3", "patches of a square in another order", ""),
        ("internvl_qwen3", "patches of a square in another order", ""),
        ("internvl_qwen3", "one block for all images", ""),
        ("internvl_qwen3", "position embeddings of the next row", ""),
        ("gemma3", "causal images", "CP2"),
        ("gemma4", "images attend in all layers", ""),
        ("gemma4_elastic", "layer inputs of visual tokens", ""),
        ("gemma4_elastic", "no clipping", ""),
        ("kimi_vl", "height and width swapped", ""),
        ("llama4", "class tokens at the first patch", ""),
        ("llava_onevision", "features of tiles in the next place", ""),
        ("ovis2", "features of tiles in the next place", ""),
        ("ovis2", "patches of a square in another order", ""),
        *(pytest.param(*case, marks=pytest.mark.long) for case in FURTHER_FAULTS),
    ],
)
def test_a_planted_fault_is_seen(family, fault, layout, folder_of):
    processes = 2 if layout else 1
    jobs = [{"name": fault, "layout": LAYOUTS[processes][layout], "settings": {"fault": fault}}]
    assert run(folder_of(family), jobs, processes)[fault]["gradients"] > SEEN
