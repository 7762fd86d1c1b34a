"""Gated delta net (https://arxiv.org/abs/2412.06464) over packed documents, as Qwen3-Next and Qwen3.5 have it.

Each value head keeps a matrix that decays, forgets what a key stood for, and learns what it stands for now:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}' k_t)',    o_t = S_t' q_t

computed by chunks of 64 tokens (https://arxiv.org/abs/2406.06484): products over all chunks of all documents at once,
and one product a step for what chunks hand on. Where `fla` is installed and a GPU is there, its kernels do the same.
Heads are kept by groups: a key head with its query head, value heads, gates, decays. So tensor parallelism cuts
all tensors into equal windows, and so does context parallelism, which trades positions for heads inside the layer.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from megatron.core.typed_torch import not_none
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 64


@dataclass(frozen=True)
class Runs:
    """Where the tokens of a micro batch lie while documents are mixed. Made on the CPU, once per micro batch.

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


def make_runs(bounds: list[int], rows: int, cp_size: int, kernel: int, device: torch.device) -> Runs:
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
    natural = _ranks_order(bounds, cp_size) if cp_size > 1 else None
    return Runs(
        places=_to(_by_sequence(places, rows), device),
        steps=steps,
        spaced=_to(_by_sequence(spaced, rows), device),
        line=tokens + (kernel - 1) * runs,
        ends=_to(F.pad(lengths.cumsum(0), (1, 0)), device),
        natural=None if natural is None else _to(natural, device),
        ranked=None if natural is None else _to(torch.argsort(natural), device),
    )


def _by_sequence(values: Tensor, rows: int) -> Tensor:
    """Values of tokens, row after row -> position after position, as hidden states have them."""
    return values.view(rows, -1).t().flatten()


def _ranks_order(bounds: list[int], cp_size: int) -> Tensor:
    """Where each position lies once the ranks' tokens, two chunks of each document, are laid one rank after another."""
    places = []
    for start, end in pairwise(bounds):
        part = (end - start) // (2 * cp_size)
        for number in range(2 * cp_size):
            rank, second = (number, 0) if number < cp_size else (2 * cp_size - 1 - number, 1)
            first = rank * (bounds[-1] // cp_size) + start // cp_size + second * part
            places.append(torch.arange(first, first + part))
    return torch.cat(places)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy: nothing waits for the device."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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
    """For each step but the first: the chunks before those of the step, and these."""
    firsts = [0, *accumulate(steps)]
    return [
        (slice(before, before + count), slice(here, here + count))
        for before, here, count in zip(firsts, firsts[1:], steps[1:], strict=False)
    ]


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, runs: Runs) -> Tensor:
    """The gated delta rule over the runs, in fp32; queries and keys are normalised here.

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


def _chunked(x: Tensor, runs: Runs) -> Tensor:
    """[tokens, ...] -> [chunks, CHUNK, ...], zeros where no token is."""
    room = x.new_zeros(sum(runs.steps) * CHUNK, *x.shape[1:])
    return room.index_copy(0, runs.places, x).unflatten(0, (-1, CHUNK))


def _later(device: torch.device) -> Tensor:
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)


def causal_conv(x: Tensor, weight: Tensor, runs: Runs) -> Tensor:
    """silu of each channel's convolution with the tokens before it in its run. x [tokens, channels], weight
    [channels, 1, kernel] -> the shape of x"""
    before = weight.shape[-1] - 1
    line = x.new_zeros(runs.line, x.shape[1]).index_copy(0, runs.spaced, x)
    mixed = F.conv1d(line.t().unsqueeze(0), weight.to(x.dtype), groups=x.shape[1])
    return F.silu(mixed.squeeze(0).t().index_select(0, runs.spaced - before))


class _Fused(NamedTuple):
    conv: Any
    rule: Any


@cache
def _fla() -> _Fused | None:
    """The kernels of flash-linear-attention, where it is installed."""
    if find_spec("fla") is None:
        return None
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    return _Fused(causal_conv1d, chunk_gated_delta_rule)


class GatedDeltaNet(MegatronModule):
    """A `self_attention` for layer specs: `in_proj` and `out_proj` are the spec's column and row parallel linears.

    Raises ValueError where TP x CP does not divide the key heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        in_proj,
        out_proj,
        pg_collection=None,
        name: str | None = None,
        **_,
    ):
        super().__init__(config=config)
        assert pg_collection is not None
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.key_dim, self.value_dim = not_none(config.linear_key_head_dim), not_none(config.linear_value_head_dim)
        key_heads, value_heads = not_none(config.linear_num_key_heads), not_none(config.linear_num_value_heads)
        kernel = not_none(config.linear_conv_kernel_dim)
        ranks = self.tp_group.size() * self.cp_group.size()
        if key_heads % ranks:
            raise ValueError(
                f"--tensor_model_parallel_size {self.tp_group.size()} x --context_parallel_size {self.cp_group.size()} "
                f"does not divide the {key_heads} key heads (linear_num_key_heads) of this model's gated delta nets"
            )
        self.groups = key_heads // self.tp_group.size()  # of this tensor-parallel rank
        self.heads = value_heads // key_heads  # of each group
        # A group's share of what is convolved, then its output gates, betas and decays.
        self.mixed = 2 * self.key_dim + self.heads * self.value_dim
        self.sections = (self.mixed, self.heads * self.value_dim, self.heads, self.heads)
        settings: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = in_proj(
            config.hidden_size,
            key_heads * sum(self.sections),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **settings,
        )
        self.out_proj = out_proj(
            value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **settings,
        )
        self.conv1d = _Weight(config, self.groups * self.mixed, 1, kernel, split=True)
        # The decay's rate is held in fp32, and so is the norm, as checkpoints have them.
        self.A_log = _parameter(config, self.groups * self.heads, fp32=True, split=True)
        self.dt_bias = _parameter(config, self.groups * self.heads, split=True)
        self.norm = _Weight(config, self.value_dim, fp32=True)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params, **_):
        """hidden_states [sequence (/ CP, and / TP under sequence parallelism), rows, hidden_size] -> (the same, bias)

        `packed_seq_params` has the micro batch's `runs`.
        """
        runs: Runs = packed_seq_params.runs
        assert runs is not None
        projected, _ = self.in_proj(hidden_states)
        length, rows, _ = projected.shape
        mixed, gate, beta, rate = projected.view(length, rows, self.groups, -1).split(self.sections, dim=-1)
        if self.cp_group.size() > 1:
            mixed, beta, rate = self._to_heads(torch.cat((mixed, beta, rate), dim=-1), runs).split(
                (self.mixed, self.heads, self.heads), dim=-1
            )
        output = self._mix(mixed, beta, rate, runs)  # [sequence, rows, groups / CP, heads, value dim]
        if self.cp_group.size() > 1:
            output = self._to_positions(output, runs)
        output, bias = self.out_proj(self._gated_norm(output, gate.reshape(output.shape)).view(length, rows, -1))
        return output, bias

    def _mix(self, mixed: Tensor, beta: Tensor, rate: Tensor, runs: Runs) -> Tensor:
        """mixed [sequence, rows, groups, channels], beta and rate [sequence, rows, groups, heads], of whole documents
        -> [sequence, rows, groups, heads, value dim]"""
        sequence, rows, groups, _ = mixed.shape
        weight, slowness, bias = (
            x.unflatten(0, (self.groups, -1)).narrow(0, self.cp_group.rank() * groups, groups)
            for x in (self.conv1d.weight, self.A_log, self.dt_bias)
        )
        beta = beta.sigmoid()
        decay = -slowness.float().exp() * F.softplus(rate.float() + bias.float())
        weight = weight.flatten(0, 1)
        fused = _fla() if mixed.is_cuda else None
        if fused is not None:
            output = self._fused(fused, mixed, weight, decay, beta, runs)
        else:
            # What is between is recomputed in the backward pass: it is many times the size of what goes in.
            output = checkpoint(
                self._plain,
                *(x.flatten(0, 1) for x in (mixed.flatten(2), decay, beta)),
                weight,
                runs,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        assert isinstance(output, Tensor)
        return output.view(sequence, rows, groups, self.heads, self.value_dim)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., groups * channels] -> query, key [..., groups, key dim], value [..., groups, heads, value dim]"""
        query, key, value = mixed.unflatten(-1, (-1, self.mixed)).split(
            (self.key_dim, self.key_dim, self.heads * self.value_dim), dim=-1
        )
        return query, key, value.unflatten(-1, (self.heads, self.value_dim))

    def _plain(self, mixed: Tensor, decay: Tensor, beta: Tensor, weight: Tensor, runs: Runs) -> Tensor:
        return delta_rule(*self._parts(causal_conv(mixed, weight, runs)), decay, beta, runs)

    def _fused(self, fused: _Fused, mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor, runs: Runs) -> Tensor:
        """As `_plain`, [sequence, rows, ...] instead of [tokens, ...]."""
        # fla has one row of documents: rows go one after another.
        sequence, rows = mixed.shape[:2]
        line = [x.transpose(0, 1).flatten(0, 1).unsqueeze(0) for x in (mixed.flatten(2), decay, beta)]
        convolved, _ = fused.conv(
            x=line[0].contiguous(),
            weight=weight.squeeze(1).to(mixed.dtype),
            bias=None,
            activation="silu",
            cu_seqlens=runs.ends,
        )
        query, key, value = self._parts(convolved)
        query, key = (x.repeat_interleave(self.heads, dim=-2) for x in (query, key))
        output, _ = fused.rule(
            query,
            key,
            value.flatten(2, 3).contiguous(),
            g=line[1].flatten(2).contiguous(),
            beta=line[2].flatten(2).contiguous(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=runs.ends,
        )
        return output.view(rows, sequence, -1).transpose(0, 1).contiguous()

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Ranks norm different heads by the same weight: its gradient is their sum.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self.tp_group)
        normed = F.rms_norm(x.float(), (self.value_dim,), weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).to(x.dtype)

    def _to_heads(self, x: Tensor, runs: Runs) -> Tensor:
        """[sequence / CP, rows, groups, channels] -> [sequence, rows, groups / CP, channels], in documents' order."""
        ranks = self.cp_group.size()
        x = x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()  # whom it goes to, first
        return all_to_all(self.cp_group, x).flatten(0, 1).index_select(0, runs.natural)

    def _to_positions(self, x: Tensor, runs: Runs) -> Tensor:
        """The way back: [sequence, rows, groups / CP, ...] -> [sequence / CP, rows, groups, ...]"""
        ranks = self.cp_group.size()
        x = x.index_select(0, runs.ranked).unflatten(0, (ranks, -1)).contiguous()
        return all_to_all(self.cp_group, x).movedim(0, 2).flatten(2, 3)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> ShardedStateDict:
        """Groups lie in order and every rank has as many: plain windows, in any layout."""
        split = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        own = make_sharded_tensors_for_checkpoint(
            {**split, "norm.weight": self.norm.weight}, prefix, dict.fromkeys(split, 0), sharded_offsets
        )
        for name, module in (("in_proj", self.in_proj), ("out_proj", self.out_proj)):
            own |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return own


class _Weight(torch.nn.Module):
    """A parameter named `weight`."""

    def __init__(self, config: TransformerConfig, *shape: int, fp32: bool = False, split: bool = False):
        super().__init__()
        self.weight = _parameter(config, *shape, fp32=fp32, split=split)


def _parameter(config: TransformerConfig, *shape: int, fp32: bool = False, split: bool = False) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    dtype = torch.float32 if fp32 else config.params_dtype
    parameter = torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    if split:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
