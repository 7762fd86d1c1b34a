"""Rows of ROLL's workers: roles and their strategies, read at 8eb27cc (`roll/configs`, `mcore_adapter`).

roll_task_rows.py has the rows of pipelines.
"""

from .table import Row, computed, needless, noted, only, refused, same, under, valued
from .verl_rows import SIZES, TRANSFORMER_FLAGS

POLICYS = "as the trained model's, with the same numbers"
FORWARD = "forward passes have the micro batches of training"
FSDP = "a setting of FSDP or DeepSpeed; megatron-core trains, with the same numbers"
TRAINED_CLASSES = (  # classes that train where the config names none
    "roll.pipeline.rlvr.actor_worker.ActorWorker", "roll.pipeline.dpo.actor_worker.ActorWorker",
    "roll.pipeline.sft.sft_worker.SFTWorker", "roll.pipeline.distill.distill_worker.StudentWorker",
)  # fmt: skip
FROZEN_CLASSES = (
    *TRAINED_CLASSES[:2], "roll.pipeline.distill.distill_worker.TeacherWorker",
    "roll.pipeline.base_worker.CriticWorker",
)  # fmt: skip
ENGINE_CLASS = "roll.pipeline.base_worker.InferWorker"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# Megatron's settings with a flag of the same name.
SAME_SETTINGS = (
    *(name for name in TRANSFORMER_FLAGS if name != "recompute_modules"), *SIZES,
    "virtual_pipeline_model_parallel_size", "use_distributed_optimizer", "overlap_grad_reduce",
    "overlap_param_gather", "accumulate_allreduce_grads_in_fp32", "transformer_impl", "optimizer",
    "optimizer_cpu_offload",
)  # fmt: skip
RENAMED_SETTINGS = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8": "fp8_format", "fp8_recipe": "fp8_recipe", "fp8_param": "fp8_param_gather",
    "lr_scheduler_kwargs.min_lr": "min_lr", "lr_scheduler_kwargs.init_lr": "lr_warmup_init",
    "lr_scheduler_kwargs.lr_decay_steps": "lr_decay_iters",
    "lr_scheduler_kwargs.wsd_decay_steps": "lr_wsd_decay_iters",
    "lr_scheduler_kwargs.lr_wsd_decay_style": "lr_wsd_decay_style",
}  # fmt: skip
NEEDLESS_SETTINGS = {
    "variable_seq_lengths": "lengths of micro batches are always variable",
    "masked_softmax_fusion": "attention's softmax is inside its kernel",
    "cross_entropy_loss_fusion": "the loss is computed in pieces, without full logits",
    "calculate_per_token_loss": "losses are divided by the counts of the global batch",
    "deallocate_pipeline_outputs": "outputs of pipeline stages are always freed",
    "delay_grad_reduce": "the pipeline's stages reduce at the same time",
    "ddp_average_in_collective": "sums of gradients are divided beforehand",
    "ddp_bucket_size": "buckets have megatron-core's size",
    "check_for_nan_in_loss_and_grad": "a loss or gradient that is not finite ends the run",
    "distrib_optim_fully_reshardable": "the optimizer's state is read in any layout",
    "distrib_optim_fully_reshardable_mem_efficient": "the optimizer's state is saved without gathering it",
    "save_hf_model": "checkpoints are Hugging Face folders",
    "save_merged_model": "--merge_lora is true by default",
    "ckpt_format": "checkpoints are Hugging Face folders",
    "ckpt_d2h_non_blocking": "checkpoints are copied without it",
    "sequence_packing": "samples of a micro batch are never padded",
    "compile_warmup": "nothing is compiled beforehand",
    "cuda_graph_impl": "CUDA graphs change no number",
    "cuda_graph_scope": "CUDA graphs change no number",
    "moe_enable_routing_replay": "router_replay.mode sets it",
}
OTHER_STRATEGIES = tuple(
    needless(key, FSDP)
    for key in (
        "fsdp_size", "param_dtype", "reduce_dtype", "reshard_after_forward", "offload_policy", "wrap_policy.**",
        "cpu_offload", "use_orig_params", "zero_optimization.**", "bf16.enabled", "fp16.**", "gradient_clipping",
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
        "zero_allow_untested_optimizer", "wall_clock_breakdown",
    )
)  # fmt: skip
STRATEGY = (
    needless("strategy_args.strategy_config", "null is an empty table"),
    computed("strategy_args.strategy_name", text="megatron-core, whatever it is, with the same numbers"),
    *under("strategy_args.strategy_config", OTHER_STRATEGIES),
)
TRAINED_SETTINGS = (
    *(same(name, name) for name in SAME_SETTINGS),
    *(same(name, flag) for name, flag in RENAMED_SETTINGS.items()),
    *(needless(name, why) for name, why in NEEDLESS_SETTINGS.items()),
    computed("sequence_parallel", "sequence_parallel", text="with tensor_model_parallel_size above 1"),
    computed("recompute_modules", "recompute_modules", text="names divided by commas"),
    computed("recompute_method", "recompute_method", text="with recompute_granularity full; full alone: uniform"),
    computed("recompute_num_layers", "recompute_num_layers", text="with recompute_granularity full; full alone: 1"),
    computed("moe_layer_recompute", "recompute_granularity", "recompute_modules", text="true: selective, module moe"),
    computed("optimizer_offload_fraction", "optimizer_offload_fraction", text="left out: 0"),
    computed("bf16", "torch_dtype", text="true: bfloat16, which model_args.dtype must be"),
    computed("fp16", "torch_dtype", text="true: float16, which model_args.dtype must be"),
    refused("lr_scheduler_kwargs.max_lr", "the peak is training_args.learning_rate. Remove it"),
    *under("additional_configs", [same(name, name) for name in TRANSFORMER_FLAGS]),
)
FROZEN_SETTINGS = (
    *(computed(size, size, text="where it differs from the trained model's; left out: 1") for size in SIZES),
    computed("virtual_pipeline_model_parallel_size", text="chunks of stages are the trained model's"),
    *(
        needless(name, POLICYS)
        for name in (
            *(name for name in SAME_SETTINGS if name not in (*SIZES, "virtual_pipeline_model_parallel_size")),
            *RENAMED_SETTINGS, *NEEDLESS_SETTINGS, "sequence_parallel", "recompute_modules", "recompute_method",
            "recompute_num_layers", "moe_layer_recompute", "optimizer_offload_fraction", "bf16", "fp16",
        )
    ),
)  # fmt: skip
PLACED = (
    needless("name", "roles are named by their tables"),
    computed("device_mapping", text="GPUs of all trained roles: processes, which share them by turns"),
    needless("infer_batch_size", FORWARD),
    needless("world_size", "counted by device_mapping"),
    needless("backend_timeout", "--ddp_timeout is in seconds"),
    needless("max_concurrency", "there are no Ray actors"),
    needless("offload_nccl", "ROLL sets it to false"),
    needless("logits_in_fp32", "losses and log-probabilities are computed in fp32"),
    noted("system_envs.*", "no variables are set for a role. Set it in the environment"),
    needless("use_dynamic_batching_in_infer", FORWARD),
    needless("max_tokens_per_microbatch_in_infer", FORWARD),
    needless("sequence_length_round_in_infer", FORWARD),
    needless("sequence_length_round_in_train", "samples are not rounded"),
    only("model_update_frequency", 1, fix="Engines get new weights before each generation"),
    only("mtp_training_mode", "disabled", fix="Set --mtp_num_layers to train prediction layers"),
    computed("data_args.template", "enable_thinking", text="native, qwen2_5: the tokenizer's own; qwen3: thinking"),
)
MODEL = (
    needless("model_args.attn_implementation", "attention's kernel is --attention_backend's"),
    needless("model_args.disable_gradient_checkpointing", "strategy_config says what is recomputed"),
    needless("model_args.gradient_checkpointing_use_reentrant", "recomputation has no settings"),
    needless("model_args.device_map", "each process takes its GPU"),
    needless("model_args.model_type", "config.json says it"),
    needless("model_args.num_labels", "a critic has one"),
    needless("model_args.autocast_adapter_dtype", "--lora_dtype sets it"),
    refused("model_args.model_config_kwargs.**", "config.json describes the model. Edit it, and remove this"),
)
SEQUENCES = (
    computed("use_sequence_packing", text="samples of a micro batch are never padded"),
    computed("sequence_packing_args.algorithm", "packing", text="load_balance: micro batches by tokens"),
    computed("sequence_packing_args.max_packed_sequence_length_train", "packing_length", text="with load_balance"),
    needless("sequence_packing_args.max_packed_sequence_length_forward", FORWARD),
    needless("sequence_packing_args.min_num_micro_batches_forward", FORWARD),
    needless("sequence_packing_args.min_num_micro_batches_train", "packs are as few as they can be"),
    computed("use_dynamic_batching_in_train", "packing", text="true: micro batches by tokens"),
    computed("max_tokens_per_microbatch_in_train", "packing_length", text="with use_dynamic_batching_in_train"),
)
PACKING_OF_FROZEN = tuple(
    needless(key, FORWARD)
    for key in (
        "use_sequence_packing", "sequence_packing_args.*", "use_dynamic_batching_in_train",
        "max_tokens_per_microbatch_in_train",
    )
)  # fmt: skip
LORA = {  # computed with lora_target alone
    "model_args.lora_target": ("target_modules", "names divided by commas, all, or a regular expression"),
    "model_args.lora_rank": ("lora_rank", "left out: 8"),
    "model_args.lora_alpha": ("lora_alpha", "left out: 2 x lora_rank"),
    "model_args.lora_dropout": ("lora_dropout", "left out: 0"),
    "model_args.additional_target": ("modules_to_save", "names divided by commas"),
}
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse-square-root",
    "inverse-square-root": "inverse-square-root", "warmup_stable_decay": "WSD", "WSD": "WSD",
}  # fmt: skip
DATA = (
    computed("data_args.file_name", "dataset", text="files or folders"),
    same("data_args.preprocessing_num_workers", "dataset_num_proc"),
    needless("data_args.dataset_dir", "ROLL has no such setting: paths are relative to the working folder"),
    only("data_args.interleave_probs", "1.0", 1, fix="Set --interleave_prob"),
    only("data_args.dataset_type", "json", "default", fix="Files are read by their endings"),
    computed("data_args.domain_interleave_probs.*", "interleave_prob", text="share of the file named as the domain"),
    computed("data_args.messages", "columns", text="column of messages"),
    computed("data_args.tag", "columns", text="column of the source"),
    needless("data_args.id", "rows need no number"),
    needless("data_args.response", "rewards read ground_truth"),
    refused("data_args.prompt", "text without a chat template. Write a column of messages, and set data_args.messages"),
)


def trained(role: str) -> list[Row]:
    """Return the rows of a trained role."""
    return under(
        role,
        (
            only("worker_cls", *TRAINED_CLASSES, fix="Write rewards and schedulers as plugins (docs/grpo.md)"),
            only("pg_variant", "ppo", fix="Set --loss_type cispo or another loss"),
            *PLACED, *MODEL, *STRATEGY, *SEQUENCES, *DATA,
            *(computed(key, flag, text=f"with lora_target; {text}") for key, (flag, text) in LORA.items()),
            computed("model_args.dtype", "torch_dtype", text="left out: bf16"),
            computed("model_args.model_name_or_path", "model", text="goes before pretrain"),
            same("model_args.adapter_name_or_path", "adapters"),
            same("model_args.moe_aux_loss_coef", "moe_aux_loss_coeff"),
            computed("model_args.freeze_module_prefix", "freeze_parameters", text="names divided by commas"),
            computed("model_args.ulysses_size", "context_parallel_size", text="with FSDP"),
            same("training_args.learning_rate", "lr", "left out: 5e-5"),
            valued("training_args.lr_scheduler_type", "lr_decay_style", SCHEDULES, "left out: linear"),
            same("training_args.weight_decay", "weight_decay", "left out: 0"),
            same("training_args.adam_beta1", "adam_beta1"),
            same("training_args.adam_beta2", "adam_beta2", "left out: 0.999"),
            computed("training_args.warmup_steps", "lr_warmup_iters", text="goes before warmup_ratio"),
            computed("training_args.warmup_ratio", "lr_warmup_fraction", text="without warmup_steps"),
            computed("training_args.per_device_train_batch_size", "micro_batch_size", text="pairs in DPO; left out: 8"),
            computed("training_args.gradient_accumulation_steps", "global_batch_size", text="x micro batch x DP"),
            computed("training_args.num_train_epochs", "num_train_epochs", text="SFT and distillation; else max_steps"),
            needless("training_args.max_steps", "ROLL overwrites it"),
            needless("training_args.seed", "ROLL overwrites it with seed"),
            same("training_args.data_seed", "data_seed"),
            same("training_args.dataloader_num_workers", "dataloader_num_workers"),
            needless("training_args.bf16", "ROLL overwrites it by model_args.dtype"),
            needless("training_args.fp16", "ROLL overwrites it by model_args.dtype"),
            needless("training_args.output_dir", "ROLL overwrites it with output_dir"),
            needless("training_args.save_hf_model", "checkpoints are Hugging Face folders"),
            needless("num_gpus_per_worker", "ROLL sets it to 1"),
            only("apply_loss_scale", True, fix="Losses are divided by the counts of the global batch"),
            valued("router_replay.mode", "router_replay_mode", {"disable": "disabled", "R3": "R3"}),
            *under("strategy_args.strategy_config", TRAINED_SETTINGS),
        ),
    )  # fmt: skip


def frozen(role: str) -> list[Row]:
    """Return the rows of a role that is not trained by its own settings, or not at all."""
    return under(
        role,
        (
            only("worker_cls", *FROZEN_CLASSES, fix="Write rewards and schedulers as plugins (docs/grpo.md)"),
            *PLACED, *MODEL, *STRATEGY, *PACKING_OF_FROZEN,
            computed("model_args.dtype", text="that of the trained model"),
            needless("num_gpus_per_worker", "ROLL sets it to 1"),
            only("apply_loss_scale", True, fix="Losses are divided by the counts of the global batch"),
            *under("strategy_args.strategy_config", FROZEN_SETTINGS),
        ),
    )  # fmt: skip


VLLM_FLAGS = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization", "mem_fraction_static": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_len", "context_length": "vllm_max_model_len",
    "max_num_seqs": "vllm_max_num_seqs", "max_running_requests": "vllm_max_num_seqs",
    "enforce_eager": "vllm_enforce_eager", "disable_cuda_graph": "vllm_enforce_eager",
    "enable_prefix_caching": "vllm_enable_prefix_caching", "sleep_level": "sleep_level",
}  # fmt: skip
VLLM_FIELDS = (  # fields of EngineArgs
    "max_num_batched_tokens", "enable_chunked_prefill", "disable_custom_all_reduce", "disable_cascade_attn",
    "compilation_config", "attention_backend", "async_scheduling",
)  # fmt: skip
NEEDLESS_OF_ENGINES = {
    "block_size": "vLLM chooses it",
    "load_format": "weights are read from the checkpoint",
    "enable_weights_cpu_backup": "--sleep_level says where weights are",
    "dtype": "the engine has the trained model's type",
    "trust_remote_code": "code of a model's folder is never run",
    "log_level": "the engine logs warnings",
    "VLLM_USE_V1": "vLLM has one engine",
    "chunked_prefill_size": "a setting of SGLang's scheduler",
    "cuda_graph_max_bs": "a setting of SGLang's CUDA graphs",
}


def engine(role: str) -> list[Row]:
    """Return the rows of a role that generates."""
    return under(
        role,
        (
            only("worker_cls", ENGINE_CLASS, fix="Write a scheduler (docs/grpo.md)"),
            *PLACED, *MODEL, *PACKING_OF_FROZEN,
            computed("strategy_args.strategy_name", "use_vllm", text="vllm; sglang: vLLM; hf_infer: transformers"),
            needless("strategy_args.strategy_config", "null is an empty table"),
            computed("model_args.dtype", text="that of the trained model"),
            computed("model_args.model_name_or_path", text="that of the trained model"),
            computed("num_gpus_per_worker", "vllm_tensor_parallel_size", text="with SGLang"),
            computed("generating_args.max_new_tokens", text="response_length"),
            needless("generating_args.max_length", "max_new_tokens bounds completions"),
            only("generating_args.num_beams", 1, fix="Completions are sampled. Set 1"),
            computed("generating_args.do_sample", text="false: temperature 0, for evaluations alone"),
            computed("generating_args.num_return_sequences", "num_generations", text="num_return_sequences_in_group"),
            computed("generating_args.temperature", "temperature", text="left out: 0.95"),
            computed("generating_args.top_p", "top_p", text="left out: 0.7"),
            computed("generating_args.top_k", "top_k", text="left out: 50"),
            same("generating_args.repetition_penalty", "repetition_penalty"),
            needless("generating_args.length_penalty", "read in beam search alone"),
            same("generating_args.stop_strings", "stop_words"),
            only("generating_args.include_stop_str_in_output", True, fix="Stop strings stay in completions"),
            needless("generating_args.logprobs", "the engine always returns them"),
            only("router_replay.mode", "disable", "R3", fix="Set it for the trained role"),
            *under(
                "strategy_args.strategy_config",
                (
                    computed("tensor_parallel_size", "vllm_tensor_parallel_size", text="GPUs of an engine"),
                    computed("tp_size", "vllm_tensor_parallel_size", text="GPUs of an engine (SGLang)"),
                    only("pipeline_parallel_size", 1, fix="Set tensor_parallel_size"),
                    only("pp_size", 1, fix="Set num_gpus_per_worker"),
                    *(computed(name, flag, text="with vLLM") for name, flag in VLLM_FLAGS.items()),
                    *(computed(name, "vllm_engine_kwargs", text="a field of EngineArgs") for name in VLLM_FIELDS),
                    *(needless(name, why) for name, why in NEEDLESS_OF_ENGINES.items()),
                ),
            ),
        ),
    )  # fmt: skip


CRITIC_ALIKE = (  # settings in which a critic is trained as the policy, with ROLL's defaults
    ("lr_scheduler_type", "linear"), ("weight_decay", 0.0), ("adam_beta1", 0.9), ("adam_beta2", 0.999),
    ("warmup_steps", 0), ("warmup_ratio", 0.0),
)  # fmt: skip
CRITIC = under(
    "critic",
    (
        computed("model_args.model_name_or_path", "critic_model", text="left out: reward_pretrain"),
        computed("training_args.learning_rate", "critic_lr", text="left out: 5e-5"),
        *(computed(f"training_args.{name}", text="as the policy's") for name, _ in CRITIC_ALIKE),
        computed("training_args.per_device_train_batch_size", text="x the next x DP: the policy's global batch"),
        computed("training_args.gradient_accumulation_steps", text="x the last x DP: the policy's global batch"),
        needless("training_args.num_train_epochs", "critics learn as long as the policy"),
    ),
)
TEACHER = under(
    "teacher",
    (
        computed("model_args.model_name_or_path", "teacher_model", text="goes before teacher_pretrain"),
        needless("training_args.per_device_train_batch_size", FORWARD),
        computed("opd_kl_coef", "teacher_kl_coef", text="with use_opd; else 1"),
        only("tag_included", fix="One teacher sees all rows. Remove it"),
    ),
)
REFERENCE = under("reference", (computed("model_args.model_name_or_path", "ref_model", text="left out: pretrain"),))
ROLE_ROWS: tuple[Row, ...] = (
    *(row for role in ("actor_train", "student_train", "sft_train", "student") for row in trained(role)),
    *(row for role in ("reference", "critic", "teacher") for row in frozen(role)),
    *(row for role in ("actor_infer", "student_infer") for row in engine(role)),
    *CRITIC, *TEACHER, *REFERENCE,
)  # fmt: skip
