"""GPT-OSS: sinks, windows in every other layer, YaRN, biases, stacked experts whose gate and up alternate."""

from functools import partial

from tests.bridge.families import MOE, SHARED, Tensors, Tiny
from tests.bridge.families.faults import Fault, rolled, zeroed

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


def config(**changes):
    from transformers import GptOssConfig

    moe = {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "sliding_window": 7,
        "tie_word_embeddings": False,
    }
    return GptOssConfig(**SHARED | {"rope_parameters": YARN} | moe | changes)


def _halves(tensors: Tensors) -> Tensors:
    """Gate and up one after the other, as in other families."""
    import torch

    return {
        name: torch.cat((tensor[..., ::2], tensor[..., 1::2]), -1) if "gate_up_proj" in name else tensor
        for name, tensor in tensors.items()
    }


FAULTS = {
    "sinks dropped": Fault(tensors=lambda tensors: {n: t - 1e3 * ("sinks" in n) for n, t in tensors.items()}),
    "gate and up not alternating": Fault(tensors=_halves),
    "gate and up swapped": rolled(r"gate_up_proj", -1),
    "bias of the experts dropped": zeroed(r"experts\.down_proj_bias"),
    "bias of gate and up dropped": zeroed(r"experts\.gate_up_proj_bias"),
    "bias of the output dropped": zeroed(r"o_proj\.bias"),
}
# Without them the limit of the activation would not be met.
STDS = {r"experts\.gate_up_proj$": 0.6, r"experts\.gate_up_proj_bias": 3.0}

TINY = {
    "": Tiny(config, (*MOE, "TP2 SP EP2 ETP2"), stds=STDS, faults=FAULTS),
    "older config": Tiny(
        partial(
            config,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            attention_bias=False,
        ),
        (),
        raw={
            "rope_parameters": None,
            "rope_theta": YARN["rope_theta"],
            "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"},
            "swiglu_limit": 7.0,
            "experts_per_token": 2,
            "initial_context_length": 32,
        },
    ),
}
