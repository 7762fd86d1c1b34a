"""Adapters of experts that PEFT has trained, which it saves in a form of its own, are read as they are."""

import re

import pytest
import torch
from megaswift.bridge.checkpoint.hub import read_adapter_config, read_config
from megaswift.bridge.checkpoint.safetensors_io import tensor_names
from megaswift.bridge.lora.adapter_mapping import adapted_modules
from peft import LoraConfig, get_peft_model

from tests import tiny
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)

RANK = 4
# What PEFT is asked for; by names of matrices that stood one by one, it makes gates and ups of twice the rank.
ASKED = {
    "qwen3_moe by name": {"target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]},
    "mixtral by name": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "qwen3_moe": {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "deepseek_v3": {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


@pytest.fixture
def saved(tmp_path, request):
    """A tiny model's folder, and PEFT's model with random adapters, which are in the folder "adapter" in it."""
    family = request.param.split()[0]
    base = tiny.model(family)
    base.save_pretrained(tmp_path)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=16, task_type="CAUSAL_LM", **ASKED[request.param]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=generator).mul_(0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path, model.eval()


@pytest.mark.parametrize("saved", ASKED, indirect=True)
def test_our_log_probabilities_are_pefts(saved, one_process):  # noqa: F811
    from megaswift.bridge.checkpoint.adapter_files import load_adapter, read_settings
    from megaswift.bridge.checkpoint.load import load_weights
    from megaswift.bridge.lora.attach import attach_adapters
    from megaswift.bridge.model.build import build_model
    from megaswift.bridge.model.model import ModelInputs
    from megaswift.bridge.model.outputs import LogProbs

    folder, theirs = saved
    config, adapter = read_config(folder), folder / "adapter"
    model = build_model(config, one_process, torch.float32, adapters=True)
    load_weights(model.chunks, config, folder)
    settings = read_settings(adapter, read_adapter_config(adapter))
    attach_adapters(model, config, settings, seed=1, names=tensor_names(folder))
    load_adapter(model.chunks, config, model.lora, adapter)
    tokens = torch.randint(3, tiny.VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    labels, places = tokens.roll(-1, 1), torch.arange(16)[None]
    model.chunks[0].eval()
    with torch.no_grad():
        ours = model.forward(model.chunks[0], ModelInputs(tokens, places, None, 16, labels=labels), LogProbs())
        expected = theirs(tokens).logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
        with theirs.disable_adapter():
            base = theirs(tokens).logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    assert (ours - expected).abs().max() < 1e-4
    assert (base - expected).abs().max() > 0.1


def test_one_matrix_alone_is_refused(tmp_path):
    names = ["base_model.model.model.layers.0.mlp.experts.lora_A.weight"]
    with pytest.raises(ValueError, match=re.escape("one of the two fused matrices")):
        adapted_modules(tmp_path, names)
