"""Windows of a step's micro batches whose media features are on the device together.

With pipeline parallelism, the media of all micro batches are encoded before the schedule. A step of many micro batches
would fill the device with features and their gradients, so the schedule runs once per window.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...bridge import runtime
from ...bridge.model.model import Model
from ...templates.batching.collator import Batch

FEATURE_BYTES = 2**32  # largest size of a replica's features and their gradients in a window


def media_windows(model: Model, batches: list[Batch]) -> list[slice]:
    """Divide a step's micro batches into windows. Every rank calls this, and all get the same.

    The windows of all ranks are equal because ranks that exchange the tokens of experts run the same schedule.
    """
    encoder, stages = model.vision, model.config.pipeline_model_parallel_size
    if encoder is None or not encoder.is_pipelined or len(batches) <= stages:
        return [slice(0, len(batches))]
    tokens = sum(len(batch.media.positions) for batch in batches if batch.media)
    size = tokens * encoder.levels * encoder.output_size * model.config.params_dtype.itemsize
    size *= 2 if encoder.trains else 1
    count = torch.tensor(max(-(-size // FEATURE_BYTES), 1), device=runtime.device())
    dist.all_reduce(count, dist.ReduceOp.MAX)
    length = -(-len(batches) // int(count))
    length = -(-length // stages) * stages  # as interleaved stages require
    return [slice(start, min(start + length, len(batches))) for start in range(0, len(batches), length)]


@contextmanager
def part_of_step(
    config: Any, chunks: Sequence[Any], window: slice, micro_batches: int, *, forward_only: bool
) -> Iterator[None]:
    """Let megatron-core's schedule run on a window of a step's micro batches.

    Losses are still divided by the number of all micro batches, and gradients are reduced in the last window alone.
    """
    is_last = window.stop == micro_batches
    changes: dict[str, Any] = {}
    if window.start:
        changes["param_sync_func"] = None  # the first window has gathered the parameters
    with ExitStack() as stack:
        if not forward_only and window != slice(0, micro_batches):
            scale, share = config.grad_scale_func, (window.stop - window.start) / micro_batches
            changes["grad_scale_func"] = lambda values: (values if scale is None else scale(values)) * share
            if not is_last:
                changes |= {"finalize_model_grads_func": None, "grad_sync_func": None, "no_sync_func": None}
                if config.no_sync_func is not None:
                    for chunk in chunks:
                        stack.enter_context(chunk.no_sync())
        stack.callback(vars(config).update, {name: getattr(config, name) for name in changes})
        vars(config).update(changes)
        yield
