"""Experts in plain PyTorch: one stacked matrix for all the experts of a rank, and grouped products over it."""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class _StackedLinear(torch.nn.Module):
    """`weight` [experts, out, in]; the split over expert tensor parallelism lies on `split_dim`."""

    def __init__(
        self, config: TransformerConfig, experts: int, inputs: int, outputs: int, split_dim: int, shared: bool
    ):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(experts, outputs, inputs, dtype=config.params_dtype, device=device)
        )
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split_dim, stride=1)
        self.weight.allreduce = shared  # type: ignore[attr-defined]  # False: reduced over expert data parallelism

    def forward(self, x: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        """x [rows, in], sorted by expert; `ends` int32 [experts]: where each expert's rows end -> [rows, out]"""
        if counts is None:
            return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        parts = zip(x.split(counts), self.weight, strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in parts])


class GroupedExperts(MegatronModule):
    """The experts of one rank. The dispatcher has already sent every row to its expert's rank and sorted the rows."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection=None, name=None):
        super().__init__(config=config)
        assert pg_collection is not None
        assert config.moe_ffn_hidden_size is not None
        if config.add_bias_linear:
            raise ValueError("experts with biases need --transformer_impl transformer_engine")
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        # As ColumnParallelLinear decides it: these weights are not replicated like the dense ones.
        shared = not (pg_collection.ep.size() > 1 or pg_collection.expt_tp.size() != pg_collection.tp.size())
        gates = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = _StackedLinear(config, num_local_experts, config.hidden_size, gates * width, 1, shared)
        self.linear_fc2 = _StackedLinear(config, num_local_experts, width, config.hidden_size, 2, shared)
        self.recompute_activation = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or []
        )

    def _activate(self, x: Tensor, probs: Tensor) -> Tensor:
        if self.config.gated_linear_unit:
            gate, up = x.chunk(2, dim=-1)
            x = self.config.activation_func(gate) * up
        else:
            x = self.config.activation_func(x)
        return (x * probs.unsqueeze(-1)).to(x.dtype)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """rows [rows, hidden_size], sorted by expert; tokens_per_expert [experts]; probs [rows] -> the shape of rows"""
        # One grouped product on the GPU in bf16; a loop over the experts elsewhere.
        grouped = self.config.moe_grouped_gemm and rows.is_cuda and rows.dtype == torch.bfloat16
        counts = None if grouped else tokens_per_expert.tolist()
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        inner = self.linear_fc1(rows, ends, counts)
        if self.recompute_activation:
            checkpoint = tensor_parallel.CheckpointWithoutOutput()
            inner = checkpoint.checkpoint(self._activate, inner, probs)
            output = self.linear_fc2(inner, ends, counts)
            checkpoint.discard_output_and_register_recompute(output)
        else:
            output = self.linear_fc2(self._activate(inner, probs), ends, counts)
        return output, None

    def backward_dw(self) -> None:
        """Nothing is delayed: weight gradients come with the backward pass."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> ShardedStateDict:
        raise RuntimeError("distributed checkpoints of grouped experts are not supported in this version")
