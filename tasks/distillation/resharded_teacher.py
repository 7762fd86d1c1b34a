"""A teacher whose processes are not laid out as the student's are: what it makes of a step's tokens is brought to them.

Every rank knows all documents of a step. Of the teacher's layout it knows too who has which tokens of them, so that
each number goes from the rank that has it to those that want it, once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from torch import Tensor

from ...bridge import runtime
from ...bridge.model.model import Model
from ...bridge.parallel import ProcessGroups
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ..distributed.collectives import run_on_all_ranks
from ..distributed.redistribute import LabelPlacement, concat_indices, redistribute
from ..options import GkdOptions
from ..run.context import Run, episode_plan


class Sight(Protocol):
    """Teacher outputs for a step's trained tokens."""

    def __call__(self, sequences: Sequences) -> tuple[list[np.ndarray], Tensor]:
        """(labels of each rank: see `BatchPlan.label_ids`, this rank's numbers of its own [labels, numbers of each])

        The numbers are hidden states, or fp32: the log-probabilities of the likeliest tokens, then these tokens.
        """
        ...


class Elsewhere:
    """Lays out a teacher's sight of the documents of a step as the student's micro batches are. Every rank makes one,
    in the student's process groups."""

    def __init__(self, sight: Sight, plan: BatchPlan, student: Model, *, top: int | None):
        self._sight, self._top = sight, top
        # Sequence parallelism splits hidden states, and nothing else does.
        self._spread = LabelPlacement(plan, student.groups, split=student.config.sequence_parallel and not top)

    def of(self, batches: list[Batch], sequences: Sequences) -> list[Tensor]:
        """Return the values of TeacherExtras for each of this rank's micro batches, on the last pipeline stage."""
        want = self._spread(sequences)
        have, values = self._sight(sequences)
        values = redistribute(have, [concat_indices(of_rank) for of_rank in want], values)
        outputs, start = [], 0
        for numbers in want[dist.get_rank()]:
            mask = torch.from_numpy(numbers >= 0).to(values.device)
            count = int((numbers >= 0).sum())
            rows = values.new_zeros(len(numbers), values.shape[1])
            rows[mask] = values[start : start + count]
            start += count
            # [2, 1, local length, top], or as a model has hidden states: [local length, 1, hidden size]
            outputs.append(rows.unflatten(1, (2, 1, -1)).movedim(0, 2) if self._top else rows.unsqueeze(1))
        return outputs


class Apart:
    """The teacher's process groups, and in them its passes. Every rank makes one.

    Raises ValueError, on every rank, where the processes do not divide.
    """

    def __init__(self, run: Run, options: GkdOptions):
        self._groups = run_on_all_ranks(lambda: ProcessGroups(options.build))
        self._run = replace(run, options=options)

    def entered(self) -> AbstractContextManager[None]:
        return self._groups.entered()

    def begin(self, model: Model, see: Callable[[list[Batch]], list[Tensor]], *, top: int | None) -> None:
        """`see`: what `model`, which was built in these groups, makes of micro batches of its own."""
        self._model, self._see, self._top = model, see, top
        split = not top and model.config.sequence_parallel
        self._spread = LabelPlacement(episode_plan(self._run, model.groups), model.groups, split=split, copies=False)

    def __call__(self, sequences: Sequences) -> tuple[list[np.ndarray], Tensor]:
        have = self._spread(sequences)
        with self.entered():
            seen = self._see(self._spread.batches(sequences))
        config, placement = self._model.config, have[dist.get_rank()]
        dtype, width = (torch.float32, 2 * self._top) if self._top else (config.params_dtype, config.hidden_size)
        rows = [torch.empty(0, width, dtype=dtype, device=runtime.device())]
        for numbers, values in zip(placement, seen if placement else [], strict=True):
            flat = values.squeeze(1).movedim(0, 1).flatten(1) if self._top else values.squeeze(1)
            rows.append(flat[torch.from_numpy(numbers >= 0).to(flat.device)].to(dtype))
        return [concat_indices(of_rank) for of_rank in have], torch.cat(rows)

    def matrix_for(self, student: Model) -> Tensor | None:
        """Return the teacher's output matrix with the student's rows per rank, zeros beyond its end.

        On the student's last pipeline stage, elsewhere None. Called in the student's process groups.
        """
        groups = self._model.groups
        held = self._model.output_matrix().detach() if is_pp_last_stage(groups.pp) else None
        first_copy = groups.dp_cp.rank() == 0
        have = np.arange(len(held)) + groups.tp.rank() * len(held) if held is not None and first_copy else np.arange(0)
        total = len(held) * groups.tp.size() if held is not None else 0
        wants, rows = is_pp_last_stage(student.groups.pp), 0
        if wants:
            rows = len(student.output_matrix())
        ranks: list[Any] = [None] * dist.get_world_size()
        first = rows * student.groups.tp.rank()
        dist.all_gather_object(ranks, (have, total, first, rows))
        end = max(total for _, total, _, _ in ranks)
        want = [np.arange(min(first, end), min(first + rows, end)) for _, _, first, rows in ranks]
        config = self._model.config
        if held is None or not first_copy:
            held = torch.empty(0, config.hidden_size, dtype=config.params_dtype, device=runtime.device())
        matrix = redistribute([have for have, _, _, _ in ranks], want, held)
        if not wants:
            return None
        return torch.cat((matrix, matrix.new_zeros(rows - len(matrix), matrix.shape[1])))
