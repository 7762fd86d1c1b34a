"""DeepSeek-V3: experts chosen by groups from sigmoid scores with a bias; Moonlight: one group, a plain query matrix."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.deepseek_v2 import EXPERTS, LATENT, YARN

BIASES = (r"e_score_correction_bias",)


def predicting(config, noise):
    """What the checkpoints have beyond the model's layers (a part of it)."""
    hidden, layer = config.hidden_size, f"model.layers.{config.num_hidden_layers}."
    return {
        layer + "eh_proj.weight": noise(hidden, 2 * hidden),
        layer + "enorm.weight": noise(hidden, mean=1.0),
        layer + "shared_head.head.weight": noise(config.vocab_size, hidden),
        layer + "mlp.gate.e_score_correction_bias": noise(config.n_routed_experts),
        layer + "mlp.experts.0.up_proj.weight": noise(config.moe_intermediate_size, hidden),
    }


def config(**changes):
    from transformers import DeepseekV3Config

    groups = {"n_group": 4, "topk_group": 2, "num_mtp_layers": 1}
    return DeepseekV3Config(**SHARED | LATENT | EXPERTS | {"rope_parameters": YARN} | groups | changes)


ONE_GROUP = {"rope_parameters": ROPE, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
# Three groups of four experts a token: megatron-core's own rule would judge a group by its best expert alone.
ODD = {"rope_interleave": False, "topk_group": 3, "norm_topk_prob": False}
# The published sizes of heads, for the kernels of GPUs: values narrower than keys.
HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "head_dim": 64}
TINY = {
    "": Tiny(config, layouts=(*MOE, "TP2 SP PP2"), fp32=BIASES, extra=predicting),
    "Moonlight": Tiny(partial(config, **ONE_GROUP), layouts=("TP2 SP EP2",), fp32=BIASES),
    "odd groups": Tiny(partial(config, **ODD), layouts=(), fp32=BIASES),
    "wide heads": Tiny(partial(config, **HEADS), layouts=("CP2",), fp32=BIASES),
}
