"""Nemotron-H: Mamba-2 layers, attention, an MLP and experts by turns; experts on latents; no experts, fewer biases."""

from functools import partial

from tests.bridge.families import SHARED, Tiny
from tests.bridge.families.arcee import another_activation
from tests.bridge.families.faults import rolled, zeroed
from tests.bridge.families.qwen3_next import leaking, planted, ungated

MAMBA = {
    "mamba_num_heads": 12,
    "mamba_head_dim": 6,
    "n_groups": 4,
    "ssm_state_size": 10,
    "conv_kernel": 4,
    "time_step_min": 1e-9,  # transformers takes it as a bound of time steps, which is config.json's time_step_limit
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
MEANS = {"A_log": -1.0, r"\.D$": 1.0}
STDS = {"A_log": 0.5, "dt_bias": 0.5, "conv1d": 0.4}


def config(**changes):
    from transformers import NemotronHConfig

    shared = {key: value for key, value in SHARED.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    layers = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe", "linear_attention", "moe"]
    settings = {"head_dim": 16, "layer_norm_epsilon": 1e-4, "layers_block_type": layers}
    return NemotronHConfig(**shared | MAMBA | EXPERTS | settings | changes)


def _norm_together(module) -> None:
    import torch

    def norm(x, gate):
        gated = (x * torch.nn.functional.silu(gate)).flatten(-3)
        return module.norm() * torch.nn.functional.rms_norm(gated, gated.shape[-1:], eps=1e-4)

    module._gated_norm = norm


FAULTS = {
    "states leak": leaking("Mamba2", "slots", "steps"),
    "convolution leaks": leaking("Mamba2", "conv_slots", "conv_length"),
    "gate dropped": planted("Mamba2", ungated),
    "norm of all groups together": planted("Mamba2", _norm_together),
    "decays of other heads": rolled("A_log"),
    "time steps without bias": zeroed("dt_bias"),
    "values not added": zeroed(r"\.D$"),
    "convolution without bias": zeroed(r"conv1d\.bias"),
    "norms of other heads": rolled(r"mixer\.norm"),
    "channels of the convolution out of place": rolled(r"conv1d\.weight"),
    "projections of other heads": rolled("in_proj"),
    "another activation": another_activation(),
}
DENSE = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "use_conv_bias": False}
BIAS = (r"e_score_correction_bias",)
TINY = {
    "": Tiny(
        config,
        layouts=("TP2 SP ETP2", "PP2", "EP2", "TP2 SP EP2", "CP2", "TP2 SP recompute", "PP2 recompute parts"),
        means=MEANS,
        stds=STDS,
        faults=FAULTS,
        fp32=BIAS,
    ),
    "latent": Tiny(
        partial(config, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], moe_latent_size=28),
        layouts=("TP2 SP EP2", "PP2", "CP2", "TP2 SP recompute"),
        means=MEANS,
        stds=STDS,
        faults={"latents of other channels": rolled("fc1_latent_proj")},
        fp32=BIAS,
    ),
    # As older files name the layers.
    "dense": Tiny(
        partial(config, **DENSE),
        layouts=("TP2",),
        means=MEANS,
        stds=STDS,
        raw={"layers_block_type": None, "hybrid_override_pattern": "M-*-"},
    ),
}
