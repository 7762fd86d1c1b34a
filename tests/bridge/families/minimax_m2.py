"""MiniMax-M2: norms over all heads together, half of each head turns, sigmoid scores with a bias on the choice."""

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import rolled, swapped


def config(**changes):
    from transformers import MiniMaxM2Config

    moe = {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "tie_word_embeddings": False,
    }
    rope = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
    return MiniMaxM2Config(**SHARED | rope | moe | changes)


def predicting(config, noise):
    """Of the second module that config.json promises; no released checkpoint has one."""
    return {f"model.layers.{config.num_hidden_layers + 1}.eh_proj.weight": noise(48, 96)}


FAULTS = {
    "q_norm and k_norm swapped": None,  # they have different lengths
    "norm of the queries out of place": rolled("q_norm"),
    "gate and up of the experts swapped": swapped(".w1.", ".w3."),
}
FP32 = (r"block_sparse_moe\.gate\.weight", "e_score_correction_bias")

TINY = {
    "": Tiny(config, MOE, fp32=FP32, faults=FAULTS),
    # As MiniMax wrote it: transformers takes these spellings of the rope for none at all.
    "published": Tiny(
        config,
        (),
        fp32=FP32,
        extra=predicting,
        faults=FAULTS,
        raw={
            "rope_parameters": None,
            "rope_theta": ROPE["rope_theta"],
            "rotary_dim": 8,
            "use_mtp": True,
            "num_mtp_modules": 3,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
    ),
}
