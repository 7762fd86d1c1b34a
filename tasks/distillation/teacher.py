"""The model that a student learns from, and what the two are compared by: its distributions of the next token.

Its passes go through the pipeline's schedule by themselves, before those of the step. What is kept of a micro batch are
its hidden states, from which its logits are made again, a chunk at a time, where they are compared with the student's;
or with --gkd_logits_topk the log-probabilities of its likeliest tokens. A teacher in a layout of its own, or behind a
server, finds them elsewhere: resharded_teacher.py has them brought to the student's ranks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.divergence import divergence, reshard_rows, top_divergence, top_log_probs
from ...bridge.layers.logprobs import label_log_probs
from ...bridge.model.build import Model, OfHiddenStates
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ..observability.flops import Flops
from ..options import GkdOptions
from ..reference.frozen_model import build_frozen, offloaded, passed
from ..run.context import Run
from ..run.planning import Layout, teacher_layout
from .remote_teacher import Served
from .resharded_teacher import Apart, Elsewhere


class Teacher:
    """Every rank makes one, of the same. Raises ValueError, on every rank, where it cannot be this student's."""

    def __init__(self, run: Run, student: Model, options: GkdOptions, plan: BatchPlan):
        self.name = options.teacher_model_server or options.teacher_model or options.mcore_teacher_model
        self.student, self.own_scale = student, student.architecture.logits_scale
        self.beta, self.temperature = options.beta, options.temperature
        self.top, self.vocab_size, self.scale = options.gkd_logits_topk, student.architecture.vocab_size, 1.0
        self.accumulate: bool = student.config.accumulate_in_matmul  # pyright: ignore[reportAttributeAccessIssue]
        self.weight: Tensor | None = None  # the output matrix, split as the student's, which stays on the device
        self.flops: Flops | None = None  # of its passes in these processes
        self.elsewhere: Elsewhere | None = None  # None: its hidden states are where the student's will be
        self.server: Served | None = None
        if options.teacher_model_server:
            self.server = Served(run, options, self.vocab_size)
            self.elsewhere = Elsewhere(self.server, plan, student, top=self.top)
            self.place = f", a server ({self.server.reader.kind})"
            return
        apart = teacher_layout(options)
        self.place = f", {Layout.of(apart, dist.get_world_size())}" if apart else ""
        self._groups = Apart(run, apart) if apart else None
        with self._groups.entered() if self._groups else nullcontext():
            self._build(replace(run, options=apart or options), options)
        theirs = self.model.architecture
        self.vocab_size, self.scale = min(self.vocab_size, theirs.vocab_size), theirs.logits_scale
        self.flops = Flops.of_model(self.model)
        if self.top and self.top > self.vocab_size:
            raise ValueError(f"--gkd_logits_topk {self.top}: there are {self.vocab_size} tokens. Give fewer")
        if self._groups is None:
            if parallel_state.is_pipeline_last_stage() and not self.top:
                rows, group = len(student.output_matrix()), parallel_state.get_tensor_model_parallel_group()
                self.weight = reshard_rows(self.model.output_matrix(), rows, group)
        else:
            self._groups.begin(self.model, self._pass, top=self.top)
            self.elsewhere = Elsewhere(self._groups, plan, student, top=self.top)
            if not self.top:
                self.weight = self._groups.matrix_for(student)
        offloads = options.offload_teacher_model and runtime.device().type == "cuda"
        self.there: Callable[[], Any] = offloaded(self.model) if offloads else nullcontext

    def _build(self, run: Run, options: GkdOptions) -> None:
        flag = "--teacher_model" if options.teacher_model else "--mcore_teacher_model"
        source = {"model": options.teacher_model or "", "mcore_model": options.mcore_teacher_model}
        self.model, self.folder = build_frozen(run, source, f"{flag} {self.name}", [])

    def looks(self, batches: list[Batch], sequences: Sequences) -> list[Batch]:
        """The micro batches with what the teacher makes of each, as `known["teacher"]`: hidden states as the output
        layer is given them, or fp32 [2, 1, local length, top] log-probabilities and tokens. `sequences`: the step's,
        of all ranks."""
        found = self.elsewhere.of(batches, sequences) if self.elsewhere else self._pass(batches)
        if not found:  # the last pipeline stage has it
            return batches
        return [replace(b, known=b.known | {"teacher": seen}) for b, seen in zip(batches, found, strict=True)]

    def _pass(self, batches: list[Batch]) -> list[Tensor]:
        """Its own passes over micro batches of its own layout."""
        with self.there():
            return passed(self.model, self.model.chunks, batches, lambda batch, values: values, self._forward)

    def compare(
        self, model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None, *, likelihood: bool
    ) -> Tensor:
        """The student's divergence from the teacher at each token, fp32 [1, local length], 0 where it is not scored;
        with `likelihood` [2, 1, local length], then the log-probabilities of the labels."""
        return _through(model, chunk, batch, scored, partial(self._compared, batch, likelihood=likelihood))

    def _forward(self, model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None) -> Tensor:
        return _through(model, chunk, batch, scored, self._likeliest if self.top else _as_they_are)

    def _likeliest(self, hidden: Tensor, weight: Tensor, **how: Any) -> Tensor:
        # fp32 has every whole number below 2^24, so any token.
        return torch.stack(
            top_log_probs(hidden, weight, self.top or 0, vocab_size=self.vocab_size, temperature=self.scale, **how)
        )

    def _compared(self, batch: Batch, hidden: Tensor, weight: Tensor, *, likelihood: bool, **how: Any) -> Tensor:
        how |= {"accumulate": self.accumulate}
        alike: dict[str, Any] = how | {"vocab_size": self.vocab_size, "beta": self.beta}
        own, theirs = self.own_scale * self.temperature, self.scale * self.temperature
        if self.top:
            log_probs, tokens = batch.known["teacher"]
            alike |= {"temperatures": (own, self.temperature)}
            found = top_divergence(hidden, weight, log_probs, tokens.long(), **alike)
        else:
            assert self.weight is not None
            alike |= {"temperatures": (own, theirs)}
            found = divergence(hidden, weight, batch.known["teacher"], self.weight, **alike)
        if not likelihood:
            return found
        vocab_size = self.student.architecture.vocab_size
        log_probs = label_log_probs(
            hidden, weight, batch.labels, vocab_size=vocab_size, temperature=self.own_scale, **how
        )
        return torch.stack((found, log_probs))


def _as_they_are(hidden: Tensor, weight: Tensor, **how: Any) -> Tensor:
    return hidden


def _through(model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None, make: OfHiddenStates) -> Tensor:
    return model.of_hidden_states(
        chunk,
        tokens=batch.tokens,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        make=make,
        scored=scored,
    )
