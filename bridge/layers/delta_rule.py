"""The gated delta rule (https://arxiv.org/abs/2412.06464) and short convolutions, over packed documents.

Each head keeps a matrix that decays, forgets what a key stood for, and learns what it stands for now:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}' k_t)',    o_t = S_t' q_t

computed by chunks of 64 tokens (https://arxiv.org/abs/2406.06484): products over all chunks of all documents at once,
and one product a step for what chunks hand on to the next.
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
    """Positions of the tokens of a micro batch in chunks of documents, made on the CPU once per micro batch.

    Tokens [sequence, rows] are flattened; each document of each row is a run of its own. Chunks are sorted by their
    number in their document, longer documents first, so that those of one step are neighbours and follow their own.
    """

    places: Tensor  # [tokens]: of each token in [chunks * CHUNK]
    steps: list[int]  # how many documents have a chunk of this number: falling; their sum is the number of chunks
    spaced: Tensor  # [tokens]: of each token in a line of the runs with `kernel - 1` free places before each
    line: int  # how long that line is
    ends: Tensor  # [runs + 1] int64
    natural: Tensor | None  # [sequence]: under context parallelism, the places of positions in the ranks' order
    ranked: Tensor | None  # its inverse


def make_delta_layout(bounds: list[int], rows: int, cp_size: int, kernel: int, device: torch.device) -> DeltaLayout:
    """`bounds` [documents + 1]: where documents begin and end in the whole sequence of each of the `rows`; under
    context parallelism each length divides by 2 x cp_size. `kernel`: the width of the convolution."""
    lengths = torch.tensor(bounds).diff().repeat(rows)  # row by row
    runs, tokens = len(lengths), int(lengths.sum())
    chunks = (lengths + CHUNK - 1) // CHUNK
    rank = torch.empty(runs, dtype=torch.int64)
    rank[torch.argsort(chunks, descending=True, stable=True)] = torch.arange(runs)
    steps = [int((chunks > step).sum()) for step in range(int(chunks.max()))]
    firsts = torch.tensor([0, *accumulate(steps)])
    run = torch.repeat_interleave(torch.arange(runs), lengths)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(tokens) - starts[run]
    places = (firsts[position // CHUNK] + rank[run]) * CHUNK + position % CHUNK
    spaced = torch.arange(tokens) + (kernel - 1) * (run + 1)
    natural = None
    if cp_size > 1:
        natural = torch.cat(
            [gathered_positions(start, end - start, bounds[-1], cp_size) for start, end in pairwise(bounds)]
        )
    return DeltaLayout(
        places=to_device(_by_sequence(places, rows), device),
        steps=steps,
        spaced=to_device(_by_sequence(spaced, rows), device),
        line=tokens + (kernel - 1) * runs,
        ends=to_device(F.pad(lengths.cumsum(0), (1, 0)), device),
        natural=None if natural is None else to_device(natural, device),
        ranked=None if natural is None else to_device(torch.argsort(natural), device),
    )


def _by_sequence(values: Tensor, rows: int) -> Tensor:
    """Values of tokens, row after row -> position after position, as hidden states have them."""
    return values.view(rows, -1).t().flatten()


class _Scan(torch.autograd.Function):
    """States at the start of every chunk: 0 for a document's first, then `keep @ state + add` of the chunk before.

    keep [chunks, heads, key dim, key dim], add [chunks, heads, key dim, value dim], sorted by steps as in `Runs`.
    """

    @staticmethod
    def forward(ctx, keep: Tensor, add: Tensor, steps: list[int]) -> Tensor:
        states = torch.zeros_like(add)
        for last, here in _neighbours(steps):
            torch.baddbmm(
                add[last].flatten(0, 1),
                keep[last].flatten(0, 1),
                states[last].flatten(0, 1),
                out=states[here].flatten(0, 1),
            )
        ctx.save_for_backward(keep, states)
        ctx.steps = steps
        return states

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        keep, states = ctx.saved_tensors
        total = grad.clone()  # d loss / d state, with what later chunks make of it
        reached = torch.zeros_like(total)  # the same for what a chunk hands on
        for last, here in reversed(list(_neighbours(ctx.steps))):
            reached[last] = total[here]
            total[last] += keep[last].mT @ total[here]
        return reached @ states.mT, reached, None


def _neighbours(steps: list[int]) -> list[tuple[slice, slice]]:
    """Return, for each step but the first, the chunks before those of the step, and these."""
    firsts = [0, *accumulate(steps)]
    return [
        (slice(before, before + count), slice(here, here + count))
        for before, here, count in zip(firsts, firsts[1:], steps[1:], strict=False)
    ]


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, runs: DeltaLayout) -> Tensor:
    """Return the gated delta rule over the runs, in fp32; queries and keys are normalised here.

    query, key [tokens, groups, key dim]; value [tokens, groups, heads, value dim]; decay (log, <= 0) and beta
    [tokens, groups, heads] -> the shape and dtype of value
    """
    dtype = value.dtype
    query, key = (_unit(x) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key, value = (_chunked(x, runs).movedim(1, -2) for x in (query, key, value.float()))
    decay, beta = (_chunked(x.float(), runs).movedim(1, -1).unsqueeze(-1) for x in (decay, beta))
    query, key = query.unsqueeze(2), key.unsqueeze(2)  # [chunks, groups, 1, CHUNK, key dim]: one for a group's heads

    # Inside a chunk. total: the decay from its start; between: from one of its tokens to a later one.
    total = decay.cumsum(-2)  # [chunks, groups, heads, CHUNK, 1]
    between = (total - total.mT).masked_fill(_later(total.device), -torch.inf).exp()
    written = torch.cat((value * beta, key * (beta * total.exp())), dim=-1)
    system = (key @ key.mT) * between * beta
    solved = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    new, read = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    seen = (query @ key.mT) * between

    # From chunk to chunk: a state decays, loses what the keys read of it, gains the new values.
    last = total[..., -1:, :]
    kept_key = (key * (last - total).exp()).mT
    eye = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    keep, add = eye * last.exp() - kept_key @ read, kept_key @ new
    states = _Scan.apply(keep.flatten(1, 2), add.flatten(1, 2), runs.steps).view_as(add)  # type: ignore[union-attr]

    output = (query * total.exp()) @ states + seen @ (new - read @ states)
    return output.movedim(-2, 1).flatten(0, 1).index_select(0, runs.places).to(dtype)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _chunked(x: Tensor, runs: DeltaLayout) -> Tensor:
    """[tokens, ...] -> [chunks, CHUNK, ...], zeros where no token is."""
    room = x.new_zeros(sum(runs.steps) * CHUNK, *x.shape[1:])
    return room.index_copy(0, runs.places, x).unflatten(0, (-1, CHUNK))


def _later(device: torch.device) -> Tensor:
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)


def causal_conv(x: Tensor, weight: Tensor, runs: DeltaLayout) -> Tensor:
    """silu of each channel's convolution with the tokens before it in its run. x [tokens, channels], weight
    [channels, 1, kernel] -> the shape of x"""
    before = weight.shape[-1] - 1
    line = x.new_zeros(runs.line, x.shape[1]).index_copy(0, runs.spaced, x)
    mixed = F.conv1d(line.t().unsqueeze(0), weight.to(x.dtype), groups=x.shape[1])
    return F.silu(mixed.squeeze(0).t().index_select(0, runs.spaced - before))
