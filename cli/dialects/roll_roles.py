"""Models of ROLL's roles and where they are: layouts, batches of a step, frozen models, engines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..flags import OptionValue, Scalar, show
from .keys import Keys
from .placement import MappingError, RolePlacement, differing_roles, parse_devices, place
from .roll_rows import CRITIC_ALIKE, DTYPES, LORA, SCHEDULES, VLLM_FIELDS, VLLM_FLAGS
from .translation import Translation
from .verl_roles import Layout, number_at, set_recomputation
from .verl_rows import SIZES

CONFIG = "strategy_args.strategy_config"
STRATEGY = "strategy_args.strategy_name"
NAMES = {"reference": "ref", "critic": "critic", "teacher": "teacher"}  # role -> prefix of flags
MEGATRON = ("megatron_train", "megatron_infer")
OTHER_STRATEGIES = (
    "fsdp2_train", "fsdp2_infer", "deepspeed_train", "deepspeed_infer", "hf_infer", "fsdp_train", "fsdp_infer",
)  # fmt: skip


@dataclass(frozen=True)
class OptimizerStep:
    """An optimizer step of the trained role."""

    layout: Layout
    micro_batch: int
    batch: int  # samples
    text: str  # arithmetic of the batch, for sources


def split_names(value: object) -> list[Scalar]:
    """Return names that are a list, or text divided by commas."""
    items = value if isinstance(value, list) else [value]
    return [name.strip() for item in items for name in str(item).split(",") if name.strip()]


def devices_of(keys: Keys, translation: Translation, role: str) -> tuple[int, ...] | None:
    """Take a role's GPUs. None: not set, or refused."""
    key = f"{role}.device_mapping"
    if key not in keys:
        return None
    try:
        return parse_devices(keys.take(key))
    except MappingError as error:
        translation.refuse(keys, key, str(error))
        return None


def set_placement(
    keys: Keys, translation: Translation, role: str, *, engine: str | None, beside: tuple[str, ...], trains: bool
) -> RolePlacement:
    """Set processes, nodes, and engines in them or apart. Return the placement.

    beside: other roles; trains: whether the first of them is trained, too
    """
    gpus = keys.integer("num_gpus_per_node", 8)
    role_devices = devices_of(keys, translation, role)
    others = {name: devices for name in beside if (devices := devices_of(keys, translation, name))}
    trained = [*(role_devices or [0]), *(others.get(beside[0], ()) if trains else ())]
    if role_devices is None and f"{role}.device_mapping" not in keys:
        translation.refused.append(f"{role}.device_mapping: missing. Set it to the GPUs of training")
    engines = devices_of(keys, translation, engine) if engine else None
    engines = engines if role_devices else None  # nothing is known to be in them, or beside them
    try:
        placement = place(trained, engines, max(gpus, 1))
    except MappingError as error:
        refused_role = engine if engine and engines and "GPUs train" in str(error) else role
        translation.refuse(keys, f"{refused_role}.device_mapping", str(error))
        placement = place(range(1), None, 1)
    translation.processes, translation.nodes = placement.processes, placement.nodes
    if placement.note:
        translation.note(keys, f"{engine}.device_mapping", placement.note)
    for name in differing_roles(trained, others | ({role: role_devices} if role_devices else {})):
        text = f"on all {placement.processes} GPUs of training, by turns, with the same numbers"
        translation.note(keys, f"{name}.device_mapping", text)
    return placement


def set_step(keys: Keys, translation: Translation, role: str, processes: int) -> OptimizerStep:
    """Set the batch of a step, and the micro batch."""
    layout = layout_of(keys, role)
    per_device, accumulation = f"{role}.training_args.per_device_train_batch_size", "gradient_accumulation_steps"
    micro = max(keys.integer(per_device, 8), 1)
    steps = max(keys.integer(f"{role}.training_args.{accumulation}", 1), 1)
    product = layout.tensor * layout.pipeline * layout.context
    devices = _count(keys, role, product)
    if devices % product:
        translation.refuse(
            keys, f"{role}.device_mapping",
            f"{devices} GPUs are not a multiple of TP x PP x CP {product}. Set a multiple",
        )  # fmt: skip
    replicas = layout.replicas(devices)
    batch = micro * steps * replicas
    text = f"{translation.source(keys, per_device)} {micro} x {accumulation} {steps} x DP {replicas}"
    translation.set("micro_batch_size", micro, translation.source(keys, per_device))
    translation.set("global_batch_size", batch, text)
    ranks = layout.replicas(processes)
    if batch % (micro * ranks):
        translation.refuse(
            keys, per_device,
            f"micro batches of {micro} on {ranks} data-parallel ranks do not divide the {batch} samples of a step. "
            f"Set {micro * ranks} or a multiple in all: {per_device} x {accumulation}",
        )  # fmt: skip
    return OptimizerStep(layout, micro, batch, text)


def layout_of(keys: Keys, role: str) -> Layout:
    """Return a role's layout without taking its keys."""
    tensor, pipeline, context = (max(number_at(keys, f"{role}.{CONFIG}.{size}", 1), 1) for size in SIZES[:3])
    if not is_megatron(keys, role):
        return Layout(1, 1, max(number_at(keys, f"{role}.model_args.ulysses_size", 1), 1))
    return Layout(tensor, pipeline, context)


def is_megatron(keys: Keys, role: str) -> bool:
    return str(keys.peek(f"{role}.{STRATEGY}") or "megatron_train") in MEGATRON


def _count(keys: Keys, role: str, default: int) -> int:
    """Return the number of a role's GPUs."""
    try:
        return len(parse_devices(keys.peek(f"{role}.device_mapping")))
    except MappingError:
        return default


def set_strategy(keys: Keys, translation: Translation, role: str) -> None:
    """Say that megatron-core runs a role, and ignore settings of another strategy."""
    key = f"{role}.{STRATEGY}"
    name = keys.text(key)
    if name is None or name in MEGATRON:
        if name:
            translation.ignore(keys, key, "megatron-core")
        return
    if name not in OTHER_STRATEGIES:
        translation.refuse(keys, key, f"choose one of {', '.join((*MEGATRON, *OTHER_STRATEGIES))}")
        return
    translation.note(keys, key, "megatron-core runs it, with the same numbers")


def set_trained(keys: Keys, translation: Translation, role: str) -> None:
    """Set what the trained model's weights, layout, memory and schedule need beside rows."""
    set_strategy(keys, translation, role)
    args, config = keys.view(f"{role}.model_args"), keys.view(f"{role}.{CONFIG}")
    dtype = args.text("dtype", "bf16")
    if dtype not in DTYPES:
        translation.refuse(args, "dtype", f"choose one of {', '.join(DTYPES)}")
    translation.set("torch_dtype", DTYPES.get(dtype, "bfloat16"), translation.source(args, "dtype"))
    for name in ("bf16", "fp16"):
        if name in config and config.boolean(name, False):
            translation.set("torch_dtype", DTYPES[name], config.source(name))
        elif name in config:
            translation.ignore(config, name, "model_args.dtype sets the type")
    if "ulysses_size" in args:
        if is_megatron(keys, role):
            translation.ignore(args, "ulysses_size", "read with FSDP alone")
        else:
            size = args.integer("ulysses_size", 1)
            translation.set("context_parallel_size", size, args.source("ulysses_size"))
    if config.boolean("sequence_parallel", False):
        if layout_of(keys, role).tensor > 1:
            translation.set("sequence_parallel", True, config.source("sequence_parallel"))
        else:
            text = "needs tensor_model_parallel_size above 1, and changes no number without it"
            translation.note(config, "sequence_parallel", text)
    elif "sequence_parallel" in config:
        translation.set("sequence_parallel", False, config.source("sequence_parallel"))
    is_full_alone = config.peek("recompute_granularity") == "full" and "recompute_method" not in config
    set_recomputation(config, translation)
    if is_full_alone:
        translation.note(config, "recompute_granularity", "every layer is a unit of recomputation, as in ROLL")
        translation.set("recompute_granularity", "full", config.source("recompute_granularity"))
    if "recompute_modules" in config and "recompute_modules" not in translation.flags:
        modules = split_names(config.take("recompute_modules"))
        translation.set("recompute_modules", modules, config.source("recompute_modules"))
    if config.peek("optimizer_cpu_offload") is True or "optimizer_offload_fraction" in config:
        fraction = config.number("optimizer_offload_fraction", 0.0)
        translation.set(
            "optimizer_offload_fraction", fraction, translation.source(config, "optimizer_offload_fraction")
        )
    if "freeze_module_prefix" in args:
        names = split_names(args.take("freeze_module_prefix"))
        translation.set("freeze_parameters", names, args.source("freeze_module_prefix"))
    _set_lora(keys.view(role), translation)
    _set_warmup(keys.view(f"{role}.training_args"), translation)
    _set_packing(keys.view(role), translation)


def _set_lora(keys: Keys, translation: Translation) -> None:
    target = keys.take("model_args.lora_target")
    if target is None:
        for key in LORA:
            if key in keys:
                translation.ignore(keys, key, "read with lora_target alone")
        return
    source = keys.source("model_args.lora_target")
    translation.set("tuner_type", "lora", source)
    if isinstance(target, str) and any(character in target for character in "*$|("):
        translation.set("target_regex", target, source)
    else:
        names: list[Scalar] = ["all-linear" if name == "all" else name for name in split_names(target)]
        translation.set("target_modules", names, source)
    rank = keys.integer("model_args.lora_rank", 8)
    translation.set("lora_rank", rank, translation.source(keys, "model_args.lora_rank"))
    alpha = keys.integer("model_args.lora_alpha", 2 * rank)
    translation.set("lora_alpha", alpha, translation.source(keys, "model_args.lora_alpha"))
    dropout = keys.number("model_args.lora_dropout", 0.0)
    translation.set("lora_dropout", dropout, translation.source(keys, "model_args.lora_dropout"))
    others = keys.take("model_args.additional_target")
    if others is not None:
        translation.set("modules_to_save", split_names(others), keys.source("model_args.additional_target"))


def _set_warmup(keys: Keys, translation: Translation) -> None:
    steps, ratio = keys.integer("warmup_steps", 0), keys.number("warmup_ratio", 0.0)
    if steps > 0 or not ratio:
        translation.set("lr_warmup_iters", steps, translation.source(keys, "warmup_steps"))
    else:
        translation.set("lr_warmup_fraction", ratio, keys.source("warmup_ratio"))


def _set_packing(keys: Keys, translation: Translation) -> None:
    """Set micro batches by tokens: packs, of which a micro batch has one."""
    packed, algorithm = "use_sequence_packing", "sequence_packing_args.algorithm"
    by_load = keys.boolean(packed, False) and keys.text(algorithm, "none") == "load_balance"
    dynamic = keys.boolean("use_dynamic_batching_in_train", False)
    lengths = {
        "sequence_packing_args.max_packed_sequence_length_train": by_load,
        "max_tokens_per_microbatch_in_train": dynamic,
    }
    for key, is_read in lengths.items():
        if is_read and (length := keys.integer(key, 0)):
            translation.set("packing", True, keys.source(algorithm if by_load else "use_dynamic_batching_in_train"))
            translation.set("packing_length", length, keys.source(key))
            translation.flags["micro_batch_size"] = 1
            translation.sources["micro_batch_size"] = f"a pack of {keys.source(key)} tokens"
        elif key in keys:
            translation.ignore(keys, key, "read with micro batches by tokens alone")
    for key in (packed, algorithm, "use_dynamic_batching_in_train"):
        if key in keys and "packing" not in translation.flags:
            translation.ignore(keys, key, "samples of a micro batch are never padded, with the same numbers")


def set_frozen(
    keys: Keys, translation: Translation, role: str, trained: str, *, is_used: bool, has_flags: bool
) -> None:
    """Set the layout of a model beside the trained one where it differs.

    is_used: whether there is such a model; has_flags: whether it may have a layout of its own
    """
    prefix, table = NAMES[role], f"{role}.{CONFIG}"
    dtype = f"{role}.model_args.dtype"
    if dtype in keys:
        policys = str(keys.peek(f"{trained}.model_args.dtype") or "bf16")
        if keys.take(dtype) == policys or policys not in DTYPES or not is_used:
            translation.ignore(keys, dtype, "as the trained model's")
        else:
            translation.refuse(keys, dtype, f"all models have {trained}.model_args.dtype. Remove it")
    set_strategy(keys, translation, role)
    chunks = f"{table}.virtual_pipeline_model_parallel_size"
    if chunks in keys:
        translation.ignore(keys, chunks, "stages of a frozen model are not cut into chunks, with the same numbers")
    follows = not is_megatron(keys, role) or (f"{role}.{STRATEGY}" not in keys and not keys.under(table))
    for size in SIZES:
        key = f"{table}.{size}"
        value = keys.integer(key, 1)
        if not is_used or follows or value == number_at(keys, f"{trained}.{CONFIG}.{size}", 1):
            if key in keys:
                translation.ignore(keys, key, "as the trained model's" if is_used else f"there is no {role}")
        elif has_flags:
            translation.set(f"{prefix}_{size}", value, translation.source(keys, key))
        elif key in keys:
            translation.note(keys, key, f"the {role} is laid out as the trained model, with the same numbers")


def set_critic(keys: Keys, translation: Translation, trained: str, step: OptimizerStep, *, is_used: bool) -> None:
    """Set the critic's model and learning rate, and refuse settings that differ from the policy's."""
    set_frozen(keys, translation, "critic", trained, is_used=is_used, has_flags=True)
    args, policy = keys.view("critic.training_args"), keys.view(f"{trained}.training_args")
    model, pretrain = "critic.model_args.model_name_or_path", "reward_pretrain"
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not is_used:
        names = (*sizes, "learning_rate", *(name for name, _ in CRITIC_ALIKE))
        for key in (model, *(f"critic.training_args.{name}" for name in names)):
            if key in keys:
                translation.ignore(keys, key, "there is no critic without adv_estimator gae")
        return
    key = model if model in keys else pretrain
    keys.take(pretrain)
    if key in keys and keys.peek(key) != translation.flags.get("model"):
        translation.set("critic_model", keys.take(key), keys.source(key))
    else:
        keys.take(key)
    translation.set("critic_lr", args.number("learning_rate", 5e-5), translation.source(args, "learning_rate"))
    for name, default in CRITIC_ALIKE:
        value = policy.peek(name)
        policy_value = default if value is None else value
        if name not in args and show(default) == show(policy_value):
            continue
        if _alike(name, args.take(name, default), policy_value):
            translation.ignore(args, name, "as the policy's")
        else:
            text = f"the critic is trained as the policy, with {show(policy_value)}. Set it to this"
            translation.refuse(args, name, text)
    layout = layout_of(keys, "critic")
    micro, accumulation = args.integer(sizes[0], 8), args.integer(sizes[1], 1)
    batch = micro * accumulation * layout.replicas(_count(keys, "critic", translation.processes or 1))
    for name in sizes:
        if batch != step.batch:
            translation.refuse(args, name, f"the critic's batch {batch} is not the policy's {step.batch}. Set it alike")
        else:
            translation.ignore(args, name, f"the critic's batch is the policy's, {step.batch}")


def _alike(name: str, value: object, other: object) -> bool:
    if name == "lr_scheduler_type":
        return SCHEDULES.get(str(value), value) == SCHEDULES.get(str(other), other)
    try:
        return float(str(value)) == float(str(other))
    except ValueError:
        return value == other


def set_engine(
    keys: Keys, translation: Translation, role: str, trained: str, placement: RolePlacement, lengths: tuple[int, int]
) -> None:
    """Set the engine that generates. lengths: of the longest prompt and completion."""
    _compare_model(keys, translation, role, trained)
    view, key = keys.view(role), f"{role}.{STRATEGY}"
    name, source = keys.text(key, "vllm"), translation.source(keys, f"{role}.{STRATEGY}")
    if name not in ("vllm", "sglang", "hf_infer"):
        translation.refuse(keys, key, "no such engine. Choose one of vllm, sglang, hf_infer")
        return
    config = view.view(CONFIG)
    settings = ("tensor_parallel_size", "tp_size", *VLLM_FLAGS, *VLLM_FIELDS)
    translation.set("use_vllm", name != "hf_infer", source)
    if name == "hf_infer":
        for setting in settings:
            if setting in config:
                translation.ignore(config, setting, "transformers generates")
        if "num_gpus_per_worker" in view:
            translation.ignore(view, "num_gpus_per_worker", "transformers generates in the training processes")
        if placement.servers:
            translation.refuse(keys, f"{role}.device_mapping", "transformers generates in training. Set its GPUs")
        return
    if name == "sglang":
        translation.note(keys, key, "vLLM generates, with the same sampling")
    translation.set("vllm_mode", placement.mode, translation.source(keys, f"{role}.device_mapping"))
    size = _engine_size(view, translation, name)
    if placement.mode == "server" and placement.servers % size:
        text = f"{placement.servers} GPUs are not a multiple of an engine's {size}. Set a multiple"
        translation.refuse(keys, f"{role}.device_mapping", text)
    flags = _engine_flags(config, translation, name)
    needed = sum(lengths)
    longest = flags.get("vllm_max_model_len")
    if longest and isinstance(longest[0], int) and longest[0] < needed:
        text = f"shorter than prompt and completion together. Set {needed} or more"
        translation.refuse(config, longest[1].rpartition(".")[2], text)
    if size > 1:
        flags["vllm_tensor_parallel_size"] = size, _size_key(view, name)
    if placement.mode == "server" and not placement.is_one_node:
        _note_servers(keys, translation, role, placement, flags)
        return
    if placement.servers:
        source = f"GPUs of {keys.source(f'{role}.device_mapping')}"
        translation.set("rollout_num_gpus", placement.servers, source)
    for flag, (value, setting) in flags.items():
        translation.set(flag, value, keys.source(setting))


def _compare_model(keys: Keys, translation: Translation, role: str, trained: str) -> None:
    model, dtype = f"{role}.model_args.model_name_or_path", f"{role}.model_args.dtype"
    if model in keys:
        if keys.take(model) == translation.flags.get("model"):
            translation.ignore(keys, model, "the engine has the trained model's weights")
        else:
            translation.refuse(keys, model, "the engine has the trained model's weights. Remove it")
    if dtype in keys:
        policy_dtype = keys.peek(f"{trained}.model_args.dtype") or "bf16"
        if keys.take(dtype) == policy_dtype:
            translation.ignore(keys, dtype, "as the trained model's")
        else:
            translation.note(keys, dtype, f"the engine has the trained model's type, {policy_dtype}")


def _size_key(view: Keys, name: str) -> str:
    names = (f"{CONFIG}.tp_size", "num_gpus_per_worker") if name == "sglang" else (f"{CONFIG}.tensor_parallel_size",)
    return view.full(next((key for key in names if key in view), names[-1]))


def _engine_size(view: Keys, translation: Translation, name: str) -> int:
    """Return the GPUs of an engine: vLLM's setting, or with SGLang the GPUs of a worker."""
    names = (f"{CONFIG}.tensor_parallel_size", f"{CONFIG}.tp_size", "num_gpus_per_worker")
    values = {key: view.integer(key, 1) for key in names}
    chosen = _size_key(view, name)
    size = next(max(value, 1) for key, value in values.items() if view.full(key) == chosen)
    for key, value in values.items():
        if key in view and view.full(key) != chosen:
            if value == size:
                translation.ignore(view, key, f"as {chosen}")
            else:
                translation.ignore(view, key, f"ROLL does not read it with {name}")
        elif key in view and value == 1:
            translation.ignore(view, key, "engines have one GPU by default")
    return size


def _engine_flags(config: Keys, translation: Translation, name: str) -> dict[str, tuple[OptionValue, str]]:
    """Take an engine's settings, and return flags with their values and keys."""
    flags: dict[str, tuple[OptionValue, str]] = {}
    for setting, flag in VLLM_FLAGS.items():
        if setting in config:
            value = config.take(setting)
            if setting == "sleep_level" and value == 2:
                translation.ignore(config, setting, "as by default")
                continue
            flags[flag] = value, config.full(setting)
    fields: dict[str, Any] = {field: config.take(field) for field in VLLM_FIELDS if field in config}
    if name == "sglang":
        for field in fields:
            translation.ignore(config, field, "a setting of SGLang")
    elif fields:
        flags["vllm_engine_kwargs"] = fields, config.full(next(iter(fields)))
    return flags


def _note_servers(
    keys: Keys,
    translation: Translation,
    role: str,
    placement: RolePlacement,
    flags: Mapping[str, tuple[OptionValue, str]],
) -> None:
    """Say how to start servers on other nodes than those of training."""
    size = flags.get("vllm_tensor_parallel_size", (1, ""))[0]
    engines = placement.servers // (size if isinstance(size, int) else 1)
    words = " ".join(f"--{flag} {show(value)}" for flag, (value, _) in flags.items())
    translation.note(
        keys, f"{role}.device_mapping",
        f"{engines} engines are on other nodes than training: start there swift rollout --model "
        f"{show(translation.flags.get('model'))} --vllm_data_parallel_size {engines} {words} --host ADDRESS, and set "
        "--vllm_server_host ADDRESS",
    )  # fmt: skip
    for _, key in flags.values():
        translation.needless[key] = "a flag of swift rollout, which serves on other nodes"
