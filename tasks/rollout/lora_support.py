"""Limits of vLLM's LoRA support. This module imports no torch: the command line imports it."""

from ...bridge.lora.adapter_mapping import AdapterPlan
from ...bridge.lora.settings import LoraSettings
from ...bridge.mapping.param_mapping import OUTPUT

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # adapter ranks that vLLM can allocate
DEFAULT_RANK = 16  # of a server without --vllm_max_lora_rank
UNREAD_EXPERTS = "adapters of this model's experts, which it does not read in PEFT's form"


def lora_rank_bucket(rank: int) -> int:
    """Return the smallest rank in RANKS for an adapter of `rank`. Raises ValueError where there is none."""
    if not 1 <= rank <= RANKS[-1]:
        raise ValueError(f"vLLM takes adapters of rank 1 to {RANKS[-1]}, not {rank}")
    return next(bucket for bucket in RANKS if bucket >= rank)


def unsupported_by_vllm(settings: LoraSettings, plan: AdapterPlan | None = None) -> str | None:
    """Return the adapter's first feature that vLLM does not support; None if none is known.

    vLLM itself rejects other unsupported modules when the first adapter arrives.
    """
    if settings.dora:
        return "DoRA"
    if settings.bias != "none":
        return f"trained biases (--lora_bias {settings.bias})"
    if settings.modules_to_save:
        return f"--modules_to_save {' '.join(settings.modules_to_save)}"
    if settings.rank > RANKS[-1]:
        return f"a rank of {settings.rank}"
    if plan is None:
        return None
    if any(key == OUTPUT or key.name.endswith("word_embeddings.weight") for key in plan.adapted):
        return "adapters of the embedding or the output layer"
    if any(name.endswith(".kv_b_proj") for name in plan.modules):
        return "adapters of kv_b_proj, which it ignores silently"
    if any(".mlp.experts." not in name for name in plan.stacked_parameters):
        return UNREAD_EXPERTS
    return unsupported_expert_rank(settings.rank) if plan.has_experts else None


def unsupported_expert_rank(rank: int) -> str | None:
    """Return why adapters of experts of `rank` are refused, None if they are not.

    vLLM 0.26 ended in an illegal memory access with rank 12. Rank 5 worked, but which others do is not known.
    """
    if rank in RANKS:
        return None
    return f"adapters of experts of rank {rank}: its kernel takes {', '.join(map(str, RANKS))}"
