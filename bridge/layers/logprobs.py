"""Log-probabilities of the labels, straight from the hidden states: vocabulary-parallel and in chunks.

No rank ever holds the logits of more than one chunk of tokens. The backward pass computes a chunk's logits again, which
costs one more product with the output matrix and saves keeping [tokens, vocabulary]. The fused kernels have no logits
in fp32 at all, and keep them where they are small: see fused/log_probs.py.
"""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from ..fused import usable

CHUNK_TOKENS = 4096


def _logits(hidden: Tensor, weight: Tensor, columns: int) -> Tensor:
    """fp32 logits [tokens, columns]: products in the weights' dtype; the padding of the vocabulary (the last rows of
    `weight`) is left out, so that it never enters a softmax."""
    return (hidden @ weight[:columns].t()).float()


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, columns: int, group, temperature: float) -> Tensor:
        local_labels = labels - dist.get_rank(group) * weight.shape[0]
        held = (local_labels >= 0) & (local_labels < columns)  # whose logit this rank has
        local_labels = torch.where(held, local_labels, 0)
        normalizer = torch.full_like(labels, -torch.inf, dtype=torch.float32)  # log sum exp over this rank's columns
        chosen = torch.zeros_like(normalizer)  # the label's logit, 0 where another rank has it
        if columns:
            for part in _chunks(len(labels)):
                logits = _logits(hidden[part], weight, columns).div_(temperature)
                normalizer[part] = torch.logsumexp(logits, dim=-1)
                chosen[part] = logits.gather(1, local_labels[part, None]).squeeze(1) * held[part]
        normalizer, chosen = _over_ranks(normalizer, chosen, group)
        ctx.save_for_backward(hidden, weight, local_labels, held, normalizer)
        ctx.columns, ctx.temperature = columns, temperature
        return chosen - normalizer

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        hidden, weight, local_labels, held, normalizer = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if ctx.columns:
            used = weight[: ctx.columns]
            for part in _chunks(len(hidden)):
                logits = _logits(hidden[part], weight, ctx.columns).div_(ctx.temperature)
                # d logp / d logits = onehot - softmax
                slope = logits.sub_(normalizer[part, None]).exp_().neg_()
                slope.scatter_add_(1, local_labels[part, None], held[part, None].float())
                slope = slope.mul_(grad[part, None] / ctx.temperature).to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = slope @ used
                if grad_weight is not None:
                    grad_weight[: ctx.columns] += slope.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _over_ranks(normalizer: Tensor, chosen: Tensor, group) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over all ranks' columns, and the label's logit from the rank that has it: [tokens] each."""
    if dist.get_world_size(group) == 1:
        return normalizer, chosen
    largest = normalizer.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((normalizer - largest).exp(), chosen))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_TOKENS, tokens)) for start in range(0, tokens, CHUNK_TOKENS)]


def label_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group,
    sequence_parallel: bool,
    temperature: float = 1.0,
    accumulate: bool = False,
    scored: Tensor | None = None,
) -> Tensor:
    """log p(label) of each position, fp32 [batch, sequence], the same on every tensor-parallel rank.

    hidden [sequence (/ TP under sequence parallelism), batch, hidden_size]; weight: this rank's rows of the output
    matrix [padded vocabulary / TP, hidden_size]; labels [batch, sequence]; `vocab_size`: real entries, without padding.
    `scored` [n]: positions of batch * sequence, each once: the others are not computed, and are 0; None: all.
    `accumulate`: the fused kernels add the weight's gradient to its `main_grad`, where it has one in fp32.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    rows = weight.shape[0]
    first = dist.get_rank(group) * rows
    columns = min(rows, max(0, vocab_size - first))
    flat = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])  # [batch * sequence, hidden_size]
    asked = labels.reshape(-1)
    if scored is not None:
        flat, asked = flat.index_select(0, scored), asked.index_select(0, scored)
    if usable(flat, weight, asked):
        from ..fused.log_probs import LabelLogProbs

        keep = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
        over_ranks = partial(_over_ranks, group=group)
        result = LabelLogProbs.apply(flat, weight, asked, first, columns, temperature, over_ranks, keep, accumulate)
    else:
        result = _LabelLogProbs.apply(flat, weight, asked, columns, group, temperature)
    if scored is not None:
        result = result.new_zeros(labels.numel()).index_copy(0, scored, result)  # type: ignore[union-attr]
    return result.view_as(labels)  # type: ignore[union-attr]
