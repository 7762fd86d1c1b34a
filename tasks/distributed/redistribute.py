"""Redistribution of per-token values between two parallel layouts."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from .collectives import all_gather_objects


def redistribute(have: Sequence[np.ndarray], want: Sequence[np.ndarray], values: Tensor) -> Tensor:
    """Exchange rows: values [len(have[rank]), width] -> [len(want[rank]), width], of the same dtype and device.

    have, want: int64 token indices of each rank, equal on every rank; each wanted index is in `have` of one rank. Every
    rank calls this. Raises ValueError on every rank where an index is in no `have`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 1 + max((int(numbers.max()) for numbers in chain(have, want) if len(numbers)), default=0)
    owners, rows = np.full(size, -1), np.zeros(size, np.int64)
    for other, numbers in enumerate(have):
        owners[numbers] = other
    rows[have[rank]] = np.arange(len(have[rank]))
    if lost := sum(int((owners[numbers] < 0).sum()) for numbers in want):
        raise ValueError(f"{lost} requested tokens are on no rank")
    sent = [rows[numbers[owners[numbers] == rank]] for numbers in want]
    sources = owners[want[rank]]
    counts = np.bincount(sources, minlength=world).tolist()
    # numpy gives empty arrays odd strides
    values = values.contiguous() if len(values) else values.new_empty(values.shape)
    flat = values.view(torch.uint8)  # as bytes: the communication library may not support the dtype
    out = flat[torch.from_numpy(np.concatenate(sent)).to(flat.device)]
    received = flat.new_empty(len(sources), flat.shape[1])
    dist.all_to_all_single(received, out, counts, [len(part) for part in sent])
    order = torch.from_numpy(np.argsort(sources, kind="stable")).to(flat.device)
    result = torch.empty_like(received)
    result[order] = received
    return result.view(values.dtype)


class LabelPlacement:
    """Placement of a step's labels on the ranks of the last pipeline stage. Every rank makes one.

    `split`: each tensor-parallel rank has its part of the tokens, as with sequence parallelism.
    `copies`: otherwise, whether all ranks of the group have all tokens, or only the first.
    """

    def __init__(self, plan: BatchPlan, groups: ProcessGroupCollection, *, split: bool, copies: bool = True):
        self.plan = plan
        tensor = groups.tp.rank()
        coordinates = None
        if is_pp_last_stage(groups.pp) and (split or copies or tensor == 0):
            coordinates = plan.rank, groups.cp.rank(), tensor if split else 0
        self._parts = groups.tp.size() if split else 1
        self._ranks = all_gather_objects(coordinates)

    def __call__(self, sequences: Sequences) -> list[list[np.ndarray]]:
        """Return `BatchPlan.label_ids` of each rank's micro batches."""
        starts, indices_of_plan = document_starts(sequences), {}
        indices: list[list[np.ndarray]] = []
        for coordinates in self._ranks:
            if coordinates is None:
                indices.append([])
                continue
            plan_key, part = coordinates[:2], coordinates[2]
            plan = self.plan.for_rank(*plan_key)
            if plan_key not in indices_of_plan:
                indices_of_plan[plan_key] = plan.label_ids(plan.batches(sequences), starts)
            indices.append([np.split(numbers, self._parts)[part] for numbers in indices_of_plan[plan_key]])
        return indices

    def batches(self, sequences: Sequences) -> list[Batch]:
        """Return this rank's micro batches."""
        return self.plan.batches(sequences)


def document_starts(sequences: Sequences) -> np.ndarray:
    """Return the index of each document's first token, counted over all documents."""
    lengths = np.array([len(tokens) for tokens in sequences.tokens], np.int64)
    return np.cumsum(lengths) - lengths


def concat_indices(batches: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the label indices of micro batches, without the positions that have no label (-1)."""
    indices = np.concatenate([np.empty(0, np.int64), *batches])
    return indices[indices >= 0]
