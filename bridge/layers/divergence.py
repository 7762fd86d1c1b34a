"""Divergence of a student's next-token distributions from a teacher's, from the hidden states of both.

The generalised Jensen-Shannon divergence of GKD (https://arxiv.org/abs/2306.13649, equation 1), vocabulary-parallel and
in chunks: no rank has the logits of more than one chunk of tokens, of either model, and the backward pass recomputes
them. The fused kernels (kernels/divergence.py) need none in fp32, and keep those that are small. `top_divergence` needs
only the teacher's k likeliest tokens, as a server returns them.

Student and teacher share a vocabulary and its split over tensor-parallel ranks: `reshard_rows` makes it so.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels import usable
from ..kernels.weight_gradient import OutputGradients
from .logprobs import OutputMatrix, cap_slopes, chunk_logits, over_ranks

CHUNK_LOGITS = 2**27  # logits of a chunk: half a GiB in fp32, a few times
FUSED_CHUNK_LOGITS = 2**28  # logits of a chunk of each model in the fused kernels: half a GiB in bf16


def divergence(
    hidden: Tensor,
    student: OutputMatrix,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperatures: tuple[float, float] = (1.0, 1.0),
    teacher_cap: float | None = None,
) -> Tensor:
    """Return the divergence at each position, in nats: fp32 [batch, sequence], the same on every tensor-parallel rank.

    hidden, teacher_hidden: see `OutputMatrix.rows`; each model has a hidden size of its own. Without gradients for the
    teacher. `student.vocab_size` is the smaller one of both models: neither distribution has further tokens.
    temperatures: divide the student's and the teacher's logits. teacher_cap: the teacher's `Architecture.logits_cap`.
    beta: 0 is the forward KL(teacher | student), 1 the reverse one; between, with the mixture
    m = beta teacher + (1 - beta) student: beta KL(teacher | m) + (1 - beta) KL(student | m).
    Raises ValueError where the two matrices have different numbers of rows.
    """
    if len(student.weight) != len(teacher_weight):
        raise ValueError(
            f"--teacher_model: its output matrix has {len(teacher_weight)} rows on this rank, the student's "
            f"{len(student.weight)}. Reshard it with reshard_rows."
        )
    rows = student.rows(hidden)
    with torch.no_grad():
        teacher_rows = replace(student, weight=teacher_weight).rows(teacher_hidden)
    models = rows.hidden, student.weight, teacher_rows.hidden, teacher_weight
    if usable(*models):
        return rows.scatter(_fused(models, student, temperatures, beta, teacher_cap))
    divergences = _Divergence.apply(*models, student, temperatures, beta, teacher_cap)
    return rows.scatter(divergences)  # type: ignore[arg-type]


def _fused(
    models: tuple[Tensor, Tensor, Tensor, Tensor],
    student: OutputMatrix,
    temperatures: tuple[float, float],
    beta: float,
    teacher_cap: float | None,
) -> Tensor:
    """Return the divergences [tokens] by the fused kernels. models: hidden states and output matrix of each"""
    from ..kernels.divergence import Comparison, FusedDivergence
    from ..kernels.logits import LogitForm

    group, sizes = student.group, (student.first, student.columns)
    form = LogitForm(*sizes, 1 / temperatures[0], student.cap)
    comparison = Comparison(form, LogitForm(*sizes, 1 / temperatures[1], teacher_cap), beta)

    def normalizers(log_sums: Tensor) -> Tensor:
        return over_ranks(log_sums, torch.zeros_like(log_sums), None, group)[0]

    def sums(totals: Tensor) -> Tensor:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(totals, group=group)
        return totals

    may_keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in models[:2])
    parts = tuple(_chunks(models[0], models[1], FUSED_CHUNK_LOGITS))
    settings = comparison, parts, normalizers, sums, may_keep, student.accumulate
    return FusedDivergence.apply(*models, *settings)  # type: ignore[return-value]


def top_divergence(
    hidden: Tensor,
    student: OutputMatrix,
    teacher_log_probs: Tensor,
    ids: Tensor,
    *,
    beta: float,
    temperatures: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Return the `divergence` between both distributions over the k tokens `ids` of each position.

    teacher_log_probs, ids [batch, sequence, k]: the teacher's likeliest tokens, each once, at temperature 1.
    Both distributions are normalised over the k tokens, after the temperatures: the divergence does not depend on the
    mass that the student gives to other tokens.
    """
    rows = student.rows(hidden)
    logits = _LogitsOf.apply(rows.hidden, student.weight, rows.select(ids), student)
    log_probs = (logits / temperatures[0]).log_softmax(-1)  # type: ignore[operator]
    teacher_log_probs = (rows.select(teacher_log_probs).float() / temperatures[1]).log_softmax(-1)
    return rows.scatter(jensen_shannon(log_probs, teacher_log_probs, beta))


@torch.no_grad()
def top_log_probs(hidden: Tensor, output: OutputMatrix, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of each position, in falling order: log-probabilities fp32 and ids int64.

    Both [batch, sequence, k], the same on every tensor-parallel rank. k is at most the vocabulary's size.
    """
    rows, group = output.rows(hidden), output.group
    local_k = min(k, output.columns)
    values = rows.hidden.new_full((len(rows.hidden), k), -torch.inf, dtype=torch.float32)
    ids = torch.zeros_like(values, dtype=torch.int64)
    for part in _chunks(rows.hidden, output.weight):
        logits = chunk_logits(rows.hidden[part], output.weight, output.columns, output.cap).div_(temperature)
        log_probs = logits.sub_(_normalizer(logits, group)[:, None])
        values[part, :local_k], columns = log_probs.topk(local_k)
        ids[part, :local_k] = columns + output.first
    if dist.get_world_size(group) > 1:
        values, ids = (torch.cat(_all_gather(tensor, group), dim=1) for tensor in (values, ids))
        values, indices = values.topk(k)
        ids = ids.gather(1, indices)
    return rows.scatter(values), rows.scatter(ids)


def reshard_rows(weight: Tensor, rows: int, group) -> Tensor:
    """Return this rank's part of an output matrix with `rows` on each tensor-parallel rank, zeros beyond its end.

    Every rank of the group calls this. No gradients.
    weight: [rows of this rank so far, hidden_size]
    """
    if rows == len(weight):
        return weight.detach()
    gathered = torch.cat(_all_gather(weight.detach(), group)) if dist.get_world_size(group) > 1 else weight.detach()
    first = dist.get_rank(group) * rows
    shard = weight.new_zeros(rows, weight.shape[1])
    rows_here = gathered[first : first + rows]
    shard[: len(rows_here)] = rows_here
    return shard


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the generalised divergence of log-probabilities [..., tokens], differentiable: see `divergence`."""
    return _terms(student, teacher, beta)[0]


def _terms(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence and KL(student | mixture), which is 0 where beta is 0."""
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
    """Return log(beta teacher + (1 - beta) student) of log-probabilities; beta above 0."""
    if beta == 1:
        return teacher
    return torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))


class _Divergence(torch.autograd.Function):
    """`divergence` [tokens] of hidden states [tokens, hidden_size] and both models' weights on this rank.

    The gradient by the student's logits, with p the student and q the teacher, is p - q where beta is 0, else
    w p (log p - log m - KL(p | m)), w = 1 - beta, or 1 where beta is 1 (and m = q).
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        output: OutputMatrix,
        temperatures: tuple[float, float],
        beta: float,
        teacher_cap: float | None,
    ) -> Tensor:
        columns, group = output.columns, output.group
        normalizers = hidden.new_empty(2, len(hidden), dtype=torch.float32)  # the student's and the teacher's
        sums = torch.zeros_like(normalizers)  # the divergence, and KL(p | m)
        for part in _chunks(hidden, weight):
            student = chunk_logits(hidden[part], weight, columns, output.cap).div_(temperatures[0])
            teacher = chunk_logits(teacher_hidden[part], teacher_weight, columns, teacher_cap).div_(temperatures[1])
            normalizers[:, part] = torch.stack((_normalizer(student, group), _normalizer(teacher, group)))
            student, teacher = student.sub_(normalizers[0, part, None]), teacher.sub_(normalizers[1, part, None])
            sums[:, part] = torch.stack(_terms(student, teacher, beta))
        if dist.get_world_size(group) > 1:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, normalizers, sums[1])
        ctx.columns, ctx.temperatures, ctx.beta, ctx.accumulate = columns, temperatures, beta, output.accumulate
        ctx.caps = output.cap, teacher_cap
        return sums[0]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        hidden, weight, teacher_hidden, teacher_weight, normalizers, divergences = ctx.saved_tensors
        gradients = OutputGradients(hidden, weight, ctx.columns, ctx.needs_input_grad, accumulates=ctx.accumulate)
        share = 1.0 if ctx.beta in (0, 1) else 1 - ctx.beta
        for part in _chunks(hidden, weight) if ctx.columns else []:
            student = chunk_logits(hidden[part], weight, ctx.columns, ctx.caps[0])
            inner_slopes = cap_slopes(student, ctx.caps[0])
            student = student.div_(ctx.temperatures[0])
            teacher = chunk_logits(teacher_hidden[part], teacher_weight, ctx.columns, ctx.caps[1])
            teacher = teacher.div_(ctx.temperatures[1])
            student, teacher = student.sub_(normalizers[0, part, None]), teacher.sub_(normalizers[1, part, None])
            if ctx.beta == 0:
                slope = student.exp_().sub_(teacher.exp_())
            else:
                excess = (student - _mixture(student, teacher, ctx.beta)).sub_(divergences[part, None])
                slope = student.exp_().mul_(excess)
            slope = slope.mul_(grad[part, None] * (share / ctx.temperatures[0]))
            slope = slope if inner_slopes is None else slope.mul_(inner_slopes)
            gradients.add(part, slope.to(weight.dtype))
        return *gradients.totals(), *[None] * 6


class _LogitsOf(torch.autograd.Function):
    """Logits fp32 [tokens, k] of the ids [tokens, k], from hidden [tokens, hidden_size] and this rank's weight."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, ids: Tensor, output: OutputMatrix) -> Tensor:
        columns, group = output.columns, output.group
        local = ids - output.first
        is_local = (local >= 0) & (local < columns)
        local = torch.where(is_local, local, 0)
        chosen = torch.zeros_like(ids, dtype=torch.float32)
        for part in _chunks(hidden, weight) if columns else []:
            logits = chunk_logits(hidden[part], weight, columns, output.cap)
            chosen[part] = logits.gather(1, local[part]) * is_local[part]
        if dist.get_world_size(group) > 1:
            dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(hidden, weight, local, is_local, cap_slopes(chosen, output.cap))
        ctx.columns, ctx.accumulate = columns, output.accumulate
        return chosen

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        hidden, weight, local, is_local, inner_slopes = ctx.saved_tensors
        gradients = OutputGradients(hidden, weight, ctx.columns, ctx.needs_input_grad, accumulates=ctx.accumulate)
        grad = grad if inner_slopes is None else grad * inner_slopes
        for part in _chunks(hidden, weight) if ctx.columns else []:
            slope = hidden.new_zeros(len(hidden[part]), ctx.columns, dtype=torch.float32)
            slope = slope.scatter_add_(1, local[part], grad[part] * is_local[part])
            gradients.add(part, slope.to(weight.dtype))
        return *gradients.totals(), *[None] * 2


def _normalizer(logits: Tensor, group) -> Tensor:
    """Return log sum exp over the columns [tokens, columns] of all tensor-parallel ranks: [tokens]."""
    local = torch.logsumexp(logits, dim=-1)  # -inf without columns
    return over_ranks(local, torch.zeros_like(local), None, group)[0]


def _all_gather(values: Tensor, group) -> list[Tensor]:
    shards = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, values.contiguous(), group=group)
    return shards


def _chunks(hidden: Tensor, weight: Tensor, logits: int | None = None) -> list[slice]:
    """Split tokens into chunks, the same on every tensor-parallel rank, as each chunk is a collective.

    logits: those of a chunk; None: CHUNK_LOGITS
    """
    size = max(1, (logits or CHUNK_LOGITS) // len(weight))
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]
