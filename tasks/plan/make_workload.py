"""Model, batch and tuner of a run by config.json and options, as far as memory and time depend on them."""

import torch
from megatron.core.transformer import TransformerConfig

from ...bridge import runtime
from ...bridge.families import family_of
from ...bridge.kernels import flash_attention
from ...bridge.lora.adapter_mapping import DEFAULT_DROPOUT
from ...bridge.mapping.architecture import HfConfig, Layer
from ...bridge.model.config import transformer_config
from ...bridge.model.kernel_selection import choose_kernels, prefers_gathered_keys
from ...bridge.options import BuildOptions
from ..options import PlanOptions
from .parameters import count_parameters
from .task import TaskWork, task_of
from .tower import BYTES, IMAGE_SHARE, TowerWork
from .workload import Fp8, Workload

TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def make_workload(
    hf_config: HfConfig, transformers_config: object, options: PlanOptions, task: TaskWork | None = None
) -> Workload:
    """Return the model's sizes and the batch. Raises ValueError for a model that cannot be planned.

    task: default: that of `options`
    """
    task = task or task_of(options)
    runtime.enable()
    family, depths = family_of(hf_config), options.mtp_num_layers or 0
    architecture = family.describe(hf_config)
    if depths:
        architecture = family.add_prediction(architecture, hf_config, depths)
    build = BuildOptions()
    config = transformer_config(
        architecture, build, choose_kernels(build, architecture, torch.bfloat16), torch.bfloat16
    )
    tower = _tower(hf_config, options)
    try:
        parameters = count_parameters(hf_config, transformers_config, depths)
    except ValueError as error:
        raise ValueError(f"--model {options.model}: cannot be planned: {error}") from None
    parameters = task.of_parameters(parameters, config.hidden_size)
    has_adapters, dropout = options.tuner_type == "lora", options.lora_dropout
    if dropout is None:
        dropout = 0.0 if config.num_moe_experts else DEFAULT_DROPOUT
    return Workload(
        config,
        parameters,
        architecture.vocab_size if task.scores_tokens else 0,
        options.max_length,
        options.document_length or options.max_length,
        options.global_batch_size,
        options.lora_rank if has_adapters else None,
        dropout if has_adapters else 0.0,
        4 if options.accumulate_allreduce_grads_in_fp32 else BYTES,
        sum(TYPE_BYTES[name] for name in (options.main_params_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype)),
        options.optimizer_offload_fraction,
        _fp8(config, options),
        tower,
        prefers_gathered_keys(options.cp_comm_type, architecture)
        and (options.cp_comm_type is not None or flash_attention.is_installed()),
        task=task,
    )


def _fp8(config: TransformerConfig, options: PlanOptions) -> Fp8 | None:
    if options.fp8_format is None:
        return None
    layers: tuple[Layer, ...] = config.architecture.layers  # type: ignore[attr-defined]
    is_usual = all(layer.mixer == "attention" and layer.has_mlp for layer in layers)
    if config.num_moe_experts or config.multi_latent_attention or not is_usual:
        raise ValueError("--fp8_format is planned for dense models with usual attention alone")
    return Fp8(options.fp8_param_gather)


def _tower(hf_config: HfConfig, options: PlanOptions) -> TowerWork | None:
    """Return the vision tower of packs with images; None without them."""
    family = family_of(hf_config)
    vision = family.describe(hf_config, vision=True).vision if family.has_tower(hf_config) else None
    share = IMAGE_SHARE if options.image_share is None else options.image_share
    if vision is None or not share:
        return None
    return TowerWork(
        vision,
        not options.freeze_vit,
        not options.freeze_aligner,
        share,
        options.image_tokens,
        options.accumulate_allreduce_grads_in_fp32,
        options.vit_gradient_checkpointing,
    )
