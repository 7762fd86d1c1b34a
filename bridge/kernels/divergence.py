"""Fused divergence of a student's next-token distributions from a teacher's: see `divergence` in layers/divergence.py.

Logits of both models stay in the weights' dtype. The backward pass overwrites the student's with their gradient. Small
logits are kept for it, others recomputed (log_probs.py).
"""
# Calls of kernels, and functions that return in both branches of an `if` at compile time:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Callable
from math import ceil, log, log1p
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .log_probs import sum_logits
from .logits import KeptLogits, LogitForm, capped, column_blocks, form_logits
from .weight_gradient import OutputGradients


class Comparison(NamedTuple):
    """Logits of both models in terms of the products with their output matrices, and the weight of the teacher."""

    student: LogitForm
    teacher: LogitForm
    beta: float


@triton.jit
def _terms(p_log, q_log, BETA: tl.constexpr, LOG_BETA: tl.constexpr, LOG_REST: tl.constexpr):
    """Return log p - log m and the terms of the divergence and of KL(p | m), of log-probabilities of both models.

    m: the mixture of both; for a BETA of 0 or 1 the second model's distribution
    """
    p, q = tl.exp(p_log), tl.exp(q_log)
    if BETA == 0.0:
        return p_log - q_log, q * (q_log - p_log), p * 0.0
    else:
        if BETA == 1.0:
            excess = p_log - q_log
            return excess, p * excess, p * excess
        else:
            a, b = p_log + LOG_REST, q_log + LOG_BETA
            highest = tl.maximum(a, b)
            mixture = highest + tl.log(tl.exp(a - highest) + tl.exp(b - highest))
            excess = p_log - mixture
            return excess, BETA * q * (q_log - mixture) + (1 - BETA) * p * excess, p * excess


@triton.jit
def _divergence_kernel(
    student,
    teacher,
    student_sums,
    teacher_sums,
    divergences,
    student_divergences,
    columns,
    width,
    student_scale,
    teacher_scale,
    STUDENT_CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    BETA: tl.constexpr,
    LOG_BETA: tl.constexpr,
    LOG_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a token's divergence and KL(p | m) over the columns, from the log-sum-exps over all ranks' columns."""
    token = tl.program_id(0).to(tl.int64)
    student_sum, teacher_sum = tl.load(student_sums + token), tl.load(teacher_sums + token)
    total, of_student = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_real = column < columns
        x, _ = capped(tl.load(student + token * width + column, mask=is_real, other=0.0).to(tl.float32), STUDENT_CAP)
        y, _ = capped(tl.load(teacher + token * width + column, mask=is_real, other=0.0).to(tl.float32), TEACHER_CAP)
        _, term, student_term = _terms(
            x * student_scale - student_sum, y * teacher_scale - teacher_sum, BETA, LOG_BETA, LOG_REST
        )
        total += tl.where(is_real, term, 0.0)
        of_student += tl.where(is_real, student_term, 0.0)
    tl.store(divergences + token, tl.sum(total, 0))
    tl.store(student_divergences + token, tl.sum(of_student, 0))


@triton.jit
def _gradient_kernel(
    student,
    teacher,
    student_sums,
    teacher_sums,
    student_divergences,
    grads,
    width,
    student_scale,
    teacher_scale,
    STUDENT_CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    BETA: tl.constexpr,
    LOG_BETA: tl.constexpr,
    LOG_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a block of a token's student logits with their gradient of the divergence x grad.

    p - q for a BETA of 0, else w p (log p - log m - KL(p | m)), w = 1 - BETA, or 1 for a BETA of 1.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_stored = column < width
    place = student + token * width + column
    x, inner_slope = capped(tl.load(place, mask=is_stored, other=0.0).to(tl.float32), STUDENT_CAP)
    y, _ = capped(tl.load(teacher + token * width + column, mask=is_stored, other=0.0).to(tl.float32), TEACHER_CAP)
    p_log = x * student_scale - tl.load(student_sums + token)
    q_log = y * teacher_scale - tl.load(teacher_sums + token)
    if BETA == 0.0:
        slope = tl.exp(p_log) - tl.exp(q_log)
    else:
        excess, _, _ = _terms(p_log, q_log, BETA, LOG_BETA, LOG_REST)
        share = 1.0 if BETA == 1.0 else 1.0 - BETA
        slope = share * tl.exp(p_log) * (excess - tl.load(student_divergences + token))
    slope = slope * (tl.load(grads + token) * student_scale) * inner_slope
    tl.store(place, slope, mask=is_stored)


def compare_logits(student: Tensor, teacher: Tensor, log_sums: Tensor, totals: Tensor, comparison: Comparison) -> None:
    """Write the parts of these columns in the divergence and in KL(p | m): `totals`, fp32 [2, tokens].

    student, teacher [tokens, width]: products with the output matrices; log_sums [2, tokens]: over all ranks' columns
    """
    sizes = comparison.student.columns, student.shape[1]
    settings = _constants(comparison) | column_blocks(student.shape[1])
    scales = comparison.student.scale, comparison.teacher.scale
    inputs, outputs = (student, teacher, log_sums[0], log_sums[1]), (totals[0], totals[1])
    _divergence_kernel[(len(student),)](*inputs, *outputs, *sizes, *scales, **settings)


def compute_gradient(
    student: Tensor,
    teacher: Tensor,
    log_sums: Tensor,
    student_divergences: Tensor,
    grads: Tensor,
    comparison: Comparison,
) -> None:
    """Overwrite the student's products with their gradient of sum(grads x divergence). Arguments: as above.

    student_divergences: KL(p | m) over all ranks' columns, and grads, [tokens] each
    """
    width = student.shape[1]
    settings = _constants(comparison) | column_blocks(width)
    grid = len(student), ceil(width / settings["BLOCK"])
    inputs = student, teacher, log_sums[0], log_sums[1], student_divergences, grads, width
    _gradient_kernel[grid](*inputs, comparison.student.scale, comparison.teacher.scale, **settings)


def _constants(comparison: Comparison) -> LaunchArgs:
    """Return the constants of both kernels."""
    beta = float(comparison.beta)
    is_mixed = 0 < beta < 1
    return {
        "STUDENT_CAP": comparison.student.cap,
        "TEACHER_CAP": comparison.teacher.cap,
        "BETA": beta,
        "LOG_BETA": log(beta) if is_mixed else 0.0,
        "LOG_REST": log1p(-beta) if is_mixed else 0.0,
    }


class FusedDivergence(torch.autograd.Function):
    """Divergences, fp32 [tokens], with gradients for the student.

    hidden, teacher_hidden: [tokens, hidden size of the model]
    parts: chunks of the tokens, as many on all ranks, since each is a collective
    weight, teacher_weight: this rank's rows of the output matrices, as many, of which the first `columns` are real
    over_ranks: reduces log-sum-exps of this rank over all tensor-parallel ranks; sum_over_ranks: sums over them
    may_keep: a backward pass may follow
    accumulate: the backward pass adds the weight's gradient to `main_grad` if there is one
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        comparison: Comparison,
        parts: tuple[slice, ...],
        over_ranks: Callable[[Tensor], Tensor],
        sum_over_ranks: Callable[[Tensor], Tensor],
        may_keep: bool,
        accumulate: bool,
    ) -> Tensor:
        columns = comparison.student.columns
        log_sums = torch.full((2, len(hidden)), -torch.inf, dtype=torch.float32, device=hidden.device)
        totals = torch.zeros_like(log_sums)  # the divergence, and KL(p | m)
        no_labels, unused = torch.full((len(hidden),), -1, device=hidden.device), torch.empty_like(log_sums[0])
        ctx.kept = KeptLogits()
        for part in parts:
            student = form_logits(hidden[part], weight, columns)
            teacher = form_logits(teacher_hidden[part], teacher_weight, columns)
            if columns:
                sum_logits(student, no_labels[part], log_sums[0, part], unused[part], None, comparison.student)
                sum_logits(teacher, no_labels[part], log_sums[1, part], unused[part], None, comparison.teacher)
            log_sums[:, part] = over_ranks(log_sums[:, part])
            if columns:
                compare_logits(student, teacher, log_sums[:, part], totals[:, part], comparison)
            may_keep = may_keep and ctx.kept.try_keep(student, teacher)
            del student, teacher
        totals = sum_over_ranks(totals)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, log_sums, totals[1])
        ctx.comparison, ctx.parts, ctx.accumulate = comparison, parts, accumulate
        return totals[0]

    @staticmethod
    def backward(ctx, grads: Tensor):  # type: ignore[override]
        hidden, weight, teacher_hidden, teacher_weight, log_sums, student_divergences = ctx.saved_tensors
        kept, grads = ctx.kept.chunks, grads.contiguous()
        columns = ctx.comparison.student.columns
        gradients = OutputGradients(hidden, weight, columns, ctx.needs_input_grad, accumulates=ctx.accumulate)
        for part in ctx.parts if columns else ():
            if kept:
                student, teacher = kept.popleft()
            else:
                student = form_logits(hidden[part], weight, columns)
                teacher = form_logits(teacher_hidden[part], teacher_weight, columns)
            sums, divergences = log_sums[:, part], student_divergences[part]
            compute_gradient(student, teacher, sums, divergences, grads[part], ctx.comparison)
            gradients.add(part, student[:, :columns])
            del student, teacher  # frees memory for the next chunk
        return *gradients.totals(), *[None] * 8
