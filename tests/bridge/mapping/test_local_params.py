"""The spellings in which a chunk may hold its tensors, all brought to the table's keys."""

from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.mapping import local_params
from megaswift.bridge.mapping.param_mapping import ParamKey
from torch import nn

LAYER = "decoder.layers.{layer}."


def chunk(*names: str, layer_numbers=(3, 4), experts=4) -> nn.Module:
    """A module with a parameter of each name (size 2, stacked experts [2, 3, 5]) and layers of these numbers."""
    root = nn.Module()
    for name in names:
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        stacked = "experts" in name and last == "weight"
        module.register_parameter(last, nn.Parameter(torch.randn(2, 3, 5) if stacked else torch.randn(2)))
    layers = dict(root.decoder.layers.named_children())
    root.decoder.layers = nn.ModuleList(layers.get(str(i), nn.Module()) for i in range(len(layer_numbers)))
    for layer, number in zip(root.decoder.layers, layer_numbers, strict=True):
        layer.layer_number = number
    root.config = SimpleNamespace(num_moe_experts=experts)
    return root


@pytest.fixture(autouse=True)
def _second_of_two_expert_ranks(monkeypatch):
    monkeypatch.setattr(local_params.parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(local_params.parallel_state, "get_expert_model_parallel_rank", lambda: 1)


def test_layers_are_counted_over_the_whole_model():
    names = ["embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc1.weight"]
    assert list(local_params.collect_params([chunk(*names)])) == [
        ParamKey("embedding.word_embeddings.weight"),
        ParamKey(LAYER + "mlp.linear_fc1.weight", 3),
    ]


def test_norms_inside_matrices():
    names = ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"]
    held = local_params.collect_params([chunk(*(f"decoder.layers.0.{name}" for name in names))])
    assert list(held) == [
        ParamKey(LAYER + "input_layernorm.weight", 2),
        ParamKey(LAYER + "pre_mlp_layernorm.weight", 2),
    ]


def test_experts_one_by_one_and_stacked():
    matrix = "mlp.experts.linear_fc1.weight"
    keys = [ParamKey(LAYER + matrix, 2, 2), ParamKey(LAYER + matrix, 2, 3)]
    each = local_params.collect_params([chunk(f"decoder.layers.0.{matrix}0", f"decoder.layers.0.{matrix}1")])
    assert list(each) == keys
    model = chunk(f"decoder.layers.0.{matrix}")
    stacked = local_params.collect_params([model])
    assert list(stacked) == keys
    for tensor in stacked.values():  # views: what is copied into them is in the model
        tensor.copy_(torch.ones(3, 5))
    assert torch.equal(model.get_parameter(f"decoder.layers.0.{matrix}"), torch.ones(2, 3, 5))


def test_buffers_that_a_checkpoint_holds():
    model = chunk("decoder.layers.0.mlp.router.weight")
    router = model.get_submodule("decoder.layers.0.mlp.router")
    router.register_buffer("expert_bias", torch.zeros(4))
    router.register_buffer("tokens_per_expert", torch.zeros(4), persistent=False)
    assert list(local_params.collect_params([model])) == [
        ParamKey(LAYER + "mlp.router.weight", 2),
        ParamKey(LAYER + "mlp.router.expert_bias", 2),
    ]
