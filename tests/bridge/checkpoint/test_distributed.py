"""megatron-core checkpoints of every family, from layout to layout, and with a plain megatron-core at the other end."""

import json
from pathlib import Path

import pytest

from tests.bridge import families
from tests.torchrun import torchrun


def launch(folder: Path, processes: int) -> dict:
    run = torchrun("tests.bridge.checkpoint.distributed_worker", folder, processes=processes, timeout=900)
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads((folder / f"results-{processes}.json").read_text())


# Dense with biases, softmax experts (and a plain megatron-core beside them), MLA with shared experts, hybrid.
FEW = ("qwen2", "qwen3_moe", "deepseek_v3", "qwen3_5_text")
FEW_LAYOUTS = ("TP2", "PP2", "TP2 SP EP2", "TP2 SP ETP2")


def is_chosen(name: str, few: bool) -> bool:
    if few:
        return name in FEW
    return name not in FEW and (
        " " not in name or name in ("deepseek_v2 Lite", "llama biases", "qwen3_5_moe_text within")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "few", [True, pytest.param(False, marks=(pytest.mark.long, pytest.mark.nosample))], ids=["few", "the others"]
)
def test_every_family_from_any_layout_to_any_other(few: bool, tmp_path: Path) -> None:
    from tests.bridge.families.reference import make

    jobs = {}
    for name, tiny in families.tinies().items():
        if is_chosen(name, few):
            make(tmp_path / name, tiny)
            jobs[name] = [layout for layout in tiny.layouts if layout not in ("CP2", "TP2 SP")] + ["TP2"]
            if few:
                jobs[name] = [layout for layout in jobs[name] if layout in FEW_LAYOUTS]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    two, one = launch(tmp_path, 2), launch(tmp_path, 1)
    for results in (two, one):
        assert not any(results["problems"]), results["problems"]
    cases = {*two["cases"], *one["cases"]}
    for name in jobs:
        layouts = [layout for layout in families.LAYOUTS[2] if layout in jobs[name]]  # in the order of the worker
        assert {f"{name}@2 {layout} -> " for layout in layouts} <= cases
        assert {f"{name}@2 {layouts[0]} -> {layout}" for layout in layouts} <= cases
    if not few:
        return
    assert "qwen3_moe@2 TP2 SP EP2 -> " in cases
    assert "qwen3_moe@2 TP2 SP ETP2 -> plain " in cases
    assert "qwen2@2 PP2 -> plain " in cases
    # Adapters: every expert's, parts of fused matrices, an embedding's; what is trained whole.
    assert "qwen3_moe everything@2 TP2 SP EP2 -> " in cases
    assert "deepseek_v3 words@2 TP2 -> PP2" in cases
    assert "qwen2 parts@2 TP2 -> PP2" in cases
