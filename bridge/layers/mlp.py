"""MLPs that recompute their activations, and activations that are modules."""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import CheckpointWithoutOutput, copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module
from torch import Tensor

from ..kernels import usable


class RecomputedMLP(MLP):
    """MLP of which the backward pass computes the first product and the activation again, `--recompute_modules mlp`.

    It keeps the input alone, as a checkpoint of the MLP would, but does not repeat the second product.
    """

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor | None]:
        checkpoint = CheckpointWithoutOutput()
        output, bias = apply_module(self.linear_fc2)(checkpoint.checkpoint(self._activations, hidden_states))
        checkpoint.discard_output_and_register_recompute(output)
        return output, bias

    def _activations(self, hidden_states: Tensor) -> Tensor:
        x, bias = apply_module(self.linear_fc1)(hidden_states)
        if bias is not None:
            x = x + bias
        if self.config.gated_linear_unit and not self.config.use_te_activation_func:
            gate, up = x.chunk(2, dim=-1)
            return self.activation_func(gate) * up
        return self.activation_func(x)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, in place of the Transformer Engine activation module of megatron-core's MLP.

    x [..., 2 * width], gates first -> [..., width]
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if usable(x):
            from ..kernels.swiglu import swiglu

            return swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class XIELU(torch.nn.Module):
    """xIELU, with two learned numbers per layer (https://arxiv.org/abs/2411.13010): x [..., width] -> the same shape.

    alpha_p x^2 + beta x where x > 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x, of positive alphas.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        empty = partial(torch.empty, 1, dtype=config.params_dtype, device=device)
        # The alphas are stored as numbers whose softplus counts, alpha_n less beta.
        self.alpha_p, self.alpha_n = torch.nn.Parameter(empty()), torch.nn.Parameter(empty())
        self.register_buffer("beta", empty())
        self.register_buffer("eps", empty())

    def forward(self, x: Tensor) -> Tensor:
        # Each tensor-parallel rank has a part of the width, and the same two numbers: their gradients are summed.
        group = parallel_state.get_tensor_model_parallel_group()
        alphas = copy_to_tensor_model_parallel_region(torch.cat((self.alpha_p, self.alpha_n)).float(), group=group)
        alphas = F.softplus(alphas) + F.pad(self.beta.float(), (1, 0))
        coefficients = torch.cat((alphas, self.beta.float(), self.eps.float()))
        if usable(x):
            from ..kernels.xielu import xielu

            return xielu(x, coefficients)
        positive, negative, linear, limit = (number.to(x.dtype) for number in coefficients)
        bent = torch.expm1(torch.minimum(x, limit)) - x
        return torch.where(x > 0, positive * x * x, negative * bent) + linear * x
