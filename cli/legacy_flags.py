"""Earlier spellings of flags and values, with their meaning in this version."""

import json
from collections.abc import Sequence

from .flags import show

# older name -> canonical name
RENAMED = {
    "train_type": "tuner_type",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "mcore_adapters": "mcore_adapter",
    "ref_load": "mcore_ref_model",
    "ref_adapter_load": "mcore_ref_adapter",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "max_epochs": "num_train_epochs",
    "max_position_embeddings": "max_model_len",
    "num_workers": "dataloader_num_workers",
    "distributed_backend": "ddp_backend",
    "manual_gc_interval": "manual_gc_steps",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "cliprange": "epsilon",
    "kl_coef": "beta",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "max_logprob_gap": "max_sampling_logp_difference",
    "wait_for_server": "server_reconnect_timeout",
}

# older name with the opposite meaning -> canonical name
INVERTED = {
    "no_rope_fusion": "apply_rope_fusion",
    "no_bias_swiglu_fusion": "bias_activation_fusion",
    "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "grad_reduce_in_bf16": "accumulate_allreduce_grads_in_fp32",
}

# --attn_impl of ms-swift -> --attention_backend
KERNELS = {
    "flash_attn": "flash",
    "flash_attention_2": "flash_2",
    "flash_attention_3": "flash_3",
    "flash_attention_4": "flash_4",
    "eager": "unfused",
    "sdpa": "auto",
    "auto": "auto",
}


def _seconds(minutes: str) -> str:
    try:
        return show(int(float(minutes) * 60))
    except (ValueError, OverflowError):
        return minutes  # an error of --ddp_timeout


# older name with a different form of value -> (canonical name, conversion of the value; None: unset)
REWRITTEN = {
    "distributed_timeout_minutes": ("ddp_timeout", _seconds),
    "bf16": ("torch_dtype", lambda value: "bfloat16" if value == "true" else None),
    "use_flash_attn": ("attention_backend", lambda value: "flash" if value == "true" else None),
    "attn_impl": ("attention_backend", KERNELS.get),
    "moe_layer_recompute": ("recompute_modules", lambda value: "moe" if value == "true" else None),
    "fp16": ("torch_dtype", lambda value: "float16" if value == "true" else None),
}
# names of REWRITTEN -> their values; the first one stands for a flag without a value, "" if it needs one
BOOLEAN = ("true", "false")
VALUES = {"attn_impl": ("", *KERNELS)} | dict.fromkeys(
    ("bf16", "use_flash_attn", "moe_layer_recompute", "fp16"), BOOLEAN
)

# canonical name -> older value -> canonical value
OLD_VALUES = {
    "infer_backend": {"pt": "transformers"},
    "cp_comm_type": {"allgather": "all_gather"},
    "report_to": {"all": "tensorboard"},
}

# Environment variables of ms-swift and their flags, and prefixes of such variables by data stage.
VARIABLE_PREFIXES = {"embedding": ("INFONCE_",), "reranker": ("LISTWISE_RERANKER_", "GENERATIVE_RERANKER_")}
FLAG_OF_VARIABLE = {
    "INFONCE_TEMPERATURE": "infonce_temperature",
    "INFONCE_USE_BATCH": "infonce_use_batch",
    "LISTWISE_RERANKER_TEMPERATURE": "listwise_temperature",
    "GENERATIVE_RERANKER_POSITIVE_TOKEN": "positive_token",
    "GENERATIVE_RERANKER_NEGATIVE_TOKEN": "negative_token",
}


def canonical(name: str, values: list) -> tuple[str, list, str | None]:
    """Return the canonical name and values of a flag, and a warning for an older name or value.

    values: as on the command line; returned empty for a flag without effect
    """
    old = flag_text(name, values)
    if name in INVERTED or name in REWRITTEN:
        values = values or [VALUES.get(name, BOOLEAN)[0]]
    if name in RENAMED:
        name = RENAMED[name]
    elif name in INVERTED:
        name, values = INVERTED[name], [{"true": "false", "false": "true"}.get(show(v).lower(), v) for v in values]
    elif name in REWRITTEN:
        name, rewrite = REWRITTEN[name]
        values = [new for value in values if (new := rewrite(show(value).lower())) is not None]
    if name == "rope_scaling":  # a type alone; its check names the types
        values = [
            json.dumps({"rope_type": value}) if isinstance(value, str) and value.isidentifier() else value
            for value in values
        ]
    if name in OLD_VALUES:
        values = [OLD_VALUES[name].get(value, value) if isinstance(value, str) else value for value in values]
    new = flag_text(name, values)
    if not values and name not in old.split()[0]:
        return name, values, f"{old} has no effect: it leaves --{name} as it is."
    return name, values, None if new == old else f"{old} is an older spelling of {new}; the older one still works."


def invalid_value(name: str, values: Sequence[object]) -> str:
    """Return the problem of a value of REWRITTEN that has no meaning; "" if there is none."""
    allowed = VALUES.get(name, ())
    values = [show(value).lower() for value in values or allowed[:1] if value is not None]
    if not allowed or all(value in allowed and value for value in values):
        return ""
    return "true or false is needed" if allowed == BOOLEAN else f"choose one of {', '.join(filter(None, allowed))}"


def flag_text(name: str, values: Sequence[object]) -> str:
    """Return a flag as written on the command line."""
    return f"--{name} {show(values)}".rstrip()
