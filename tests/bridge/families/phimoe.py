"""Phi-MoE: biases everywhere, SparseMixer with a wide margin, LongRoPE's short factors, and its long ones."""

from functools import partial

from megaswift.bridge.mapping.architecture import Routing

from tests.bridge.families import MOE, SHARED, Tiny, faults

MARGIN = 0.2  # so that several experts are near the best one


def longrope(original: int) -> dict:
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.4, 3.1, 3.3],
        "long_factor": [1.1, 1.6, 2.3, 3.7, 4.9, 5.5, 7.1, 8.0],
        "attention_factor": 1.0,  # transformers' class, too, takes these two instead
        "short_mscale": 1.2,
        "long_mscale": 1.2,
        "original_max_position_embeddings": original,
    }


def config(**changes):
    from transformers import PhimoeConfig

    settings = {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": MARGIN,
        "attention_bias": True,
        "lm_head_bias": True,
        "tie_word_embeddings": False,
        "sliding_window": 13,
        "rope_parameters": longrope(128),
    }
    return PhimoeConfig(**SHARED | settings | changes)


def with_long_factors(settings):
    """transformers' class, with the length that it does not give to its rope function."""
    from transformers import PhimoeForCausalLM

    model = PhimoeForCausalLM._from_config(settings, attn_implementation="eager")
    rotary = model.model.rotary_emb
    rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=2)
    return model


LONG = {"rope_parameters": longrope(1), "sliding_window": None, "attention_bias": False, "lm_head_bias": False}
FAULTS = {
    "output layer without a bias": faults.zeroed(r"lm_head\.bias"),
    "a bias of other tokens": faults.rolled(r"lm_head\.bias"),
    "norms without biases": faults.zeroed(r"norm\.bias"),
    "output projection without a bias": faults.zeroed(r"o_proj\.bias"),
    "gate and up of the experts swapped": faults.swapped(".w1.", ".w3."),
    "a narrower margin": faults.changed(routing=Routing(sparse_mixer=MARGIN / 4)),
}
TINY = {
    "": Tiny(config, MOE, faults=FAULTS),
    "long factors": Tiny(partial(config, **LONG), ("CP2",), model=with_long_factors),
}
