"""Falcon-H1: attention beside Mamba-2 of one group, without its norm, and factors; of two groups, with norms."""

from dataclasses import replace
from functools import partial

from tests.bridge.families import DENSE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import Fault, changed, rolled, zeroed
from tests.bridge.families.nemotron_h import MEANS, STDS
from tests.bridge.families.qwen3_next import leaking, planted, ungated

MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_ssm": 96,
    "mamba_n_groups": 1,
    "mamba_d_state": 20,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}
FACTORS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.7, 0.6],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.8, 1.2, 1.1, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
}


def config(**changes):
    from transformers import FalconH1Config

    return FalconH1Config(**SHARED | MAMBA | FACTORS | {"rope_parameters": ROPE, "head_dim": 16} | changes)


def one_multiplier_off(position: int) -> Fault:
    def change(about):
        multipliers = list(about.mamba.multipliers)
        multipliers[position] *= 1.5
        return replace(about, mamba=about.mamba._replace(multipliers=tuple(multipliers)))

    return Fault(architecture=change)


FAULTS = {
    "states leak": leaking("Mamba2", "slots", "steps"),
    "convolution leaks": leaking("Mamba2", "conv_slots", "conv_length"),
    "gate dropped": planted("Mamba2", ungated),
    "decays of other heads": rolled("A_log"),
    "channels of the convolution out of place": rolled(r"conv1d\.weight"),
    "projections of other heads": rolled("in_proj"),
    "no attention": zeroed("self_attn.o_proj"),
    "no Mamba-2": zeroed("mamba.out_proj"),
    "mixers of the same size": changed(mixer_scales=(1.0, 1.0)),
    **{f"multiplier {number} of another size": one_multiplier_off(number) for number in range(5)},
}
TINY = {
    "": Tiny(
        config,
        layouts=(*DENSE, "TP2 SP recompute", "PP2 recompute parts", "TP4 SP"),
        means=MEANS,
        stds=STDS,
        faults=FAULTS,
    ),
    "norms": Tiny(
        partial(config, mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False, tie_word_embeddings=True),
        layouts=("TP2", "CP2", "TP4 SP"),
        means=MEANS,
        stds=STDS,
        faults={"norms of other heads": rolled(r"mamba\.norm")},
    ),
}
