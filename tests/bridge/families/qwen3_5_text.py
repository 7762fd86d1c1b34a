"""Qwen3.5, dense: alone, or within a vision-language model, as on the hub."""

from functools import partial

from tests.bridge.families import DENSE, SHARED, Tensors, Tiny
from tests.bridge.families.faults import swapped
from tests.bridge.families.qwen3_next import DELTA, FAULTS, MEANS, STDS

FP32 = (r"linear_attn\.(A_log|norm)",)
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, **DELTA["rope_parameters"]}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48}
VISION |= {"patch_size": 4}
DECAYS = {"decays and betas swapped": swapped("in_proj_a.", "in_proj_b.")}


def config(**changes):
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**SHARED | DELTA | changes)


def seeing(**changes):
    from transformers import Qwen3_5Config

    text = config(rope_parameters=MROPE, **changes).to_dict()
    return Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=text["tie_word_embeddings"])


def _model(config):
    from transformers import Qwen3_5ForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen3_5ForConditionalGeneration(config)


def unseen(tensors: Tensors) -> Tensors:
    """Without the vision tower, which has no gradients: `carried` has some of it."""
    return {name: tensor for name, tensor in tensors.items() if "visual" not in name}


def carried(config, noise) -> Tensors:
    """Some of the vision tower, and of the layer that predicts one token more."""
    text = config.get_text_config()
    return {
        "model.visual.patch_embed.proj.weight": noise(16, 3, 2, 4, 4),
        "model.visual.merger.norm.bias": noise(16),
        "mtp.fc.weight": noise(text.hidden_size, 2 * text.hidden_size),
        "mtp.layers.0.self_attn.q_norm.weight": noise(text.head_dim),
    }


TINY = {
    # With more ranks than query groups megatron-core cuts queries, gates, keys and values another way.
    "": Tiny(config, (*DENSE, "TP4 SP"), means=MEANS, stds=STDS, fp32=FP32, faults=FAULTS | DECAYS),
    "within": Tiny(
        partial(seeing, attention_bias=True, tie_word_embeddings=True),
        ("TP2 SP",),
        means=MEANS,
        stds=STDS,
        fp32=FP32,
        files=unseen,
        extra=carried,
        model=_model,
    ),
}
