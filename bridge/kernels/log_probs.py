"""Fused log-probabilities of labels. Logits stay in the weights' dtype, and each pass reads them once.

The backward pass overwrites logits with their gradient. Small logits are kept for it, others recomputed, which costs
one more product with the output matrix and gives the same numbers.
"""
# Calls of kernels, and functions that return in both branches of an `if` at compile time:
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import ClassVar, NamedTuple
from weakref import WeakSet

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs
from .weight_gradient import accumulate_product, has_main_grad, mark_grad_added


class LogitForm(NamedTuple):
    """Logits of a call in terms of the products with the output matrix."""

    first: int  # label of the first column
    columns: int  # number of real columns
    scale: float  # factor of the logits
    cap: float | None = None  # a product x is cap * tanh(x / cap) before the factor


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """Return cap * tanh(x / cap) and its derivative; without a cap, x and 1."""
    if CAP is None:
        return x, 1.0
    else:
        bent = 2 * tl.sigmoid(2 / CAP * x) - 1  # tanh, which Triton's interpreter has not
        return CAP * bent, 1 - bent * bent


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
        x, _ = _capped(tl.load(row + column, mask=column < width, other=0.0).to(tl.float32), CAP)
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
    label_logit, _ = _capped(tl.load(row + label, mask=is_local, other=0.0).to(tl.float32), CAP)
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
    x, inner_slope = _capped(tl.load(place, mask=column < width, other=0.0).to(tl.float32), CAP)
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
    width, settings = logits.shape[1], _blocks(logits.shape[1])
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
    width, settings = logits.shape[1], _blocks(logits.shape[1])
    grid = (len(logits), ceil(width / settings["BLOCK"]))
    settings["ENTROPY"] = of_entropies is not None
    entropies = of_entropies or (log_sums, grads)  # not read
    inputs = logits, labels, log_sums, grads, *entropies
    _gradient_kernel[grid](*inputs, form.first, width, form.scale, CAP=form.cap, **settings)


def _blocks(width: int) -> LaunchArgs:
    """Return the columns per iteration of a program, and its warps."""
    block = min(4096, int(triton.next_power_of_2(width)))
    return {"BLOCK": block, "num_warps": max(1, block // 1024)}


class _KeptLogits:
    """Logits of a call's first chunks, kept from its forward pass for its backward pass."""

    instances: ClassVar[WeakSet["_KeptLogits"]] = WeakSet()  # in this process, which has one device

    def __init__(self):
        self.chunks: deque[Tensor] = deque()
        _KeptLogits.instances.add(self)

    def try_keep(self, logits: Tensor) -> bool:
        """Keep the logits if there is memory left beside those of other pending calls. Return whether they are kept."""
        free_bytes = max_kept_bytes(logits.device) - sum(
            chunk.nbytes for kept in _KeptLogits.instances for chunk in kept.chunks
        )
        if logits.nbytes <= free_bytes:
            self.chunks.append(logits)
        return logits.nbytes <= free_bytes


def max_kept_bytes(device: torch.device) -> int:
    """Return the limit of kept logits in bytes: a sixteenth of the device's memory, however much of it is free."""
    return torch.cuda.get_device_properties(device).total_memory // 16 if device.type == "cuda" else 2**30


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
        ctx.kept = _KeptLogits()
        for part in _chunks(hidden, form.columns):
            logits = _logits(hidden[part], weight, form.columns)
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
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        accumulate, total = ctx.accumulate and has_main_grad(weight), None
        if ctx.needs_input_grad[1]:
            total = weight.main_grad if accumulate else torch.zeros_like(weight, dtype=torch.float32)
        columns = ctx.form.columns
        for part in _chunks(hidden, columns):
            logits = kept.popleft() if kept else _logits(hidden[part], weight, columns)
            of_entropies = None if bends is None else (bends[0][part], bends[1][part])
            compute_gradient(logits, labels[part], log_sums[part], grads[part], of_entropies, ctx.form)
            slopes = logits[:, :columns]
            if grad_hidden is not None:
                torch.mm(slopes, weight[:columns], out=grad_hidden[part])
            if total is not None:
                accumulate_product(total[:columns], slopes, hidden[part])
            del logits, slopes  # frees memory for the next chunk
        if total is None:
            return grad_hidden, *[None] * 7
        return grad_hidden, mark_grad_added(weight) if accumulate else total.to(weight.dtype), *[None] * 6


def _logits(hidden: Tensor, weight: Tensor, columns: int) -> Tensor:
    """Return logits [tokens, columns + padding]: rows are aligned to 128 bytes or more; padding is undefined."""
    logits = hidden.new_empty(len(hidden), -(-columns // 64) * 64)
    torch.mm(hidden, weight[:columns].t(), out=logits[:, :columns])
    return logits


def _chunks(hidden: Tensor, columns: int) -> list[slice]:
    """Split tokens into equal chunks of at most a third of `max_kept_bytes`: one exists even if none is kept."""
    tokens = len(hidden)
    number = ceil(3 * tokens * columns * hidden.itemsize / max_kept_bytes(hidden.device))
    size = ceil(tokens / number / 128) * 128 if number else 0
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] if size else []
