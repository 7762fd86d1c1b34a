"""Legacy and unsupported flags, with their meaning in this version."""

from collections.abc import Sequence
from typing import NamedTuple

from .flags import show

# older name -> canonical name
RENAMED = {
    "train_type": "tuner_type",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "ref_load": "mcore_ref_model",
    "ref_adapter_load": "mcore_ref_adapter",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "max_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "distributed_backend": "ddp_backend",
    "manual_gc_interval": "manual_gc_steps",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "max_logprob_gap": "max_sampling_logp_difference",
    "wait_for_server": "server_reconnect_timeout",
}

# older name with the opposite meaning -> canonical name
INVERTED = {
    "no_rope_fusion": "apply_rope_fusion",
    "no_bias_swiglu_fusion": "bias_activation_fusion",
    "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
}

# older name with a different form of value -> (canonical name, conversion of the value; None: unset)
REWRITTEN = {
    "distributed_timeout_minutes": ("ddp_timeout", lambda value: show(int(float(value) * 60))),
    "bf16": ("torch_dtype", lambda value: "bfloat16" if value == "true" else None),
    "fp16": ("torch_dtype", lambda value: "float16" if value == "true" else None),
}

# canonical name -> older value -> canonical value
OLD_VALUES = {
    "infer_backend": {"pt": "transformers"},
    "cp_comm_type": {"allgather": "all_gather"},
    "report_to": {"all": "tensorboard"},
}

# Flags whose `true` always holds. Another value is ignored with a note.
ALWAYS_TRUE = {
    "cross_entropy_loss_fusion": "the loss is computed in pieces, vocab-parallel, without full logits",
    "masked_softmax_fusion": "attention's softmax is inside its kernel",
    "attention_softmax_in_fp32": "attention's kernels compute their softmax in fp32",
    "calculate_per_token_loss": "the loss is per token over the global batch",
    "load_safetensors": "weights are read from safetensors",
    "check_model": "weights are checked as they are read",
    "remove_unused_columns": "columns that nothing reads are dropped",
    "save_missing_weights": "every tensor of the checkpoint is saved",
    "log_throughput": "every log line has it",
    "create_checkpoint_symlink": "last and best are links to checkpoints",
    "dist_ckpt_optim_fully_reshardable": "the optimizer's state is read in any layout",
    "align_grad_reduce": "the pipeline's stages reduce at the same time",
    "align_param_gather": "the pipeline's stages gather at the same time",
    "dataloader_pin_memory": "batches are pinned where there is a GPU",
    "dataloader_persistent_workers": "the workers that make batches persist",
}

# Flags without effect: accepted with a note.
NO_EFFECT = {
    "no_masked_softmax_fusion": "attention's softmax is inside its kernel",
    "cross_entropy_fusion_impl": "the loss has one implementation",
    "log_timers_to_tensorboard": "timers are not logged",
    "log_params_norm": "parameter norms are not logged",
    "ckpt_format": "--save_safetensors chooses: Hugging Face folders, or torch_dist",
    "wandb_save_dir": "it is in the run's folder",
    "tensorboard_queue_size": "every log line is written",
    "lazy_tokenize": "tokens are cached, so that they are made once",
    "use_chat_template": "pt takes plain text, sft the tokenizer's chat template",
    "template_backend": "the template is the tokenizer's own (jinja)",
    "packing_num_proc": "packing takes seconds for a million rows",
    "packing_strategy": "packs are made by best fit",
    "dataloader_prefetch_factor": "it is two batches",
    "perform_initialization": "every weight comes from the checkpoint",
    "no_initialization": "every weight comes from the checkpoint",
    "use_cpu_initialization": "every weight comes from the checkpoint",
    "vllm_enable_lora": "swift infer does so with --adapters",
    "vllm_max_lora_rank": "in swift infer it is the adapter's rank",
    "use_persistent_ckpt_worker": "checkpoints are written without one",
    "model_type": "the model's config.json says it",
    "calculate_KL": "--loss_type kto takes an estimate of it, apo_zero_unpaired does without",
}


class UnsupportedFlag(NamedTuple):
    """Flag of an unsupported feature."""

    feature: str
    fix: str
    neutral: tuple[str, ...] = ()  # accepted values, which have no effect


def _unsupported(feature: str, fix: str, **neutral: tuple[str, ...] | str) -> dict[str, UnsupportedFlag]:
    return {name: UnsupportedFlag(feature, fix, (v,) if isinstance(v, str) else v) for name, v in neutral.items()}


NONE: tuple[str, ...] = ()
UNSUPPORTED: dict[str, UnsupportedFlag] = {
    **_unsupported("other LoRA implementations", "Remove it.", tuner_backend="peft", use_swift_lora="false"),
    **_unsupported("FP4", "Remove it.", fp4_format=NONE, fp4_recipe=NONE, fp4_param_gather="false"),
    **_unsupported("offload of the optimizer", "Remove it, and use more processes if memory is short.",
                   optimizer_cpu_offload="false", optimizer_offload_fraction=("1", "1.0", "0", "0.0"),
                   optimizer_cuda_graph="false"),
    **_unsupported("options from a checkpoint", "Set its args.json: --config CHECKPOINT/args.json.", load_args="false"),
    **_unsupported("exports other than to_mcore and to_hf", "Remove it.", quant_bits=NONE, quant_method=NONE,
                   quant_n_samples=NONE, quant_batch_size=NONE, group_size=NONE, to_peft_format="false",
                   to_ollama="false", to_cached_dataset="false", test_convert_dtype=NONE),
    **_unsupported("uploads to a hub", "Upload with `hf upload NAME checkpoint-500`.", push_to_hub="false",
                   hub_model_id=NONE, hub_private_repo="false"),
    **_unsupported("multimodal models", "Remove it, and use a text model.", freeze_llm="false",
                   freeze_vit=("true", "false"),
                   freeze_aligner=("true", "false"), vit_lr=NONE, aligner_lr=NONE, vit_gradient_checkpointing=NONE,
                   vit_gradient_checkpointing_kwargs=NONE, vit_attn_impl=NONE, max_pixels=NONE,
                   language_model_only="false"),
    **_unsupported("optimizer states in other dtypes than fp32", "Remove it.", use_precision_aware_optimizer="false",
                   main_grads_dtype="fp32", main_params_dtype="fp32", exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32"),
    **_unsupported("FSDP", "Remove it: --use_distributed_optimizer shards the optimizer's state.",
                   use_megatron_fsdp="false"),
    **_unsupported("overlapped tensor-parallel communication", "Remove it.", tp_comm_overlap="false"),
    **_unsupported("DeepEP", "Set --moe_token_dispatcher_type alltoall.", moe_enable_deepep="false"),
    **_unsupported("textual pipeline layouts", "Set --decoder_first_pipeline_num_layers and its sibling.",
                   pipeline_model_parallel_layout=NONE, account_for_embedding_in_pipeline_split="false",
                   account_for_loss_in_pipeline_split="false"),
    **_unsupported("layers per virtual stage", "Set the number of chunks: --virtual_pipeline_model_parallel_size.",
                   num_layers_per_virtual_pipeline_stage=NONE),
    **_unsupported("reference adapters in megatron-core's format",
                   "Convert it with `swift export --to_hf true --merge_lora false`, and set it as --ref_adapters.",
                   mcore_ref_adapter=NONE),
    **_unsupported("plugins", "Remove it.", callbacks=NONE, custom_register_path=NONE,
                   custom_dataset_info=NONE),
    **_unsupported("other templates than the tokenizer's", "Write the template to the model's chat_template.jinja.",
                   template=NONE, agent_template=NONE, response_prefix=NONE),
    **_unsupported("pre-tokenized datasets", "Set them as --dataset: tokens are cached.",
                   cached_dataset=NONE, cached_val_dataset=NONE),
    **_unsupported("dataset mixing by probability", "Set NAME#rows for each of --dataset.", interleave_prob=NONE,
                   stopping_strategy=NONE),
    **_unsupported("offload of the bridge, which holds no memory", "Remove it: --offload_model, --offload_optimizer.",
                   offload_bridge="false"),
    **_unsupported("gym environments", "Write one as a scheduler (docs/grpo.md) and set --multi_turn_scheduler.",
                   use_gym_env="false", gym_env=NONE),
    **_unsupported("a length per answer of an episode", "--max_completion_length bounds the episode.",
                   completion_length_limit_scope="total"),
    **_unsupported("checkpoints kept at an interval",
                   "Set --save_total_limit N to keep the last N.", save_retain_interval=NONE),
}  # fmt: skip

# Unsupported values of flags.
UNSUPPORTED_VALUES: dict[tuple[str, str], UnsupportedFlag] = {
    ("tuner_type", "lora_llm"): UnsupportedFlag("multimodal models", "Set --tuner_type lora, and a text model."),
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
        values = values or ["true"]
    if name in RENAMED:
        name = RENAMED[name]
    elif name in INVERTED:
        name, values = INVERTED[name], [{"true": "false", "false": "true"}.get(show(v).lower(), v) for v in values]
    elif name in REWRITTEN:
        name, rewrite = REWRITTEN[name]
        values = [new for value in values if (new := rewrite(show(value).lower())) is not None]
    if name in OLD_VALUES:
        values = [OLD_VALUES[name].get(value, value) if isinstance(value, str) else value for value in values]
    new = flag_text(name, values)
    return name, values, None if new == old else f"{old} is an older spelling of {new}"


def flag_text(name: str, values: Sequence[object]) -> str:
    """Return a flag as written on the command line."""
    return f"--{name} {show(values)}".rstrip()
