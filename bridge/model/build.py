"""Model builder: this rank's chunks of a megatron-core GPTModel, from a raw config.json and the options."""

import logging
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .. import patches, runtime
from ..families import family_of
from ..layers.activation_offload import offload_activations
from ..layers.embedding import AccumulatingEmbedding
from ..layers.layer_inputs import LayerInputs
from ..layers.moe import ExpertLayer
from ..layers.mtp import PredictingModel
from ..layers.pooling import ScoreHead
from ..layers.recompute_offload import offload_recomputed
from ..layers.rope import make_rotary_rule
from ..layers.spec import block_spec, mtp_spec
from ..layers.tower_part import TowerPart
from ..mapping import fp8
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import decoder_layers
from ..options import BuildOptions
from ..parallel import current_groups
from ..pipeline_layout import virtual_pipeline_size
from .config import transformer_config
from .kernel_selection import Kernels, choose_kernels
from .model import Model
from .vision_encoder import VisionEncoder

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_model(
    hf_config: HfConfig,
    options: BuildOptions,
    dtype: torch.dtype,
    *,
    adapters: bool = False,
    vision: bool = False,
) -> Model:
    """Build this rank's chunks on its device, with uninitialized weights. parallel.py must have created the groups.

    adapters: build norms as separate modules, since adapters need the input of each linear layer. vision: build the
    vision tower too.
    """
    runtime.enable()
    patches.apply_patches()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # its warnings are for users of its own launcher
    family = family_of(hf_config)
    architecture = family.describe(hf_config, vision=vision)
    if options.mtp_num_layers:
        architecture = family.add_prediction(architecture, hf_config, options.mtp_num_layers)
    if "num_moe_experts" in architecture.transformer and dtype == torch.float16:
        # megatron-core has separate loss scales for dense weights and for experts, which can diverge.
        raise ValueError("--torch_dtype float16 is not for a mixture of experts: give bfloat16 or float32")
    kernels = choose_kernels(options, architecture, dtype)
    config = transformer_config(architecture, options, kernels, dtype)
    config.separates_norms = adapters  # type: ignore[attr-defined]
    stages = virtual_pipeline_size(options)
    chunks = [_build_chunk(config, architecture, kernels, stage) for stage in (range(stages) if stages else [None])]
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ExpertLayer)]
    kernels = replace(kernels, reads_peers=any(layer.reads_peers for layer in layers))
    if options.cpu_offloading:
        offload = offload_recomputed if options.recompute_granularity == "full" else offload_activations
        offload(chunks, options.cpu_offloading_num_layers)
    ropes = tuple(make_rotary_rule(rope, runtime.device()) for rope in architecture.ropes)
    groups = current_groups()
    encoder = _build_encoder(chunks, config, architecture, groups) if vision else None
    scale = options.mtp_loss_scaling_factor
    return Model(chunks, config, architecture, kernels, ropes, groups, mtp_loss_scale=scale, vision=encoder)


def _build_encoder(
    chunks: list[GPTModel],
    config: TransformerConfig,
    architecture: Architecture,
    groups: ProcessGroupCollection,
) -> VisionEncoder:
    stages: list[list[int]] = [[]] * groups.pp.size()
    layers = [layer.layer_number for chunk in chunks for layer in decoder_layers(chunk)]
    embeds = any(hasattr(chunk, "embedding") for chunk in chunks)
    dist.all_gather_object(stages, [0, *layers] if embeds else layers, group=groups.pp)
    part = TowerPart(architecture.vision, architecture.audio, config, runtime.device())
    return VisionEncoder(part, config, groups, stages)


def _build_chunk(
    config: TransformerConfig, architecture: Architecture, kernels: Kernels, vp_stage: int | None
) -> GPTModel:
    tp = config.tensor_model_parallel_size
    model = (PredictingModel if architecture.mtp_depths else GPTModel)(
        config,
        block_spec(config, transformer_engine=kernels.transformer_engine, vp_stage=vp_stage),  # pyright: ignore[reportArgumentType]
        vocab_size=-(-architecture.vocab_size // tp) * tp,  # padded to a multiple of TP in memory only
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="none",  # attention applies the rope itself: see layers/attention.py
        vp_stage=vp_stage,
    )
    if architecture.num_labels is not None and model.post_process:
        head = ScoreHead(architecture.num_labels, config.hidden_size, config.params_dtype)
        model.output_layer = head  # pyright: ignore[reportAttributeAccessIssue]
    elif architecture.logits_bias and model.post_process:
        # GPTModel builds its output layer without a bias. Only its parameters are used: see outputs.py.
        weight = cast(Tensor, model.output_layer.weight)
        bias = torch.nn.Parameter(weight.new_empty(len(weight)))
        set_tensor_model_parallel_attributes(bias, is_parallel=True, dim=0, stride=1)
        model.output_layer.bias = bias
    fp8.move_to_device(model, runtime.device())
    if config.fp8:
        fp8.check_sizes(model.decoder)
    if isinstance(model, PredictingModel):
        layer, norm = mtp_spec(config, transformer_engine=kernels.transformer_engine)
        model.add_prediction(architecture.mtp_depths, layer, norm, runtime.device())
    has_embedding = hasattr(model, "embedding")
    if architecture.layer_input_size:
        model.embedding.layer_inputs = LayerInputs(config, model.vocab_size, current_groups())
    if has_embedding and config.accumulate_in_matmul:  # pyright: ignore[reportAttributeAccessIssue]
        # GPTModel creates its embedding without a spec.
        model.embedding.word_embeddings.__class__ = AccumulatingEmbedding
    if has_embedding and architecture.embedding_scale != 1.0:
        scale = float(torch.tensor(architecture.embedding_scale, dtype=config.params_dtype))
        model.embedding.register_forward_hook(lambda module, inputs, output: cast(Tensor, output) * scale)
    return model


def enable_grads_through_frozen(chunk: GPTModel, *, has_trained_input: bool = False) -> None:
    """Enable the gradients of trained parameters next to frozen ones. Call this after parameters are frozen.

    has_trained_input: the embeddings of some micro batches depend on trained parameters outside of the chunk.
    Raises ValueError for trained biases of frozen weights in FP8.
    """
    is_trained = any(parameter.requires_grad for parameter in chunk.parameters())
    if chunk.pre_process and ((is_trained and chunk.config.recompute_granularity) or has_trained_input):
        # Recomputed modules give their parameters gradients only if their input requires one.
        chunk.embedding.register_forward_hook(_require_output_grad)
    for name, module in chunk.named_modules():
        bias, weight = getattr(module, "bias", None), getattr(module, "weight", None)
        if bias is None or weight is None or not bias.requires_grad or weight.requires_grad or not _fuses_bias(module):
            continue
        if chunk.config.fp8:
            raise ValueError(f"--fp8_format: the bias of {name} is to be trained, and its matrix is not; leave one out")
        module.register_forward_hook(_add_bias_gradient, prepend=True)


def _require_output_grad(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _fuses_bias(module: Any) -> bool:
    """Return whether megatron-core or Transformer Engine adds the bias in the autograd function of the product.

    These functions give the bias no gradient if the weight has none.
    """
    if isinstance(module, ColumnParallelLinear):
        return not module.skip_bias_add
    return not getattr(module, "te_return_bias", True)


def _add_bias_gradient(module: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] + (module.bias - module.bias.detach()), output[1]
