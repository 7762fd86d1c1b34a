"""Base of token mixers whose heads or channels are in groups: delta rules, Mamba-2, lightning attention, convolutions.

Tensors are ordered by groups, so that tensor parallelism splits them into equal windows. So does context parallelism,
which exchanges positions for heads inside the layer: a rank then has whole documents, of a part of the heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .delta_rule import DeltaLayout


class GroupedMixer(MegatronModule, ABC):
    """Projection, short convolution and state of each group, gated norm, projection: a `self_attention` for specs.

    in_proj and out_proj: the spec's column- and row-parallel linears
    groups: their number, of which `noun` tells the user
    sections: channels of a group: of the convolution, of the output and its gate, and of further inputs of `_mix`
    projected: those of them that `in_proj` gives, by default all; the others come from a layer's own `_project`
    Raises ValueError if TP x CP does not divide the groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        in_proj,
        out_proj,
        pg_collection,
        *,
        groups: int,
        noun: str,
        sections: Sequence[int],
        projected: Sequence[int] | None = None,
    ):
        super().__init__(config=config)
        assert pg_collection is not None
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size() * self.cp_group.size()
        if groups % ranks:
            raise ValueError(
                f"--tensor_model_parallel_size {self.tp_group.size()} x --context_parallel_size {self.cp_group.size()} "
                f"does not divide the {groups} {noun}"
            )
        self.groups = groups // self.tp_group.size()  # on this tensor-parallel rank
        self.sections = tuple(sections)
        settings: dict[str, Any] = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = in_proj(
            config.hidden_size,
            groups * sum(projected or sections),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **settings,
        )
        self.out_proj = out_proj(
            groups * sections[1],
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **settings,
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params, **_):
        """hidden_states [sequence (/ CP, and / TP under sequence parallelism), rows, hidden_size] -> (the same, bias)

        `packed_seq_params` has the micro batch's `delta_layout`.
        """
        layout: DeltaLayout = packed_seq_params.delta_layout
        assert layout is not None
        convolved, gate, *inputs = self._project(hidden_states)
        length, rows = convolved.shape[:2]
        if self.cp_group.size() > 1:
            sizes = self.sections[:1] + self.sections[2:]
            exchanged = self._to_heads(torch.cat((convolved, *inputs), dim=-1), layout)
            convolved, *inputs = exchanged.split(sizes, dim=-1)
        output = self._mix(convolved, *inputs, layout)  # [sequence, rows, groups / CP, heads, value dim]
        if self.cp_group.size() > 1:
            output = self._to_positions(output, layout)
        output, bias = self.out_proj(self._gated_norm(output, gate.reshape(output.shape)).view(length, rows, -1))
        return output, bias

    def _project(self, hidden_states: Tensor) -> Sequence[Tensor]:
        """Return the `sections`, each [sequence / CP, rows, groups, channels]."""
        projected, _ = self.in_proj(hidden_states)
        return projected.unflatten(-1, (self.groups, -1)).split(self.sections, dim=-1)

    @abstractmethod
    def _mix(self, *inputs: Any) -> Tensor:
        """Mix the tokens of full documents: inputs [sequence, rows, groups, ...] of each section but the gate's.

        Returns [sequence, rows, groups, heads, value dim]. The last input is the layout.
        """

    @abstractmethod
    def _gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm the output and multiply it by its gate: both [sequence, rows, groups, heads, value dim]."""

    def _recompute(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return function(*arguments), which the backward pass computes again.

        The intermediate tensors are many times larger than the inputs.
        """
        output = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(output, Tensor)
        return output

    def _local(self, parameter: Tensor, groups: int) -> Tensor:
        """Return the part of a parameter for the groups in `_mix`: [..] -> [groups, ...]."""
        return parameter.unflatten(0, (self.groups, -1)).narrow(0, self.cp_group.rank() * groups, groups)

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


class MixerWeight(torch.nn.Module):
    """A parameter named `weight`, returned by `forward`: module hooks wait for an overlapped parameter all-gather.

    bias: there is a `bias` too, as long as the weight's first dimension.
    """

    def __init__(
        self, config: TransformerConfig, *shape: int, fp32: bool = False, split: bool = False, bias: bool = False
    ):
        super().__init__()
        self.weight = make_parameter(config, *shape, fp32=fp32, split=split)
        self.bias = make_parameter(config, shape[0], fp32=fp32, split=split) if bias else None

    def forward(self) -> Tensor:
        return self.weight


def make_parameter(
    config: TransformerConfig, *shape: int, fp32: bool = False, split: bool = False, dim: int = 0
) -> torch.nn.Parameter:
    """Return an empty parameter on this rank's device; split: a part of it along `dim`, by tensor parallelism."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    dtype = torch.float32 if fp32 else config.params_dtype
    parameter = torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    if split:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    return parameter
