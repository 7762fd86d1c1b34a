"""GLM-4-9B: adjacent planes of half a head, fused gates; or no biases."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import GlmConfig

    rope = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
    return GlmConfig(**SHARED | rope | {"head_dim": 16, "attention_bias": True} | changes)


TINY = {
    "": Tiny(config),
    "no biases": Tiny(partial(config, attention_bias=False, tie_word_embeddings=True), layouts=()),
}
