"""What the rollout server asks of whatever generates for it."""

from collections.abc import Sequence
from typing import Protocol

from .engine import Completion, Request, Sampling, Top
from .weight_buckets import Bucket


class Backend(Protocol):
    """What generates, for the server: an engine in its process, or vLLM's processes."""

    name: str  # transformers, vllm
    workers: int  # processes that hold weights
    nccl: bool  # whether it takes buckets from the trainer's GPU
    adapters: int  # the highest rank of adapters, which are all that it takes; 0: it takes whole weights

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]: ...
    async def top_log_probs(self, tokens: list[int], places: list[int], top: int, vocab_size: int) -> Top:
        """As a `Reader` does."""
        ...

    async def vocabulary(self) -> dict[str, int]: ...
    async def begin(self) -> None:
        """New weights will come."""
        ...

    async def load(self, bucket: Bucket) -> None:
        """Take a bucket; returns once its memory may be written to again."""
        ...

    async def finish(self) -> None:
        """All have come: generate by them."""
        ...

    async def abort(self) -> None:
        """The rest will not come: be ready for another `begin`."""
        ...

    async def group(self, host: str, port: int) -> None:
        """Join the group of the trainer's GPU (rank 0) and all workers whose store listens there."""
        ...

    async def gpus(self) -> list[str]:
        """`gpu_name` of each worker's, where it takes buckets from the trainer's."""
        ...

    async def checksums(self, names: Sequence[str]) -> dict[str, str]: ...
    async def reset_cache(self) -> None: ...
    async def sleep(self, level: int) -> None: ...
    async def wake(self) -> None: ...
    def failed(self) -> bool:
        """Whether it will never do anything again."""
        ...

    def close(self) -> None: ...
