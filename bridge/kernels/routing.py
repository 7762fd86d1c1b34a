"""Fused choice of experts and their weights, forward and backward."""
# Loops and numbers at compile time:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LaunchArgs

TILE = 2048  # scores per program


class RoutingForm(NamedTuple):
    """Rule that converts logits to experts' weights."""

    topk: int
    sigmoid: bool  # scores are sigmoids; else a softmax over all experts
    normalize: bool  # divide the weights of a token's experts by their sum,
    smallest_sum: float  # or by this if it is larger
    scale: float


def route(
    logits: Tensor, bias: Tensor | None, form: RoutingForm, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights and indices of each token's best experts, best first. Computed in fp32.

    logits [tokens, experts] -> weights in the logits' dtype and indices in int32, both [tokens, topk]. The best experts
    have the highest logits or, with `bias` [experts], the highest sums of score and bias. replayed [tokens, topk]:
    experts to use instead, except where negative.
    """
    replayed = None if replayed is None else replayed.contiguous()
    return cast(tuple[Tensor, Tensor], _Route.apply(logits.contiguous(), bias, form, replayed))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, bias: Tensor | None, form: RoutingForm, replayed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens, num_experts = logits.shape
        weights = logits.new_empty(tokens, form.topk)
        experts = torch.empty_like(weights, dtype=torch.int32)
        if tokens:
            grid, blocks = _blocks(tokens, num_experts, form)
            _route_forward[grid](logits, bias, replayed, weights, experts, tokens, num_experts, **blocks)
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        ctx.form = form
        return weights, experts

    @staticmethod
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, experts = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        if len(logits):
            tokens, num_experts = logits.shape
            grid, blocks = _blocks(tokens, num_experts, ctx.form)
            _route_backward[grid](grad.contiguous(), logits, experts, grad_logits, tokens, num_experts, **blocks)
        return grad_logits, None, None, None


def _blocks(tokens: int, num_experts: int, form: RoutingForm) -> tuple[tuple[int], LaunchArgs]:
    experts = int(triton.next_power_of_2(num_experts))
    down = max(TILE // experts, 1)
    blocks = {"TOPK": form.topk, "PADDED": triton.next_power_of_2(form.topk), "EXPERTS": experts, "DOWN": down}
    blocks |= {"SIGMOID": form.sigmoid, "NORMALIZE": form.normalize, "SMALLEST": form.smallest_sum, "SCALE": form.scale}
    return (int(triton.cdiv(tokens, down)),), blocks


@triton.jit
def _scores(logits, token, expert, mask, num_experts, SIGMOID: tl.constexpr):
    """Return the logits and the scores, both fp32 [DOWN, EXPERTS]."""
    logit = tl.load(logits + token * num_experts + expert, mask, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        highest = tl.max(tl.where(expert < num_experts, logit, -3e38), 1, keep_dims=True)
        score = tl.exp(logit - highest)
        score = score / tl.sum(score, 1, keep_dims=True)
    return logit, score


@triton.jit(do_not_specialize=["tokens"])
def _route_forward(
    logits,
    bias,
    replayed,
    weights,
    experts,
    tokens,
    num_experts,
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
    mask = (token < tokens) & (expert < num_experts)
    logit, score = _scores(logits, token, expert, mask, num_experts, SIGMOID)
    choice_scores = logit
    if bias is not None:
        choice_scores = score + tl.load(bias + expert, expert < num_experts, other=0.0).to(tl.float32)
    # NaN ranks lowest, so that a token's experts are always valid and distinct.
    choice_scores = tl.where(expert < num_experts, tl.where(choice_scores > -3e38, choice_scores, -3e38), -float("inf"))
    slot = tl.arange(0, PADDED)[None, :]
    weight, best = tl.zeros((DOWN, PADDED), tl.float32), tl.zeros((DOWN, PADDED), tl.int32)
    for k in tl.static_range(TOPK):
        highest = tl.max(choice_scores, 1, keep_dims=True)
        chosen = tl.min(tl.where(choice_scores == highest, expert, EXPERTS), 1, keep_dims=True)
        if replayed is not None:
            replayed_expert = tl.load(replayed + token * TOPK + k, token < tokens, other=-1).to(tl.int32)
            chosen = tl.where(replayed_expert < 0, chosen, replayed_expert)
        is_chosen = expert == chosen
        weight = tl.where(slot == k, tl.sum(tl.where(is_chosen, score, 0.0), 1, keep_dims=True), weight)
        best = tl.where(slot == k, chosen, best)
        choice_scores = tl.where(is_chosen, -float("inf"), choice_scores)
    if NORMALIZE:
        total = tl.sum(weight, 1, keep_dims=True)
        weight = weight / tl.where(total < SMALLEST, SMALLEST, total)
    mask = (token < tokens) & (slot < TOPK)
    tl.store(weights + token * TOPK + slot, (weight * SCALE).to(weights.dtype.element_ty), mask)
    tl.store(experts + token * TOPK + slot, best, mask)


@triton.jit(do_not_specialize=["tokens"])
def _route_backward(
    grad,
    logits,
    experts,
    grad_logits,
    tokens,
    num_experts,
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
    mask = (token < tokens) & (expert < num_experts)
    _, score = _scores(logits, token, expert, mask, num_experts, SIGMOID)
    grad_weight, chosen = tl.zeros((DOWN, EXPERTS), tl.float32), tl.zeros((DOWN, EXPERTS), tl.float32)
    for k in tl.static_range(TOPK):
        is_chosen = expert == tl.load(experts + token * TOPK + k, token < tokens, other=0)
        slope = tl.load(grad + token * TOPK + k, token < tokens, other=0.0).to(tl.float32) * SCALE
        grad_weight = tl.where(is_chosen, slope, grad_weight)
        chosen = tl.where(is_chosen, 1.0, chosen)
    if NORMALIZE:
        total = tl.sum(chosen * score, 1, keep_dims=True)
        mean = tl.sum(grad_weight * score, 1, keep_dims=True) / total
        grad_weight = tl.where(total < SMALLEST, grad_weight / SMALLEST, chosen * (grad_weight - mean) / total)
    slope = (
        grad_weight * score * (1 - score)
        if SIGMOID
        else score * (grad_weight - tl.sum(grad_weight * score, 1, keep_dims=True))
    )
    tl.store(grad_logits + token * num_experts + expert, slope.to(grad_logits.dtype.element_ty), mask)
