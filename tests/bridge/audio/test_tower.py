"""Audio towers by themselves beside transformers': features, and the gradient of every parameter."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaswift.bridge.families import family_of
from megaswift.bridge.families.audio_tower import (
    audio_mappings,
    audio_with_1d_convolutions,
    audio_with_2d_convolutions,
)
from megaswift.bridge.layers.audio_plan import plan_audios
from megaswift.bridge.layers.tower_part import TowerPart
from megaswift.bridge.mapping.param_mapping import AUDIO_TOWER, MappingEntry, expand_mappings

from tests.bridge.audio import BINS, FAMILIES, TOWER, TOWER_2D
from tests.bridge.audio.reference import documents, model_inputs, randomized
from tests.bridge.families.reference import _noise
from tests.bridge.vision.test_tower import whole
from tests.tiny_vision import mean_of


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


@pytest.mark.parametrize("frames", [[133, 130, 230], [41], [60, 7]])
@pytest.mark.parametrize("kind", ["Qwen2_5Omni", "Qwen3OmniMoe"])
def test_the_same_class_is_the_tower_of_omni_models(kind: str, frames: list[int]) -> None:
    """Audios that are shorter than a chunk by themselves: what transformers pads them with depends on those beside."""
    name = "qwen2_5_omni" if kind == "Qwen2_5Omni" else "qwen3_omni_moe"
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    if kind == "Qwen2_5Omni":
        config = module.Qwen2_5OmniAudioEncoderConfig(**TOWER | {"n_window": 10})
        audio, names = audio_with_1d_convolutions(config.to_dict()), ("proj",)
    else:
        config = module.Qwen3OmniMoeAudioEncoderConfig(**TOWER_2D)
        audio, names = audio_with_2d_convolutions(config.to_dict(), masks="short"), ("proj1", "proj2")
    model: Any = getattr(module, f"{kind}AudioEncoder")._from_config(config, attn_implementation="eager")
    noise = _noise(2)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(noise(*tensor.shape, mean=mean_of(model, name) or float(name == "ln_post.weight")))
    spectrograms = [noise(count, BINS, mean=0.0) for count in frames]
    lengths = torch.tensor(frames)
    arguments = {"aftercnn_lens": (lengths - 1) // 2 + 1} if kind == "Qwen2_5Omni" else {}
    if max(frames) >= audio.chunk:
        expected = model(torch.cat(spectrograms).t(), feature_lens=lengths, **arguments).last_hidden_state
    else:
        expected = torch.cat(
            [model(one.t(), feature_lens=torch.tensor([len(one)])).last_hidden_state for one in spectrograms]
        )
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()

    raw = FAMILIES["qwen3_asr"]().to_dict() | {"architectures": ["Qwen3ASRForConditionalGeneration"]}
    about = replace(family_of(raw).describe(raw, vision=True), audio=audio)
    settings: Any = SimpleNamespace(params_dtype=torch.float32, attention_kernel="torch")
    tower = TowerPart(None, audio, settings, torch.device("cpu")).audio
    assert tower is not None
    table = {
        mapping.mcore.format(layer=layer).removeprefix(AUDIO_TOWER): MappingEntry(
            mapping.kind, tuple(mapping.hf.format(layer=layer, part=part) for part in mapping.kind.parts), False, False
        )
        for mapping in audio_mappings(audio, "", "", names)
        for layer in mapping.layers or (None,)
    }
    theirs, ours = dict(model.named_parameters()), dict(tower.named_parameters())
    assert table.keys() == ours.keys()
    used = {name for name, parameter in theirs.items() if parameter.grad is not None}
    assert {name for entry in table.values() for name in entry.hf} == used
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(whole(table[name], theirs, tuple(parameter.shape), about))
    plan = plan_audios(frames, audio, torch.device("cpu"))
    found = tower.merge(tower.encode(torch.cat(spectrograms), plan), plan)[0]
    assert (found - expected).norm() < 1e-6 * expected.norm()
    (found * weights).sum().backward()
    gradients = {name: theirs[name].grad for name in used}
    for name, parameter in ours.items():
        gradient = whole(table[name], gradients, tuple(parameter.shape), about)
        assert parameter.grad is not None
        assert (parameter.grad - gradient).norm() < 5e-5 * gradient.norm(), name


@pytest.mark.parametrize("frames", [200, 400])
def test_flops_are_those_that_torch_counts(frames: int) -> None:
    """Of whole chunks, whose convolutions have no padding but their own."""
    from megaswift.tasks.observability.audio_flops import AudioFlops
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = FAMILIES["qwen3_asr"]().audio_config.to_dict()
    for audio in (audio_with_2d_convolutions(config, masks="never"), audio_with_1d_convolutions(config)):
        settings: Any = SimpleNamespace(params_dtype=torch.float32, attention_kernel="torch")
        tower = TowerPart(None, audio, settings, torch.device("cpu")).audio
        assert tower is not None
        plan = plan_audios([frames], audio, torch.device("cpu"))
        flops = AudioFlops.of(audio, trains_layers=True, trains_mergers=True)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            tower.merge(tower.encode(torch.zeros(frames, BINS), plan), plan)
        assert flops.forward(frames) == counter.get_total_flops()
