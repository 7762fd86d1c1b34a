"""Models and settings in which documents with a prompt in common can share it in a packed row."""

from ..mapping.architecture import Architecture
from ..options import BuildOptions


def unshared_reason(architecture: Architecture, options: BuildOptions) -> str:
    """Return why a prompt that is computed once would change a document's numbers, for messages; "" if it would not.

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
    reasons = {
        "context parallelism": options.context_parallel_size > 1,
        "experts with a balancing loss, a z-loss, a capacity or a score bias": counts_tokens,
        "a loss of indexers": options.dsa_indexer_loss_coeff,
        "dropout": options.attention_dropout or options.hidden_dropout,
        "multi-token prediction": architecture.mtp_depths,
        "layers that are not attention": any(layer.mixer != "attention" for layer in architecture.layers),
        # The length of a document chooses among its frequencies.
        "longrope": any((rope.scaling or {}).get("rope_type") == "longrope" for rope in architecture.ropes),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
