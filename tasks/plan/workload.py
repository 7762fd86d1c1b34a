"""Model, batch and tuner of a run by config.json and options, as far as memory and time depend on them."""

import torch

from ...bridge import runtime
from ...bridge.families import family_of
from ...bridge.lora.adapter_mapping import DEFAULT_DROPOUT
from ...bridge.mapping.param_mapping import HfConfig
from ...bridge.model.config import transformer_config
from ...bridge.model.kernel_selection import choose_kernels
from ...bridge.options import BuildOptions
from ..options import PlanOptions
from .memory import Workload
from .parameters import count_parameters


def make_workload(hf_config: HfConfig, transformers_config: object, options: PlanOptions) -> Workload:
    """Return the model's sizes and the batch. Raises ValueError for a model that cannot be planned."""
    runtime.enable()
    architecture = family_of(hf_config).describe(hf_config)
    build = BuildOptions()
    config = transformer_config(
        architecture, build, choose_kernels(build, architecture, torch.bfloat16), torch.bfloat16
    )
    try:
        parameters = count_parameters(hf_config, transformers_config)
    except ValueError as error:
        raise ValueError(f"--model {options.model}: cannot be planned: {error}") from None
    has_adapters, dropout = options.tuner_type == "lora", options.lora_dropout
    if dropout is None:
        dropout = 0.0 if config.num_moe_experts else DEFAULT_DROPOUT
    return Workload(
        config,
        parameters,
        architecture.vocab_size,
        options.max_length,
        options.document_length or options.max_length,
        options.global_batch_size,
        options.lora_rank if has_adapters else None,
        dropout if has_adapters else 0.0,
    )
