"""Flags that are accepted without effect, each with the reason in at most 12 words."""


def _because(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


# Flags that say what the model's folder says: compared with it (checks/agreement.py), and without other effect.
COMPARED = {
    "model_type": "config.json says it",
    "template": "the chat template is the tokenizer's own",
    "agent_template": "the tokenizer's chat template has the format of tool calls",
}

# Flags whose `true` always holds. Another value has no effect, which a note says.
ALWAYS_TRUE = {
    "cross_entropy_loss_fusion": "the loss is computed in pieces, vocab-parallel, without full logits",
    "masked_softmax_fusion": "attention's softmax is inside its kernel",
    "attention_softmax_in_fp32": "attention's kernels compute their softmax in fp32",
    "calculate_per_token_loss": "the loss is per token over the global batch",
    "load_safetensors": "weights are read from safetensors",
    "safe_serialization": "weights are written as safetensors",
    "check_model": "weights are checked as they are read",
    "remove_unused_columns": "columns that nothing reads are dropped",
    "save_missing_weights": "every tensor of the checkpoint is saved",
    "log_throughput": "every log line has it",
    "disable_ignore_empty_think": "--loss_scale ignore_empty_think leaves empty thoughts out",
    "create_checkpoint_symlink": "last and best are links to checkpoints",
    "dist_ckpt_optim_fully_reshardable": "the optimizer's state is read in any layout",
    "auto_detect_ckpt_format": "the format is read from the checkpoint",
    "align_grad_reduce": "the pipeline's stages reduce at the same time",
    "align_param_gather": "the pipeline's stages gather at the same time",
    "dataloader_pin_memory": "batches are pinned where there is a GPU",
    "dataloader_persistent_workers": "the workers that make batches persist",
    "use_rotary_position_embeddings": "config.json says how positions enter",
}

# Flags without effect: accepted with a note.
NO_EFFECT = {
    # kernels and memory: the same numbers
    "no_masked_softmax_fusion": "attention's softmax is inside its kernel",
    "cross_entropy_fusion_impl": "the loss has one implementation",
    "linear_decoupled_in_proj": "each matrix of a delta net has its own adapter",
    "experts_impl": "experts are megatron-core's",
    "vit_attn_impl": "the vision tower takes the fastest kernel of this machine",
    **_because("recomputation has no settings", "vit_gradient_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
    "te_rng_tracker": "random states are kept without CUDA graphs",
    "mlp_padding_free": "packed rows have no padding to skip",
    "padding_side": "training pads on the right, generation on the left",
    "cp_partition_mode": "each rank takes two chunks of a document, which balances causal attention",
    "tp_comm_overlap": "the numbers are the same; communication is not overlapped",
    "overlap_param_gather_with_optimizer_step": "the numbers are the same; gathering overlaps the forward pass",
    "distrib_optim_fully_reshardable_mem_efficient": "the optimizer's state is saved without gathering it",
    "use_precision_aware_optimizer": "the optimizer's states have the types of their own flags",
    **_because("the host's step is torch's, and overlaps its copies",
               "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
    "cpu_offloading_double_buffering": "activations of a layer move while another computes",
    "local_rollout_forward_batch_size": "log-probabilities and values are computed in micro batches",
    "move_model_batches": "weights are sent tensor by tensor",
    # start of the processes
    "local_rank": "torchrun sets it",
    "skip_megatron_init": "process groups are made once",
    "nccl_comm_warmup": "communicators are made when they are first used",
    **_because("each process takes its GPU and its part of the model", "device_map", "max_memory"),
    "enable_npu_model_patch": "there are no patches for NPUs",
    # weights
    **_because("every weight comes from the checkpoint", "perform_initialization", "no_initialization",
               "use_cpu_initialization", "initialize_embedding", "init_strategy", "data_parallel_random_init"),
    "bridge_backend": "weights are converted by this project's own mapping",
    "local_repo_path": "no model needs the code of a repository",
    "exit_on_missing_checkpoint": "a missing checkpoint is always an error",
    "teacher_model_type": "the teacher's config.json says it",
    "_teacher_use_disable_adapter": "it follows from --teacher_model and --adapters",
    # data
    "lazy_tokenize": "tokens are cached, so that they are made once",
    "use_chat_template": "pt takes plain text, sft the tokenizer's chat template",
    "template_backend": "the template is the tokenizer's own (jinja)",
    "packing_num_proc": "packing takes seconds for a million rows",
    "packing_strategy": "packs are made by best fit",
    "packing_cache": "the lengths of samples are in the token cache",
    **_because("samples are shuffled over the whole dataset", "data_sharding", "no_data_sharding"),
    "dataloader_type": "samples are shuffled anew in every epoch",
    "dataloader_prefetch_factor": "it is two batches",
    "dataloader_multiprocessing_context": "workers are started in the way that the platform needs",
    "pipeline_dtype": "stages exchange the type of the computation",
    "seq_length": "--max_length bounds samples, --packing_length packs",
    "vllm_server_pass_dataset": "schedulers run in the trainer, which has the rows",
    # checkpoints
    "ckpt_format": "--save_safetensors chooses: Hugging Face folders, or torch_dist",
    "use_persistent_ckpt_worker": "checkpoints are written without one",
    # logs
    "logging_level": "the console has one level",
    "log_timers_to_tensorboard": "timers are not logged",
    "log_params_norm": "parameter norms are not logged",
    **_because("logging.jsonl and TensorBoard have it", "log_memory_to_tensorboard", "log_loss_scale_to_tensorboard",
               "log_learning_rate_to_tensorboard", "no_log_learning_rate_to_tensorboard",
               "log_validation_ppl_to_tensorboard", "tensorboard_log_interval"),
    "wandb_save_dir": "it is in the run's folder",
    "wandb_log_unique_prompts": "completions are logged by step",
    "tensorboard_queue_size": "every log line is written",
    # read by features that are off
    **_because("weights are not quantized by bitsandbytes or HQQ", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type",
               "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "hqq_axis"),
    **_because("it is a setting of FSDP, which is not used", "data_parallel_sharding_strategy",
               "strict_fsdp_dtensor_load"),
    # inference and rollout engines
    "attention_backend": "transformers and vLLM choose their kernel",
    "vllm_enable_lora": "swift infer does so with --adapters",
    "vllm_max_lora_rank": "in swift infer it is the adapter's rank",
    "verbose": "requests are not logged",
    "vllm_server_group_port": "a free port is chosen",
    "vllm_use_async_engine": "the server's engine is asynchronous",
    **_because("vLLM chooses it by the machine", "vllm_disable_cascade_attn", "vllm_disable_custom_all_reduce"),
    **_because("the server answers training runs only", "served_model_name", "owned_by",
               "vllm_reasoning_parser", "max_logprobs"),
    "calculate_KL": "--loss_type kto takes an estimate of it, apo_zero_unpaired does without",
}  # fmt: skip
