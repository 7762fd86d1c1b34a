"""Form of a row of the benchmark table."""

from dataclasses import dataclass, field
from typing import Any

BF16_MOMENTS = "--use_precision_aware_optimizer true --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"
RECOMPUTE = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
RECOMPUTE_HALF = "--recompute_granularity full --recompute_method block --recompute_num_layers 6"
LORA = "--tuner_type lora --merge_lora false"


@dataclass(frozen=True)
class Rlhf:
    """Task of `megatron rlhf` on rows of equal lengths."""

    kind: str  # --rlhf_type
    prompt: int  # tokens, as those of an answer without the turn's own
    answer: int
    flags: str = ""  # of every system
    packs: str = ""  # flags of megaswift, which packs answers
    servers: int = 0  # GPUs that generate, and do not train
    teacher: str | None = None  # row with the model of GKD's teacher

    @property
    def generates(self) -> bool:
        """Return whether the model's completions are trained on."""
        return self.kind in ("grpo", "ppo")


@dataclass(frozen=True)
class Row:
    """Model of a real shape with random weights, its layout, and its targets."""

    title: str
    config: dict[str, Any]
    micro_batch: int
    global_batch: int  # packs of a step; per GPU if `gpus` is None
    gpus: int | None = 1  # None: all visible GPUs
    steps: int = 12
    length: int = 4096  # tokens of a pack
    documents: int | None = None  # of the text; None: all
    document_tokens: int | None = None  # tokens of a document, about: chats are joined; None: single chats
    pictures: tuple[int, int] | None = None  # least and most visual tokens of a picture; None: text alone
    layout: str = ""  # flags of every system
    rlhf: Rlhf | None = None  # None: supervised. Else the batches count samples, and `length` is that of one
    warmup: int = 3  # the first steps, which do not count
    peer: str = ""  # extra flags of the peer that its documentation recommends for speed
    min_speedup: dict[str, float] = field(default_factory=dict)  # system -> lowest speed relative to its baseline
    mfu: float | None = None  # lowest MFU
    first_step: float | None = None  # most seconds from the command to the end of step 1

    def batch_on(self, gpus: int) -> int:
        """Return the packs of a global batch."""
        return self.global_batch * (1 if self.gpus else gpus)
