"""`megatron plan`: a table of the layouts that fit, the fastest first, and the command of the best."""

from dataclasses import replace

from ...bridge.checkpoint.hub import model_folder, read_config
from ...bridge.checkpoint.pretrained import load_config
from ...bridge.checkpoint.quantized import quantization_of, weight_reader
from ...templates.plural import plural
from ..options import PlanOptions
from ..system.memory import GIB
from .further_models import with_models_of_plan
from .gpus import GPUS
from .make_workload import make_workload
from .memory import OUTSIDE, Memory, host_bytes
from .search import Plan, Search, search, smallest_cluster
from .speed import Machine, StepTime
from .table import aligned, choices
from .workload import Workload

HEADINGS = (
    "layout", "micro batch", "recompute", "AdamW on", *Memory._fields, "GiB", "s/step", "tokens/s/GPU", "slower by"
)  # fmt: skip
GENERATING = "grpo", "ppo", "gkd"  # tasks whose packs have completions
TOO_LARGE = 3  # faster layouts that are named although they do not fit


def run(options: PlanOptions, sources: dict[str, str]) -> int:
    """Print the plans. Raises ValueError if nothing fits."""
    folder = model_folder(options.model_options, weights=False)
    hf_config = read_config(folder)
    weight_reader(folder, hf_config)  # raises ValueError for an unknown quantization
    device = GPUS[options.gpu].name
    memory = options.memory or GPUS[options.gpu].memory
    work = with_models_of_plan(make_workload(hf_config, load_config(folder), options), options)
    work = replace(work, gpu_bytes=memory * GIB)
    _check_task(options, work)
    _check_offload(options, work)
    machine = Machine.of(device, options.gpus_per_node)
    assert machine is not None
    pins = _pins(options)
    limit = memory * GIB - OUTSIDE
    result = search(work, options.gpus, machine, limit, pins)
    print(_summary(options, work, device, memory, quantization_of(hf_config).get("quant_method")))
    if result.best is None:
        raise ValueError(_misfit(options, work, machine, limit, result, pins))
    print(table(work, _of_each_size(result.plans)[: options.rows]))
    print(f"\n{len(result.plans):,} layouts fit, and {len(result.too_large):,} do not.", end=" ")
    faster = [plan for plan in result.too_large if plan.seconds < result.best.seconds]
    if faster:
        print("Faster, but too large:")
        print("\n".join(f"  {_excess(plan, limit)}" for plan in _of_each_size(faster)[:TOO_LARGE]))
    print("The first:")
    print(f"  {_command(options, work, result.best)}")
    if on_host := host_bytes(work, result.best.layout):
        print(f"It keeps {on_host / GIB:.1f} GiB of each GPU in host memory.")
    return 0


def _check_task(options: PlanOptions, work: Workload) -> None:
    """Raise ValueError for what is not planned of `megatron rlhf`."""
    if options.rlhf_type is None:
        return
    flag = f"--rlhf_type {options.rlhf_type}"
    if work.tower:
        raise ValueError(f"{flag}: not planned with images. Set --image_share 0, which plans the language model alone")
    if work.fp8 and work.task.reference != "none":
        raise ValueError(f"{flag}: not planned in FP8 beside a reference model. Remove --fp8_format")
    if work.fp8 and options.rlhf_type == "gkd":
        raise ValueError(f"{flag}: not planned in FP8. Remove --fp8_format")
    if work.depths:
        raise ValueError(f"{flag} cannot be used with --mtp_num_layers. Remove one of them")


def _check_offload(options: PlanOptions, work: Workload) -> None:
    """Raise ValueError for an offload of activations that a run refuses."""
    layers, total = options.cpu_offloading_num_layers or 0, work.config.num_layers
    if layers > total:
        raise ValueError(f"--cpu_offloading_num_layers {layers}: the model has {total} layers. Set at most these")
    if layers and options.fp8_format:
        raise ValueError("--cpu_offloading_num_layers cannot be used with --fp8_format. Remove one of them")


def _of_each_size(plans: list[Plan]) -> list[Plan]:
    """Return the fastest plan of each choice of parallel sizes. plans: the fastest first"""
    best: dict[tuple[int, ...], Plan] = {}
    for plan in plans:
        layout = plan.layout
        sizes = layout.tensor, layout.pipeline, layout.context, layout.expert, layout.expert_tensor
        best.setdefault(sizes, plan)
    return list(best.values())


def _excess(plan: Plan, limit: float) -> str:
    """Return what a layout needs that does not fit, and the greatest part of it."""
    memory, layout = plan.memory, plan.layout
    name, part = max(memory._asdict().items(), key=lambda item: item[1])
    return (
        f"{layout}, micro batch {layout.micro_batch}: {plan.seconds:.2f} s/step, but {memory.total / GIB:.1f} GiB, "
        f"{(memory.total - limit) / GIB:.1f} too many; {name} {part / GIB:.1f}"
    )


def _command(options: PlanOptions, work: Workload, plan: Plan) -> str:
    task, packs = "sft", f"--max_length {work.length} --global_batch_size {work.global_batch}"
    if options.rlhf_type:
        task = f"rlhf --rlhf_type {options.rlhf_type}" + ("" if options.beta is None else f" --beta {options.beta:g}")
    if options.rlhf_type == "ppo":
        task += " --offload_critic true"
    if options.rlhf_type == "gkd":
        task += f" --teacher_model {options.teacher_model}"
    if options.rlhf_type in GENERATING:  # the batch counts completions, and --max_length is of prompts
        completions = work.global_batch * (work.length // work.document_length)
        packs = f"--packing_length {work.length} --max_length ... --global_batch_size {completions}"
    words = [
        f"NPROC_PER_NODE={min(options.gpus, options.gpus_per_node)} megatron {task} --model {options.model}",
        f"--packing true {packs}",
        plan.layout.flags(),
        "--dataset ...",
    ]
    if options.tuner_type == "lora":
        words.insert(1, f"--tuner_type lora --lora_rank {options.lora_rank}")
        if options.lora_dropout is not None:
            words.insert(2, f"--lora_dropout {options.lora_dropout:g}")
    tower_flags = "freeze_vit", "freeze_aligner", "vit_gradient_checkpointing"
    types = "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "accumulate_allreduce_grads_in_fp32"
    if options.mtp_num_layers:
        words.insert(-1, f"--mtp_num_layers {options.mtp_num_layers}")
        if work.parameters.tower.total:
            words.insert(-1, "--language_model_only true")
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
        "expert_tensor": options.expert_tensor_parallel_size,
        "micro_batch": options.micro_batch_size,
        "recompute": options.recompute and [options.recompute],
        "offloads": options.optimizer_cpu_offload,
        "offloaded_layers": options.cpu_offloading_num_layers,
    }
    pins: dict[str, object] = {name: value for name, value in values.items() if value is not None}
    return pins | {"recomputed": None} if pins.get("recompute") == ["full"] else pins


def table(work: Workload, plans: list[Plan]) -> str:
    """Return the plans as lines of columns; memory in GiB of the rank that needs most."""
    return aligned([HEADINGS, *(_cells(work, plan, plans[0]) for plan in plans)])


def _cells(work: Workload, plan: Plan, best: Plan) -> tuple[str, ...]:
    return (
        *choices(plan.layout),
        *(f"{part / GIB:.1f}" for part in plan.memory),
        f"{plan.memory.total / GIB:.1f}",
        f"{plan.seconds:.2f}",
        f"{plan.tokens_per_second(work):,.0f}",
        _slower_by(plan.time, best.time),
    )


def _slower_by(time: StepTime, best: StepTime) -> str:
    """Return the share that a step takes longer than the best, and what has grown most."""
    name = max(StepTime._fields, key=lambda field: getattr(time, field) - getattr(best, field))
    share = time.total / best.total - 1
    return f"{share:.1%} ({name})" if share else ""


def _summary(options: PlanOptions, work: Workload, device: str, memory: float, quantization: str | None) -> str:
    experts = sum(layer.expert for layer in work.parameters.layers)
    of_experts = f", {experts / 1e9:.1f} billion in experts" if experts else ""
    trained = "all of the language model's" if work.tower else "all of them"
    trained = trained if work.lora_rank is None else f"LoRA of rank {work.lora_rank}"
    count = work.parameters.total if work.tower else work.parameters.language
    size = f"{count / 1e9:.2f} billion parameters"
    dtype = "FP8" if work.fp8 else "bf16"
    lines = [
        f"{options.model}: {size}{of_experts}; training {trained} in {dtype}{_task(options, work)}",
        f"{plural(options.gpus, f'{device} GPU')} of {memory:g} GiB; steps of {plural(work.global_batch, 'pack')} of "
        f"{work.length:,} tokens, in documents of {work.document_length:,}",
    ]
    if quantization:
        lines.append(f"The weights of the checkpoint, in {quantization}, are read as bf16.")
    if tower := work.tower:
        parts = [
            name for name, trains in (("layers", tower.trains_layers), ("mergers", tower.trains_mergers)) if trains
        ]
        state = f"whose {' and '.join(parts)} are trained" if parts else "which is frozen"
        lines.append(f"{tower.image_share:.0%} of the tokens are of images, for the vision tower, {state}.")
    return "\n".join([*lines, ""])


def _task(options: PlanOptions, work: Workload) -> str:
    """Return the words for a task of `megatron rlhf`."""
    if options.rlhf_type is None:
        return ""
    models = ["a reference model"] if work.task.reference == "kept" else []
    if work.further:
        models.append("a critic" if work.further.is_trained else f"{options.teacher_model}")
    beside = f" beside {' and '.join(models)}" if models else ""
    generation = ", without generation" if options.rlhf_type in GENERATING else ""
    return f", for {options.rlhf_type}{beside}{generation}"


def _misfit(
    options: PlanOptions, work: Workload, machine: Machine, limit: float, result: Search, pins: dict[str, object]
) -> str:
    """Return the error message where nothing fits."""
    if result.smallest is None:
        return (
            f"--gpus {options.gpus}, --global_batch_size {options.global_batch_size}: no layout divides the batch, "
            f"the GPUs, and the heads, layers and experts of {work.names_of_models}. Change one of them, or remove "
            "parallel sizes"
        )
    need, layout = result.smallest.memory.total + OUTSIDE, result.smallest.layout
    cluster = smallest_cluster(work, machine, limit, pins)
    fix = f"It fits on {cluster} GPUs" if cluster else "Set a shorter --max_length, or --tuner_type lora"
    return (
        f"--gpus {options.gpus}: no layout fits. The least memory is {need / GIB:.1f} GiB of each GPU, with "
        f"{layout.flags()}. {fix}"
    )
