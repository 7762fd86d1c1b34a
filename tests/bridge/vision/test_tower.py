"""Towers by themselves beside transformers': features, and the gradient of every parameter."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.layers.patch_plan import plan_patches
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.architecture import CLIP_BOUNDS, Architecture
from megaswift.bridge.mapping.param_mapping import TOWERS, MappingEntry, expand_mappings
from torch import Tensor

from tests.bridge.families.reference import _by_names_in_files, _noise
from tests.bridge.vision import FAMILIES, gemma4
from tests.bridge.vision.reference import build, documents, form, model_inputs
from tests.tiny_vision import mean_of

ARCHITECTURES = {
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl_qwen3": "InternVLForConditionalGeneration",
    "kimi_vl": "KimiVLForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "ovis2": "Ovis2ForConditionalGeneration",
}
VARIANTS = {"gemma4 without a scale of features": partial(gemma4, standardize=False)}


BUFFERS = "std_bias", "std_scale", *CLIP_BOUNDS


def whole(entry: MappingEntry, tensors: dict[str, Tensor], shape: tuple[int, ...], about: Architecture) -> Tensor:
    """Return a tensor of ours from transformers'."""
    if entry.kind.is_scalar:
        return tensors[entry.hf[0]].view(1)
    spans = entry.spans(shape, 1, about)
    return torch.cat([tensors[entry.hf[span.part or 0]][span.start : span.stop : span.step] for span in spans])


def by_names_in_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return _by_names_in_files(model, tensors) if model.config.model_type == "gemma4_unified" else tensors


@pytest.mark.parametrize(
    "family",
    [
        *(
            "mistral3",
            "ministral3",
            "internvl_qwen3",
            "kimi_vl",
            "gemma3",
            "gemma4",
            "gemma4_elastic",
            "llava",
            "llama4",
            "ovis2",
        ),
        *("ovis2_with_biases", "gemma4_unified", *VARIANTS),
    ],
)
def test_features_and_gradients_are_those_of_transformers(family: str) -> None:
    config = (FAMILIES | VARIANTS)[family]()
    model = build(config)
    noise = _noise(1)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(noise(*tensor.shape, mean=mean_of(model, name)))
    document = max((one for pack in documents(model) for one in pack), key=lambda one: len(one.grids))
    inputs = model_inputs(document, form(model))
    if family == "kimi_vl":
        features = model.image_features(**inputs)
    elif family == "llama4":
        states = model.vision_model(**inputs).last_hidden_state
        features = model.multi_modal_projector(states.flatten(0, 1))
    else:
        features = model.get_image_features(**inputs).pooler_output
        features = features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(features)
    weights = torch.linspace(-1, 1, features.numel()).view_as(features)
    (features * weights).sum().backward()

    raw = config.to_dict() | {"architectures": [type(model).__name__]}
    about = family_of(raw).describe(raw, vision=True)
    assert about.vision is not None
    settings: Any = SimpleNamespace(params_dtype=torch.float32, attention_kernel="torch")
    part = TowerPart(about.vision, None, settings, torch.device("cpu"))
    ours = part.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith(BUFFERS)}
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    theirs = by_names_in_files(model, trained | buffers)
    entries = expand_mappings(family_of(raw), raw, about, theirs)
    tower = {key.name.format(layer=key.layer): e for key, e in entries.items() if key.name.startswith(TOWERS)}
    assert tower.keys() == ours.keys()
    assert {name for entry in tower.values() for name in entry.hf} == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(whole(tower[name], theirs, tuple(parameter.shape), about))

    patches = (torch.cat(document.pixels).float() / 255 - 0.5) / 0.5
    plan, module = plan_patches(torch.tensor(document.grids), about.vision, torch.device("cpu")), part.vision
    assert module is not None
    found = module.merge(module.encode(patches, plan), plan)[0]
    assert (found - features).norm() < 1e-6 * features.norm()
    (found * weights).sum().backward()
    gradients = by_names_in_files(model, {name: p.grad for name, p in trained.items() if p.grad is not None})
    for name, parameter in part.named_parameters():
        expected = whole(tower[name], gradients, tuple(parameter.shape), about)
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() < 5e-6 * expected.norm(), name


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """But for class tokens, which are left out: one beside 1,024 patches."""
    from megaswift.tasks.observability.flops import VisionFlops
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    raw = FAMILIES[family]().to_dict() | {"architectures": [ARCHITECTURES[family]]}
    vision = family_of(raw).describe(raw, vision=True).vision
    assert vision is not None
    settings: Any = SimpleNamespace(params_dtype=torch.float32, attention_kernel="torch")
    tower = TowerPart(vision, None, settings, torch.device("cpu")).vision
    assert tower is not None
    grid = 1, 32, 32
    plan = plan_patches(torch.tensor([grid]), vision, torch.device("cpu"))
    patches = torch.zeros(32 * 32, vision.channels * vision.patch_size**2)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tower.merge(tower.encode(patches, plan), plan)
    flops = VisionFlops.of(vision, trains_layers=True, trains_mergers=True)
    assert flops.forward([grid]) == pytest.approx(counter.get_total_flops(), rel=3e-3 if vision.class_token else 1e-9)


def test_plain_moonvit_is_the_tower_of_kimi_k25(tmp_path: Path) -> None:
    """transformers has the same tower for images within Kimi-K2.5, whose checkpoints name the projector otherwise."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText

    plain = build(FAMILIES["kimi_vl"]())
    noise = _noise(1)
    with torch.no_grad():
        for name, tensor in plain.state_dict(keep_vars=True).items():
            tensor.copy_(noise(*tensor.shape, mean=mean_of(plain, name)))
    plain.save_pretrained(tmp_path)
    names = {"linear_1": "proj.0", "linear_2": "proj.2"}
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.startswith("multi_modal_projector.")]:
        _, module, leaf = name.split(".")
        tensors[f"mm_projector.{names.get(module, module)}.{leaf}"] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    vision = config["vision_config"]
    vision |= {f"pos_emb_{side}": vision.pop(f"init_pos_emb_{side}") for side in ("height", "width")}
    config |= {"model_type": "kimi_k25", "projection_hidden_size": vision["hidden_size"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": vision | {"model_type": ""}}))

    theirs: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    document = max((one for pack in documents(plain) for one in pack), key=lambda one: len(one.grids))
    inputs = model_inputs(document, form(plain))
    features = torch.cat(theirs.get_image_features(inputs["pixel_values"], torch.tensor(document.grids)).pooler_output)
    found = plain.image_features(**inputs)
    assert (found - features).norm() < 1e-6 * features.norm()
