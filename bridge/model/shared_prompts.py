"""Models and settings in which completions of a prompt can share it in a packed row."""

from ..mapping.param_mapping import Architecture
from ..options import BuildOptions


def supports_shared_prompts(architecture: Architecture, options: BuildOptions) -> bool:
    """Return whether a prompt that is computed once gives every completion the numbers of a document by itself.

    Layers must see earlier tokens through attention alone, nothing may count tokens or draw random numbers for them,
    and a rank must hold the whole row.
    """
    settings = architecture.transformer
    counts_tokens = "num_moe_experts" in settings and (
        settings.get("moe_router_enable_expert_bias")
        or options.moe_aux_loss_coeff
        or options.moe_z_loss_coeff
        or options.moe_expert_capacity_factor is not None
        or options.moe_router_load_balancing_type == "sinkhorn"
    )
    return (
        options.context_parallel_size == 1
        and not counts_tokens
        and not (options.attention_dropout or options.hidden_dropout)
        and not architecture.mtp_depths
        and all(layer.mixer == "attention" for layer in architecture.layers)
        # The length of a document chooses among these frequencies.
        and all((rope.scaling or {}).get("rope_type") != "longrope" for rope in architecture.ropes)
    )
