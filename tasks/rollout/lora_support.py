"""Adapters alone, to engines of vLLM that have the weights beneath them. No torch: the command line looks here too."""

from ...bridge.lora.adapter_mapping import AdapterPlan
from ...bridge.lora.settings import LoraSettings
from ...bridge.mapping.param_mapping import EMBEDDING, OUTPUT

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room
SERVERS_RANK = 16  # for which a server does that is not told otherwise


def room_for(rank: int) -> int:
    """The smallest of vLLM's rooms that a rank fits into. Raises ValueError where there is none."""
    if not 1 <= rank <= RANKS[-1]:
        raise ValueError(f"vLLM takes adapters of a rank from 1 to {RANKS[-1]}, not {rank}")
    return next(room for room in RANKS if room >= rank)


def refused(settings: LoraSettings, plan: AdapterPlan | None = None) -> str | None:
    """What of an adapter vLLM does not take; None: nothing that is known. Whatever modules it has no place for, it
    says itself, when the first adapter comes."""
    if settings.dora:
        return "DoRA"
    if settings.bias != "none":
        return f"biases that are trained (--lora_bias {settings.bias})"
    if settings.modules_to_save:
        return f"--modules_to_save {' '.join(settings.modules_to_save)}"
    if settings.rank > RANKS[-1]:
        return f"a rank of {settings.rank}"
    if plan is None:
        return None
    if plan.adapted.keys() & {EMBEDDING, OUTPUT}:
        return "adapters of the embedding or the output layer"
    if any(name.endswith(".kv_b_proj") for name in plan.modules):
        return "adapters of kv_b_proj, which it leaves out without a word"
    if plan.has_experts and settings.rank not in RANKS:
        return f"adapters of experts of rank {settings.rank}: its kernel takes {', '.join(map(str, RANKS))}"
    return None
