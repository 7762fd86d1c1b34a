"""Numbers of tokens from the ranks that have them to those that want them, where the two are laid out differently."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences


def exchanged(have: Sequence[np.ndarray], want: Sequence[np.ndarray], values: Tensor) -> Tensor:
    """values [those of have[own rank], width] -> [those of want[own rank], width], of the same dtype and device.

    have, want: int64 numbers by rank, known to every rank; each number that is wanted is had by one rank. Every rank
    calls this. Raises ValueError, on every rank, where nobody has what is wanted.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 1 + max((int(numbers.max()) for numbers in chain(have, want) if len(numbers)), default=0)
    holders, places = np.full(size, -1), np.zeros(size, np.int64)
    for other, numbers in enumerate(have):
        holders[numbers] = other
    places[have[rank]] = np.arange(len(have[rank]))
    if lost := sum(int((holders[numbers] < 0).sum()) for numbers in want):
        raise ValueError(f"{lost} tokens are wanted that no rank has")
    sent = [places[numbers[holders[numbers] == rank]] for numbers in want]
    sources = holders[want[rank]]
    got = np.bincount(sources, minlength=world).tolist()
    values = values.contiguous() if len(values) else values.new_empty(values.shape)  # of none numpy has odd strides
    flat = values.view(torch.uint8)  # any dtype, whatever the communication library knows
    out = flat[torch.from_numpy(np.concatenate(sent)).to(flat.device)]
    back = flat.new_empty(len(sources), flat.shape[1])
    dist.all_to_all_single(back, out, got, [len(each) for each in sent])
    order = torch.from_numpy(np.argsort(sources, kind="stable")).to(flat.device)
    found = torch.empty_like(back)
    found[order] = back
    return found.view(values.dtype)


class Spread:
    """Which rank has which labels of a step, on the last pipeline stage of the process groups as they are.

    Every rank makes one. `split`: of a tensor-parallel group each rank has its part of the tokens, as sequence
    parallelism gives it; else `copies` says whether all of them have all, or the first alone.
    """

    def __init__(self, plan: BatchPlan, *, split: bool, copies: bool = True):
        self.plan = plan
        tensor = parallel_state.get_tensor_model_parallel_rank()
        own = None
        if parallel_state.is_pipeline_last_stage() and (split or copies or tensor == 0):
            own = plan.rank, parallel_state.get_context_parallel_rank(), tensor if split else 0
        self._parts = parallel_state.get_tensor_model_parallel_world_size() if split else 1
        self._ranks: list[tuple[int, int, int] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(self._ranks, own)

    def __call__(self, sequences: Sequences) -> list[list[np.ndarray]]:
        """Of each rank, and each of its micro batches, `BatchPlan.label_ids` of its places."""
        starts, known = starts_of(sequences), {}
        found: list[list[np.ndarray]] = []
        for place in self._ranks:
            if place is None:
                found.append([])
                continue
            plan = self.plan.for_rank(*place[:2])
            if place[:2] not in known:
                known[place[:2]] = plan.label_ids(plan.batches(sequences), starts)
            found.append([np.split(numbers, self._parts)[place[2]] for numbers in known[place[:2]]])
        return found

    def batches(self, sequences: Sequences) -> list[Batch]:
        """This rank's own micro batches."""
        return self.plan.batches(sequences)


def starts_of(sequences: Sequences) -> np.ndarray:
    """Where each document's tokens begin, in one count of all."""
    lengths = np.array([len(tokens) for tokens in sequences.tokens], np.int64)
    return np.cumsum(lengths) - lengths


def together(of_each: Sequence[np.ndarray]) -> np.ndarray:
    """The labels of all micro batches in a row, without the places that have none."""
    whole = np.concatenate([np.empty(0, np.int64), *of_each])
    return whole[whole >= 0]
