"""Teacher of a distillation: its forward passes, and the comparison of the student with it.

Its passes run before those of the step, through the same pipeline schedule. Per micro batch it keeps hidden states,
from which the comparison recomputes logits a chunk at a time; with --gkd_logits_topk, the log-probabilities of the
likeliest tokens. Outputs of a teacher in another layout or behind a server are redistributed (resharded_teacher.py).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.divergence import divergence, reshard_rows, top_divergence, top_log_probs
from ...bridge.layers.logprobs import OutputMatrix, label_log_probs
from ...bridge.model.model import Model
from ...bridge.model.outputs import HiddenStates
from ...bridge.model.vision_encoder import VisionEncoder
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ..observability.flops import Flops
from ..options import GkdOptions
from ..reference.frozen_model import build_frozen, forward_only, offloaded
from ..run.context import Run
from ..run.roles import Role
from ..train.media_features import share_features, shared_encoder
from ..train.objective import extras_of
from .remote_teacher import RemoteTeacher
from .resharded_teacher import OwnLayoutOutputs, ReshardedOutputs


@dataclass(frozen=True)
class TeacherExtras:
    """Teacher outputs for a micro batch, on the last pipeline stage."""

    values: (
        Tensor  # hidden states before the output layer, or fp32 [2, 1, local length, top]: log-probabilities, tokens
    )


class Teacher:
    """Teacher of a student, on every rank. Raises ValueError on every rank if the two do not fit together."""

    def __init__(self, run: Run, student: Model, options: GkdOptions, plan: BatchPlan):
        self.name = (
            options.teacher.teacher_model_server or options.teacher.teacher_model or options.teacher.mcore_teacher_model
        )
        self.student, self.student_scale = student, student.architecture.logits_scale
        self.beta, self.temperature = options.beta, options.sampling.temperature
        self.top, self.vocab_size, self.scale = options.teacher.gkd_logits_topk, student.architecture.vocab_size, 1.0
        self.cap: float | None = None
        self.weight: Tensor | None = None  # output matrix, split as the student's, always on the device
        self.flops: Flops | None = None  # of its forward passes in these processes
        self.resharded: ReshardedOutputs | None = None  # None: in the student's layout
        self.server: RemoteTeacher | None = None
        self.shared_encoder: VisionEncoder | None = None  # the student's, if the teacher has the same frozen tower
        if student.architecture.logits_bias:
            raise ValueError(
                "--rlhf_type gkd: models whose output layer has a bias are not supported. Use another model"
            )
        if options.teacher.teacher_model_server:
            self.server = RemoteTeacher(run, options, self.vocab_size)
            self.resharded = ReshardedOutputs(self.server, plan, student, top=self.top)
            self.location = f", a server ({self.server.reader.kind})"
            return
        role = Role(run, "teacher")
        self.location = role.note
        with role.entered():
            self._build(role.run, options)
        architecture = self.model.architecture
        if architecture.logits_bias:
            raise ValueError(
                "--teacher_model: its output layer has a bias, which is not supported. Use another teacher"
            )
        self.vocab_size, self.scale = min(self.vocab_size, architecture.vocab_size), architecture.logits_scale
        self.cap = architecture.logits_cap
        self.flops = Flops.of_model(self.model)
        self.shared_encoder = None if role.has_own_layout else shared_encoder(student, self.model)
        if self.shared_encoder:
            self.flops = replace(self.flops, vision=None)
            self.location += ", whose images are encoded by the student's vision tower"
        if self.top and self.top > self.vocab_size:
            raise ValueError(f"--gkd_logits_topk {self.top}: the vocabulary has {self.vocab_size} tokens. Set fewer")
        if not role.has_own_layout:
            if is_pp_last_stage(student.groups.pp) and not self.top:
                rows, group = len(student.output_matrix()), student.groups.tp
                self.weight = reshard_rows(self.model.output_matrix(), rows, group)
        else:
            outputs = OwnLayoutOutputs(role, self.model, self._forward, top=self.top)
            self.resharded = ReshardedOutputs(outputs, plan, student, top=self.top)
            if not self.top:
                self.weight = outputs.output_matrix_for(student)
        offloads = options.teacher.offload_teacher_model and runtime.device().type == "cuda"
        self.on_device: Callable[[], Any] = offloaded(self.model) if offloads else nullcontext

    def _build(self, run: Run, options: GkdOptions) -> None:
        flag = "--teacher_model" if options.teacher.teacher_model else "--mcore_teacher_model"
        source = {
            "model": options.teacher.teacher_model or "",
            "mcore_model": options.teacher.mcore_teacher_model,
            "rope_scaling": {},  # --rope_scaling is the student's
            "max_model_len": None,
        }
        self.model, self.folder = build_frozen(run, source, f"{flag} {self.name}", [])

    def annotate(self, batches: list[Batch], sequences: Sequences) -> list[Batch]:
        """Return the micro batches with TeacherExtras. sequences: the step's, of all ranks."""
        if self.shared_encoder:
            share_features(self.shared_encoder, batches)
        outputs = self.resharded.compute(batches, sequences) if self.resharded else self._forward(batches)
        if not outputs:  # not the last pipeline stage
            return batches
        return [replace(b, extras=TeacherExtras(values)) for b, values in zip(batches, outputs, strict=True)]

    def _forward(self, batches: list[Batch]) -> list[Tensor]:
        """Return the outputs of micro batches in the teacher's layout."""
        output = HiddenStates(self._top_log_probs if self.top else _hidden_states)
        with self.on_device():
            return forward_only(self.model, self.model.chunks, batches, lambda batch: output)

    def compare(self, batch: Batch, *, likelihood: bool) -> HiddenStates:
        """Return the output that computes the student's divergence from the teacher at each token: fp32 [1, local
        length], 0 where the label has no loss; with `likelihood` [2, 1, local length], the second the log-probabilities
        of the labels."""
        return HiddenStates(partial(self._compare, batch, likelihood=likelihood))

    def _top_log_probs(self, hidden: Tensor, output: OutputMatrix) -> Tensor:
        output = replace(output, vocab_size=self.vocab_size)
        # fp32 represents every integer below 2^24, so every token id.
        return torch.stack(top_log_probs(hidden, output, self.top or 0, temperature=self.scale))

    def _compare(self, batch: Batch, hidden: Tensor, output: OutputMatrix, *, likelihood: bool) -> Tensor:
        shared, extras = replace(output, vocab_size=self.vocab_size), extras_of(batch, TeacherExtras)
        student_temperature = self.student_scale * self.temperature
        if self.top:
            log_probs, tokens = extras.values
            temperatures = student_temperature, self.temperature
            divergences = top_divergence(
                hidden, shared, log_probs, tokens.long(), beta=self.beta, temperatures=temperatures
            )
        else:
            assert self.weight is not None
            temperatures = student_temperature, self.scale * self.temperature
            divergences = divergence(
                hidden,
                shared,
                extras.values,
                self.weight,
                beta=self.beta,
                temperatures=temperatures,
                teacher_cap=self.cap,
            )
        if not likelihood:
            return divergences
        return torch.stack((divergences, label_log_probs(hidden, output, batch.labels, temperature=self.student_scale)))


def _hidden_states(hidden: Tensor, output: OutputMatrix) -> Tensor:
    return hidden
