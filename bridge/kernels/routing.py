"""A token's choice of experts in one kernel each way."""

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

TILE = 2048  # scores that a program has


class RoutingForm(NamedTuple):
    """Conversion of logits to weights."""

    topk: int
    sigmoid: bool  # scores are sigmoids; else a softmax over all experts
    normalize: bool  # the weights of a token's experts are divided by their sum,
    smallest_sum: float  # or by this where it is more
    scale: float


def route(
    logits: Tensor, bias: Tensor | None, form: RoutingForm, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights of each token's experts, best first, and their numbers.

    logits [tokens, experts] -> both [tokens, topk], in the logits' type and in int32. The best have the highest logits,
    or, with `bias` [experts], the highest sums of score and bias. Computed in fp32. `given` [tokens, topk]: experts to
    take in the place of the best, but where they are below 0.
    """
    replayed = None if replayed is None else replayed.contiguous()
    return cast(tuple[Tensor, Tensor], _Route.apply(logits.contiguous(), bias, form, replayed))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, bias: Tensor | None, form: RoutingForm, replayed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens, number = logits.shape
        weights = logits.new_empty(tokens, form.topk)
        experts = torch.empty_like(weights, dtype=torch.int32)
        if tokens:
            grid, blocks = _blocks(tokens, number, form)
            _choose[grid](logits, bias, replayed, weights, experts, tokens, number, **blocks)
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        ctx.form = form
        return weights, experts

    @staticmethod
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, experts = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        if len(logits):
            tokens, number = logits.shape
            grid, blocks = _blocks(tokens, number, ctx.form)
            _slope[grid](grad.contiguous(), logits, experts, grad_logits, tokens, number, **blocks)
        return grad_logits, None, None, None


def _blocks(tokens: int, number: int, form: RoutingForm) -> tuple[tuple[int], LaunchArgs]:
    experts = int(triton.next_power_of_2(number))
    down = max(TILE // experts, 1)
    blocks = {"TOPK": form.topk, "PADDED": triton.next_power_of_2(form.topk), "EXPERTS": experts, "DOWN": down}
    blocks |= {"SIGMOID": form.sigmoid, "NORMALIZE": form.normalize, "SMALLEST": form.smallest_sum, "SCALE": form.scale}
    return (int(triton.cdiv(tokens, down)),), blocks


@triton.jit
def _scores(logits, token, expert, there, number, SIGMOID: tl.constexpr):
    """The logits and the scores, both fp32 [DOWN, EXPERTS]"""
    logit = tl.load(logits + token * number + expert, there, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        highest = tl.max(tl.where(expert < number, logit, -3e38), 1, keep_dims=True)
        score = tl.exp(logit - highest)
        score = score / tl.sum(score, 1, keep_dims=True)
    return logit, score


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logits,
    bias,
    replayed,
    weights,
    experts,
    tokens,
    number,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SMALLEST: tl.constexpr,
    SCALE: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    DOWN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * DOWN + tl.arange(0, DOWN)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    there = (token < tokens) & (expert < number)
    logit, score = _scores(logits, token, expert, there, number, SIGMOID)  # pyright: ignore[reportGeneralTypeIssues]
    merit = logit
    if bias is not None:
        merit = score + tl.load(bias + expert, expert < number, other=0.0).to(tl.float32)
    # What is not a number is the worst, so that a token's experts are always distinct ones that exist.
    merit = tl.where(expert < number, tl.where(merit > -3e38, merit, -3e38), -float("inf"))
    place = tl.arange(0, PADDED)[None, :]
    weight, best = tl.zeros((DOWN, PADDED), tl.float32), tl.zeros((DOWN, PADDED), tl.int32)
    for k in tl.static_range(TOPK):
        highest = tl.max(merit, 1, keep_dims=True)
        chosen = tl.min(tl.where(merit == highest, expert, EXPERTS), 1, keep_dims=True)
        if replayed is not None:
            replayed_expert = tl.load(replayed + token * TOPK + k, token < tokens, other=-1).to(tl.int32)
            chosen = tl.where(replayed_expert < 0, chosen, replayed_expert)
        taken = expert == chosen
        weight = tl.where(place == k, tl.sum(tl.where(taken, score, 0.0), 1, keep_dims=True), weight)
        best = tl.where(place == k, chosen, best)
        merit = tl.where(taken, -float("inf"), merit)
    if NORMALIZE:
        total = tl.sum(weight, 1, keep_dims=True)
        weight = weight / tl.where(total < SMALLEST, SMALLEST, total)
    there = (token < tokens) & (place < TOPK)
    tl.store(weights + token * TOPK + place, (weight * SCALE).to(weights.dtype.element_ty), there)
    tl.store(experts + token * TOPK + place, best, there)


@triton.jit(do_not_specialize=["tokens"])
def _slope(
    grad,
    logits,
    experts,
    grad_logits,
    tokens,
    number,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SMALLEST: tl.constexpr,
    SCALE: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    DOWN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * DOWN + tl.arange(0, DOWN)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    there = (token < tokens) & (expert < number)
    _, score = _scores(logits, token, expert, there, number, SIGMOID)  # pyright: ignore[reportGeneralTypeIssues]
    grad_weight, chosen = tl.zeros((DOWN, EXPERTS), tl.float32), tl.zeros((DOWN, EXPERTS), tl.float32)
    for k in tl.static_range(TOPK):
        taken = expert == tl.load(experts + token * TOPK + k, token < tokens, other=0)
        slope = tl.load(grad + token * TOPK + k, token < tokens, other=0.0).to(tl.float32) * SCALE
        grad_weight = tl.where(taken, slope, grad_weight)
        chosen = tl.where(taken, 1.0, chosen)
    if NORMALIZE:
        total = tl.sum(chosen * score, 1, keep_dims=True)
        mean = tl.sum(grad_weight * score, 1, keep_dims=True) / total
        grad_weight = tl.where(total < SMALLEST, grad_weight / SMALLEST, chosen * (grad_weight - mean) / total)
    slope = (
        grad_weight * score * (1 - score)
        if SIGMOID
        else score * (grad_weight - tl.sum(grad_weight * score, 1, keep_dims=True))
    )
    tl.store(grad_logits + token * number + expert, slope.to(grad_logits.dtype.element_ty), there)
