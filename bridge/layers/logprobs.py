"""Log-probabilities of the labels, straight from the hidden states: vocabulary-parallel and in chunks.

No rank ever holds the logits of more than one chunk of tokens. The backward pass computes a chunk's logits again, which
costs one more product with the output matrix and saves keeping [tokens, vocabulary]. The fused kernels have no logits
in fp32 at all, and keep them where they are small: see fused/log_probs.py. Entropies come from the same logits.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from ..kernels import usable

CHUNK_TOKENS = 4096


def chunk_logits(hidden: Tensor, weight: Tensor, columns: int) -> Tensor:
    """fp32 logits [tokens, columns]: products in the weights' dtype; the padding of the vocabulary (the last rows of
    `weight`) is left out, so that it never enters a softmax."""
    return (hidden @ weight[:columns].t()).float()


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, columns: int, group, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        local_labels = labels - dist.get_rank(group) * weight.shape[0]
        held = (local_labels >= 0) & (local_labels < columns)  # whose logit this rank has
        local_labels = torch.where(held, local_labels, 0)
        normalizer = torch.full_like(labels, -torch.inf, dtype=torch.float32)  # log sum exp over this rank's columns
        chosen = torch.zeros_like(normalizer)  # the label's logit, 0 where another rank has it
        entropies = torch.zeros_like(normalizer) if entropy else None  # of the softmax over this rank's columns
        if columns:
            for part in _chunks(len(labels)):
                logits = chunk_logits(hidden[part], weight, columns).div_(temperature)
                normalizer[part] = torch.logsumexp(logits, dim=-1)
                chosen[part] = logits.gather(1, local_labels[part, None]).squeeze(1) * held[part]
                if entropies is not None:
                    log_probs = logits.sub_(normalizer[part, None])
                    entropies[part] = -(log_probs.exp().mul_(log_probs)).sum(dim=-1)
        normalizer, chosen, entropies = over_ranks(normalizer, chosen, entropies, group)
        ctx.save_for_backward(hidden, weight, local_labels, held, normalizer)
        ctx.columns, ctx.temperature = columns, temperature
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return chosen - normalizer, entropies

    @staticmethod
    def backward(ctx, grad: Tensor, _):  # type: ignore[override]
        hidden, weight, local_labels, held, normalizer = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if ctx.columns:
            used = weight[: ctx.columns]
            for part in _chunks(len(hidden)):
                logits = chunk_logits(hidden[part], weight, ctx.columns).div_(ctx.temperature)
                # d logp / d logits = onehot - softmax
                slope = logits.sub_(normalizer[part, None]).exp_().neg_()
                slope.scatter_add_(1, local_labels[part, None], held[part, None].float())
                slope = slope.mul_(grad[part, None] / ctx.temperature).to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = slope @ used
                if grad_weight is not None:
                    grad_weight[: ctx.columns] += slope.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def over_ranks(
    normalizer: Tensor, chosen: Tensor, entropies: Tensor | None, group
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-sum-exp over all ranks' columns, a number from the rank that has it (the label's logit), and the entropy of
    the softmax over all columns: [tokens] each, of the same for each rank's columns alone."""
    if dist.get_world_size(group) == 1:
        return normalizer, chosen, entropies
    largest = normalizer.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    masses = (normalizer - largest).exp()  # of the ranks' columns, but for a factor that they share
    rows = [masses, chosen]
    if entropies is not None:
        # H = sum over ranks of p H(columns) - p log p, p = masses / their sum
        rows.append(masses * entropies + torch.special.entr(masses))
    sums = torch.stack(rows)
    dist.all_reduce(sums, group=group)
    log_mass = sums[0].log()
    return largest + log_mass, sums[1], None if entropies is None else sums[2] / sums[0] + log_mass


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_TOKENS, tokens)) for start in range(0, tokens, CHUNK_TOKENS)]


@dataclass(frozen=True)
class ScoredRows:
    """Positions [batch, sequence] as rows of a matrix: all of them, or those that are scored."""

    hidden: Tensor  # [tokens, hidden_size]
    columns: int  # rows of this rank's output matrix that are real, not padding of the vocabulary
    shape: tuple[int, int]  # (batch, sequence)
    scored: Tensor | None  # [tokens]: which of batch * sequence they are; None: all

    def select(self, values: Tensor) -> Tensor:
        """[batch, sequence, ...] -> [tokens, ...]"""
        flat = values.flatten(0, 1)
        return flat if self.scored is None else flat.index_select(0, self.scored)

    def scatter(self, values: Tensor) -> Tensor:
        """[tokens, ...] -> [batch, sequence, ...], 0 where nothing is scored."""
        if self.scored is not None:
            values = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:]).index_copy(
                0, self.scored, values
            )
        return values.unflatten(0, self.shape)


def select_rows(
    hidden: Tensor, weight: Tensor, *, vocab_size: int, group, sequence_parallel: bool, scored: Tensor | None
) -> ScoredRows:
    """Return the input rows of the output matrix. Arguments as of `label_log_probs`."""
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    sequence, batch, size = hidden.shape
    flat = hidden.transpose(0, 1).reshape(-1, size)
    columns = min(len(weight), max(0, vocab_size - dist.get_rank(group) * len(weight)))
    return ScoredRows(flat if scored is None else flat.index_select(0, scored), columns, (batch, sequence), scored)


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
    `temperature`: what logits are divided by. `scored` [n]: positions of batch * sequence, each once: the others are
    not computed, and are 0; None: all. `accumulate`: the fused kernels add the weight's gradient to its `main_grad`,
    where it has one in fp32.
    """
    rows = select_rows(
        hidden, weight, vocab_size=vocab_size, group=group, sequence_parallel=sequence_parallel, scored=scored
    )
    log_probs, _ = _log_probs(rows, weight, labels, group, temperature, accumulate, entropy=False)
    return rows.scatter(log_probs)


def log_probs_and_entropies(
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
) -> tuple[Tensor, Tensor]:
    """Return `label_log_probs` and the entropy of p at each position, in nats and without gradients.

    Both fp32 [batch, sequence].
    """
    rows = select_rows(
        hidden, weight, vocab_size=vocab_size, group=group, sequence_parallel=sequence_parallel, scored=scored
    )
    log_probs, entropies = _log_probs(rows, weight, labels, group, temperature, accumulate, entropy=True)
    assert entropies is not None
    return rows.scatter(log_probs), rows.scatter(entropies)


def _log_probs(
    rows: ScoredRows, weight: Tensor, labels: Tensor, group, temperature: float, accumulate: bool, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    selected = rows.select(labels)
    if not usable(rows.hidden, weight, selected):
        return _LabelLogProbs.apply(rows.hidden, weight, selected, rows.columns, group, temperature, entropy)  # type: ignore[return-value]
    from ..kernels.log_probs import LabelLogProbs

    first, together = dist.get_rank(group) * len(weight), partial(over_ranks, group=group)
    keep = torch.is_grad_enabled() and (rows.hidden.requires_grad or weight.requires_grad)
    return LabelLogProbs.apply(  # type: ignore[return-value]
        rows.hidden, weight, selected, first, rows.columns, temperature, together, keep, accumulate, entropy
    )
