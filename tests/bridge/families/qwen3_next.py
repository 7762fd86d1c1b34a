"""Qwen3-Next: gated delta nets and gated attention by turns, experts in all layers but one."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

from tests.bridge.families import MOE, SHARED, Tiny
from tests.bridge.families.faults import Fault, rolled, zeroed

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "tie_word_embeddings": False,
}
MEANS = {r"linear_attn\.norm": 1.0, "norm": 0.0, "A_log": -1.0}
STDS = {"A_log": 0.5, "dt_bias": 0.5, "conv1d": 0.4}


def config(**changes):
    from transformers import Qwen3NextConfig

    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    }
    return Qwen3NextConfig(**SHARED | DELTA | moe | changes)


def planted(name: str, plant: Callable[[Any], None]) -> Fault:
    """`plant` is done to every module of a class."""

    def everywhere(model) -> None:
        found = [module for chunk in model.chunks for module in chunk.modules() if type(module).__name__ == name]
        assert found
        for module in found:
            plant(module)

    return Fault(model=everywhere)


def leaking(name: str, *fields: str) -> Fault:
    """All documents are one, as far as these fields of `DeltaLayout` go."""
    from megaswift.bridge.layers.delta_rule import make_delta_layout

    def leak(module, args, kwargs):
        documents = copy(kwargs["packed_seq_params"])
        places = documents.delta_layout.slots
        kernel = module.config.architecture.convolution
        whole = make_delta_layout([0, len(places)], 1, 1, kernel, places.device)
        documents.delta_layout = replace(documents.delta_layout, **{field: getattr(whole, field) for field in fields})
        return args, kwargs | {"packed_seq_params": documents}

    return planted(name, lambda module: module.register_forward_pre_hook(leak, with_kwargs=True))


def ungated(module) -> None:
    """The gate is the same for all."""

    def norm(self, x, gate):
        return type(self)._gated_norm(self, x, gate * 0 + 1)

    module._gated_norm = MethodType(norm, module)


FAULTS = {
    "states leak": leaking("GatedDeltaNet", "slots", "steps"),
    "convolution leaks": leaking("GatedDeltaNet", "conv_slots", "conv_length"),
    "gate of the delta net dropped": planted("GatedDeltaNet", ungated),
    "gate of attention dropped": planted(
        "LayerSelfAttention", lambda module: setattr(module, "_apply_output_gate", lambda x, gate: x)
    ),
    "norm of the delta net around 1": Fault(
        tensors=lambda tensors: {name: t + ("linear_attn.norm" in name) for name, t in tensors.items()}
    ),
    "decays of other heads": rolled("A_log"),
    "decays without bias": zeroed("dt_bias"),
    "channels of the convolution out of place": rolled("conv1d"),
}
SHARED_EXPERT = {"gate of the shared expert dropped": zeroed("shared_expert_gate")}

TINY = {
    "": Tiny(
        config,
        MOE,
        means=MEANS,
        stds=STDS,
        faults=FAULTS | SHARED_EXPERT | {"projections of other heads": rolled("in_proj_ba")},
    ),
    # As on the hub, where an interval says which layers attend.
    "interval": Tiny(
        partial(config, layer_types=None, norm_topk_prob=False, linear_num_value_heads=8, mlp_only_layers=[]),
        (),
        means=MEANS,
        stds=STDS,
        raw={"layer_types": None, "full_attention_interval": 4},
    ),
}
