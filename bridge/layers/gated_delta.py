"""Gated delta nets, as Qwen3-Next and Qwen3.5 have them: a `self_attention` for layer specs.

Heads are kept by groups: a key head with its query head, value heads, gates, decays. So tensor parallelism cuts all
tensors into equal windows, and so does context parallelism, which trades positions for heads inside the layer. Where
`fla` is installed and a GPU is there, its kernels do what delta_rule.py does in plain PyTorch.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .delta_rule import DeltaLayout, causal_conv, delta_rule


class _Fused(NamedTuple):
    conv: Callable
    rule: Callable


@cache
def _fla() -> _Fused | None:
    """Return the kernels of flash-linear-attention, where it is installed."""
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
        runs: DeltaLayout = packed_seq_params.runs
        assert runs is not None
        projected, _ = self.in_proj(hidden_states)
        length, rows, _ = projected.shape
        mixed, gate, beta, step = projected.view(length, rows, self.groups, -1).split(self.sections, dim=-1)
        if self.cp_group.size() > 1:
            mixed, beta, step = self._to_heads(torch.cat((mixed, beta, step), dim=-1), runs).split(
                (self.mixed, self.heads, self.heads), dim=-1
            )
        output = self._mix(mixed, beta, step, runs)  # [sequence, rows, groups / CP, heads, value dim]
        if self.cp_group.size() > 1:
            output = self._to_positions(output, runs)
        output, bias = self.out_proj(self._gated_norm(output, gate.reshape(output.shape)).view(length, rows, -1))
        return output, bias

    def _mix(self, mixed: Tensor, beta: Tensor, step: Tensor, runs: DeltaLayout) -> Tensor:
        """mixed [sequence, rows, groups, channels], beta and step [sequence, rows, groups, heads], of whole documents
        -> [sequence, rows, groups, heads, value dim]"""
        sequence, rows, groups, _ = mixed.shape
        weight, log_rate, bias = (
            x.unflatten(0, (self.groups, -1)).narrow(0, self.cp_group.rank() * groups, groups)
            for x in (self.conv1d(), self.A_log, self.dt_bias)
        )
        beta = beta.sigmoid()
        decay = -log_rate.float().exp() * F.softplus(step.float() + bias.float())
        weight = weight.flatten(0, 1)
        # fla's kernels are for half precision, and add up in no fixed order.
        fits = mixed.is_cuda and mixed.dtype != torch.float32 and not self.config.deterministic_mode
        if fits and (fused := _fla()) is not None:
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

    def _plain(self, mixed: Tensor, decay: Tensor, beta: Tensor, weight: Tensor, runs: DeltaLayout) -> Tensor:
        return delta_rule(*self._parts(causal_conv(mixed, weight, runs)), decay, beta, runs)

    def _fused(
        self, fused: _Fused, mixed: Tensor, weight: Tensor, decay: Tensor, beta: Tensor, runs: DeltaLayout
    ) -> Tensor:
        """Compute `_plain` by fla's kernels, on [sequence, rows, ...] instead of [tokens, ...]."""
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
        weight = copy_to_tensor_model_parallel_region(self.norm(), group=self.tp_group)
        normed = F.rms_norm(x.float(), (self.value_dim,), weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).to(x.dtype)

    def _to_heads(self, x: Tensor, runs: DeltaLayout) -> Tensor:
        """Exchange [sequence / CP, rows, groups, ...] for [sequence, rows, groups / CP, ...], in document order."""
        ranks = self.cp_group.size()
        x = x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()  # whom it goes to, first
        return all_to_all(self.cp_group, x).flatten(0, 1).index_select(0, not_none(runs.natural))

    def _to_positions(self, x: Tensor, runs: DeltaLayout) -> Tensor:
        """Exchange [sequence, rows, groups / CP, ...] for [sequence / CP, rows, groups, ...]."""
        ranks = self.cp_group.size()
        x = x.index_select(0, not_none(runs.ranked)).unflatten(0, (ranks, -1)).contiguous()
        return all_to_all(self.cp_group, x).movedim(0, 2).flatten(2, 3)


class _Weight(torch.nn.Module):
    """A parameter named `weight`, got by a call: an overlapped gathering of parameters waits in a module's hooks."""

    def __init__(self, config: TransformerConfig, *shape: int, fp32: bool = False, split: bool = False):
        super().__init__()
        self.weight = _parameter(config, *shape, fp32=fp32, split=split)

    def forward(self) -> Tensor:
        return self.weight


def _parameter(config: TransformerConfig, *shape: int, fp32: bool = False, split: bool = False) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    dtype = torch.float32 if fp32 else config.params_dtype
    parameter = torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    if split:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
