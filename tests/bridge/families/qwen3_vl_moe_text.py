"""Qwen3-VL-MoE: experts stacked and transposed as on the hub; tied by the outer config alone."""

from tests.bridge.families import SHARED, Tensors, Tiny
from tests.bridge.families.qwen2_5_vl_text import without_tower
from tests.bridge.families.qwen3_vl_text import TEXT, VISION, tower


def config(**changes):
    from transformers import Qwen3VLMoeConfig

    moe = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    # The inner tie_word_embeddings is true by default, and without effect.
    return Qwen3VLMoeConfig(text_config=SHARED | TEXT | moe | changes, vision_config=VISION)


def _model(config):
    from transformers import Qwen3VLMoeForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen3VLMoeForConditionalGeneration(config)


def _transposed(tensors: Tensors) -> Tensors:
    tensors = without_tower(tensors)
    return {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}


TINY = Tiny(config, ("PP2", "EP2", "TP2 SP ETP2"), files=_transposed, extra=tower, model=_model)
