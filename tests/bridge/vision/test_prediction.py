"""Multi-token prediction on texts with images and videos, against torch around transformers' model.

At a visual token the layer is given its feature instead of an embedding, as vLLM's drafts are.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.families import CP, EP, PP, SP, TP, VPP
from tests.bridge.families.test_prediction import (
    CASES,
    SCALE,
    further_layers,
    further_loss,
    loss,
    names_in_files,
)
from tests.bridge.vision import FAMILIES
from tests.bridge.vision.test_vision import is_right, run

KINDS = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
FLAGS = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": SCALE}
LAYOUTS = {
    1: {"one process": {}},
    2: {"TP2 SP": {TP: 2, SP: True}, "CP2": {CP: 2}, "PP2": {PP: 2}, "PP2 VPP2": {PP: 2, VPP: 2}, "EP2": {EP: 2}},
    4: {"TP2 SP CP2": {TP: 2, SP: True, CP: 2}, "TP2 SP PP2": {TP: 2, SP: True, PP: 2}},
}
pytestmark = pytest.mark.slow


def make(folder: Path, family: str) -> None:
    """Write `folder`/fp32, a checkpoint with the layer, and `folder`/reference.pt with gradients of both losses."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.bridge.families.reference import gradient
    from tests.bridge.vision import reference

    reference.make(folder, family)
    model, case = reference.build(FAMILIES[family]()).eval(), CASES[KINDS[family]]
    settings = model.config.text_config
    model = type(model).from_pretrained(folder / "fp32", attn_implementation="eager", dtype=torch.float32)
    text = model.model.language_model
    layers = further_layers(case, settings, sys.modules[type(text).__module__], KINDS[family])
    files = folder / "fp32" / "model.safetensors"
    added = names_in_files(case, settings, layers, lambda layer: layer.named_parameters())
    save_file(load_file(files) | added, files, metadata={"format": "pt"})

    seen: dict[str, Any] = {}
    text.layers[0].register_forward_pre_hook(
        lambda _, positional, named: seen.update(inputs=positional[0], turns=named["position_embeddings"]),
        with_kwargs=True,
    )
    text.register_forward_hook(lambda _, inputs, output: seen.update(hidden=output.last_hidden_state))
    expected = torch.load(folder / "reference.pt", weights_only=False)
    total, count = torch.zeros(()), 0.0
    for document in (document for pack in expected["packs"] for document in pack):
        reference.run(model, document)
        tokens, weights = torch.from_numpy(document.ids), torch.from_numpy(document.weights)
        states = seen["hidden"], seen["inputs"], seen["turns"]
        total = total + loss(model, seen["hidden"], tokens, weights, 1)
        total = total + SCALE * further_loss(model, layers, *states, tokens, weights)
        count += float(weights[1:].sum())
    (total / count).backward()
    gradients = names_in_files(
        case, settings, layers, lambda layer: [(n, gradient(p)) for n, p in layer.named_parameters()]
    )
    for name, parameter in model.named_parameters():
        if name in expected["gradients"]:
            gradients[name] = gradient(parameter)
    assert len(gradients) > len(expected["gradients"]) // 2
    torch.save(expected | {"gradients": gradients}, folder / "reference.pt")


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
def folder(request, tmp_path_factory):
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("prediction")
    make(folder, request.param)
    return folder, request.param


@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_gradients(folder, processes):
    import torch

    root, family = folder
    layouts = {name: flags for name, flags in LAYOUTS[processes].items() if family.endswith("moe") or EP not in flags}
    jobs = [{"name": name, "layout": flags | FLAGS} for name, flags in layouts.items()]
    expected = torch.load(root / "reference.pt", weights_only=False)["gradients"]
    for name, result in run(root, jobs, processes).items():
        assert result["of"] == len(expected) > sum(part.startswith("mtp.") for part in expected) > 10
        assert is_right(result), f"{name}: {result['worst gradient']}: {result['gradients']}"
