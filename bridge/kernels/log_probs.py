"""Fused log-probabilities of labels. Logits stay in the weights' dtype, and each pass reads them once.

The backward pass overwrites logits with their gradient. Small logits are kept for it, others recomputed, which costs
one more product with the output matrix and gives the same numbers.
"""
# Calls of kernels, and of a function that returns in both branches of an `if` at compile time:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Callable
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logits import KeptLogits, LogitForm, capped, column_blocks, form_logits, max_kept_bytes
from .weight_gradient import OutputGradients


@triton.jit
def _log_sum_kernel(
    logits,
    labels,
    log_sums,
    chosen,
    entropies,
    first,
    columns,
    width,
    scale,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a token's log-sum-exp over the columns and its label's logit (0 if on another rank), both x scale.

    ENTROPY: also the entropy of the softmax over these columns.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * width
    highest = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)  # sum per lane, relative to the highest of all lanes
    weighted = tl.zeros([BLOCK], tl.float32)  # the same sum with each term times its logit
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x, _ = capped(tl.load(row + column, mask=column < width, other=0.0).to(tl.float32), CAP)
        x = tl.where(column < columns, x * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        less, terms = tl.exp(highest - higher), tl.exp(x - higher)
        total = total * less + terms
        if ENTROPY:
            weighted = weighted * less + tl.where(column < columns, terms * x, 0.0)
        highest = higher
    label = tl.load(labels + token) - first
    is_local = (label >= 0) & (label < columns)
    log_sum = highest + tl.log(tl.sum(total, 0))
    tl.store(log_sums + token, log_sum)
    if ENTROPY:
        tl.store(entropies + token, log_sum - tl.sum(weighted, 0) / tl.sum(total, 0))
    label_logit, _ = capped(tl.load(row + label, mask=is_local, other=0.0).to(tl.float32), CAP)
    tl.store(chosen + token, label_logit * scale)


@triton.jit
def _gradient_kernel(
    logits,
    labels,
    log_sums,
    grads,
    entropies,
    entropy_grads,
    first,
    width,
    scale,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a block of a token's logits with (onehot - softmax) x grad x scale x the cap's derivative.

    ENTROPY: less softmax x (log softmax + entropy) x the entropy's grad x scale.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + token * width + column
    x, inner_slope = capped(tl.load(place, mask=column < width, other=0.0).to(tl.float32), CAP)
    label = tl.load(labels + token) - first
    log_prob = x * scale - tl.load(log_sums + token)
    probability = tl.exp(log_prob)
    slope = (tl.where(column == label, 1.0, 0.0) - probability) * (tl.load(grads + token) * scale)
    if ENTROPY:
        bend = probability * (log_prob + tl.load(entropies + token))
        slope -= bend * (tl.load(entropy_grads + token) * scale)
    tl.store(place, slope * inner_slope, mask=column < width)


def sum_logits(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    chosen: Tensor,
    entropies: Tensor | None,
    form: LogitForm,
) -> None:
    """Write the log-sum-exp of the logits, those of the labels, and the softmax's entropy.

    Outputs: log_sums, chosen and, unless None, entropies, fp32 [tokens].
    logits [tokens, width]: products with the output matrix.
    """
    width, settings = logits.shape[1], column_blocks(logits.shape[1])
    settings["ENTROPY"] = entropies is not None
    outputs = (log_sums, chosen, log_sums if entropies is None else entropies)
    sizes = form.first, form.columns, width
    _log_sum_kernel[(len(logits),)](logits, labels, *outputs, *sizes, form.scale, CAP=form.cap, **settings)


def compute_gradient(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    grads: Tensor,
    of_entropies: tuple[Tensor, Tensor] | None,
    form: LogitForm,
) -> None:
    """Overwrite products with the output matrix [tokens, width] with their gradient of sum(grads x log p(labels)).

    labels, log_sums (over all ranks' columns) and grads [tokens]. of_entropies: entropies and their gradients, [tokens]
    each, whose part is added.
    """
    width, settings = logits.shape[1], column_blocks(logits.shape[1])
    grid = (len(logits), ceil(width / settings["BLOCK"]))
    settings["ENTROPY"] = of_entropies is not None
    entropies = of_entropies or (log_sums, grads)  # not read
    inputs = logits, labels, log_sums, grads, *entropies
    _gradient_kernel[grid](*inputs, form.first, width, form.scale, CAP=form.cap, **settings)


class LabelLogProbs(torch.autograd.Function):
    """log p(label), fp32 [tokens], and optionally the entropy of p, fp32 [tokens], or None.

    hidden: [tokens, hidden_size]
    weight: this rank's rows of the output matrix, of which the first `form.columns` are real
    labels: [tokens]
    over_ranks: reduces log-sum-exp, labels' logits and entropy of this rank over all tensor-parallel ranks
    may_keep: a backward pass may follow
    accumulate: the backward pass adds the weight's gradient to `main_grad` if there is one
    """

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        form: LogitForm,
        over_ranks: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]],
        may_keep: bool,
        accumulate: bool,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        log_sums = torch.full_like(labels, -torch.inf, dtype=torch.float32)
        chosen = torch.zeros_like(log_sums)
        entropies = torch.zeros_like(log_sums) if entropy else None
        ctx.kept = KeptLogits()
        for part in _chunks(hidden, form.columns):
            logits = form_logits(hidden[part], weight, form.columns)
            outputs = (log_sums[part], chosen[part], None if entropies is None else entropies[part])
            sum_logits(logits, labels[part], *outputs, form)
            may_keep = may_keep and ctx.kept.try_keep(logits)
            del logits
        log_sums, chosen, entropies = over_ranks(log_sums, chosen, entropies)
        ctx.save_for_backward(hidden, weight, labels, log_sums, entropies)
        ctx.form, ctx.accumulate = form, accumulate
        ctx.set_materialize_grads(False)  # no work for entropies that are only logged
        return chosen - log_sums, entropies

    @staticmethod
    def backward(ctx, grads: Tensor | None, entropy_grads: Tensor | None):  # type: ignore[override]
        hidden, weight, labels, log_sums, entropies = ctx.saved_tensors
        kept = ctx.kept.chunks  # removed since they are overwritten: a second backward pass recomputes them
        grads = torch.zeros_like(log_sums) if grads is None else grads.contiguous()
        bends = None if entropy_grads is None else (entropies, entropy_grads.contiguous())
        columns = ctx.form.columns
        gradients = OutputGradients(hidden, weight, columns, ctx.needs_input_grad, accumulates=ctx.accumulate)
        for part in _chunks(hidden, columns):
            logits = kept.popleft()[0] if kept else form_logits(hidden[part], weight, columns)
            of_entropies = None if bends is None else (bends[0][part], bends[1][part])
            compute_gradient(logits, labels[part], log_sums[part], grads[part], of_entropies, ctx.form)
            gradients.add(part, logits[:, :columns])
            del logits  # frees memory for the next chunk
        return *gradients.totals(), *[None] * 6


def _chunks(hidden: Tensor, columns: int) -> list[slice]:
    """Split tokens into equal chunks of at most a third of `max_kept_bytes`: one exists even if none is kept."""
    tokens = len(hidden)
    number = ceil(3 * tokens * columns * hidden.itemsize / max_kept_bytes(hidden.device))
    size = ceil(tokens / number / 128) * 128 if number else 0
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] if size else []
