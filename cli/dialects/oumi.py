"""Oumi's configs: `model`, `data`, `training`, `peft`, `megatron`, `grpo`.

Read at oumi-ai/oumi d8ed077, and for `megatron` at its branch oelachqar/megatron.
"""

import math

from ..launch import Processes, visible_gpus
from .keys import Keys
from .oumi_data import set_data, set_rewards
from .oumi_rows import ROWS
from .oumi_verl import PREFIX, set_verl
from .oumi_verl import ROWS as VERL_ROWS
from .translation import Dialect, Translation, take_computed
from .verl_roles import number_at

# training.trainer_type -> command, --rlhf_type ("": none).
TRAINERS = {
    "TRL_SFT": ("sft", ""),
    "HF": ("sft", ""),
    "OUMI": ("sft", ""),
    "TRL_DPO": ("rlhf", "dpo"),
    "TRL_KTO": ("rlhf", "kto"),
    "TRL_GKD": ("rlhf", "gkd"),
    "TRL_GRPO": ("rlhf", "grpo"),
    "MEGATRON_GRPO": ("rlhf", "grpo"),
    "VERL_GRPO": ("rlhf", "grpo"),
}
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "f16", "half"), "float16"),
    **dict.fromkeys(("float32", "f32", "float"), "float32"),
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "cosine_with_min_lr": "cosine"}
OPTIMIZERS = {**dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adam"), "sgd": "sgd"}
# Oumi's defaults that differ from ours: flag -> value, key.
OPTIMIZATION = {
    "lr": (5e-5, "training.learning_rate"),
    "weight_decay": (0.0, "training.weight_decay"),
    "adam_beta2": (0.999, "training.adam_beta2"),
}
GRPO = {  # those of TRL, 0.24 and later, with what Oumi sets
    "max_length": (512, "max_prompt_length"),
    "max_completion_length": (256, "max_completion_length"),
}
MEGATRON_GRPO = {
    "max_length": (512, "max_prompt_length"),
    "max_completion_length": (512, "max_completion_length"),
}
NEVER = 1_000_000_000  # steps between checkpoints of a run that saves the last alone


def _compute(keys: Keys, translation: Translation) -> None:
    key = "training.trainer_type"
    trainer = keys.text(key, "HF").upper()
    if trainer not in TRAINERS:
        nearest = "TRL_GKD is the nearest" if trainer == "TRL_GOLD" else f"choose one of {', '.join(TRAINERS)}"
        translation.refuse(keys, key, f"no such trainer here. Fix: {nearest}")
        take_computed(keys, OUMI.rows)
        return
    translation.command, kind = TRAINERS[trainer]
    if kind:
        translation.set("rlhf_type", kind, keys.source(key))
    translation.set("use_hf", True, "Oumi reads Hugging Face's hub")
    _set_model(keys, translation)
    locations = set_data(keys, translation, kind)
    _set_adapter(keys, translation)
    _set_backends(keys, translation)
    _set_recomputation(keys, translation)
    _set_run(keys, translation)
    _leave_others(keys, translation, trainer, kind)
    if kind == "grpo":
        set_rewards(keys, translation, locations)
    table = _grpo_table(keys, translation) if kind == "grpo" else ""
    if trainer == "VERL_GRPO":
        set_verl(keys, translation, table)
        return
    _set_reports(keys, translation)
    _set_schedule(keys, translation)
    _set_intervals(keys, translation, trainer)
    _set_batches(keys, translation, table)
    _set_lengths(keys, translation, trainer, table)
    if kind == "grpo":
        _set_grpo(keys, translation, trainer, table)
    elif kind == "gkd":
        _set_gkd(keys, translation)


def _leave_others(keys: Keys, translation: Translation, trainer: str, kind: str) -> None:
    """Leave tables aside that the trainer does not read."""
    tables = {
        "training.grpo": kind == "grpo",
        "grpo": kind == "grpo",
        "megatron.grpo_config": trainer == "MEGATRON_GRPO",
        "megatron.sampling_config": trainer == "MEGATRON_GRPO",
        "training.gkd": kind == "gkd",
        "training.gold": False,
        "training.verl_config_overrides": trainer == "VERL_GRPO",
    }
    for table, is_read in tables.items():
        for key in [] if is_read else keys.under(table):
            keys.take(key)
            translation.needless[key] = f"{trainer} does not read it"


def _default(keys: Keys, translation: Translation, flag: str, value: object, *names: str) -> None:
    """Set a flag to Oumi's default of the first key, unless one of the keys has a value."""
    if not any(name in keys for name in names):
        translation.set(flag, value, f"Oumi's default of {names[0]}")  # type: ignore[arg-type]


def _set_model(keys: Keys, translation: Translation) -> None:
    key = "model.torch_dtype_str"
    dtype = keys.text(key, "auto").lower()
    mixed = keys.text("training.mixed_precision_dtype", "none").lower()
    if mixed in ("bf16", "fp16"):  # the optimizer has fp32 masters of weights in any type
        source = keys.source("training.mixed_precision_dtype")
        translation.set("torch_dtype", "bfloat16" if mixed == "bf16" else "float16", source)
    elif dtype in DTYPES:
        translation.set("torch_dtype", DTYPES[dtype], keys.source(key))
    elif dtype != "auto":
        translation.refuse(keys, key, f"choose one of auto, {', '.join(DTYPES)}")
    key = "model.tokenizer_name"
    if (name := keys.text(key)) and name != keys.peek("model.model_name"):
        translation.refuse(keys, key, "the tokenizer is that of the model's folder. Put it there, and remove this")
    key = "model.model_kwargs.rope_scaling"
    if keys.under(key):
        translation.set("rope_scaling", keys.tree["model"]["model_kwargs"]["rope_scaling"], keys.source(key))
        keys.drop(key)
    key = "model.freeze_layers"
    if modules := keys.items(key):
        translation.set("freeze_parameters", [f"{module}." for module in modules], keys.source(key))


def _set_adapter(keys: Keys, translation: Translation) -> None:
    """Set LoRA's flags, where `training.use_peft` is true."""
    if not keys.boolean("training.use_peft", False):
        for key in keys.under("peft"):
            keys.take(key)
            translation.needless[key] = "only read with training.use_peft true"
        return
    translation.set("tuner_type", "lora", keys.source("training.use_peft"))
    _default(keys, translation, "lora_rank", 8, "peft.lora_r")
    _default(keys, translation, "lora_alpha", 8, "peft.lora_alpha")
    _default(keys, translation, "lora_dropout", 0.0, "peft.lora_dropout")
    key = "peft.lora_target_modules"
    if modules := keys.items(key):
        translation.set("target_modules", modules, keys.source(key))
    else:
        fix = "is not set, and PEFT would choose by the model. Set it, as in peft.lora_target_modules=[q_proj,v_proj]"
        translation.refused.append(f"{key}: {fix}")
    key = "peft.peft_save_mode"
    is_merged = keys.text(key, "adapter_only").lower() != "adapter_only"
    translation.set("merge_lora", is_merged, keys.source(key) if key in keys else f"Oumi's default of {key}")


def _set_backends(keys: Keys, translation: Translation) -> None:
    """Note FSDP and DeepSpeed, whose place megatron-core takes, and refuse them beside a layout."""
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
    layout = next((name for size in sizes if (keys.peek(name := f"megatron.{size}_parallel_size") or 1) != 1), None)
    for name in ("fsdp", "deepspeed"):
        key = f"{name}.enable_{name}"
        if not keys.boolean(key, False):
            continue
        if layout:
            translation.refuse(keys, key, f"cannot be used with {layout}. Remove one of them")
        else:
            text = "megatron-core trains, and its distributed optimizer shards the optimizer's state (ZeRO-1)"
            translation.note(keys, key, text)


def _set_recomputation(keys: Keys, translation: Translation) -> None:
    table = "megatron.transformer_config"
    key = f"{table}.recompute_granularity"
    granularity = keys.text(key)
    checkpointing = "training.enable_gradient_checkpointing"
    is_checkpointing = keys.boolean(checkpointing, False)
    method, layers = keys.text(f"{table}.recompute_method"), keys.integer(f"{table}.recompute_num_layers")
    modules = keys.items(f"{table}.recompute_modules")
    if granularity == "full" or (granularity is None and is_checkpointing):
        source = keys.source(key if granularity else checkpointing)
        translation.set("recompute_granularity", "full", source)
        translation.set("recompute_method", method or "uniform", source)
        translation.set("recompute_num_layers", layers or 1, source)
    elif granularity:
        translation.set("recompute_granularity", granularity, keys.source(key))
        if modules:
            translation.set("recompute_modules", modules, keys.source(f"{table}.recompute_modules"))


def _set_reports(keys: Keys, translation: Translation) -> None:
    reports = [
        name
        for name, is_default in (("tensorboard", True), ("wandb", False), ("mlflow", False))
        if keys.boolean(f"training.enable_{name}", is_default)
    ]
    translation.set("report_to", [*reports] or ["none"], keys.source("training.enable_tensorboard"))
    _default(keys, translation, "logging_steps", 50, "training.logging_steps")


def _set_run(keys: Keys, translation: Translation) -> None:
    key = "training.dataloader_num_workers"
    if keys.peek(key) != "auto" and (workers := keys.integer(key)) is not None:
        translation.set("dataloader_num_workers", workers, keys.source(key))
    elif keys.take(key):
        translation.needless[key] = "this project's default"
    if minutes := keys.number(key := "training.nccl_default_timeout_minutes"):
        translation.set("ddp_timeout", round(60 * minutes), f"{keys.source(key)} x 60 s")
    if keys.boolean(key := "training.try_resume_from_last_checkpoint"):
        translation.set("resume_from_checkpoint", "auto", keys.source(key))
    key = "megatron.optimizer_config.optimizer_offload_fraction"
    fraction = keys.number(key)
    if fraction is not None and keys.peek("megatron.optimizer_config.optimizer_cpu_offload"):
        translation.set("optimizer_offload_fraction", fraction, keys.source(key))


def _set_schedule(keys: Keys, translation: Translation) -> None:
    for flag, (value, key) in OPTIMIZATION.items():
        _default(keys, translation, flag, value, key)
    key = "training.lr_scheduler_type"
    schedule = keys.text(key, "linear").lower()
    if schedule not in SCHEDULES:
        translation.refuse(keys, key, f"choose one of {', '.join(SCHEDULES)}")
    else:
        source = keys.source(key) if key in keys else f"Oumi's default of {key}"
        translation.set("lr_decay_style", SCHEDULES[schedule], source)
    rate = "training.lr_scheduler_kwargs.min_lr_rate"
    if (share := keys.number(rate)) is not None:
        rate_there = keys.peek("training.learning_rate")
        lr = rate_there if isinstance(rate_there, int | float) else 5e-5
        translation.set("min_lr", lr * share, f"{keys.source(rate)} x training.learning_rate")
    key = "training.optimizer"
    optimizer = keys.text(key, "adamw_torch").lower()
    if optimizer not in OPTIMIZERS:
        translation.refuse(keys, key, f"no such optimizer here. Set one of {', '.join(OPTIMIZERS)}")
    else:
        translation.set("optimizer", OPTIMIZERS[optimizer], keys.source(key))
        if optimizer == "sgd":
            _default(keys, translation, "sgd_momentum", 0.0, "training.sgd_momentum")
    steps, epochs = keys.integer("training.max_steps", -1), keys.number("training.num_train_epochs")
    if steps > 0:
        translation.set("train_iters", steps, keys.source("training.max_steps"))
        if epochs is not None:
            translation.needless["training.num_train_epochs"] = "training.max_steps goes before"
    else:
        key = "training.num_train_epochs"
        translation.set(
            "num_train_epochs", epochs or 3, keys.source(key) if key in keys else f"Oumi's default of {key}"
        )


def _set_intervals(keys: Keys, translation: Translation, trainer: str) -> None:
    """Set when the run saves and evaluates."""
    steps, by_epoch = keys.integer("training.save_steps", 500), keys.boolean("training.save_epoch", False)
    if steps > 0:
        key = "training.save_steps"
        translation.set("save_steps", steps, keys.source(key) if key in keys else f"Oumi's default of {key}")
    elif by_epoch:
        translation.set("save_strategy", "epoch", keys.source("training.save_epoch"))
    else:
        translation.set("save_steps", NEVER, f"{keys.source('training.save_steps')}: the last step alone")
    if keys.boolean("training.save_final_model", True) is False:
        translation.note(keys, "training.save_final_model", "the last step is always saved")
    is_megatron = trainer == "MEGATRON_GRPO"  # it evaluates whatever eval_strategy says
    strategy = keys.text("training.eval_strategy", "steps" if is_megatron else "no").lower()
    interval = keys.integer("training.eval_steps", 500)
    if not keys.names("data.validation.datasets"):
        return
    if strategy == "steps":
        translation.set("eval_steps", interval, keys.source("training.eval_steps"))
    elif strategy == "no":
        translation.set("eval_iters", 0, keys.source("training.eval_strategy"))
    elif not (strategy == "epoch" and by_epoch and steps <= 0):
        translation.refuse(keys, "training.eval_strategy", "set steps, with training.eval_steps")


def _grpo_table(keys: Keys, translation: Translation) -> str:
    """Return the table of GRPO's keys, which is one of the two that Oumi's configs have."""
    if not keys.under("grpo"):
        return "training.grpo"
    for key in keys.under("training.grpo"):
        translation.refuse(keys, key, "the config has a table grpo, too. Remove one of them")
    return "grpo"


def _data_parallel_size(keys: Keys, translation: Translation) -> tuple[int, str]:
    """Return the size that the launcher's processes give, and how it comes about."""
    names = ("tensor_model", "pipeline_model", "context")
    sizes = [max(number_at(keys, f"megatron.{name}_parallel_size", 1), 1) for name in names]
    processes = Processes.of_environment(visible_gpus()).world
    model = math.prod(sizes)
    if processes % model:
        if processes == 1:  # a config that is converted elsewhere than it runs
            return 1, f"1 data-parallel rank of {model} processes"
        translation.refused.append(
            f"megatron: tensor, pipeline and context parallelism take {model} processes, of which {processes} "
            f"(NPROC_PER_NODE x NNODES) are no multiple. Start {model}, or a multiple"
        )
        return 1, ""
    return processes // model, f"{processes // model} data-parallel ranks (of {processes} processes)"


def _set_batches(keys: Keys, translation: Translation, table: str) -> None:
    ranks, how = _data_parallel_size(keys, translation)
    _set_virtual_stages(keys, translation)
    device, accumulation = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    per_device, steps = keys.integer(device, 8), keys.integer(accumulation, 1)
    micro = keys.integer("megatron.micro_batch_size", per_device)
    key = "megatron.micro_batch_size" if "megatron.micro_batch_size" in keys else device
    translation.set("micro_batch_size", micro, keys.source(key))
    total = keys.integer("megatron.global_batch_size")
    if total is None:
        total = micro * steps * ranks
        source = f"{keys.source(key)} {micro} x {accumulation} {steps} x {how}"
    else:
        source = keys.source("megatron.global_batch_size")
    translation.set("global_batch_size", total, source)
    if table:
        count = keys.integer(f"{table}.num_generations", 8)
        key = f"{table}.num_generations"
        translation.set("num_generations", count, keys.source(key) if key in keys else f"Oumi's default of {key}")
        if total <= 0 or count <= 0:
            return  # the flags' own checks refuse it
        generations = math.lcm(total, count) // total
        translation.set("steps_per_generation", generations, f"whole prompts: lcm({total}, {count}) / {total}")
        if generations > 1:
            translation.notes.append(
                f"{key} {count}: a step has {total} completions, so {generations} steps share a generation of "
                f"{total * generations}."
            )


def _set_virtual_stages(keys: Keys, translation: Translation) -> None:
    """Set VPP: chunks of layers of a stage, where Oumi counts those of all stages."""
    key = "megatron.virtual_pipeline_model_parallel_size"
    chunks, stages = keys.integer(key), number_at(keys, "megatron.pipeline_model_parallel_size", 1)
    if chunks is None or stages <= 1:
        return
    if chunks % stages:
        translation.refuse(keys, key, f"not a multiple of megatron.pipeline_model_parallel_size {stages}. Set one")
        return
    if chunks > stages:
        source = f"{keys.source(key)} / megatron.pipeline_model_parallel_size {stages}"
        translation.set("virtual_pipeline_model_parallel_size", chunks // stages, source)
    text = f"Oumi counts the chunks of all {stages} stages; here each has {chunks // stages}"
    translation.note(keys, key, text)


def _set_lengths(keys: Keys, translation: Translation, trainer: str, table: str) -> None:
    """Set the longest sample, or for GRPO the longest prompt and completion."""
    key = "model.model_max_length"
    length = keys.integer(key)
    if not table:
        if length is None and trainer in ("TRL_SFT", "TRL_DPO", "TRL_GKD"):
            translation.set("max_length", 1024, "TRL's default, for want of model.model_max_length")
        elif length is not None:
            translation.set("max_length", length, keys.source(key))
            if trainer == "TRL_SFT":
                translation.set("truncation_strategy", "right", "TRL truncates")
        if translation.flags.get("packing"):
            translation.set("packing_length", length or 1024, keys.source(key))
        return
    for flag, (value, name) in (MEGATRON_GRPO if trainer == "MEGATRON_GRPO" else GRPO).items():
        keys_of_flag = [f"{table}.{name}"]
        if name == "max_completion_length":
            keys_of_flag.append("megatron.sampling_config.max_tokens")
        _default(keys, translation, flag, value, *keys_of_flag)
    translation.set("truncation_strategy", "left", "Oumi's prompts lose their beginning")
    if trainer != "MEGATRON_GRPO":
        if length is not None:
            translation.needless[key] = f"Oumi ignores it with {trainer}"
        return
    prompt = number_at(keys, f"{table}.max_prompt_length", 512)
    tokens = number_at(keys, "megatron.sampling_config.max_tokens", 512)
    completion = number_at(keys, f"{table}.max_completion_length", tokens)
    if keys.boolean("megatron.enable_sequence_packing", False):
        translation.set("packing", True, keys.source("megatron.enable_sequence_packing"))
        source = f"{table}.max_prompt_length {prompt} + {table}.max_completion_length {completion}"
        translation.set("packing_length", prompt + completion, source)
    if length is not None and length < prompt + completion:
        fix = f"less than {table}.max_prompt_length and max_completion_length together. Set {prompt + completion}"
        translation.refuse(keys, key, fix)


def _set_grpo(keys: Keys, translation: Translation, trainer: str, table: str) -> None:
    """Set the loss and the engine."""
    if trainer == "MEGATRON_GRPO":
        _default(keys, translation, "beta", 0.001, f"{table}.kl_beta", "megatron.grpo_config.kl_beta")
        if keys.boolean("megatron.grpo_config.normalize_advantages", True) is False:
            translation.set("scale_rewards", "none", keys.source("megatron.grpo_config.normalize_advantages"))
    else:
        _default(keys, translation, "beta", 0.0, f"{table}.kl_beta", "training.trainer_kwargs.beta")
        _default(keys, translation, "loss_type", "dapo", "training.trainer_kwargs.loss_type")
    backend_key, use_key = "megatron.inference_backend", f"{table}.use_vllm"
    backend, use_vllm = keys.text(backend_key, "vllm").lower(), keys.boolean(use_key)
    is_megatron = trainer == "MEGATRON_GRPO"
    if use_vllm is None:
        use_vllm = is_megatron and backend != "megatron"
    elif use_vllm is False and is_megatron and backend == "vllm" and backend_key in keys:
        translation.note(keys, backend_key, f"{use_key} false is the nearer key: transformers generate")
    if backend == "sglang" and use_vllm:
        translation.note(keys, backend_key, "vLLM generates, with the same weights")
    source = keys.source(use_key if use_key in keys else backend_key)
    translation.set("use_vllm", use_vllm, source)
    modes = (f"{table}.vllm_mode", "training.trainer_kwargs.vllm_mode")
    mode_key = next((key for key in modes if key in keys), modes[0])
    mode = keys.text(mode_key, "colocate" if is_megatron else "server").lower()
    utilization = f"{table}.vllm_gpu_memory_utilization"
    share = keys.number(utilization)
    length = keys.peek("model.model_max_length") if is_megatron else None
    if not use_vllm:
        translation.needless.update({key: "no vLLM engine" for key in (*modes, utilization) if key in keys})
        return
    translation.set("vllm_mode", mode, keys.source(mode_key) if mode_key in keys else f"Oumi's default of {mode_key}")
    if mode == "colocate":
        if share is not None:
            translation.set("vllm_gpu_memory_utilization", share, keys.source(utilization))
        if isinstance(length, int):
            translation.set("vllm_max_model_len", length, keys.source("model.model_max_length"))
    elif share is not None:
        translation.note(keys, utilization, "the server has GPUs of its own: give it to `swift rollout`")


def _set_gkd(keys: Keys, translation: Translation) -> None:
    _default(keys, translation, "max_completion_length", 128, "training.gkd.max_new_tokens")
    translation.set("use_vllm", False, "Oumi's GKD generates by transformers")
    key = "training.gkd.temperature"
    if (keys.number(key, 0.9)) != 1:
        translation.notes.append(f"{keys.shown(key)}: the loss divides both models' logits by it, too.")
    _default(keys, translation, "temperature", 0.9, key)
    if key in keys:
        translation.set("temperature", keys.number(key), keys.source(key))


OUMI = Dialect("Oumi", (*ROWS, *VERL_ROWS), _compute, tree=PREFIX)
