"""Teacher with a parallel layout of its own: its outputs are redistributed to the student's ranks.

Every rank knows all documents of a step, and which tokens each rank has in both layouts. So each value is sent once to
each rank that needs it.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from torch import Tensor

from ...bridge import runtime
from ...bridge.model.model import Model
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ..distributed.redistribute import LabelPlacement, concat_indices, redistribute
from ..run.context import episode_plan
from ..run.roles import Role


class TeacherOutputs(Protocol):
    """Teacher outputs for a step's trained tokens."""

    def __call__(self, sequences: Sequences) -> tuple[list[np.ndarray], Tensor]:
        """Return the label ids of each rank (`BatchPlan.label_ids`), and this rank's values [its labels, width].

        Values are hidden states, or fp32: the log-probabilities of the top tokens, then their token ids.
        """
        ...


class ReshardedOutputs:
    """Teacher outputs in the layout of the student's micro batches.

    Every rank creates an instance, in the student's process groups.
    """

    def __init__(self, teacher_outputs: TeacherOutputs, plan: BatchPlan, student: Model, *, top: int | None):
        self._teacher_outputs, self._top = teacher_outputs, top
        # Sequence parallelism splits hidden states, but not log-probabilities.
        self._placement = LabelPlacement(plan, student.groups, split=student.config.sequence_parallel and not top)

    def compute(self, batches: list[Batch], sequences: Sequences) -> list[Tensor]:
        """Return the values of TeacherExtras for each of this rank's micro batches, on the last pipeline stage."""
        label_ids = self._placement(sequences)
        teacher_ids, values = self._teacher_outputs(sequences)
        values = redistribute(teacher_ids, [concat_indices(ids) for ids in label_ids], values)
        outputs, start = [], 0
        for ids in label_ids[dist.get_rank()]:
            mask = torch.from_numpy(ids >= 0).to(values.device)
            count = int((ids >= 0).sum())
            rows = values.new_zeros(len(ids), values.shape[1])
            rows[mask] = values[start : start + count]
            start += count
            # [2, 1, local length, top], or the shape of hidden states: [local length, 1, hidden size]
            outputs.append(rows.unflatten(1, (2, 1, -1)).movedim(0, 2) if self._top else rows.unsqueeze(1))
        return outputs


class OwnLayoutOutputs:
    """Outputs of a teacher in its own layout. Every rank creates an instance.

    model: built in the role's process groups. forward: its outputs for micro batches of its layout.
    """

    def __init__(self, role: Role, model: Model, forward: Callable[[list[Batch]], list[Tensor]], *, top: int | None):
        self._role, self._model, self._forward, self._top = role, model, forward, top
        split = not top and model.config.sequence_parallel
        self._placement = LabelPlacement(episode_plan(role.run, model.groups), model.groups, split=split, copies=False)

    def __call__(self, sequences: Sequences) -> tuple[list[np.ndarray], Tensor]:
        label_ids = self._placement(sequences)
        with self._role.entered():
            outputs = self._forward(self._placement.batches(sequences))
        config, local_ids = self._model.config, label_ids[dist.get_rank()]
        dtype, width = (torch.float32, 2 * self._top) if self._top else (config.params_dtype, config.hidden_size)
        rows = [torch.empty(0, width, dtype=dtype, device=runtime.device())]
        for ids, values in zip(local_ids, outputs if local_ids else [], strict=True):
            flat = values.squeeze(1).movedim(0, 1).flatten(1) if self._top else values.squeeze(1)
            rows.append(flat[torch.from_numpy(ids >= 0).to(flat.device)].to(dtype))
        return [concat_indices(ids) for ids in label_ids], torch.cat(rows)

    def output_matrix_for(self, student: Model) -> Tensor | None:
        """Return the teacher's output matrix in the student's tensor-parallel layout, padded with zeros.

        None except on the student's last pipeline stage. Call it in the student's process groups.
        """
        groups = self._model.groups
        weight = self._model.output_matrix().detach() if is_pp_last_stage(groups.pp) else None
        first_copy = groups.dp_cp.rank() == 0
        teacher_rows = (
            np.arange(len(weight)) + groups.tp.rank() * len(weight)
            if weight is not None and first_copy
            else np.arange(0)
        )
        teacher_vocab = len(weight) * groups.tp.size() if weight is not None else 0
        is_last_stage, num_rows = is_pp_last_stage(student.groups.pp), 0
        if is_last_stage:
            num_rows = len(student.output_matrix())
        layouts: list[Any] = [None] * dist.get_world_size()
        start = num_rows * student.groups.tp.rank()
        dist.all_gather_object(layouts, (teacher_rows, teacher_vocab, start, num_rows))
        vocab_end = max(teacher_vocab for _, teacher_vocab, _, _ in layouts)
        student_rows = [
            np.arange(min(start, vocab_end), min(start + num_rows, vocab_end)) for _, _, start, num_rows in layouts
        ]
        config = self._model.config
        if weight is None or not first_copy:
            weight = torch.empty(0, config.hidden_size, dtype=config.params_dtype, device=runtime.device())
        matrix = redistribute([teacher_rows for teacher_rows, _, _, _ in layouts], student_rows, weight)
        if not is_last_stage:
            return None
        return torch.cat((matrix, matrix.new_zeros(num_rows - len(matrix), matrix.shape[1])))
