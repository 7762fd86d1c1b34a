"""Llama: rope scaled as since 3.1, tied, a head size of its own; or with biases everywhere, or in the MLP alone."""

from functools import partial

from tests.bridge.families import SHARED, Tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}


def config(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(**SHARED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True} | changes)


TINY = {
    "": Tiny(partial(config, head_dim=10)),
    "biases": Tiny(
        partial(config, attention_bias=True, mlp_bias=True, tie_word_embeddings=False), layouts=("TP2 SP", "PP2")
    ),
    "MLP biases": Tiny(partial(config, mlp_bias=True, rope_parameters=LINEAR), layouts=()),
}
