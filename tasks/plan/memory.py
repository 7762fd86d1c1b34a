"""Memory of a rank in bytes: states by arithmetic, activations by what the layers save for the backward pass.

Activations are those of the fused kernels (bridge/kernels) with Transformer Engine's attention, in bf16. The results of
scripts/bench hold the sum against `torch.cuda.max_memory_reserved` (tests/tasks/plan/test_plan.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from megatron.core.transformer import TransformerConfig

from ...bridge.layers.delta_rule import CHUNK
from ...bridge.layers.divergence import CHUNK_LOGITS, FUSED_CHUNK_LOGITS
from ...bridge.mapping.architecture import Layer
from ..system.memory import GIB
from .gpu_layout import GpuLayout
from .parameters import Parameters
from .task import Distillation
from .tower import BYTES
from .workload import Workload

OUTSIDE = 2 * GIB  # CUDA's context and NCCL's buffers on a GPU, which PyTorch does not count
# What PyTorch reserves beyond tensors that live at the peak: fragments, workspaces, buckets of gradients.
RESERVE = 1.5 * GIB
# Share of a GPU up to which a trained tower keeps activations that it could recompute, or encodes more micro batches
# together. The rest is for fragments of their varying sizes, and for what runs take beyond the plan.
TOWER_FILL = 0.85
EXPERT_SKEW = 1.1  # tokens of the busiest rank of expert parallelism, relative to the mean
# Logits that the output layer keeps, in the memory of a GPU, and those of a chunk beside them (kernels/log_probs.py).
KEPT_LOGITS, LOGITS_CHUNK = 1 / 16, 1 / 48
DROPOUT_MASK_BYTES = 1
# Keys and values of a layer that context parallelism's ring sends or receives: two forward, four backward. PyTorch does
# not reuse the memory of what a peer is sent before the GPU has done that, and the host is as many kernels ahead.
RING_BUFFERS = 6
LAUNCH_QUEUE = 4096  # kernels (CUDA_SCALE_LAUNCH_QUEUES, cli/launch.py)
LAYER_LAUNCHES = {"dense": 120, "experts": 180}  # about, of both passes
# Copies of a pack's keys and values that a layer has in its backward pass where they are gathered: those of all ranks,
# those that its queries meet, and their gradients, partly in fp32.
GATHERED_BUFFERS = 5
# Values that a layer of multi-token prediction saves per token beside those of the layer within it, as multiples of the
# hidden size: two norms' inputs, their outputs together for its matrix, and the last norm's input and output.
PREDICTION_VALUES = 6
# Layers with activations on the GPU while those of the others are on the host: one computes, its neighbours leave or
# arrive. Fitted to Qwen3-4B's documents of 131,072 tokens.
RESIDENT_LAYERS = 3
TOP_LOGIT_BYTES = 4 + BYTES  # a logit and its copy, of a chunk (layers/divergence.py)
TOP_BYTES = 2 * 4  # log-probability and id of a teacher's token
FP8_WEIGHT_BYTES = 2  # copy of a matrix and its transpose, which the products of both passes read


class Memory(NamedTuple):
    """Bytes of a rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)


def memory_of_rank(work: Workload, layout: GpuLayout) -> Memory:
    """Return the memory of a rank in the pipeline stage, and with the micro batch, that need most."""
    kept = kept_patches(work, layout)
    return max(
        (
            _with_other_models(work, layout, stage, _memory_of_stage(work, layout, stage, layers, share, kept))
            for (stage, layers), share in _cases(work, layout)
        ),
        key=_total,
    )


def host_bytes(work: Workload, layout: GpuLayout) -> float:
    """Return the bytes of host memory that a rank fills: optimizer's state, activations and other models."""
    on_gpu = memory_of_rank(work.alone, replace(layout, offloads=False)).optimizer
    state = on_gpu * work.offload_fraction * (work.optimizer_bytes - BYTES) / work.optimizer_bytes
    tokens = layout.micro_batch * work.length / layout.context
    micro_batches = layout.micro_batches(work.global_batch)
    activations = max(
        tokens * layout.chunks_in_flight(stage, micro_batches) / layout.virtual * offloaded_bytes(work, layout, layers)
        for stage, layers in enumerate(layout.stages(work.config.num_layers))
    )
    reference = memory_of_rank(work.alone, layout).weights if work.task.reference == "offloaded" else 0.0
    return (state if layout.offloads else 0.0) + activations + reference + _host_bytes_of_further(work, layout)


def _host_bytes_of_further(work: Workload, layout: GpuLayout) -> float:
    """Return the bytes of host memory of a further model: what is offloaded to it between uses, and its optimizer."""
    if work.further is None or work.further_work is None:
        return 0.0
    memory = memory_of_rank(work.further_work, replace(layout, offloaded_layers=0))
    between_uses = memory.weights + memory.optimizer * work.further.is_trained if work.further.is_offloaded else 0.0
    return between_uses + (
        host_bytes(work.further_work, replace(layout, offloaded_layers=0)) if work.further.is_trained else 0.0
    )


def kept_patches(work: Workload, layout: GpuLayout) -> int:
    """Return the patches whose activations a rank keeps for the tower's backward pass, as of VisionEncoder.

    They fill the memory that is free up to TOWER_FILL. 0: what is kept does not depend on memory.
    """
    tower = work.tower
    if tower is None or not tower.is_bounded_by_memory(layout):
        return 0
    limit, patches = TOWER_FILL * work.gpu_bytes - OUTSIDE, []
    micro_batches = layout.micro_batches(work.global_batch)
    for stage, share in _cases(work, layout):
        room = max(limit - _memory_of_stage(work, layout, *stage, share, 0).total, 0.0)
        least = tower.least_patches(layout, layout.micro_batch * work.length * share, micro_batches)
        patches.append(least + room / tower.patch_bytes(layout))
    return int(min(patches))


def _cases(work: Workload, layout: GpuLayout) -> Iterator[tuple[tuple[int, range], float]]:
    """Return the pipeline stages, and for each the shares of visual tokens in micro batches with fewest and most."""
    shares = work.tower.shares if work.tower else (0.0,)
    return product(enumerate(layout.stages(work.config.num_layers)), shares)


def _total(memory: Memory) -> float:
    return memory.total


def _memory_of_stage(
    work: Workload, layout: GpuLayout, stage: int, layers: range, image_share: float, kept_patches: int
) -> Memory:
    """Return the memory of a rank in a stage.

    image_share: visual tokens of a micro batch in all of its tokens; kept_patches: as of VisionEncoder
    """
    is_last = stage == layout.pipeline - 1
    held = work.parameters.of_stage(layers, is_first=stage == 0, is_last=is_last)
    dense, experts = held.split / layout.tensor + held.replicated, held.expert / layout.expert_shards
    trained, trained_experts = dense, experts
    if work.lora_rank is not None:
        adapters = sum((_adapters(work, layer) for layer in layers), Parameters())
        trained, trained_experts = adapters.split / layout.tensor, adapters.expert / layout.expert_shards
    shards = trained / (layout.data * layout.context) + trained_experts / layout.expert_data
    tokens = layout.micro_batch * work.length / layout.context
    micro_batches = layout.micro_batches(work.global_batch)
    in_flight = layout.chunks_in_flight(stage, micro_batches) / layout.virtual
    kinds = work.kinds[layers.start : layers.stop]
    bytes_by_kind = {layer: _layer_bytes(work, layout, layer) for layer in set(kinds)}
    saved = [bytes_by_kind[layer][0] for layer in kinds]
    depths = work.depths if is_last else 0
    scored = 1 + depths if depths else 1 - image_share  # logits of a token
    logits = BYTES * tokens * scored * work.vocab_size / layout.tensor if is_last else 0.0
    logits = min(logits, (KEPT_LOGITS + LOGITS_CHUNK) * work.gpu_bytes)
    if is_last and work.task.distillation:
        logits = _compared_bytes(work, layout, work.task.distillation, tokens)
    recomputed = layout.recomputed_share(len(layers))
    # Bytes that a layer computes again when the logits are freed, and of the gradients within its MLP.
    within_mlps = [bytes_by_kind[layer][1] for layer in kinds]
    in_backward = max(total + within for total, within in zip(saved, within_mlps, strict=True))
    if layout.recompute == "mlp":
        in_backward = max(within_mlps)
        saved = [total - within for total, within in zip(saved, within_mlps, strict=True)]
    state = BYTES * work.config.hidden_size / layout.tensor
    kept = [recomputed * state + (1 - recomputed) * total for total in saved]
    offloaded = kept[: layout.offloaded_layers]
    activations = tokens * in_flight * (sum(kept) - sum(offloaded))
    resident = min(RESIDENT_LAYERS, len(offloaded))
    activations += tokens * resident * (max(offloaded, default=0.0) + kept_attention_bytes(work, layout))
    again = tokens * in_backward - logits if layout.recompute != "none" else 0.0
    if depths:  # their backward pass follows their forward pass at once, when one of the logits are freed
        kept, computed_again = _prediction_bytes(work, layout)
        activations += tokens * depths * kept
        again = max(again, tokens * computed_again - logits / (1 + depths))
    activations += max(again, 0.0)
    activations += tokens * _exchange_bytes(work, layout, layers)
    if work.tower:
        pack = layout.micro_batch * work.length
        kept, recomputed = work.tower.bytes_of_micro_batches(
            layout, pack * image_share, pack * work.tower.image_share, micro_batches, kept_patches
        )
        # A tower is recomputed after the language model's backward passes.
        activations = kept + max(activations, recomputed)
        dense += work.parameters.tower.total + work.parameters.mergers.total
        trained += work.trained_tower
        shards += work.trained_tower / (layout.data * layout.context)
    on_gpu = 1 - work.offload_fraction if layout.offloads else 1.0
    reserve = RESERVE
    if work.fp8 and not work.fp8.stores_weights:
        reserve += FP8_WEIGHT_BYTES * sum(work.parameters.layers[layer].split for layer in layers) / layout.tensor
    weights = BYTES * (dense + experts)
    if work.task.reference == "kept":
        weights *= 2
    elif work.task.reference == "offloaded":
        # Its weights come before the step, when there are no activations.
        activations = max(activations, weights - logits)
    return Memory(
        weights,
        work.gradient_bytes * (trained + trained_experts),
        work.optimizer_bytes * shards * on_gpu,
        activations,
        logits,
        reserve,
    )


def _with_other_models(work: Workload, layout: GpuLayout, stage: int, memory: Memory) -> Memory:
    """Return the memory of a rank in a stage with that of a reward model, a critic or a teacher.

    memory: without them
    """
    if stage == 0:
        memory = memory._replace(weights=memory.weights + work.reward_bytes)
    if work.further and work.further_work:
        layers = layout.stages(work.further_work.config.num_layers)[stage]
        on_gpu = replace(layout, offloaded_layers=0)
        further = _memory_of_stage(work.further_work, on_gpu, stage, layers, 0.0, 0)
        memory = (_with_critic if work.further.is_trained else _with_teacher)(work, layout, stage, memory, further)
    if stage == layout.pipeline - 1 and work.task.distillation:
        memory = memory._replace(activations=memory.activations + _kept_outputs_of_teacher(work, layout))
    return memory


def _with_critic(work: Workload, layout: GpuLayout, stage: int, memory: Memory, critic: Memory) -> Memory:
    """Return the memory of a rank with a critic. The policy's states stay on the GPU during the critic's step."""
    step, reserve = critic.activations + critic.logits, critic.reserve - RESERVE
    if work.further and work.further.is_offloaded:
        during = step + critic.weights + critic.gradients + critic.optimizer + reserve
        return memory._replace(activations=max(memory.activations, during - memory.logits))
    return Memory(
        memory.weights + critic.weights,
        memory.gradients + critic.gradients,
        memory.optimizer + critic.optimizer,
        max(memory.activations, step - memory.logits),
        memory.logits,
        memory.reserve + reserve,
    )


def _with_teacher(work: Workload, layout: GpuLayout, stage: int, memory: Memory, teacher: Memory) -> Memory:
    """Return the memory of a rank with a teacher, whose forward passes come before the step."""
    further, model = work.further, work.further_work
    if further is None or model is None:
        return memory
    weights, activations = memory.weights, memory.activations
    if further.is_offloaded:
        activations = max(activations, teacher.weights - memory.logits)
    else:
        weights += teacher.weights
    compares_all = work.task.distillation is not None and work.task.distillation.top is None
    # A copy of the output layer's matrix stays on the GPU, or has as many rows as the student's.
    if stage == layout.pipeline - 1 and compares_all and (further.is_offloaded or model.vocab_size != work.vocab_size):
        weights += BYTES * work.vocab_size * model.config.hidden_size / layout.tensor
    return memory._replace(weights=weights, activations=activations)


def _compared_bytes(work: Workload, layout: GpuLayout, distillation: Distillation, tokens: float) -> float:
    """Return the bytes of the logits of a student and of what it is compared with. tokens: of a rank's micro batch"""
    logits, kept = tokens * work.vocab_size / layout.tensor, KEPT_LOGITS * work.gpu_bytes
    likelihood = BYTES * logits if distillation.adds_likelihood else 0.0
    if distillation.top is None:
        return min(2 * BYTES * logits + likelihood, kept + 2 * BYTES * FUSED_CHUNK_LOGITS)
    return TOP_LOGIT_BYTES * min(logits, CHUNK_LOGITS) + min(likelihood, kept + LOGITS_CHUNK * work.gpu_bytes)


def _kept_outputs_of_teacher(work: Workload, layout: GpuLayout) -> float:
    """Return the bytes of a teacher's outputs for all micro batches of a step, on the last pipeline stage."""
    tokens = layout.micro_batches(work.global_batch) * layout.micro_batch * work.length / layout.context
    if work.task.distillation and work.task.distillation.top:
        return TOP_BYTES * tokens * work.task.distillation.top
    hidden = work.further_work.config.hidden_size if work.further_work else 0
    return BYTES * tokens * hidden / layout.tensor


def kept_attention_bytes(work: Workload, layout: GpuLayout) -> float:
    """Return the bytes per token of the output of attention that a recomputed layer keeps on the host beside its input.

    It is not computed again then. Transformer Engine's ring of context parallelism keeps none.
    """
    is_local = layout.context == 1 or work.gathers_keys
    keeps = layout.offloaded_layers and layout.recompute == "full" and is_local
    return BYTES * _head_values(work.config)[1] / layout.tensor if keeps else 0.0


def offloaded_bytes(work: Workload, layout: GpuLayout, layers: range) -> float:
    """Return the bytes per token that a stage's layers send to the host in a forward pass."""
    offloaded = layers[: layout.offloaded_layers]
    if layout.recompute == "full":
        state = BYTES * work.config.hidden_size / layout.tensor
        return len(offloaded) * (state + kept_attention_bytes(work, layout))
    return sum(_saved_bytes(work, layout, layer) for layer in offloaded)


def _prediction_bytes(work: Workload, layout: GpuLayout) -> tuple[float, float]:
    """Return the bytes that a layer of multi-token prediction keeps per token, and those that it computes again."""
    state = BYTES * work.config.hidden_size / layout.tensor
    inner, within_mlp = _layer_bytes(work, layout, work.prediction_like)
    saved = PREDICTION_VALUES * state + inner
    if layout.recompute == "full":
        return 2 * state, saved
    return (saved - within_mlp, within_mlp) if layout.recompute == "mlp" else (saved, 0.0)


def _layer_bytes(work: Workload, layout: GpuLayout, layer: int) -> tuple[float, float]:
    """Return the bytes that a layer saves per token, and of these those within its MLP."""
    return _saved_bytes(work, layout, layer), _mlp_bytes(work, layout, layer)


def _saved_bytes(work: Workload, layout: GpuLayout, layer: int) -> float:
    """Return the bytes that a layer saves per token of a rank, with sequence parallelism under tensor parallelism."""
    skew = EXPERT_SKEW if layout.expert > 1 else 1.0
    kind, is_sparse = work.layer(layer), work.is_sparse(layer)
    values = 0.0 if kind.mixer == "none" else _mixer_values(work.config, kind)
    if kind.has_mlp:
        values += _expert_values(work, layout) * skew if is_sparse else _dense_values(work.config, kind)
    masks = 0.0
    if work.fp8:
        # The matrices' inputs are saved in FP8, attention's output in both types.
        values -= 0.5 * _quantized_inputs(work.config) - _head_values(work.config)[1]
    if work.lora_rank is not None and work.lora_dropout and (work.fp8 or layout.tensor > 1):
        # Adapters outside of the products save masks, and a copy of attention's output, which attention has saved too.
        inputs = _adapter_inputs(work.config, is_sparse=is_sparse)
        masks = DROPOUT_MASK_BYTES * inputs + BYTES * _head_values(work.config)[1]
    return (BYTES * values + masks) / layout.tensor


def _exchange_bytes(work: Workload, layout: GpuLayout, layers: range) -> float:
    """Return the bytes per token of this rank of keys and values in context parallelism's exchange.

    In a ring they are those of many layers, which wait for the GPU.
    """
    if layout.context == 1:
        return 0.0
    if work.gathers_keys:
        return GATHERED_BUFFERS * layout.context * BYTES * key_values(work.config) / layout.tensor
    launches = LAYER_LAUNCHES["experts" if any(map(work.is_sparse, layers)) else "dense"]
    ahead = min(sum(work.layer(layer).mixer == "attention" for layer in layers), LAUNCH_QUEUE / launches)
    return RING_BUFFERS * ahead * BYTES * key_values(work.config) / layout.tensor


def _mlp_bytes(work: Workload, layout: GpuLayout, layer: int) -> float:
    """Return the bytes per token of the values within a dense MLP, saved only without `--recompute_modules mlp`."""
    if not work.layer(layer).has_mlp or work.is_sparse(layer):
        return 0.0
    return BYTES * (_dense_values(work.config, work.layer(layer)) - 2 * work.config.hidden_size) / layout.tensor


def _head_values(config: TransformerConfig) -> tuple[int, int]:
    """Return the values of a token's queries, keys and values, and of attention's output."""
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    if config.multi_latent_attention:
        query = config.qk_head_dim + config.qk_pos_emb_head_dim  # type: ignore[attr-defined]
        return heads * (2 * query + config.v_head_dim), heads * config.v_head_dim  # type: ignore[attr-defined]
    dim = config.kv_channels or config.hidden_size // heads
    return (heads + 2 * groups) * dim, heads * dim


def key_values(config: TransformerConfig) -> int:
    """Return the values of a token's keys and values."""
    mixed, output = _head_values(config)
    if not config.multi_latent_attention:
        return mixed - output
    return mixed - config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)  # type: ignore[attr-defined]


def _mixer_values(config: TransformerConfig, layer: Layer) -> int:
    if layer.mixer == "lightning_attention":
        # Its norm's input and output, what is projected, activated too, and the output, before and after its norm.
        return 2 * config.hidden_size + 9 * _head_values(config)[1]
    if layer.mixer == "short_conv":
        # Its norm's input and output, what is projected, before and after the convolution, and the gated output.
        return 8 * config.hidden_size
    if layer.mixer == "kimi_delta":
        # Its norm's input and output, two latents, what is projected, before and after the convolution, decays,
        # products of a chunk's keys with its keys and queries, and in fp32 the output, normed too, and its gate.
        heads, dim, _ = config.architecture.kimi_delta  # type: ignore[attr-defined]
        return 2 * config.hidden_size + 2 * dim + (14 * dim + 2 * CHUNK) * heads
    attention = _attention_values(config) if layer.has_attention else 0
    if layer.mixer in ("attention", "gated_delta_net"):
        return _attention_values(config)
    mamba = config.architecture.mamba  # type: ignore[attr-defined]
    values = mamba.heads * mamba.head_dim
    # Its norm's input and output, what is projected, before and after the convolution, and the gated output.
    projected = 2 * values + 2 * mamba.groups * mamba.state_dim + mamba.heads
    return (attention or 2 * config.hidden_size) + 2 * projected + 2 * values


def _attention_values(config: TransformerConfig) -> int:
    """Return the values that attention saves per token: its norm's input and output, its matrices' and kernel's."""
    mixed, output = _head_values(config)
    copies = 2 if config.qk_layernorm or config.multi_latent_attention else 1  # norms save the mixed queries and keys
    return 2 * config.hidden_size + copies * mixed + output


def _dense_values(config: TransformerConfig, layer: Layer) -> int:
    width = layer.ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
    return 2 * config.hidden_size + (3 if config.gated_linear_unit else 2) * width


def _expert_values(work: Workload, layout: GpuLayout) -> int:
    """Return the values that a layer of experts saves per token: its norm's, the experts' inputs and MLPs.

    Ranks that split an expert have the inputs of all of them, and their share of its columns.
    """
    config = work.config
    gates = 2 if config.gated_linear_unit else 1
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * config.hidden_size
    copy = config.hidden_size * layout.expert_tensor + (gates + 1) * width
    shared = (gates + 1) * (config.moe_shared_expert_intermediate_size or 0)
    return 2 * config.hidden_size + config.moe_router_topk * copy + shared


def _quantized_inputs(config: TransformerConfig) -> int:
    """Return the values that a dense layer's matrices take per token."""
    return 2 * config.hidden_size + _head_values(config)[1] + (config.ffn_hidden_size or 4 * config.hidden_size)


def quantized_values(config: TransformerConfig) -> int:
    """Return the values that a dense layer's matrices take and return per token."""
    width = config.ffn_hidden_size or 4 * config.hidden_size
    outputs = _head_values(config)[0] + 2 * config.hidden_size + (2 if config.gated_linear_unit else 1) * width
    return _quantized_inputs(config) + outputs


def _adapter_inputs(config: TransformerConfig, *, is_sparse: bool) -> int:
    """Return the sum of the input sizes of the matrices with adapters, without those of experts."""
    inputs = config.hidden_size + _head_values(config)[1]
    return inputs if is_sparse else inputs + config.hidden_size + (config.ffn_hidden_size or 4 * config.hidden_size)


def _adapters(work: Workload, layer: int) -> Parameters:
    """Return the parameters of a layer's adapters on all linear layers."""
    config, rank = work.config, work.lora_rank or 0
    mixed, output = _head_values(config)
    hidden, gates = config.hidden_size, 2 if config.gated_linear_unit else 1
    sizes = hidden + mixed + output + hidden
    if not work.is_sparse(layer):
        width = config.ffn_hidden_size or 4 * hidden
        return Parameters(split=rank * (sizes + hidden + gates * width + width + hidden))
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 4 * hidden
    latent = config.moe_latent_size or hidden
    experts = (config.num_moe_experts or 0) * rank * (latent + gates * width + width + latent)
    return Parameters(split=rank * sizes, expert=experts)
