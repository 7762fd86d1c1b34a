"""Gated delta nets of Qwen3-Next and Qwen3.5: a `self_attention` for layer specs.

A group is a key head with its query head, value heads, gates and decays. Tensors are ordered by groups, so that tensor
parallelism splits them into equal windows. So does context parallelism, which exchanges positions for heads inside the
layer. On a GPU with `fla` installed, its kernels replace the plain PyTorch of delta_rule.py.
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


class _FlaKernels(NamedTuple):
    conv: Callable
    rule: Callable


def delta_kernels(dtype: torch.dtype, *, on_gpu: bool, deterministic: bool) -> str:
    """Return the kernels of gated delta nets: "fla", "torch", or "missing": torch, since fla is not installed."""
    # fla's kernels support half precision only, and are not deterministic.
    if not on_gpu or dtype == torch.float32 or deterministic:
        return "torch"
    return "fla" if find_spec("fla") else "missing"


@cache
def _fla_kernels() -> _FlaKernels:
    """Return the kernels of flash-linear-attention."""
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    return _FlaKernels(causal_conv1d, chunk_gated_delta_rule)


class GatedDeltaNet(MegatronModule):
    """Gated delta net. `in_proj` and `out_proj` are the spec's column- and row-parallel linears.

    Raises ValueError if TP x CP does not divide the key heads.
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
        self.groups = key_heads // self.tp_group.size()  # on this tensor-parallel rank
        self.heads = value_heads // key_heads  # per group
        # Channels per group: the convolution's, then the output gates, betas and decays.
        self.conv_dim = 2 * self.key_dim + self.heads * self.value_dim
        self.sections = (self.conv_dim, self.heads * self.value_dim, self.heads, self.heads)
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
        self.conv1d = _Weight(config, self.groups * self.conv_dim, 1, kernel, split=True)
        # A_log and the norm are in fp32, as in checkpoints.
        self.A_log = _parameter(config, self.groups * self.heads, fp32=True, split=True)
        self.dt_bias = _parameter(config, self.groups * self.heads, split=True)
        self.norm = _Weight(config, self.value_dim, fp32=True)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params, **_):
        """hidden_states [sequence (/ CP, and / TP under sequence parallelism), rows, hidden_size] -> (the same, bias)

        `packed_seq_params` has the micro batch's `delta_layout`.
        """
        layout: DeltaLayout = packed_seq_params.delta_layout
        assert layout is not None
        projected, _ = self.in_proj(hidden_states)
        length, rows, _ = projected.shape
        qkv, gate, beta, dt = projected.view(length, rows, self.groups, -1).split(self.sections, dim=-1)
        if self.cp_group.size() > 1:
            qkv, beta, dt = self._to_heads(torch.cat((qkv, beta, dt), dim=-1), layout).split(
                (self.conv_dim, self.heads, self.heads), dim=-1
            )
        output = self._delta_net(qkv, beta, dt, layout)  # [sequence, rows, groups / CP, heads, value dim]
        if self.cp_group.size() > 1:
            output = self._to_positions(output, layout)
        output, bias = self.out_proj(self._gated_norm(output, gate.reshape(output.shape)).view(length, rows, -1))
        return output, bias

    def _delta_net(self, qkv: Tensor, beta: Tensor, dt: Tensor, layout: DeltaLayout) -> Tensor:
        """qkv [sequence, rows, groups, channels], beta and dt [sequence, rows, groups, heads], of full documents
        -> [sequence, rows, groups, heads, value dim]"""
        sequence, rows, groups, _ = qkv.shape
        conv_weight, a_log, dt_bias = (
            x.unflatten(0, (self.groups, -1)).narrow(0, self.cp_group.rank() * groups, groups)
            for x in (self.conv1d(), self.A_log, self.dt_bias)
        )
        beta = beta.sigmoid()
        decay = -a_log.float().exp() * F.softplus(dt.float() + dt_bias.float())
        conv_weight = conv_weight.flatten(0, 1)
        if delta_kernels(qkv.dtype, on_gpu=qkv.is_cuda, deterministic=self.config.deterministic_mode) == "fla":
            output = self._run_fla(_fla_kernels(), qkv, conv_weight, decay, beta, layout)
        else:
            # Recomputed in the backward pass: the intermediate tensors are many times larger than the inputs.
            output = checkpoint(
                self._run_torch,
                *(x.flatten(0, 1) for x in (qkv.flatten(2), decay, beta)),
                conv_weight,
                layout,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        assert isinstance(output, Tensor)
        return output.view(sequence, rows, groups, self.heads, self.value_dim)

    def _split_qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., groups * channels] -> query, key [..., groups, key dim], value [..., groups, heads, value dim]"""
        query, key, value = qkv.unflatten(-1, (-1, self.conv_dim)).split(
            (self.key_dim, self.key_dim, self.heads * self.value_dim), dim=-1
        )
        return query, key, value.unflatten(-1, (self.heads, self.value_dim))

    def _run_torch(self, qkv: Tensor, decay: Tensor, beta: Tensor, conv_weight: Tensor, layout: DeltaLayout) -> Tensor:
        return delta_rule(*self._split_qkv(causal_conv(qkv, conv_weight, layout)), decay, beta, layout)

    def _run_fla(
        self, kernels: _FlaKernels, qkv: Tensor, conv_weight: Tensor, decay: Tensor, beta: Tensor, layout: DeltaLayout
    ) -> Tensor:
        """Compute `_run_torch` with fla's kernels, on [sequence, rows, ...] instead of [tokens, ...]."""
        # fla takes one row of documents, so the rows are concatenated.
        sequence, rows = qkv.shape[:2]
        packed = [x.transpose(0, 1).flatten(0, 1).unsqueeze(0) for x in (qkv.flatten(2), decay, beta)]
        convolved, _ = kernels.conv(
            x=packed[0].contiguous(),
            weight=conv_weight.squeeze(1).to(qkv.dtype),
            bias=None,
            activation="silu",
            cu_seqlens=layout.cu_seqlens,
        )
        query, key, value = self._split_qkv(convolved)
        query, key = (x.repeat_interleave(self.heads, dim=-2) for x in (query, key))
        output, _ = kernels.rule(
            query,
            key,
            value.flatten(2, 3).contiguous(),
            g=packed[1].flatten(2).contiguous(),
            beta=packed[2].flatten(2).contiguous(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=layout.cu_seqlens,
        )
        return output.view(rows, sequence, -1).transpose(0, 1).contiguous()

    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        # Ranks normalize different heads by the same weight, so its gradient is summed over them.
        weight = copy_to_tensor_model_parallel_region(self.norm(), group=self.tp_group)
        normed = F.rms_norm(x.float(), (self.value_dim,), weight.float(), self.config.layernorm_epsilon)
        return (normed * F.silu(gate.float())).to(x.dtype)

    def _to_heads(self, x: Tensor, layout: DeltaLayout) -> Tensor:
        """Exchange [sequence / CP, rows, groups, ...] for [sequence, rows, groups / CP, ...], in document order."""
        ranks = self.cp_group.size()
        x = x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()  # destination rank first
        return all_to_all(self.cp_group, x).flatten(0, 1).index_select(0, not_none(layout.document_order))

    def _to_positions(self, x: Tensor, layout: DeltaLayout) -> Tensor:
        """Exchange [sequence, rows, groups / CP, ...] for [sequence / CP, rows, groups, ...]."""
        ranks = self.cp_group.size()
        x = x.index_select(0, not_none(layout.rank_order)).unflatten(0, (ranks, -1)).contiguous()
        return all_to_all(self.cp_group, x).movedim(0, 2).flatten(2, 3)


class _Weight(torch.nn.Module):
    """A parameter named `weight`, returned by `forward`: module hooks wait for an overlapped parameter all-gather."""

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
