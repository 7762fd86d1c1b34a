"""Interface between the rollout server and the engine behind it."""

from collections.abc import Sequence
from typing import Protocol

from .engine import Completion, Request, Sampling, TopLogProbs
from .weight_buckets import Bucket


class Backend(Protocol):
    """Engine of the rollout server, in the server's process or in vLLM's processes."""

    name: str  # transformers, vllm
    workers: int  # processes that hold weights
    has_nccl: bool  # whether it receives weight buckets from the trainer's GPU by NCCL
    max_adapter_rank: int  # of the LoRA adapters that it loads; 0: it loads full weights

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]: ...
    async def top_log_probs(self, document: Request, positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """Return the likeliest next tokens, as `ScoringEngine.top_log_probs` does."""
        ...

    async def vocabulary(self) -> dict[str, int]: ...
    async def begin(self) -> None:
        """Start an update of the weights."""
        ...

    async def load(self, bucket: Bucket) -> None:
        """Load a bucket. Returns once its memory may be overwritten."""
        ...

    async def finish(self) -> None:
        """End the update after all weights have arrived."""
        ...

    async def abort(self) -> None:
        """Abort the update. Another `begin` may follow."""
        ...

    async def group(self, host: str, port: int) -> None:
        """Join the process group of the trainer's GPU (rank 0) and all workers through the store at this address."""
        ...

    async def gpus(self) -> list[str]:
        """Return `gpu_name` of each worker's GPU where the backend supports NCCL."""
        ...

    async def checksums(self, names: Sequence[str]) -> dict[str, str]: ...
    async def reset_cache(self) -> None: ...
    async def sleep(self, level: int) -> None: ...
    async def wake(self) -> None: ...
    def has_failed(self) -> bool:
        """Return whether the engine has failed permanently."""
        ...

    def close(self) -> None: ...
