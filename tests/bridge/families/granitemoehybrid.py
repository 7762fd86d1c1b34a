"""Granite 4: Mamba-2 of one group and attention without positions, experts; dense; attention alone, with rope."""

from functools import partial

from tests.bridge.families import MOE, ROPE, SHARED, Tiny
from tests.bridge.families.faults import rolled, zeroed
from tests.bridge.families.granitemoe import EXPERTS, FACTORS
from tests.bridge.families.nemotron_h import MEANS, STDS
from tests.bridge.families.qwen3_next import leaking, planted, ungated

MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 1,
    "mamba_d_state": 20,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
    "shared_intermediate_size": 28,
    "position_embedding_type": None,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "tie_word_embeddings": True,
}


def config(**changes):
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(**SHARED | FACTORS | EXPERTS | MAMBA | {"rope_parameters": ROPE} | changes)


FAULTS = {
    "states leak": leaking("Mamba2", "slots", "steps"),
    "convolution leaks": leaking("Mamba2", "conv_slots", "conv_length"),
    "gate dropped": planted("Mamba2", ungated),
    "decays of other heads": rolled("A_log"),
    "time steps without bias": zeroed("dt_bias"),
    "values not added": zeroed(r"\.D$"),
    "norms of other heads": rolled(r"mamba\.norm"),
    "channels of the convolution out of place": rolled(r"conv1d\.weight"),
    "projections of other heads": rolled("in_proj"),
    "no shared MLP": zeroed("shared_mlp.output_linear"),
}
DENSE = {"num_local_experts": 0, "mamba_conv_bias": False}
TINY = {
    "": Tiny(
        config,
        layouts=(*MOE, "TP2 SP recompute", "PP2 recompute parts", "TP4 SP", "TP2 SP EP2 ETP2"),
        means=MEANS,
        stds=STDS,
        faults=FAULTS | {"experts out of place": rolled(r"moe\.input_linear")},
    ),
    # As published files name the layers.
    "dense": Tiny(
        partial(config, **DENSE),
        layouts=("TP2", "TP4 SP", "CP2"),
        means=MEANS,
        stds=STDS,
        raw={"layer_types": ["mamba", "attention", "mamba", "mamba"], "position_embedding_type": "nope"},
    ),
    "attention": Tiny(
        partial(config, num_local_experts=0, layer_types=["full_attention"] * 4, position_embedding_type="rope"),
        layouts=("TP2 SP",),
    ),
}
