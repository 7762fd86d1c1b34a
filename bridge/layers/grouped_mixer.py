"""Base of token mixers whose heads or channels are in groups: delta rules, Mamba-2, lightning attention, convolutions.

Tensors are ordered by groups, so that tensor parallelism splits them into equal windows. So does context parallelism,
which exchanges positions for heads inside the layer: a rank then has whole documents, of a part of the heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .delta_rule import DeltaLayout
from .fla_check import is_right
from .fla_kernels import FlaKernels, fla_kernels, mixer_kernels
from .linear import column_linear


class Groups(NamedTuple):
    """Groups of a mixer, as its projections need them.

    number: of which `noun` tells the user
    sections: channels of a group: of the convolution, of the output and its gate, and of further inputs of `_mix`
    projected: those of them that `in_proj` gives, by default all; the others come from a layer's own `_project`
    """

    number: int
    noun: str
    sections: tuple[int, ...]
    projected: tuple[int, ...] | None = None


class GroupedMixer(MegatronModule, ABC):
    """Projection, short convolution and state of each group, gated norm, projection: a `self_attention` for specs.

    A layer names its `_groups`, its further modules, and how it mixes tokens: `_run_torch`, and `_run_fla` on GPUs.
    in_proj and out_proj: the spec's column- and row-parallel linears; column: that of further linears
    Raises ValueError if TP x CP does not divide the groups.
    """

    token_inputs: ClassVar[int] = 1  # number of `_run_torch`'s inputs with a row for each token; they come first
    has_mamba_kernel: ClassVar[bool] = False  # in mamba_ssm
    is_recomputed: ClassVar[bool] = True  # plain PyTorch, whose intermediate tensors are many times larger than inputs

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        in_proj,
        out_proj,
        column=None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        **_,
    ):
        super().__init__(config=config)
        assert pg_collection is not None
        self.layer_number, self.column = layer_number, column
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        number, noun, self.sections, projected = self._groups(config)
        ranks = self.tp_group.size() * self.cp_group.size()
        if number % ranks:
            raise ValueError(
                f"--tensor_model_parallel_size {self.tp_group.size()} x --context_parallel_size {self.cp_group.size()} "
                f"does not divide the {number} {noun}"
            )
        self.groups = number // self.tp_group.size()  # on this tensor-parallel rank
        outputs = number * sum(projected or self.sections)
        self.in_proj = column_linear(
            in_proj, config, config.hidden_size, outputs, self.tp_group, tp_comm_buffer_name="fc1"
        )
        self.out_proj = out_proj(
            number * self.sections[1],
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
            tp_comm_buffer_name="fc2",
        )
        self._add_modules(config)

    @abstractmethod
    def _groups(self, config: TransformerConfig) -> Groups:
        """Return the groups, and keep the sizes that the layer needs."""

    @abstractmethod
    def _add_modules(self, config: TransformerConfig) -> None:
        """Add the layer's modules and parameters beside its projections; those split by TP are for `self.groups`."""

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

    def _run(self, x: Tensor, *inputs: Any) -> Tensor:
        """Return the output of `_run_fla` or of `_run_torch` for x [tokens, ...]: [tokens, ...].

        The last input is the layout.
        """
        if self._kernels(x) == "fla":
            run, (*arguments, layout) = partial(self._run_fla, fla_kernels()), (x, *inputs)
            rows, parameters = arguments[: self.token_inputs], arguments[self.token_inputs :]
            if is_right(type(self).__name__, run, self._run_torch, rows, parameters, layout):
                return run(x, *inputs)
        return self._recompute(self._run_torch, x, *inputs) if self.is_recomputed else self._run_torch(x, *inputs)

    def _kernels(self, x: Tensor) -> str:
        return mixer_kernels(
            x.dtype,
            on_gpu=x.is_cuda,
            deterministic=self.config.deterministic_mode,
            has_mamba_kernel=self.has_mamba_kernel,
        )

    @abstractmethod
    def _run_torch(self, *inputs: Any) -> Tensor:
        """Mix the tokens of full documents in plain PyTorch: inputs [sequence * rows, ...]; the last is the layout."""

    @abstractmethod
    def _run_fla(self, kernels: FlaKernels, *inputs: Any) -> Tensor:
        """Compute `_run_torch` with flash-linear-attention's kernels."""

    def _recompute(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Return function(*arguments), which the backward pass computes again."""
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
