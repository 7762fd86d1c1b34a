"""Norms in plain PyTorch, for layer specs without Transformer Engine."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm:
    """RMSNorm or LayerNorm, as `config.normalization` says, with the mark that sequence parallelism needs.

    megatron-core's own torch norm refuses sequence parallelism. All that it asks of a norm is the mark on its
    parameters: each rank sees its own tokens, so their gradients are summed over the tensor-parallel ranks.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_) -> torch.nn.Module:
        norm = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        module = norm(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module
