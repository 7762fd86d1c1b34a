"""Divergence of a student's next-token distributions from a teacher's, straight from the hidden states of both.

The generalised Jensen-Shannon divergence of GKD (https://arxiv.org/abs/2306.13649, equation 1), vocabulary-parallel and
in chunks: no rank has the logits of more than one chunk of tokens, of either model, and the backward pass computes them
again. Or over the teacher's k likeliest tokens alone, for teachers of which nothing else is known, or that are gone.

Student and teacher share a vocabulary, and the tensor-parallel ranks it is split over: `with_rows` makes it so.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.weight_gradient import accumulate_product, has_main_grad, mark_grad_added
from .logprobs import chunk_logits, over_ranks, select_rows

CHUNK_LOGITS = 2**27  # logits of a model that are there at once: half a GiB in fp32, a few times


def divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    vocab_size: int,
    group,
    sequence_parallel: bool,
    beta: float,
    temperatures: tuple[float, float] = (1.0, 1.0),
    accumulate: bool = False,
    scored: Tensor | None = None,
) -> Tensor:
    """Return the divergence at each position, in nats: fp32 [batch, sequence], the same on every tensor-parallel rank.

    hidden, weight, group, sequence_parallel, accumulate, scored: as of `label_log_probs`; the teacher's alike, with a
    hidden size of its own, and without gradients. `vocab_size`: the smaller one of both models; what is beyond has no
    part in either distribution. `temperatures`: what the student's and the teacher's logits are divided by.
    `beta`: 0 is the forward KL(teacher | student), 1 the reverse one; between, with the mixture
    m = beta teacher + (1 - beta) student: beta KL(teacher | m) + (1 - beta) KL(student | m).
    Raises ValueError where the two matrices have different numbers of rows.
    """
    if len(weight) != len(teacher_weight):
        raise ValueError(
            f"--teacher_model: its output matrix has {len(teacher_weight)} rows on this rank, the student's "
            f"{len(weight)}: give the teacher's through with_rows."
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "group": group,
        "sequence_parallel": sequence_parallel,
        "scored": scored,
    }
    rows = select_rows(hidden, weight, **sizes)
    with torch.no_grad():
        teacher = select_rows(teacher_hidden, teacher_weight, **sizes)
    divergences = _Divergence.apply(
        rows.hidden, weight, teacher.hidden, teacher_weight, rows.columns, temperatures, beta, group, accumulate
    )
    return rows.scatter(divergences)  # type: ignore[arg-type]


def top_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_log_probs: Tensor,
    ids: Tensor,
    *,
    vocab_size: int,
    group,
    sequence_parallel: bool,
    beta: float,
    temperatures: tuple[float, float] = (1.0, 1.0),
    accumulate: bool = False,
    scored: Tensor | None = None,
) -> Tensor:
    """Return the `divergence` between both distributions over the k tokens `ids` of each position.

    teacher_log_probs, ids [batch, sequence, k]: of the teacher's likeliest tokens, each once, at temperature 1. What
    either model gives to other tokens is left out: both are normalised over the k tokens, after the temperatures (so
    the divergence says nothing of how much of the student's mass lies elsewhere).
    """
    rows = select_rows(
        hidden, weight, vocab_size=vocab_size, group=group, sequence_parallel=sequence_parallel, scored=scored
    )
    logits = _LogitsOf.apply(rows.hidden, weight, rows.select(ids), rows.columns, group, accumulate)
    student = (logits / temperatures[0]).log_softmax(-1)  # type: ignore[operator]
    teacher = (rows.select(teacher_log_probs).float() / temperatures[1]).log_softmax(-1)
    return rows.scatter(jensen_shannon(student, teacher, beta))


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    vocab_size: int,
    group,
    sequence_parallel: bool,
    temperature: float = 1.0,
    scored: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of each position, from the likeliest on: log-probabilities fp32 and ids int64,
    [batch, sequence, k] each, the same on every tensor-parallel rank. Arguments as of `label_log_probs`; k is at most
    vocab_size."""
    rows = select_rows(
        hidden, weight, vocab_size=vocab_size, group=group, sequence_parallel=sequence_parallel, scored=scored
    )
    first, local_k = dist.get_rank(group) * len(weight), min(k, rows.columns)
    values = rows.hidden.new_full((len(rows.hidden), k), -torch.inf, dtype=torch.float32)
    ids = torch.zeros_like(values, dtype=torch.int64)
    for part in _chunks(rows.hidden, weight):
        logits = chunk_logits(rows.hidden[part], weight, rows.columns).div_(temperature)
        log_probs = logits.sub_(_normalizer(logits, group)[:, None])
        values[part, :local_k], columns = log_probs.topk(local_k)
        ids[part, :local_k] = columns + first
    if dist.get_world_size(group) > 1:
        values, ids = (torch.cat(_gathered(each, group), dim=1) for each in (values, ids))
        values, places = values.topk(k)
        ids = ids.gather(1, places)
    return rows.scatter(values), rows.scatter(ids)


def reshard_rows(weight: Tensor, rows: int, group) -> Tensor:
    """Return an output matrix in another split: `rows` on each tensor-parallel rank, zeros beyond its end.

    Every rank of the group calls this. No gradients.
    weight: [this rank's present rows, hidden_size]
    """
    if rows == len(weight):
        return weight.detach()
    gathered = torch.cat(_gathered(weight.detach(), group)) if dist.get_world_size(group) > 1 else weight.detach()
    first = dist.get_rank(group) * rows
    shard = weight.new_zeros(rows, weight.shape[1])
    rows_here = gathered[first : first + rows]
    shard[: len(rows_here)] = rows_here
    return shard


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalised divergence of log-probabilities [..., tokens], which autograd knows: see `divergence`."""
    return _terms(student, teacher, beta)[0]


def _terms(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence, and its part KL(student | mixture), which is not computed where beta is 0."""
    if beta == 0:
        forward = (teacher.exp() * (teacher - student)).sum(-1)
        return forward, torch.zeros_like(forward)
    mixture = _mixture(student, teacher, beta)
    from_student = (student.exp() * (student - mixture)).sum(-1)
    if beta == 1:
        return from_student, from_student
    from_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_student, from_student


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log(beta teacher + (1 - beta) student), of log-probabilities; beta above 0."""
    if beta == 1:
        return teacher
    return torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))


class _Divergence(torch.autograd.Function):
    """[tokens] of hidden [tokens, hidden_size], this rank's weight and `columns`, and the teacher's; see `divergence`.

    By the student's logits z, with p the student and q the teacher, the slope is (p - q) where beta is 0, else
    w p (log p - log m - KL(p | m)), w = 1 - beta, or 1 where beta is 1 (and m = q).
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        columns: int,
        temperatures: tuple[float, float],
        beta: float,
        group,
        accumulate: bool,
    ) -> Tensor:
        normalizers = hidden.new_empty(2, len(hidden), dtype=torch.float32)  # the student's and the teacher's
        sums = torch.zeros_like(normalizers)  # the divergence, and KL(p | m)
        for part in _chunks(hidden, weight):
            student = chunk_logits(hidden[part], weight, columns).div_(temperatures[0])
            teacher = chunk_logits(teacher_hidden[part], teacher_weight, columns).div_(temperatures[1])
            normalizers[:, part] = torch.stack((_normalizer(student, group), _normalizer(teacher, group)))
            student, teacher = student.sub_(normalizers[0, part, None]), teacher.sub_(normalizers[1, part, None])
            sums[:, part] = torch.stack(_terms(student, teacher, beta))
        if dist.get_world_size(group) > 1:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, normalizers, sums[1])
        ctx.columns, ctx.temperatures, ctx.beta, ctx.accumulate = columns, temperatures, beta, accumulate
        return sums[0]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        hidden, weight, teacher_hidden, teacher_weight, normalizers, divergences = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight)
        share = 1.0 if ctx.beta in (0, 1) else 1 - ctx.beta
        for part in _chunks(hidden, weight) if ctx.columns else []:
            student = chunk_logits(hidden[part], weight, ctx.columns).div_(ctx.temperatures[0])
            teacher = chunk_logits(teacher_hidden[part], teacher_weight, ctx.columns).div_(ctx.temperatures[1])
            student, teacher = student.sub_(normalizers[0, part, None]), teacher.sub_(normalizers[1, part, None])
            if ctx.beta == 0:
                slope = student.exp_().sub_(teacher.exp_())
            else:
                excess = (student - _mixture(student, teacher, ctx.beta)).sub_(divergences[part, None])
                slope = student.exp_().mul_(excess)
            gradients.add(part, slope.mul_(grad[part, None] * (share / ctx.temperatures[0])))
        return *gradients.found(), *[None] * 7


class _LogitsOf(torch.autograd.Function):
    """Logits fp32 [tokens, k] of the ids [tokens, k], of hidden [tokens, hidden_size] and this rank's weight."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, ids: Tensor, columns: int, group, accumulate: bool) -> Tensor:
        local = ids - dist.get_rank(group) * len(weight)
        held = (local >= 0) & (local < columns)  # whose logits this rank has
        local = torch.where(held, local, 0)
        chosen = torch.zeros_like(ids, dtype=torch.float32)
        for part in _chunks(hidden, weight) if columns else []:
            chosen[part] = chunk_logits(hidden[part], weight, columns).gather(1, local[part]) * held[part]
        if dist.get_world_size(group) > 1:
            dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(hidden, weight, local, held)
        ctx.columns, ctx.accumulate = columns, accumulate
        return chosen

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        hidden, weight, local, held = ctx.saved_tensors
        gradients = _Gradients(ctx, hidden, weight)
        for part in _chunks(hidden, weight) if ctx.columns else []:
            slope = hidden.new_zeros(len(hidden[part]), ctx.columns, dtype=torch.float32)
            gradients.add(part, slope.scatter_add_(1, local[part], grad[part] * held[part]))
        return *gradients.found(), *[None] * 4


class _Gradients:
    """Gradients of hidden states and output matrix, accumulated by chunks from the slopes of logits."""

    def __init__(self, ctx, hidden: Tensor, weight: Tensor):
        self._inputs, self._weight, self._used = hidden, weight, weight[: ctx.columns]
        self._hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        self._accumulates = ctx.accumulate and has_main_grad(weight)
        self._total: Tensor | None = None
        if ctx.needs_input_grad[1]:
            main = getattr(weight, "main_grad", None)
            self._total = main if self._accumulates else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, part: slice, slope: Tensor) -> None:
        """slope [tokens of the part, columns] fp32"""
        slope = slope.to(self._weight.dtype)
        if self._hidden is not None:
            self._hidden[part] = slope @ self._used
        if self._total is not None:
            accumulate_product(self._total[: len(self._used)], slope, self._inputs[part])

    def found(self) -> tuple[Tensor | None, Tensor | None]:
        if self._total is None:
            return self._hidden, None
        return self._hidden, mark_grad_added(self._weight) if self._accumulates else self._total.to(self._weight.dtype)


def _normalizer(logits: Tensor, group) -> Tensor:
    """log sum exp over the columns [tokens, columns] of all tensor-parallel ranks: [tokens]."""
    local = torch.logsumexp(logits, dim=-1)  # -infinity of no columns
    return over_ranks(local, torch.zeros_like(local), None, group)[0]


def _gathered(values: Tensor, group) -> list[Tensor]:
    """Gather values of all ranks, in their order."""
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, values.contiguous(), group=group)
    return everyone


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Split tokens into chunks, the same on every tensor-parallel rank, as each chunk is a collective."""
    size = max(1, CHUNK_LOGITS // len(weight))
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]
