"""Audio towers by themselves beside transformers': features, and the gradient of every parameter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.layers.audio_plan import plan_audios
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.param_mapping import AUDIO_TOWER, expand_mappings

from tests.bridge.audio import FAMILIES
from tests.bridge.audio.reference import documents, model_inputs, randomized
from tests.bridge.vision.test_tower import whole


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_gradients_are_those_of_transformers(family: str) -> None:
    model: Any = randomized(family)
    document = documents()[0][2]
    features = model.get_audio_features(**model_inputs(document)).pooler_output
    weights = torch.linspace(-1, 1, features.numel()).view_as(features)
    (features * weights).sum().backward()

    raw = model.config.to_dict() | {"architectures": [type(model).__name__]}
    about = family_of(raw).describe(raw, vision=True)
    assert about.audio is not None
    settings: Any = SimpleNamespace(params_dtype=torch.float32, attention_kernel="torch")
    part = TowerPart(None, about.audio, settings, torch.device("cpu"))
    ours = dict(part.named_parameters())
    theirs = {name: p for name, p in model.named_parameters() if p.grad is not None}
    entries = expand_mappings(family_of(raw), raw, about, theirs)
    table = {key.name.format(layer=key.layer): e for key, e in entries.items() if key.name.startswith(AUDIO_TOWER)}
    assert table.keys() == ours.keys()
    assert {name for entry in table.values() for name in entry.hf} == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(whole(table[name], theirs, tuple(parameter.shape), about))

    plan, tower = plan_audios([len(one) for one in document.spectrograms], about.audio, torch.device("cpu")), part.audio
    assert tower is not None
    found = tower.merge(tower.encode(torch.cat(document.spectrograms), plan), plan)[0]
    assert (found - features).norm() < 1e-6 * features.norm()
    (found * weights).sum().backward()
    gradients = {name: p.grad for name, p in theirs.items() if p.grad is not None}
    for name, parameter in ours.items():
        expected = whole(table[name], gradients, tuple(parameter.shape), about)
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() < 5e-6 * expected.norm(), name
