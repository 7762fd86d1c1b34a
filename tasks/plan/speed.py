"""Expected time of a step: FLOPs over what matrices of a size reach, bytes over memory and links, and idle stages.

The constants were fitted to docs/results.md (H100 and H200, bf16). They rank layouts; a run may be a sixth faster or
slower.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...bridge.mapping.architecture import Architecture
from ..observability.flops import Flops, peak_flops
from .gpu_layout import GpuLayout
from .gpus import GPUS, gpu_kind
from .memory import (
    BYTES,
    KEPT_LOGITS,
    kept_attention_bytes,
    kept_patches,
    key_values,
    offloaded_bytes,
    quantized_values,
)
from .workload import Workload

# Share of the peak that products reach: BEST for large matrices, less for a hidden size near SMALL.
BEST, SMALL = 0.602, 768.0
# Shares of the peak that attention's kernels reach, forward and backward, and that with sinks or capped scores does.
ATTENTION, OWN_ATTENTION = 0.58, 0.15
SCORED = 0.69  # share of a chat's tokens that are trained on, which alone pass through the output layer
BANDWIDTH = 0.8  # share of the memory's bandwidth that kernels reach
UPDATE_BANDWIDTH = 0.69  # share of it that the optimizer's step reaches
ROUTED_PASSES = 3.0  # how often what experts take and compute of a token is written or read beside products
# Shares of the links: of all-gathers and reduce-scatters, of all-to-alls with their waits, of reads of peers' memory.
GATHERING, ALL_TO_ALL, PEER_READS = 0.31, 0.167, 0.39
NETWORK = 40e9  # bytes a second of a GPU between nodes
# Bytes a second of a GPU, in each direction at once, to and from the host: one GPU of a node, and all of it.
PCIE, SHARED_PCIE = 48e9, 34e9
OVERLAP = 0.83  # share of the gradients' exchange that is hidden behind the backward pass
FP8_SPEEDUP = 1.9  # speed of products, relative to bf16
QUANTIZATION = 6.5e-12  # seconds to quantize a value of their inputs and outputs, both passes
# Bytes that are moved beside products for a logit of a student and that of its teacher (kernels/divergence.py), and for
# one of each where the teacher's likeliest tokens are compared (layers/divergence.py).
COMPARED_BYTES, COMPARED_TOP_BYTES = 14, 58
LORA_OVERHEAD = 1.2  # adapters add small products
# Operations that take the time of both passes of the adapters of an expert, for one token. Their small products depend
# on the tokens more than on the experts' sizes: those of Qwen3-30B-A3B and of gpt-oss-20b take about the same.
ADAPTED_ROW = 2.08e7
# Seconds in which the host launches a layer's kernels of both passes, and one collective of tensor parallelism. By
# Qwen3-VL-4B with TP2 and micro batches of one pack, on hosts of which one is a quarter faster (docs/results.md).
HOST_LAYER, HOST_EXCHANGE = 3.5e-3, 0.25e-3
# The first for experts on several ranks. Probably the host waits for the number of their rows, and then launches many
# kernels. By Qwen3-30B-A3B with EP4, and, with adapters, EP2; micro batches of one pack of 4,096 tokens, and of two.
HOST_EXPERTS, HOST_ADAPTED_EXPERTS = 7e-3, 9e-3
# Seconds that a layer's attention in a ring of context parallelism takes the host longer. By Qwen3-8B with CP2 and
# micro batches of one pack of 4,096 tokens.
HOST_RING = 5e-3
# Seconds that a layer with experts on several ranks takes longer, fitted to Qwen3-30B-A3B of 8 layers with EP2.
# Probably the host's wait for the number of their rows.
COUNTING = 1.2e-3


@dataclass(frozen=True)
class Machine:
    """GPUs that a plan is for."""

    peak_flops: float  # dense bf16
    per_node: int = 8
    bandwidth: float = GPUS["h200"].bandwidth  # bytes a second of a GPU's memory
    link: float = GPUS["h200"].link  # bytes a second between GPUs of a node, both directions together
    host_memory: float = math.inf  # bytes of a GPU's share of the host

    @classmethod
    def of(cls, name: str, per_node: int = 8, host_memory: float = math.inf) -> "Machine | None":
        """Return the machine of GPUs with torch's `name`; None if their speed is not known."""
        peak, kind = peak_flops(name), gpu_kind(name)
        return cls(peak, per_node, kind.bandwidth, kind.link, host_memory) if peak else None


class StepTime(NamedTuple):
    """Seconds of a step by what takes them."""

    compute: float  # products, attention and memory
    exchange: float  # communication of tensor, expert and context parallelism, and of gradients
    host: float  # waits for the host
    idle: float  # pipeline bubbles
    update: float  # the optimizer's step

    @property
    def total(self) -> float:
        return sum(self)


def seconds_per_step(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the expected seconds of a step of `work.global_batch` packs."""
    return step_time(work, layout, machine).total


def step_time(work: Workload, layout: GpuLayout, machine: Machine) -> StepTime:
    """Return the expected time of a step of `work.global_batch` packs, with that of a critic or a teacher."""
    trained = _step_of_model(work, layout, machine)
    model = work.further_work
    if work.further is None or model is None:
        return trained
    layout = replace(layout, offloaded_layers=0)
    step = _step_of_model(model, layout, machine)
    if work.further.is_trained:
        return _sum(trained, step)
    # A forward pass takes what one more of them adds to a step.
    with_forward = _step_of_model(model.with_forward, layout, machine)
    return _sum(trained, StepTime(*(a - b for a, b in zip(with_forward, step, strict=True))))


def _sum(*times: StepTime) -> StepTime:
    return StepTime(*map(sum, zip(*times, strict=True)))


def _step_of_model(work: Workload, layout: GpuLayout, machine: Machine) -> StepTime:
    """Return the expected time of a step of one model."""
    micro_batches = layout.micro_batches(work.global_batch)
    stages = _stage_times(work, layout, machine)
    slowest = max(stages, key=sum)
    # The other stages are idle while the first and the last micro batches pass through them.
    idle = (sum(map(sum, stages)) - sum(slowest)) / layout.virtual
    compute, exchange, host = (micro_batches * seconds for seconds in slowest)
    gradients, update = _update_seconds(work, layout, machine)
    return StepTime(compute, exchange + gradients, host, idle, update)


def _stage_times(work: Workload, layout: GpuLayout, machine: Machine) -> list[tuple[float, float, float]]:
    """Return the seconds of a micro batch's forward and backward pass on a rank of each pipeline stage.

    Those of computation, of exchanges, and those that the host takes longer.
    """
    config, flops = work.config, work.flops
    of_layers = (_tensor_seconds, _expert_seconds, _context_seconds)
    exchange = sum(seconds(work, layout, machine) for seconds in of_layers)
    sending = _pipeline_seconds(work, layout, machine)
    image_share = work.tower.image_share if work.tower else 0.0
    visual_tokens = layout.micro_batch * work.length * image_share
    tower = 0.0
    if work.tower:
        sizes = layout, visual_tokens, layout.micro_batches(work.global_batch)
        recomputed = work.tower.recomputed_share(*sizes, kept_patches(work, layout))
        tower = work.tower.seconds(layout, visual_tokens, machine.peak_flops, recomputed)
    stages = []
    for layers in layout.stages(config.num_layers):
        is_last = len(stages) == layout.pipeline - 1
        depths = work.depths if is_last else 0
        part, recomputed = len(layers) / config.num_layers, layout.recomputed_share(len(layers))
        kept = layout.offloaded_layers / len(layers) if kept_attention_bytes(work, layout) else 0.0
        seconds = part * _layers_seconds(work, layout, flops, machine, recomputed, max(recomputed - kept, 0.0))
        seconds += _traffic(work, layout, layers, depths, recomputed) / (BANDWIDTH * machine.bandwidth)
        if is_last:
            seconds += _output_seconds(work, layout, flops, machine, 1 - image_share)
            seconds += _prediction_seconds(work, layout, machine, 1 - image_share)
            seconds += _comparison_seconds(work, layout, machine)
        exchanges = (part + depths / config.num_layers) * exchange + sending
        wait = max(_host_seconds(work, layout, len(layers) + depths, recomputed) - seconds - exchanges, 0.0)
        wait += _offload_wait(work, layout, layers, seconds + exchanges)
        stages.append((seconds + tower, exchanges, wait))
    return stages


def _layers_seconds(
    work: Workload, layout: GpuLayout, flops: Flops, machine: Machine, recomputed: float, repeated: float
) -> float:
    """Return the seconds of a micro batch in the products of all layers, if one pipeline stage had them.

    recomputed: share of the layers whose forward pass is done twice; repeated: share whose attention is, too
    """
    trained = 1.0 if work.lora_rank is None else 0.0
    forwards = work.task.forwards
    # Forward, inputs' gradients, weights' gradients, forward again, and by or beside a reference model.
    passes = 2 + trained + recomputed + forwards
    share = layout.micro_batch / (layout.tensor * layout.context)
    products = passes * 2 * (flops.matrix_parameters - flops.output) * work.length * share
    documents = work.length / work.document_length
    pairs = flops.forward([work.document_length]) - 2 * flops.matrix_parameters * work.document_length
    attention = (3 + repeated + forwards) * pairs * documents * share
    expert_share = _expert_share(work, flops)
    again = 2 * _first_products(work) * work.length * share if layout.recompute == "mlp" else 0.0
    dense = (products * (1 - expert_share) + again) / (FP8_SPEEDUP if work.fp8 else 1.0)
    seconds = (attention / _attention_rate(work) + dense / _dense_rate(work, layout)) / machine.peak_flops
    experts = products * expert_share / BEST / machine.peak_flops
    if work.fp8:
        seconds += QUANTIZATION * quantized_values(work.config) * work.config.num_layers * work.length * share
    if work.lora_rank is None:
        return seconds + experts
    seconds = LORA_OVERHEAD * seconds + experts
    layers = sum(map(work.is_sparse, range(work.config.num_layers)))
    rows = work.length * share * work.config.moe_router_topk * layers
    return seconds + passes / 2 * ADAPTED_ROW * rows / BEST / machine.peak_flops


def _traffic(work: Workload, layout: GpuLayout, layers: range, depths: int, recomputed: float) -> float:
    """Return the bytes that a stage's layers move beside products, for a micro batch.

    depths: layers of multi-token prediction among them
    Weights' gradients are added to their sums. Those of experts take longer than their products, of few tokens each
    (kernels/grouped_gradient.py), as does reading the weights.
    """
    parameters = work.parameters.of_layers(layers)
    if depths:
        parameters += work.parameters.prediction
    experts = parameters.expert / layout.expert_shards
    dense = parameters.split / layout.tensor + parameters.replicated
    again = recomputed + work.task.forwards
    moved = (2 + again) * BYTES * experts
    if work.lora_rank is None:
        moved += 2 * work.gradient_bytes * (dense + experts)
    config = work.config
    gates = 2 if config.gated_linear_unit else 1
    values = config.hidden_size * layout.expert_tensor + (gates + 1) * (config.moe_ffn_hidden_size or 0)
    tokens = layout.micro_batch * work.length / (layout.context * layout.tensor)
    sparse = sum(map(work.is_sparse, layers)) + depths * bool(config.num_moe_experts)
    routed = tokens * config.moe_router_topk * sparse
    return moved + (1 + again / 3) * ROUTED_PASSES * BYTES * routed * values


def _host_seconds(work: Workload, layout: GpuLayout, layers: int, recomputed: float) -> float:
    """Return the seconds in which the host launches a stage's kernels for a micro batch. No GPU is faster."""
    exchanges = _exchanges(work, layout) if layout.tensor > 1 else 0
    again = recomputed + work.task.forwards
    layer = HOST_LAYER
    if layout.expert_shards > 1:
        layer = HOST_EXPERTS if work.lora_rank is None else HOST_ADAPTED_EXPERTS
    layer += HOST_RING if layout.context > 1 and not work.gathers_keys else 0.0
    return layers * ((1 + again / 3) * layer + exchanges * HOST_EXCHANGE)


def _offload_wait(work: Workload, layout: GpuLayout, layers: range, seconds: float) -> float:
    """Return the seconds that a micro batch waits for activations on their way to the host and back.

    seconds: of its forward and backward pass, of which the first is about a third
    """
    tokens = layout.micro_batch * work.length / layout.context
    way = tokens * offloaded_bytes(work, layout, layers) / (PCIE if layout.gpus == 1 else SHARED_PCIE)
    return max(way - seconds / 3, 0.0) + max(way - seconds * 2 / 3, 0.0)


def _output_seconds(work: Workload, layout: GpuLayout, flops: Flops, machine: Machine, text_share: float) -> float:
    """Return the seconds of a micro batch in the output layer. Visual tokens are not scored."""
    passes = (3 if work.lora_rank is None else 2) + work.task.forwards
    tokens = layout.micro_batch * work.length * text_share / (layout.tensor * layout.context)
    overhead = LORA_OVERHEAD if work.lora_rank is not None else 1.0
    return overhead * SCORED * passes * 2 * flops.output * tokens / _dense_rate(work, layout) / machine.peak_flops


def _comparison_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the seconds of a micro batch in the comparison with a teacher, beside both models' output layers.

    The backward pass computes logits again that are not kept.
    """
    if work.task.distillation is None:
        return 0.0
    tokens = SCORED * layout.micro_batch * work.length / (layout.tensor * layout.context)
    is_top = work.task.distillation.top is not None
    moved = (COMPARED_TOP_BYTES if is_top else COMPARED_BYTES) * tokens * work.vocab_size
    again = 0.0
    if not is_top and work.further_work:
        repeated = max(1 - KEPT_LOGITS * work.gpu_bytes / (2 * BYTES * tokens * work.vocab_size), 0.0)
        again = repeated * 2 * (work.flops.output + work.further_work.flops.output) * tokens
    return again / _dense_rate(work, layout) / machine.peak_flops + moved / (BANDWIDTH * machine.bandwidth)


def _prediction_seconds(work: Workload, layout: GpuLayout, machine: Machine, text_share: float) -> float:
    """Return the seconds of a micro batch in the layers of multi-token prediction and their output layers.

    All tokens pass through output layers then, visual ones too, and also through that of the next token.
    """
    if not work.depths:
        return 0.0
    model, predicting = work.flops, work.predicting_flops
    share = layout.micro_batch / (layout.tensor * layout.context)
    passes = 3 if work.lora_rank is None else 2  # they have no adapters
    again = 1 if layout.recompute == "full" else 0
    output = model.output * (work.depths + 1 - SCORED * text_share)
    inner = predicting.matrix_parameters - model.matrix_parameters - work.depths * model.output
    products = 2 * (passes * output + (passes + again) * inner) * work.length * share
    tokens = [work.document_length]
    pairs = predicting.forward(tokens) - model.forward(tokens)
    pairs -= 2 * (predicting.matrix_parameters - model.matrix_parameters) * work.document_length
    attention = (3 + again) * pairs * work.length / work.document_length * share
    seconds = products / _dense_rate(work, layout) + attention / _attention_rate(work)
    return seconds / machine.peak_flops


def _attention_rate(work: Workload) -> float:
    """Return the share of the peak of attention's kernels: vendors' have neither sinks nor capped scores of packs."""
    architecture: Architecture = work.config.architecture  # type: ignore[attr-defined]
    return OWN_ATTENTION if architecture.sinks or architecture.score_cap else ATTENTION


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


def _exchanges(work: Workload, layout: GpuLayout) -> int:
    """Return the collectives of tensor parallelism in a layer: four in a forward pass, and six backward."""
    return 10 + {"none": 0, "mlp": 1, "full": 4}[layout.recompute] + 4 * work.task.forwards


def _tensor_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the seconds of the all-gathers and reduce-scatters of tensor parallelism."""
    moved = _exchanges(work, layout) * _hidden_bytes(work, layout) * (layout.tensor - 1) / layout.tensor
    return moved / (GATHERING * machine.link)


def _expert_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the seconds of two exchanges in a forward pass and two backward of each layer.

    Within a node a token goes once to each GPU that has experts of it; otherwise once to each of its experts.
    """
    chosen = work.config.moe_router_topk
    exchanges = (6 if layout.recompute == "full" else 4) + 2 * work.task.forwards
    states = exchanges * _hidden_bytes(work, layout) / layout.tensor
    # Ranks that split experts gather all rows of these, and add up their outputs.
    gathered = states * chosen * (layout.expert_tensor - 1) / (GATHERING * machine.link)
    if layout.expert == 1:
        return gathered
    if layout.expert <= machine.per_node and layout.expert_tensor == 1:
        share = 1 - (1 - 1 / layout.expert) ** chosen  # share of the tokens that have experts on a given GPU
        waits = work.config.num_layers * COUNTING
        return states * share * (layout.expert - 1) / (PEER_READS * machine.link) + waits
    near = (min(layout.expert, machine.per_node) - 1) / (ALL_TO_ALL * machine.link)
    far = max(layout.expert - machine.per_node, 0) / NETWORK
    return gathered + states * chosen / layout.expert * max(near, far)


def _context_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the seconds of keys and values, forward and backward: in a ring half of them are hidden."""
    if layout.context == 1:
        return 0.0
    passes = 3 + work.task.forwards
    moved = passes * key_values(work.config) / work.config.hidden_size * _hidden_bytes(work, layout) / layout.tensor
    is_near = layout.tensor * layout.context <= machine.per_node
    exposed = 1.0 if work.gathers_keys else 0.5
    return exposed * moved * (layout.context - 1) / (GATHERING * machine.link if is_near else NETWORK)


def _pipeline_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> float:
    """Return the seconds in which a stage sends a micro batch's hidden states and their gradients."""
    if layout.pipeline == 1:
        return 0.0
    moved = 2 * layout.virtual * _hidden_bytes(work, layout) / work.config.num_layers / layout.tensor
    return moved / (GATHERING * machine.link if layout.gpus <= machine.per_node else NETWORK)


def _update_seconds(work: Workload, layout: GpuLayout, machine: Machine) -> tuple[float, float]:
    """Return the seconds of the gradients' exchange that are not hidden, and of the optimizer's step."""
    if work.lora_rank is not None:
        return 0.0, 0.0
    parameters = work.parameters.language / layout.pipeline
    held = work.parameters.of_layers(range(work.config.num_layers)) + work.parameters.prediction
    experts = held.expert / layout.pipeline
    dense = (parameters - experts) / layout.tensor + work.trained_tower
    held_experts = experts / layout.expert_shards
    replicas = layout.data * layout.context
    link = GATHERING * machine.link if layout.gpus <= machine.per_node else NETWORK
    moved = dense * (replicas - 1) / replicas + held_experts * (layout.expert_data - 1) / layout.expert_data
    exchange = (work.gradient_bytes + BYTES) * moved / link * (1 - OVERLAP)
    updated = dense / replicas + held_experts / layout.expert_data
    on_host = updated * work.offload_fraction if layout.offloads else 0.0
    # A master on the host is two bytes beside its bf16 copy.
    host_seconds = on_host * (work.optimizer_bytes - BYTES) / (PCIE if layout.gpus == 1 else SHARED_PCIE)
    touched = (updated - on_host) * (work.gradient_bytes + 2 * work.optimizer_bytes + BYTES)
    return exchange, host_seconds + touched / (UPDATE_BANDWIDTH * machine.bandwidth)
