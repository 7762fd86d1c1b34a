"""Muon (https://kellerjordan.github.io/posts/muon): matrices move by their orthogonalized momentum, the rest by AdamW.

Matrices are those of the layers, as in megatron-core: of attention, MLPs, routers and each expert. Embeddings, the
output layer, heads, convolutions, norms and biases are AdamW's. The Newton-Schulz iteration is emerging-optimizers'.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge.model.model import Model
from ..options.groups import OptimizerOptions
from .adamw import AdamW


@dataclass(frozen=True)
class Matrix:
    """Matrix that Muon updates, or a stack of experts' matrices, and how it is split."""

    group: dist.ProcessGroup | None = None  # over which the matrix is split; None: this rank has all of it
    dim: int = 0  # dimension that is split, of a single matrix
    heads: tuple[int, ...] = ()  # rows of each query group's query, (gate,) key and value, orthogonalized separately


def find_matrices(model: Model, *, split_qkv: bool) -> dict[Tensor, Matrix]:
    """Return the trained parameters that Muon updates.

    split_qkv: orthogonalize queries, keys and values separately.
    """
    found = {}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and _is_matrix(name, parameter):
                found[parameter] = _matrix(model, name, parameter, split_qkv=split_qkv)
    return found


def _is_matrix(name: str, parameter: Tensor) -> bool:
    is_stack = parameter.ndim == 3 and ".experts." in name  # others of three dimensions are convolutions
    return ".layers." in f".{name}" and name.endswith("weight") and (parameter.ndim == 2 or is_stack)


def _matrix(model: Model, name: str, parameter: Any, *, split_qkv: bool) -> Matrix:
    config: Any = model.config
    group = model.groups.expt_tp if ".experts." in name else model.groups.tp
    dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    heads: tuple[int, ...] = ()
    if split_qkv and name.endswith(("self_attention.linear_qkv.weight", "self_attention.attention.linear_qkv.weight")):
        if any(layer.head_dim or layer.groups for layer in model.architecture.layers):
            raise ValueError(
                "--muon_split_qkv true: this model's layers have heads of different sizes. Set it to false"
            )
        queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
        heads = (queries,) * (1 + config.attention_output_gate) + (config.kv_channels,) * 2
        if len(parameter) % sum(heads):
            raise ValueError(
                f"--muon_split_qkv true: --tensor_model_parallel_size {group.size()} splits the model's "
                f"{config.num_query_groups} key-value heads. Set at most {config.num_query_groups}, or "
                "--muon_split_qkv false"
            )
    if dim < 0 or group.size() == 1:
        return Matrix(heads=heads)
    return Matrix(group, dim - (parameter.ndim - 2), heads)


class Muon(AdamW):
    """Muon on `matrices` (by the tensor that is updated, such as an fp32 master), AdamW on the other parameters.

    Its state is one `momentum_buffer` per matrix. As in AdamW, the host waits for the device nowhere.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        copies: dict[Tensor, Tensor],
        matrices: dict[Tensor, Matrix],
        options: OptimizerOptions,
        **defaults: Any,
    ):
        self._matrices, self._options = matrices, options
        super().__init__(groups, copies, **defaults)

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter in self._matrices:
            return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
        return super()._initial_state(parameter)

    def _step_group(self, number: int, group: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        super()._step_group(number, group, [p for p in parameters if p not in self._matrices])
        for parameter in parameters:
            if parameter in self._matrices:
                self._step_matrix(parameter, group)

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a matrix, in the order of operations of emerging-optimizers' Muon."""
        options, momentum, gradient = self._options, self.state[parameter]["momentum_buffer"], parameter.grad
        assert gradient is not None
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:  # the momentum then stays
            gradient = torch.where(self.found_inf.bool(), momentum, gradient)
        momentum.lerp_(gradient, 1 - options.muon_momentum)
        direction = gradient.lerp(momentum, options.muon_momentum) if options.muon_use_nesterov else momentum
        update = orthogonalize(direction, self._matrices[parameter], options)
        rate = group["lr"]
        updated = parameter.add(parameter, alpha=-group["weight_decay"] * rate).add_(update, alpha=-rate)
        if self.found_inf is not None:
            updated = torch.where(self.found_inf.bool(), parameter, updated)
        parameter.copy_(updated)
        if (copy := self.copies.get(parameter)) is not None:
            copy.copy_(parameter)


def orthogonalize(direction: Tensor, matrix: Matrix, options: OptimizerOptions) -> Tensor:
    """Return the scaled, nearly orthogonal matrix of a direction: fp32 [rows, columns] or [experts, rows, columns].

    Every rank of the matrix's group calls this.
    """
    from emerging_optimizers.utils import fp32_matmul_precision

    with fp32_matmul_precision(options.muon_fp32_matmul_prec):
        if not matrix.heads:
            return _orthogonalize_part(direction, matrix, options)
        columns = direction.shape[1]
        groups = direction.view(-1, sum(matrix.heads), columns).split(matrix.heads, dim=1)
        parts = [_orthogonalize_part(part.reshape(-1, columns), matrix, options) for part in groups]
        shaped = [part.view(len(direction) // sum(matrix.heads), -1, columns) for part in parts]
        return torch.cat(shaped, dim=1).view_as(direction)


def _orthogonalize_part(direction: Tensor, matrix: Matrix, options: OptimizerOptions) -> Tensor:
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz, newton_schulz_tp

    steps, coefficients, mode = options.muon_num_ns_steps, options.muon_coefficient_type, options.muon_tp_mode
    group = None if mode == "blockwise" else matrix.group
    shape = list(direction.shape[-2:])
    if group is None:
        result = newton_schulz(direction, steps, coefficients)
    else:
        shape[matrix.dim] *= group.size()
        if direction.ndim == 2:
            result = newton_schulz_tp(direction, steps, coefficients, group, matrix.dim, mode)  # pyright: ignore
        elif mode == "duplicated":
            dim = matrix.dim + 1
            parts = [torch.empty_like(direction) for _ in range(group.size())]
            dist.all_gather(parts, direction.contiguous(), group)
            result = newton_schulz(torch.cat(parts, dim), steps, coefficients).chunk(group.size(), dim)[group.rank()]
        else:  # normalizes by the norm of what it gets, which must be one matrix
            result = torch.stack(
                [newton_schulz_tp(each, steps, coefficients, group, matrix.dim, mode) for each in direction]  # pyright: ignore
            )
    return result * get_muon_scale_factor(*shape, mode=options.muon_scale_mode) * options.muon_extra_scale_factor
