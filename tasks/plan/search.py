"""Search of the layouts that fit, the fastest first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from .further_models import divides_further_model
from .gpu_layout import RECOMPUTE, GpuLayout
from .memory import Memory, host_bytes, memory_of_rank
from .speed import Machine, StepTime, step_time
from .workload import Workload

MICRO_BATCHES = 1, 2, 4, 8, 16
DIVISION = "virtual", "first", "last"
VIRTUAL = 2, 3, 4  # chunks of a pipeline stage
WORTH = 1.03  # least speedup for which activations are kept on the host, in the same layout
UNEVEN = 2  # numbers of layers that are tried for the last stage, those nearest to an even split


@dataclass(frozen=True)
class Plan:
    """GpuLayout with its memory and time."""

    layout: GpuLayout
    memory: Memory
    time: StepTime

    @property
    def seconds(self) -> float:
        return self.time.total

    def tokens_per_second(self, work: Workload) -> float:
        """Return the tokens per second of a GPU."""
        return work.global_batch * work.length / self.seconds / self.layout.gpus


@dataclass(frozen=True)
class Search:
    """Result of a search: plans that fit and those that do not, the fastest first, and that of the least memory."""

    plans: list[Plan]
    smallest: Plan | None  # None: the batch or the model's sizes exclude every layout
    too_large: list[Plan]

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None


def search(work: Workload, gpus: int, machine: Machine, memory: float, pins: Mapping[str, object]) -> Search:
    """Search the layouts of `gpus` GPUs. memory: bytes for tensors

    pins: values of GpuLayout's fields that are not searched; of `recompute` those that may be chosen
    """
    plans: list[Plan] = []
    too_large: list[Plan] = []
    for layout in _layouts(work, gpus, machine, pins):
        fits: list[Plan] = []
        for offloads in [pins["offloads"]] if "offloads" in pins else (False, True):
            choices = _memory_choices(work, replace(layout, offloads=bool(offloads)), pins)
            timed = [(step_time(work, choice, machine), choice) for choice in choices]
            for time, choice in sorted(timed, key=_preference):
                if not _fits_host(work, choice, machine, pins):
                    continue
                plan = Plan(choice, memory_of_rank(work, choice), time)
                if plan.memory.total <= memory:
                    fits.append(plan)
                    break  # the choices after it are slower, or hardly faster and on the host
                too_large.append(plan)
        plans += _by_speed(fits)[:1]
    smallest = min([*plans, *too_large], key=lambda plan: plan.memory.total, default=None)
    return Search(_by_speed(plans), smallest, _by_speed(too_large))


def _preference(timed: tuple[StepTime, GpuLayout]) -> float:
    time, layout = timed
    return time.total * (WORTH if layout.offloaded_layers else 1)


def _by_speed(plans: list[Plan]) -> list[Plan]:
    return sorted(plans, key=lambda plan: plan.seconds)


def smallest_cluster(work: Workload, machine: Machine, memory: float, pins: Mapping[str, object]) -> int | None:
    """Return the least number of GPUs, a power of two up to 1,024, that hold the run; None if none do."""
    sizes = (2**power for power in range(11))
    return next((gpus for gpus in sizes if search(work, gpus, machine, memory, pins).plans), None)


def _layouts(work: Workload, gpus: int, machine: Machine, pins: Mapping[str, Any]) -> Iterator[GpuLayout]:
    """Yield the layouts that the model and the batch allow, without recomputation and offload."""
    config = work.config
    stages = range(1, min(gpus, config.num_layers) + 1)
    if any(model.config.architecture.is_one_stage for model in work.models):  # type: ignore[attr-defined]
        stages = range(1, 2)
    powers = [2**power for power in range(11) if 2**power <= gpus]
    width = (config.moe_ffn_hidden_size if config.num_moe_experts else None) or 1  # columns of an expert
    values = {
        "tensor": [n for n in powers if n <= machine.per_node and all(_divides_matrices(w, n) for w in work.models)],
        "pipeline": [n for n in stages if gpus % n == 0],
        "context": [n for n in powers if work.length % (2 * n) == 0],
        "expert": [n for n in powers if config.num_moe_experts and config.num_moe_experts % n == 0] or [1],
        "expert_tensor": [n for n in powers if n <= machine.per_node and width % n == 0],
        "micro_batch": list(MICRO_BATCHES),
    }
    values |= {name: [pin] for name, pin in pins.items() if name in values}
    for sizes in product(*values.values()):
        layout = GpuLayout(gpus, **dict(zip(values, sizes, strict=True)))
        model = layout.tensor * layout.pipeline * layout.context
        if gpus % model or gpus % (layout.pipeline * layout.expert_shards):
            continue
        if work.length % (layout.tensor * layout.context) or not _may_split_experts(work, layout, pins):
            continue
        if work.batch % (layout.micro_batch * layout.data) == 0:
            yield from _divisions(work, layout, pins)


def _may_split_experts(work: Workload, layout: GpuLayout, pins: Mapping[str, Any]) -> bool:
    """Return whether a layout may split experts: by a flag, or where there are no more of them to distribute."""
    experts = work.config.num_moe_experts
    is_chosen = layout.expert_tensor > 1 and "expert_tensor" not in pins
    return not is_chosen or bool(experts and experts % (2 * layout.expert))


def _divisions(work: Workload, layout: GpuLayout, pins: Mapping[str, Any]) -> Iterator[GpuLayout]:
    """Yield the layout with its layers divided evenly, over virtual stages, and with fewer on the last stage."""
    stages, layers = layout.pipeline, work.config.num_layers
    divisions: list[tuple[Any, Any, Any]] = [(1, None, None)]  # virtual stages, layers of the first and the last stage
    if any(name in pins for name in DIVISION):
        divisions = [(pins.get("virtual", 1), pins.get("first"), pins.get("last"))]
    elif stages > 1:
        divisions += [(chunks, None, None) for chunks in VIRTUAL]
        divisions += [(1, None, last) for last in _last_stages(layers, stages)]
    for virtual, first, last in divisions:
        choice = replace(layout, virtual=virtual, first=first, last=last)
        # megatron-core's interleaved schedule takes as many micro batches as stages at a time.
        is_interleaved = stages > 1 and layout.micro_batches(work.global_batch) % stages == 0
        is_valid = (virtual == 1 or is_interleaved) and (stages > 1 or first is last is None) and choice.divides(layers)
        is_valid = is_valid and divides_further_model(work, choice)
        if is_valid and min(map(len, choice.stages(layers))) >= pins.get("offloaded_layers", 0):
            yield choice


def _last_stages(layers: int, stages: int) -> Iterator[int]:
    """Yield numbers of layers of a last stage that has fewer than the others, for the output layer is on it too."""
    sizes = (layers - middle * (stages - 1) for middle in range(layers // stages + 1, layers))
    yield from islice((size for size in sizes if size > 0), UNEVEN)


def _divides_matrices(work: Workload, tensor: int) -> bool:
    """Return whether tensor parallelism of this size divides the attention's heads and the MLP."""
    config = work.config
    groups = config.num_query_groups or config.num_attention_heads
    return (
        config.num_attention_heads % tensor == 0
        and max(groups, tensor) % min(groups, tensor) == 0
        and (config.ffn_hidden_size or 0) % tensor == 0
    )


def _memory_choices(work: Workload, layout: GpuLayout, pins: Mapping[str, Any]) -> Iterator[GpuLayout]:
    """Yield the layout with its choices of what is recomputed, and of the activations that are kept on the host."""
    allowed, is_pinned = pins.get("recompute", RECOMPUTE), bool(pins.get("offloaded_layers"))
    if is_pinned and "full" in allowed:  # otherwise more leaves than the host holds, or the links carry
        allowed = ["full"]
    if len(allowed) > 1 and not work.has_dense_mlps:
        allowed = [choice for choice in allowed if choice != "mlp"]
    for recompute in allowed:
        counts = [pins.get("recomputed")] if "recomputed" in pins or is_pinned else _recomputed_layers(work, layout)
        for recomputed in counts if recompute == "full" else [None]:
            choice = replace(layout, recompute=recompute, recomputed=recomputed)
            numbers = [pins["offloaded_layers"]] if "offloaded_layers" in pins else _offloaded_layers(work, choice)
            for offloaded in numbers:
                if _can_offload(work, choice, offloaded):
                    yield replace(choice, offloaded_layers=offloaded)


def _offloaded_layers(work: Workload, layout: GpuLayout) -> list[int]:
    """Return numbers of layers of each stage whose activations may go to the host: none, or all of the shortest stage.

    They go only where they are inputs of recomputed layers: the links would not carry the others.
    """
    is_planned = work.has_usual_attention and not work.fp8 and not work.tower
    if layout.recompute != "full" or layout.recomputed is not None or not is_planned:
        return [0]
    return [0, min(map(len, layout.stages(work.config.num_layers)))]


def _can_offload(work: Workload, layout: GpuLayout, offloaded: int) -> bool:
    """Return whether a run accepts this number of layers. Where only some are recomputed, it offloads no others."""
    if layout.recompute != "full" or layout.recomputed is None:
        return True
    chunk = max(map(len, layout.stages(work.config.num_layers))) // layout.virtual
    return min(offloaded, chunk) <= layout.recomputed


def _fits_host(work: Workload, layout: GpuLayout, machine: Machine, pins: Mapping[str, object]) -> bool:
    """Return whether the host holds what the search, and not a flag, has put there."""
    is_chosen = (layout.offloads and "offloads" not in pins) or (
        layout.offloaded_layers and "offloaded_layers" not in pins
    )
    return not is_chosen or host_bytes(work, layout) <= machine.host_memory


def _recomputed_layers(work: Workload, layout: GpuLayout) -> list[int | None]:
    """Return numbers of recomputed layers of each chunk: a quarter, half and three quarters of them, and None, all."""
    chunk = max(map(len, layout.stages(work.config.num_layers))) // layout.virtual
    return [*sorted({chunk * quarters // 4 for quarters in (1, 2, 3)} - {0}), None]
