"""Expected time of a step: FLOPs over what matrices of a size reach, bytes over links, and idle stages.

The constants were fitted to docs/results.md (H200, bf16). They rank layouts; a run may be a fifth faster or slower.
"""

import math
from dataclasses import dataclass

from ..observability.flops import Flops
from .gpu_layout import GpuLayout
from .memory import BYTES, Workload, quantized_values

# Share of the peak that products reach: BEST for large matrices, less for a hidden size or expert width near SMALL.
BEST, SMALL, SMALL_EXPERT = 0.607, 780.0, 705.0
ATTENTION = 0.537  # share of the peak of attention's kernels, forward and backward
SCORED = 0.69  # share of a chat's tokens that are trained on, which alone pass through the output layer
DISPATCH = 0.817  # share of an expert layer's time in products; the rest is routing and permutation
# Bytes a second of a GPU: all-gathers and reduce-scatters, all-to-alls with their waits, and links between nodes.
NVLINK, NVLINK_ALL_TO_ALL, NETWORK = 205e9, 159e9, 40e9
MEMORY_BANDWIDTH = 3.3e12  # bytes a second that the optimizer's step reaches on an H200
# Bytes a second of a GPU, in each direction at once, of optimizer states on the host: one GPU of a node, and all of it.
PCIE, SHARED_PCIE = 48e9, 34e9
OVERLAP = 0.7  # share of the gradients' exchange that is hidden behind the backward pass
FP8_SPEEDUP = 1.9  # speed of products, relative to bf16
QUANTIZATION = 6.7e-12  # seconds to quantize a value of their inputs and outputs, both passes
LORA_OVERHEAD = 1.35  # adapters add small products


@dataclass(frozen=True)
class Machine:
    """GPUs that a plan is for."""

    peak_flops: float  # dense bf16
    per_node: int = 8


def seconds_per_step(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the expected seconds of a step of `work.global_batch` packs."""
    micro_batches = layout.micro_batches(work.global_batch)
    stages = _stage_seconds(work, layout, machine)
    slowest = max(stages)
    # The other stages are idle while the first and the last micro batches pass through them.
    passes = micro_batches * slowest + (sum(stages) - slowest) / layout.virtual
    return passes + _update_seconds(work, layout, machine)


def _stage_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> list[float]:
    """Return the seconds of a micro batch's forward and backward pass on a rank of each pipeline stage."""
    config, flops = work.config, Flops.of(work.config, work.vocab_size, trained=1.0 if work.lora_rank is None else 0.0)
    exchange = _tensor_seconds(work, layout) + _expert_seconds(work, layout) + _context_seconds(work, layout)
    image_share = work.tower.image_share if work.tower else 0.0
    visual_tokens = layout.micro_batch * work.length * image_share
    tower = work.tower.seconds(layout, visual_tokens, machine.peak_flops) if work.tower else 0.0
    stages = []
    for layers in layout.stages(config.num_layers):
        part = len(layers) / config.num_layers
        compute = _layers_seconds(work, layout, flops, machine, layout.recomputed_share(len(layers)))
        stages.append(part * (compute + exchange) + tower)
    stages[-1] += _output_seconds(work, layout, flops, machine, 1 - image_share)
    return stages


def _layers_seconds(work: Workload, layout: GpuLayout, flops: Flops, machine: Machine, recomputed: float) -> float:
    """Return the seconds of a micro batch in all layers, if one pipeline stage had them.

    recomputed: share of the layers whose forward pass is done twice
    """
    config = work.config
    trained = 1.0 if work.lora_rank is None else 0.0
    passes = 2 + trained + recomputed  # forward, inputs' gradients, weights' gradients, forward again
    share = layout.micro_batch / (layout.tensor * layout.context)
    products = passes * 2 * (flops.matrix_parameters - flops.output) * work.length * share
    documents = work.length / work.document_length
    pairs = flops.forward([work.document_length]) - 2 * flops.matrix_parameters * work.document_length
    attention = (3 + recomputed) * pairs * documents * share
    expert_share = _expert_share(work, flops)
    again = 2 * _first_products(work) * work.length * share if layout.recompute == "mlp" else 0.0
    width = config.moe_ffn_hidden_size or 0
    expert_rate = BEST * DISPATCH * (1 - math.exp(-width / SMALL_EXPERT)) if width else 1.0
    dense = products * (1 - expert_share) + again
    dense /= FP8_SPEEDUP if work.fp8 else 1.0
    flops_at_peak = products * expert_share / expert_rate + attention / ATTENTION + dense / _dense_rate(work, layout)
    seconds = flops_at_peak / machine.peak_flops
    if work.fp8:
        seconds += QUANTIZATION * quantized_values(config) * config.num_layers * work.length * share
    return seconds * (LORA_OVERHEAD if work.lora_rank is not None else 1.0)


def _output_seconds(work: Workload, layout: GpuLayout, flops: Flops, machine: Machine, text_share: float) -> float:
    """Return the seconds of a micro batch in the output layer. Visual tokens are not scored."""
    passes = 3 if work.lora_rank is None else 2
    tokens = layout.micro_batch * work.length * text_share / (layout.tensor * layout.context)
    overhead = LORA_OVERHEAD if work.lora_rank is not None else 1.0
    return overhead * SCORED * passes * 2 * flops.output * tokens / _dense_rate(work, layout) / machine.peak_flops


def _dense_rate(work: Workload, layout: GpuLayout) -> float:
    return BEST * (1 - math.exp(-work.config.hidden_size / math.sqrt(layout.tensor) / SMALL))


def _first_products(work: Workload) -> int:
    """Return the parameters of the first products of dense MLPs, which `--recompute_modules mlp` repeats."""
    config = work.config
    width = (2 if config.gated_linear_unit else 1) * (config.ffn_hidden_size or 0)
    dense = sum(work.layer(layer).has_mlp and not work.is_sparse(layer) for layer in range(config.num_layers))
    return dense * config.hidden_size * width


def _expert_share(work: Workload, flops: Flops) -> float:
    """Return the share of experts in the matrix products of layers."""
    config = work.config
    sparse = sum(map(work.is_sparse, range(config.num_layers)))
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size or 0
    matrices = 3 if config.gated_linear_unit else 2
    experts = sparse * matrices * config.hidden_size * config.moe_router_topk * width
    return experts / (flops.matrix_parameters - flops.output)


def _hidden_bytes(work: Workload, layout: GpuLayout) -> float:
    """Return the bytes of a micro batch's hidden states, over all layers."""
    tokens = layout.micro_batch * work.length / layout.context
    return tokens * work.config.hidden_size * BYTES * work.config.num_layers


def _tensor_seconds(work: Workload, layout: GpuLayout) -> float:
    """Return the seconds of four all-gathers or reduce-scatters forward, and six backward, of each layer."""
    exchanges = 10 + {"none": 0, "mlp": 1, "full": 4}[layout.recompute]
    return exchanges * _hidden_bytes(work, layout) * (layout.tensor - 1) / layout.tensor / NVLINK


def _expert_seconds(work: Workload, layout: GpuLayout) -> float:
    """Return the seconds of two all-to-alls forward and two backward of each layer."""
    if layout.expert == 1:
        return 0.0
    copies = work.config.moe_router_topk * _hidden_bytes(work, layout) / layout.tensor
    return (6 if layout.recompute == "full" else 4) * copies * (layout.expert - 1) / layout.expert / NVLINK_ALL_TO_ALL


def _context_seconds(work: Workload, layout: GpuLayout) -> float:
    """Return the seconds of keys and values around the ring, forward and backward, half of them hidden."""
    if layout.context == 1:
        return 0.0
    config = work.config
    groups = config.num_query_groups or config.num_attention_heads
    keys = 2 * groups * (config.kv_channels or config.hidden_size // config.num_attention_heads) / config.hidden_size
    return 0.5 * 3 * keys * _hidden_bytes(work, layout) / layout.tensor * (layout.context - 1) / NVLINK


def _update_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the seconds of the gradients' exchange that are not hidden, and of the optimizer's step."""
    if work.lora_rank is not None:
        return 0.0
    parameters = work.parameters.language / layout.pipeline
    experts = sum(layer.expert for layer in work.parameters.layers) / layout.pipeline
    dense = (parameters - experts) / layout.tensor + work.trained_tower
    held_experts = experts / layout.expert
    replicas = layout.data * layout.context
    link = NVLINK if layout.gpus <= machine.per_node else NETWORK
    moved = dense * (replicas - 1) / replicas + held_experts * (layout.expert_data - 1) / layout.expert_data
    exchange = (work.gradient_bytes + BYTES) * moved / link * (1 - OVERLAP)
    updated = dense / replicas + held_experts / layout.expert_data
    on_host = updated * work.offload_fraction if layout.offloads else 0.0
    # A master on the host is two bytes beside its bf16 copy.
    host_seconds = on_host * (work.optimizer_bytes - BYTES) / (PCIE if layout.gpus == 1 else SHARED_PCIE)
    touched = (updated - on_host) * (work.gradient_bytes + 2 * work.optimizer_bytes + BYTES)
    return exchange + host_seconds + touched / MEMORY_BANDWIDTH
