"""Log-probabilities of labels from hidden states, vocabulary-parallel and in chunks.

No rank holds the logits of more than one chunk of tokens. The backward pass recomputes a chunk's logits: one more
product with the output matrix, instead of [tokens, vocabulary] in memory. The fused kernels (kernels/log_probs.py)
need no logits in fp32, and keep those that are small. Entropies come from the same logits.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from ..kernels import usable

CHUNK_TOKENS = 4096
BIAS_COLUMNS = 8  # kernels need rows of 16 bytes


def chunk_logits(hidden: Tensor, weight: Tensor, columns: int, cap: float | None = None) -> Tensor:
    """Return fp32 logits [tokens, columns], from products in the weights' dtype.

    The vocabulary's padding (the last rows of `weight`) is excluded, so that no softmax sees it.
    cap: see `Architecture.logits_cap`.
    """
    logits = (hidden @ weight[:columns].t()).float()
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def cap_slopes(logits: Tensor, cap: float | None) -> Tensor | None:
    """Return the derivatives of capped logits by the products, like logits; None without a cap."""
    return None if cap is None else 1 - (logits / cap).square()


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, output: "OutputMatrix", temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        columns, group = output.columns, output.group
        local_labels = labels - output.first
        is_local = (local_labels >= 0) & (local_labels < columns)
        local_labels = torch.where(is_local, local_labels, 0)
        normalizer = torch.full_like(labels, -torch.inf, dtype=torch.float32)  # log sum exp over this rank's columns
        chosen = torch.zeros_like(normalizer)  # the label's logit, 0 where another rank has it
        entropies = torch.zeros_like(normalizer) if entropy else None  # of the softmax over this rank's columns
        if columns:
            for part in _chunks(len(labels)):
                logits = chunk_logits(hidden[part], weight, columns, output.cap).div_(temperature)
                normalizer[part] = torch.logsumexp(logits, dim=-1)
                chosen[part] = logits.gather(1, local_labels[part, None]).squeeze(1) * is_local[part]
                if entropies is not None:
                    log_probs = logits.sub_(normalizer[part, None])
                    entropies[part] = -(log_probs.exp().mul_(log_probs)).sum(dim=-1)
        normalizer, chosen, entropies = over_ranks(normalizer, chosen, entropies, group)
        ctx.save_for_backward(hidden, weight, local_labels, is_local, normalizer, entropies)
        ctx.columns, ctx.temperature, ctx.cap = columns, temperature, output.cap
        ctx.set_materialize_grads(False)  # no work for entropies that are only logged
        return chosen - normalizer, entropies

    @staticmethod
    def backward(ctx, grad: Tensor | None, entropy_grad: Tensor | None):  # type: ignore[override]
        hidden, weight, local_labels, is_local, normalizer, entropies = ctx.saved_tensors
        grad = torch.zeros_like(normalizer) if grad is None else grad
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        if ctx.columns:
            used = weight[: ctx.columns]
            for part in _chunks(len(hidden)):
                logits = chunk_logits(hidden[part], weight, ctx.columns, ctx.cap)
                inner_slopes = cap_slopes(logits, ctx.cap)
                log_probs = logits.div_(ctx.temperature).sub_(normalizer[part, None])
                # d entropy / d logits = -softmax x (log softmax + entropy)
                bends = None if entropy_grad is None else log_probs + entropies[part, None]
                # d logp / d logits = onehot - softmax
                slope = log_probs.exp_().neg_()
                bends = None if bends is None or entropy_grad is None else bends.mul_(slope * entropy_grad[part, None])
                slope.scatter_add_(1, local_labels[part, None], is_local[part, None].float())
                slope = slope.mul_(grad[part, None] / ctx.temperature)
                slope = slope if bends is None else slope.add_(bends / ctx.temperature)
                slope = (slope if inner_slopes is None else slope.mul_(inner_slopes)).to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = slope @ used
                if grad_weight is not None:
                    grad_weight[: ctx.columns] += slope.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 4


def over_ranks(
    normalizer: Tensor, chosen: Tensor, entropies: Tensor | None, group
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combine values of each rank's columns into those of all columns: [tokens] each.

    normalizer: log-sum-exp; chosen: the label's logit, 0 on ranks without it; entropies: of the softmax.
    """
    if dist.get_world_size(group) == 1:
        return normalizer, chosen, entropies
    largest = normalizer.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    masses = (normalizer - largest).exp()  # of each rank's columns, up to a common factor
    rows = [masses, chosen]
    if entropies is not None:
        # H = sum over ranks of p H(columns) - p log p, p = masses / their sum
        rows.append(masses * entropies + torch.special.entr(masses))
    sums = torch.stack(rows)
    dist.all_reduce(sums, group=group)
    log_mass = sums[0].log()
    return largest + log_mass, sums[1], None if entropies is None else sums[2] / sums[0] + log_mass


def with_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the matrix [rows, columns + BIAS_COLUMNS] with the bias [rows] as a column; see `OutputMatrix`."""
    return torch.cat((weight, F.pad(bias.unsqueeze(1), (0, BIAS_COLUMNS - 1))), dim=1)


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_TOKENS, tokens)) for start in range(0, tokens, CHUNK_TOKENS)]


@dataclass(frozen=True)
class OutputMatrix:
    """This rank's rows of a vocabulary-parallel output matrix, and the layout of the hidden states that it multiplies.

    accumulate: the fused kernels add the weight's gradient to its `main_grad`, where it has one in fp32.
    """

    weight: Tensor  # [padded vocabulary / TP, hidden_size]
    vocab_size: int  # real entries, without padding
    group: dist.ProcessGroup  # tensor-parallel
    sequence_parallel: bool = False  # hidden states are [sequence / TP, batch, hidden_size]
    positions: Tensor | None = None  # [n]: positions of batch * sequence to compute, each once; None: all
    accumulate: bool = False
    cap: float | None = None  # see `Architecture.logits_cap`
    bias_columns: int = 0  # last columns of `weight`: the first is a bias of the logits, the others are padding

    @property
    def columns(self) -> int:
        """Number of this rank's rows that are real, not padding of the vocabulary."""
        return min(len(self.weight), max(0, self.vocab_size - self.first))

    @property
    def first(self) -> int:
        """Token id of this rank's first row."""
        return dist.get_rank(self.group) * len(self.weight)

    def rows(self, hidden: Tensor) -> "HiddenRows":
        """Select the positions of hidden states [sequence (/ TP), batch, hidden_size]."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        sequence, batch, size = hidden.shape
        flat = hidden.transpose(0, 1).reshape(-1, size)
        selected = flat if self.positions is None else flat.index_select(0, self.positions)
        if self.bias_columns:
            selected = F.pad(F.pad(selected, (0, 1), value=1.0), (0, self.bias_columns - 1))
        return HiddenRows(selected, (batch, sequence), self.positions)


@dataclass(frozen=True)
class HiddenRows:
    """Hidden states of the selected positions [batch, sequence], as rows of a matrix."""

    hidden: Tensor  # [tokens, hidden_size]
    shape: tuple[int, int]  # (batch, sequence)
    positions: Tensor | None  # [tokens]: as OutputMatrix.positions

    def select(self, values: Tensor) -> Tensor:
        """[batch, sequence, ...] -> [tokens, ...]"""
        flat = values.flatten(0, 1)
        return flat if self.positions is None else flat.index_select(0, self.positions)

    def scatter(self, values: Tensor) -> Tensor:
        """[tokens, ...] -> [batch, sequence, ...], 0 at positions that are not selected."""
        if self.positions is not None:
            zeros = values.new_zeros(self.shape[0] * self.shape[1], *values.shape[1:])
            values = zeros.index_copy(0, self.positions, values)
        return values.unflatten(0, self.shape)


def label_log_probs(hidden: Tensor, output: OutputMatrix, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log p(label) of each position, fp32 [batch, sequence], the same on every tensor-parallel rank.

    hidden: see `OutputMatrix.rows`; labels [batch, sequence]; temperature: divides the logits. Positions that are not
    selected are 0.
    """
    rows = output.rows(hidden)
    return rows.scatter(_log_probs(rows, output, labels, temperature, entropy=False)[0])


def log_probs_and_entropies(
    hidden: Tensor, output: OutputMatrix, labels: Tensor, *, temperature: float = 1.0, trains_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `label_log_probs` and the entropy of p at each position, in nats.

    Both fp32 [batch, sequence]. trains_entropy: entropies have gradients, too.
    """
    rows = output.rows(hidden)
    log_probs, entropies = _log_probs(rows, output, labels, temperature, entropy=True)
    assert entropies is not None
    return rows.scatter(log_probs), rows.scatter(entropies if trains_entropy else entropies.detach())


def _log_probs(
    rows: HiddenRows, output: OutputMatrix, labels: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    selected, weight, group = rows.select(labels), output.weight, output.group
    if not usable(rows.hidden, weight, selected):
        return _LabelLogProbs.apply(rows.hidden, weight, selected, output, temperature, entropy)  # type: ignore[return-value]
    from ..kernels.log_probs import LabelLogProbs
    from ..kernels.logits import LogitForm

    keep = torch.is_grad_enabled() and (rows.hidden.requires_grad or weight.requires_grad)
    form = LogitForm(output.first, output.columns, 1 / temperature, output.cap)
    reduce = partial(over_ranks, group=group)
    return LabelLogProbs.apply(rows.hidden, weight, selected, form, reduce, keep, output.accumulate, entropy)  # type: ignore[return-value]
