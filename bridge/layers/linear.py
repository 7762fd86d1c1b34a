"""Linear layers that attention and token mixers share."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


def column_linear(
    builder: Any, config: TransformerConfig, inputs: int, outputs: int, tp_group: ProcessGroup, **options: Any
) -> Any:
    """Return a column-parallel linear without bias, made by the spec's `builder`, whose outputs stay split."""
    return builder(
        inputs,
        outputs,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=tp_group,
        **options,
    )


class ReplicatedLinear(torch.nn.Module):
    """Linear layer replicated on all tensor-parallel ranks: `weight` [outputs, inputs]."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        # With sequence parallelism each rank has different tokens, so the gradients are summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
