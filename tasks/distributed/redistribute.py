"""Redistribution of per-token values between two parallel layouts, and to all ranks by document."""

from collections.abc import Sequence
from dataclasses import replace
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


def redistribute(source_ids: Sequence[np.ndarray], target_ids: Sequence[np.ndarray], values: Tensor) -> Tensor:
    """Exchange rows of values between ranks: [len(source_ids[rank]), width] -> [len(target_ids[rank]), width].

    source_ids, target_ids: int64 token indices of each rank, equal on every rank. One rank is the source of each target
    index. The result has the dtype and device of `values`. Every rank calls this. Raises ValueError on every rank where
    an index has no source.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 1 + max((int(ids.max()) for ids in chain(source_ids, target_ids) if len(ids)), default=0)
    rank_of_id, row_of_id = np.full(size, -1), np.zeros(size, np.int64)
    for source_rank, ids in enumerate(source_ids):
        rank_of_id[ids] = source_rank
    row_of_id[source_ids[rank]] = np.arange(len(source_ids[rank]))
    if missing_count := sum(int((rank_of_id[ids] < 0).sum()) for ids in target_ids):
        raise ValueError(f"{missing_count} requested tokens are on no rank")
    sent_rows = [row_of_id[ids[rank_of_id[ids] == rank]] for ids in target_ids]
    source_ranks = rank_of_id[target_ids[rank]]
    counts = np.bincount(source_ranks, minlength=world).tolist()
    # numpy gives empty arrays odd strides
    values = values.contiguous() if len(values) else values.new_empty(values.shape)
    flat = values.view(torch.uint8)  # as bytes: the communication library may not support the dtype
    send_buffer = flat[torch.from_numpy(np.concatenate(sent_rows)).to(flat.device)]
    received = flat.new_empty(len(source_ranks), flat.shape[1])
    dist.all_to_all_single(received, send_buffer, counts, [len(part) for part in sent_rows])
    order = torch.from_numpy(np.argsort(source_ranks, kind="stable")).to(flat.device)
    result = torch.empty_like(received)
    result[order] = received
    return result.view(values.dtype)


class LabelPlacement:
    """Placement of a step's labels on the ranks of the last pipeline stage. Every rank constructs it.

    `split`: each tensor-parallel rank has its part of the tokens, as with sequence parallelism.
    `copies`: without `split`, all tensor-parallel ranks have all tokens; if false, only the first one.
    """

    def __init__(self, plan: BatchPlan, groups: ProcessGroupCollection, *, split: bool, copies: bool = True):
        self.plan = plan
        tp_rank = groups.tp.rank()
        coordinates = None
        if is_pp_last_stage(groups.pp) and (split or copies or tp_rank == 0):
            coordinates = plan.rank, groups.cp.rank(), tp_rank if split else 0
        self._split_count = groups.tp.size() if split else 1
        self._ranks = all_gather_objects(coordinates)

    def __call__(self, sequences: Sequences) -> list[list[np.ndarray]]:
        """Return `BatchPlan.label_ids` of each rank's micro batches."""
        # Images have no labels: without them they are not decoded for each rank.
        sequences = replace(sequences, media=[])
        starts, ids_of_plan = document_starts(sequences), {}
        rank_ids: list[list[np.ndarray]] = []
        for coordinates in self._ranks:
            if coordinates is None:
                rank_ids.append([])
                continue
            plan_key, split_index = coordinates[:2], coordinates[2]
            plan = self.plan.for_rank(*plan_key)
            if plan_key not in ids_of_plan:
                ids_of_plan[plan_key] = plan.label_ids(plan.batches(sequences), starts)
            rank_ids.append([np.split(ids, self._split_count)[split_index] for ids in ids_of_plan[plan_key]])
        return rank_ids

    def batches(self, sequences: Sequences) -> list[Batch]:
        """Return this rank's micro batches."""
        return self.plan.batches(sequences)


def gather_by_document(
    plan: BatchPlan, groups: ProcessGroupCollection, batches: list[Batch], values: list[Tensor]
) -> list[np.ndarray]:
    """Gather per-token values of the ranks' micro batches into arrays per document, on every rank.

    values: [1, local length] of each micro batch on the last pipeline stage, none on the others.
    """
    rank_values = plan.label_values_by_document(batches, values) if values and groups.tp.rank() == 0 else {}
    all_values: list[dict[int, np.ndarray]] = [{}] * dist.get_world_size()
    dist.all_gather_object(all_values, rank_values)
    documents: dict[int, np.ndarray] = {}
    for rank_values in all_values:
        for item, label_values in rank_values.items():  # each context-parallel rank has a part, and 0 elsewhere
            documents[item] = documents[item] + label_values if item in documents else label_values
    return [documents[item] for item in sorted(documents)]


def document_starts(sequences: Sequences) -> np.ndarray:
    """Return the index of each document's first token, counted over all documents."""
    lengths = np.array([len(tokens) for tokens in sequences.tokens], np.int64)
    return np.cumsum(lengths) - lengths


def concat_indices(batches: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the label indices of micro batches, without the positions that have no label (-1)."""
    ids = np.concatenate([np.empty(0, np.int64), *batches])
    return ids[ids >= 0]
