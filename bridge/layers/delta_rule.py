"""The gated delta rule (https://arxiv.org/abs/2412.06464) and short convolutions, over packed documents.

Each head keeps a state matrix that decays and, for each key, replaces the old value by the new one:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}' k_t)',    o_t = S_t' q_t

It is computed in chunks of 64 tokens (https://arxiv.org/abs/2406.06484): matrix products over all chunks of all
documents at once, and one batched product per step that passes the states on to the documents' next chunks.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed_seqs import gathered_positions, to_device

CHUNK = 64


@dataclass(frozen=True)
class DeltaLayout:
    """Positions of a micro batch's tokens in chunks of documents, made on the CPU once per micro batch.

    Tokens [sequence, rows] are flattened. All rows have the same document boundaries. Chunks are sorted by their index
    in the document, then by the document's length, longest first. So the chunks of one step are contiguous, and in the
    same order as their predecessors.
    """

    slots: Tensor  # [tokens]: index of each token in [chunks * CHUNK]
    steps: list[int]  # number of documents with an n-th chunk, in descending order; their sum is the number of chunks
    conv_slots: Tensor  # [tokens]: index of each token if `kernel - 1` zeros precede each document
    conv_length: int  # length of the tokens with these zeros
    cu_seqlens: Tensor  # [rows * documents + 1] int64
    cu_seqlens_cpu: Tensor  # the same on the CPU
    rows: int
    document_order: Tensor | None  # [sequence]: with context parallelism, rank-major index of each position
    rank_order: Tensor | None  # its inverse


def make_delta_layout(bounds: list[int], rows: int, cp_size: int, kernel: int, device: torch.device) -> DeltaLayout:
    """Return the layout of a micro batch.

    bounds [documents + 1]: boundaries of the documents in the full sequence, the same in each of the `rows`; with
    context parallelism each length is divisible by 2 x cp_size. kernel: width of the convolution.
    """
    lengths = torch.tensor(bounds).diff().repeat(rows)  # row by row
    count, tokens = len(lengths), int(lengths.sum())
    chunks = (lengths + CHUNK - 1) // CHUNK
    order = torch.empty(count, dtype=torch.int64)
    order[torch.argsort(chunks, descending=True, stable=True)] = torch.arange(count)
    steps = [int((chunks > step).sum()) for step in range(int(chunks.max()))]
    step_starts = torch.tensor([0, *accumulate(steps)])
    document = torch.repeat_interleave(torch.arange(count), lengths)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(tokens) - starts[document]
    slots = (step_starts[position // CHUNK] + order[document]) * CHUNK + position % CHUNK
    conv_slots = torch.arange(tokens) + (kernel - 1) * (document + 1)
    document_order = None
    if cp_size > 1:
        document_order = torch.cat(
            [gathered_positions(start, end - start, bounds[-1], cp_size) for start, end in pairwise(bounds)]
        )
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    return DeltaLayout(
        slots=to_device(_sequence_major(slots, rows), device),
        steps=steps,
        conv_slots=to_device(_sequence_major(conv_slots, rows), device),
        conv_length=tokens + (kernel - 1) * count,
        cu_seqlens=to_device(cu_seqlens, device),
        cu_seqlens_cpu=cu_seqlens,
        rows=rows,
        document_order=None if document_order is None else to_device(document_order, device),
        rank_order=None if document_order is None else to_device(torch.argsort(document_order), device),
    )


def _sequence_major(values: Tensor, rows: int) -> Tensor:
    """Reorder values of tokens from row-major to sequence-major, the order of hidden states."""
    return values.view(rows, -1).t().flatten()


class StateScan(torch.autograd.Function):
    """States at the start of every chunk: 0, then `transition @ state + update` of the previous chunk.

    transition [chunks, heads, key dim, key dim], update [chunks, heads, key dim, value dim], sorted as in DeltaLayout.
    """

    @staticmethod
    def forward(ctx, transition: Tensor, update: Tensor, steps: list[int]) -> Tensor:
        states = torch.zeros_like(update)
        for previous, current in consecutive_steps(steps):
            torch.baddbmm(
                update[previous].flatten(0, 1),
                transition[previous].flatten(0, 1),
                states[previous].flatten(0, 1),
                out=states[current].flatten(0, 1),
            )
        ctx.save_for_backward(transition, states)
        ctx.steps = steps
        return states

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        transition, states = ctx.saved_tensors
        grad_states = grad.clone()  # d loss / d state, through later chunks too
        grad_update = torch.zeros_like(grad_states)  # d loss / d (the state at the chunk's end)
        for previous, current in reversed(list(consecutive_steps(ctx.steps))):
            grad_update[previous] = grad_states[current]
            grad_states[previous] += transition[previous].mT @ grad_states[current]
        return grad_update @ states.mT, grad_update, None


def consecutive_steps(steps: list[int]) -> list[tuple[slice, slice]]:
    """Return the previous chunks and the current chunks of each step but the first."""
    starts = [0, *accumulate(steps)]
    return [
        (slice(previous, previous + count), slice(current, current + count))
        for previous, current, count in zip(starts, starts[1:], steps[1:], strict=False)
    ]


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, layout: DeltaLayout) -> Tensor:
    """Return the output of the gated delta rule, computed in fp32. Queries and keys are normalized here.

    query, key [tokens, groups, key dim]; value [tokens, groups, heads, value dim]; decay (log, <= 0) and beta
    [tokens, groups, heads] -> the shape and dtype of value
    """
    dtype = value.dtype
    query, key = (l2_normalize(x) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key, value = (to_chunks(x, layout).movedim(1, -2) for x in (query, key, value.float()))
    decay, beta = (to_chunks(x.float(), layout).movedim(1, -1).unsqueeze(-1) for x in (decay, beta))
    query, key = query.unsqueeze(2), key.unsqueeze(2)  # [chunks, groups, 1, CHUNK, key dim]

    # Within a chunk. log_decay: from the chunk's start; relative_decay: from one token to a later one.
    log_decay = decay.cumsum(-2)  # [chunks, groups, heads, CHUNK, 1]
    relative_decay = (log_decay - log_decay.mT).masked_fill(future_mask(log_decay.device), -torch.inf).exp()
    targets = torch.cat((value * beta, key * (beta * log_decay.exp())), dim=-1)
    system = (key @ key.mT) * relative_decay * beta
    solution = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    new_values, read_keys = solution.split((value.shape[-1], key.shape[-1]), dim=-1)
    scores = (query @ key.mT) * relative_decay

    # Between chunks: a state decays, loses the values that the keys read, and gains the new values.
    chunk_decay = log_decay[..., -1:, :]
    decayed_key = (key * (chunk_decay - log_decay).exp()).mT
    eye = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    transition, update = eye * chunk_decay.exp() - decayed_key @ read_keys, decayed_key @ new_values
    states = StateScan.apply(transition.flatten(1, 2), update.flatten(1, 2), layout.steps).view_as(update)  # type: ignore[union-attr]

    output = (query * log_decay.exp()) @ states + scores @ (new_values - read_keys @ states)
    return output.movedim(-2, 1).flatten(0, 1).index_select(0, layout.slots).to(dtype)


def l2_normalize(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def to_chunks(x: Tensor, layout: DeltaLayout) -> Tensor:
    """Reshape [tokens, ...] to [chunks, CHUNK, ...], with zeros after a document's end."""
    zeros = x.new_zeros(sum(layout.steps) * CHUNK, *x.shape[1:])
    return zeros.index_copy(0, layout.slots, x).unflatten(0, (-1, CHUNK))


def future_mask(device: torch.device) -> Tensor:
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)


def causal_conv(
    x: Tensor, weight: Tensor, layout: DeltaLayout, bias: Tensor | None = None, *, is_activated: bool = True
) -> Tensor:
    """Return silu of each channel's causal convolution within documents, in the shape of x.

    x [tokens, channels], weight [channels, 1, kernel], bias [channels]; without silu unless `is_activated`
    """
    padding = weight.shape[-1] - 1
    padded = x.new_zeros(layout.conv_length, x.shape[1]).index_copy(0, layout.conv_slots, x)
    bias = None if bias is None else bias.to(x.dtype)
    convolved = F.conv1d(padded.t().unsqueeze(0), weight.to(x.dtype), bias, groups=x.shape[1])
    convolved = convolved.squeeze(0).t().index_select(0, layout.conv_slots - padding)
    return F.silu(convolved) if is_activated else convolved
