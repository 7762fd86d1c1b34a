"""Towers by themselves beside transformers': features, and the gradient of every parameter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.layers.patch_plan import plan_patches
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.param_mapping import TOWERS, Architecture, MappingEntry, expand_mappings
from torch import Tensor

from tests.bridge.families.reference import _noise
from tests.bridge.vision import FAMILIES
from tests.bridge.vision.reference import documents, model_inputs
from tests.tiny_vision import mean_of


def whole(entry: MappingEntry, tensors: dict[str, Tensor], shape: tuple[int, ...], about: Architecture) -> Tensor:
    """Return a tensor of ours from transformers'."""
    spans = entry.spans(shape, 1, about)
    return torch.cat([tensors[entry.hf[span.part or 0]][span.start : span.stop : span.step] for span in spans])


@pytest.mark.parametrize("family", ["mistral3", "ministral3", "internvl_qwen3"])
def test_features_and_gradients_are_those_of_transformers(family: str) -> None:
    from transformers import AutoModelForImageTextToText

    config = FAMILIES[family]()
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    noise = _noise(1)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(noise(*tensor.shape, mean=mean_of(model, name)))
    document = max((one for pack in documents(model) for one in pack), key=lambda one: len(one.grids))
    features = model.get_image_features(**model_inputs(document)).pooler_output
    features = features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(features)
    weights = torch.linspace(-1, 1, features.numel()).view_as(features)
    (features * weights).sum().backward()

    raw = config.to_dict() | {"architectures": [type(model).__name__]}
    about = family_of(raw).describe(raw, vision=True)
    assert about.vision is not None
    settings: Any = SimpleNamespace(params_dtype=torch.float32, attention_kernel="torch")
    part = TowerPart(about.vision, None, settings, torch.device("cpu"))
    ours = dict(part.named_parameters())
    theirs = {name: p for name, p in model.named_parameters() if p.grad is not None}
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
    gradients = {name: p.grad for name, p in theirs.items() if p.grad is not None}
    for name, parameter in ours.items():
        expected = whole(tower[name], gradients, tuple(parameter.shape), about)
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() < 5e-6 * expected.norm(), name
