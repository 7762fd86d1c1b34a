"""Qwen3-Omni: the thinker's text model, whose settings are nested and whose tensors have a prefix; or alone."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tensors, Tiny

VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 48,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 36,
}  # fmt: skip
AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 20, "d_model": 16, "output_dim": 48}
TEXT = {"head_dim": 16, "rope_parameters": {"mrope_section": [4, 2, 2], "mrope_interleaved": True, **ROPE}}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}


def config(**changes):
    from transformers import Qwen3OmniMoeThinkerConfig

    return Qwen3OmniMoeThinkerConfig(
        text_config=SHARED | TEXT | MOE | changes, vision_config=VISION, audio_config=AUDIO
    )


def _model(config):
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    config.text_config._attn_implementation = "eager"
    return Qwen3OmniMoeThinkerForConditionalGeneration(config)


def without_towers(tensors: Tensors, prefix: str = "") -> Tensors:
    """Drop the towers, which have no gradients."""
    return {prefix + name: t for name, t in tensors.items() if not name.startswith(("visual.", "audio_tower."))}


def whole(thinker: dict) -> dict:
    """The config.json of a model that speaks too."""
    name = thinker["architectures"][0].replace("Thinker", "")
    settings = {key: value for key, value in thinker.items() if key not in ("architectures", "dtype")}
    talker = {"text_config": {"vocab_size": 7, "num_hidden_layers": 3}, "tie_word_embeddings": True}
    dtype = {"dtype": thinker["dtype"]}
    return {
        "architectures": [name], "model_type": thinker["model_type"].removesuffix("_thinker"),
        "thinker_config": settings | dtype, "talker_config": talker, "tie_word_embeddings": True, **dtype,
    }  # fmt: skip


def carried(config, noise) -> Tensors:
    """Some tensors of the towers and of the models that speak."""
    return {
        "thinker.visual.merger_list.0.ln_q.bias": noise(64),
        "thinker.audio_tower.proj1.weight": noise(16, 16),
        "talker.model.layers.0.mlp.gate.weight": noise(4, 24),
        "code2wav.decoder.0.conv.weight": noise(3, 5, 7),
    }


WHOLE = {"files": partial(without_towers, prefix="thinker."), "raw": whole, "extra": carried, "model": _model}
TINY = {
    "": Tiny(config, ("PP2", "EP2", "TP2 SP ETP2"), **WHOLE),
    "alone, biases": Tiny(partial(config, attention_bias=True), (), files=without_towers, model=_model),
}
