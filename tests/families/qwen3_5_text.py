"""Qwen3.5, dense: alone, or within a checkpoint whose model also sees."""

from functools import partial

from tests.families import DENSE, SHARED, Tensors, Tiny
from tests.families.faults import swapped
from tests.families.qwen3_next import DELTA, FAULTS, MEANS, STDS

FP32 = (r"linear_attn\.(A_log|norm)",)
MROPE = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, **DELTA["rope_parameters"]}


def config(**changes):
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(**SHARED | DELTA | changes)


def within(tensors: Tensors) -> Tensors:
    """The names in a checkpoint of Qwen3_5ForConditionalGeneration."""
    return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}


def unseen(config, noise) -> Tensors:
    """What is carried along: some of the vision tower and of the layer that predicts one token more."""
    return {
        "model.visual.patch_embed.proj.weight": noise(16, 3, 2, 4, 4),
        "model.visual.merger.norm.bias": noise(16),
        "mtp.fc.weight": noise(config.hidden_size, 2 * config.hidden_size),
        "mtp.layers.0.self_attn.q_norm.weight": noise(config.head_dim),
    }


def nested(text):
    """config.json as the hub has it, of a text model's."""
    return {
        "architectures": [text["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "layer_types")},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


DECAYS = {"decays and betas swapped": swapped("in_proj_a.", "in_proj_b.")}

TINY = {
    # With more ranks than query groups megatron-core cuts queries, gates, keys and values another way.
    "": Tiny(config, (*DENSE, "TP4 SP"), means=MEANS, stds=STDS, fp32=FP32, faults=FAULTS | DECAYS),
    "within": Tiny(
        partial(config, layer_types=None, rope_parameters=MROPE, attention_bias=True, tie_word_embeddings=True),
        ("TP2 SP",),
        means=MEANS,
        stds=STDS,
        fp32=FP32,
        files=within,
        raw=nested,
        extra=unseen,
    ),
}
