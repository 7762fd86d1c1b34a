"""Qwen3.5-MoE: alone, experts one by one; within a vision-language model, stacked as on the hub."""

from typing import Any

from tests.bridge.families import MOE, SHARED, Tensors, Tiny
from tests.bridge.families.qwen3_5_text import DECAYS, FP32, MROPE, VISION, carried, unseen
from tests.bridge.families.qwen3_next import DELTA, FAULTS, MEANS, SHARED_EXPERT, STDS


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


def seeing(vision: dict[str, Any] = VISION, **changes):
    from transformers import Qwen3_5MoeConfig

    text = config(**{"rope_parameters": MROPE} | changes)
    return Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=vision)


def _model(config):
    from transformers import Qwen3_5MoeForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen3_5MoeForConditionalGeneration(config)


def stacked(tensors: Tensors) -> Tensors:
    """Files as on the hub, without the vision tower."""
    import torch

    found = {name: tensor for name, tensor in unseen(tensors).items() if ".experts." not in name}
    for layer in range(4):
        place = f"model.language_model.layers.{layer}.mlp.experts."
        for parts, name in ((("gate", "up"), "gate_up_proj"), (("down",), "down_proj")):
            experts = [
                torch.cat([tensors[f"{place}{expert}.{part}_proj.weight"] for part in parts]) for expert in range(8)
            ]
            found[place + name] = torch.stack(experts)
    return found


TINY = {
    "": Tiny(config, MOE, means=MEANS, stds=STDS, fp32=FP32, faults=FAULTS | DECAYS | SHARED_EXPERT),
    "within": Tiny(
        seeing,
        ("EP2", "TP2 SP ETP2"),
        means=MEANS,
        stds=STDS,
        fp32=FP32,
        files=stacked,
        extra=carried,
        model=_model,
    ),
}
