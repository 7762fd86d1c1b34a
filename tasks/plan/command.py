"""`megatron plan`: a table of the layouts that fit, the fastest first, and the command of the best."""

from dataclasses import replace

from ...bridge.checkpoint.hub import model_folder, read_config
from ...bridge.checkpoint.pretrained import load_config
from ...templates.plural import plural
from ..observability.flops import peak_flops
from ..options import PlanOptions
from ..system.memory import GIB
from .memory import OUTSIDE, Memory, Workload
from .search import Plan, Search, search, smallest_cluster
from .speed import Machine
from .table import aligned, choices
from .workload import make_workload

# Names as torch has them, and GiB that a process sees.
GPUS = {
    "h100": ("NVIDIA H100", 79.1),
    "h200": ("NVIDIA H200", 139.8),
    "h20": ("NVIDIA H20", 95.1),
    "a100": ("NVIDIA A100", 79.1),
    "b200": ("NVIDIA B200", 178.3),
    "l40s": ("NVIDIA L40S", 44.4),
}
HEADINGS = ("layout", "micro batch", "recompute", "AdamW on", *Memory._fields, "GiB", "s/step", "tokens/s/GPU")


def run(options: PlanOptions, sources: dict[str, str]) -> int:
    """Print the plans. Raises ValueError if nothing fits."""
    folder = model_folder(options.model_options, weights=False)
    hf_config = read_config(folder)
    device, memory = GPUS[options.gpu]
    memory = options.memory or memory
    work = replace(make_workload(hf_config, load_config(folder), options), gpu_bytes=memory * GIB)
    peak = peak_flops(device)
    assert peak is not None
    machine = Machine(peak, options.gpus_per_node)
    pins = _pins(options)
    limit = memory * GIB - OUTSIDE
    result = search(work, options.gpus, machine, limit, pins)
    print(_summary(options, work, device, memory))
    if result.best is None:
        raise ValueError(_misfit(options, work, machine, limit, result, pins))
    print(table(work, result.plans[: options.rows]))
    print(f"\n{len(result.plans):,} layouts fit, and {result.rejected:,} do not. The first:")
    print(f"  {_command(options, result.best)}")
    return 0


def _command(options: PlanOptions, plan: Plan) -> str:
    words = [
        f"NPROC_PER_NODE={min(options.gpus, options.gpus_per_node)} megatron sft --model {options.model}",
        f"--packing true --max_length {options.max_length} --global_batch_size {options.global_batch_size}",
        plan.layout.flags(),
        "--dataset ...",
    ]
    if options.tuner_type == "lora":
        words.insert(1, f"--tuner_type lora --lora_rank {options.lora_rank}")
        if options.lora_dropout is not None:
            words.insert(2, f"--lora_dropout {options.lora_dropout:g}")
    tower_flags = "freeze_vit", "freeze_aligner", "vit_gradient_checkpointing"
    types = "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "accumulate_allreduce_grads_in_fp32"
    for name in (*tower_flags, "fp8_format", "fp8_param_gather", *types, "optimizer_offload_fraction"):
        if (value := getattr(options, name)) != getattr(PlanOptions(), name):
            words.insert(-1, f"--{name} {str(value).lower()}")
    return " ".join(words)


def _pins(options: PlanOptions) -> dict[str, object]:
    """Return the fields of `GpuLayout` that flags fix."""
    values = {
        "tensor": options.tensor_model_parallel_size,
        "pipeline": options.pipeline_model_parallel_size,
        "virtual": options.virtual_pipeline_model_parallel_size,
        "first": options.decoder_first_pipeline_num_layers,
        "last": options.decoder_last_pipeline_num_layers,
        "context": options.context_parallel_size,
        "expert": options.expert_model_parallel_size,
        "micro_batch": options.micro_batch_size,
        "recompute": options.recompute and [options.recompute],
        "offloads": options.optimizer_cpu_offload,
    }
    return {name: value for name, value in values.items() if value is not None}


def table(work: Workload, plans: list[Plan]) -> str:
    """Return the plans as lines of columns; memory in GiB of the rank that needs most."""
    return aligned([HEADINGS, *(_cells(work, plan) for plan in plans)])


def _cells(work: Workload, plan: Plan) -> tuple[str, ...]:
    return (
        *choices(plan.layout),
        *(f"{part / GIB:.1f}" for part in plan.memory),
        f"{plan.memory.total / GIB:.1f}",
        f"{plan.seconds:.2f}",
        f"{plan.tokens_per_second(work):,.0f}",
    )


def _summary(options: PlanOptions, work: Workload, device: str, memory: float) -> str:
    experts = sum(layer.expert for layer in work.parameters.layers)
    of_experts = f", {experts / 1e9:.1f} billion in experts" if experts else ""
    trained = "all of the language model's" if work.tower else "all of them"
    trained = trained if work.lora_rank is None else f"LoRA of rank {work.lora_rank}"
    count = work.parameters.total if work.tower else work.parameters.language
    size = f"{count / 1e9:.2f} billion parameters"
    lines = [
        f"{options.model}: {size}{of_experts}; training {trained} in {'FP8' if work.fp8 else 'bf16'}",
        f"{plural(options.gpus, f'{device} GPU')} of {memory:g} GiB; steps of {plural(work.global_batch, 'pack')} of "
        f"{work.length:,} tokens, in documents of {work.document_length:,}",
    ]
    if tower := work.tower:
        parts = [
            name for name, trains in (("layers", tower.trains_layers), ("mergers", tower.trains_mergers)) if trains
        ]
        state = f"whose {' and '.join(parts)} are trained" if parts else "which is frozen"
        lines.append(f"{tower.image_share:.0%} of the tokens are of images, for the vision tower, {state}.")
    return "\n".join([*lines, ""])


def _misfit(
    options: PlanOptions, work: Workload, machine: Machine, limit: float, result: Search, pins: dict[str, object]
) -> str:
    """Return the error message where nothing fits."""
    if result.smallest is None:
        return (
            f"--gpus {options.gpus}, --global_batch_size {options.global_batch_size}: no layout divides the batch, the "
            "model's heads, layers and experts, and the GPUs. Change one of them, or remove parallel sizes"
        )
    need, layout = result.smallest.memory.total + OUTSIDE, result.smallest.layout
    cluster = smallest_cluster(work, machine, limit, pins)
    fix = f"It fits on {cluster} GPUs" if cluster else "Set a shorter --max_length, or --tuner_type lora"
    return (
        f"--gpus {options.gpus}: no layout fits. The least memory is {need / GIB:.1f} GiB of each GPU, with "
        f"{layout.flags()}. {fix}"
    )
