"""Qwen3.5-MoE: experts one by one, as transformers writes them, or stacked, as the hub has them."""

from functools import partial
from typing import Any

from tests.families import MOE, SHARED, Tensors, Tiny
from tests.families.qwen3_5_text import DECAYS, FP32, MROPE, nested, unseen, within
from tests.families.qwen3_next import DELTA, FAULTS, MEANS, SHARED_EXPERT, STDS


def config(**changes):
    from transformers import Qwen3_5MoeTextConfig

    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    }
    shared: dict[str, Any] = {key: value for key, value in SHARED.items() if key != "intermediate_size"}
    return Qwen3_5MoeTextConfig(**shared | DELTA | moe | changes)


def _stacked(tensors: Tensors) -> Tensors:
    import torch

    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        for parts, name in ((("gate", "up"), "gate_up_proj"), (("down",), "down_proj")):
            one = f"model.layers.{layer}.mlp.experts.%d.%s_proj.weight"
            experts = [torch.cat([tensors[one % (expert, part)] for part in parts]) for expert in range(8)]
            found[f"model.layers.{layer}.mlp.experts.{name}"] = torch.stack(experts)
    return within(found)


TINY = {
    "": Tiny(config, MOE, means=MEANS, stds=STDS, fp32=FP32, faults=FAULTS | DECAYS | SHARED_EXPERT),
    "within": Tiny(
        partial(config, layer_types=None, rope_parameters=MROPE),
        ("EP2", "TP2 SP ETP2"),
        means=MEANS,
        stds=STDS,
        fp32=FP32,
        files=_stacked,
        extra=unseen,
        raw=nested,
    ),
}
