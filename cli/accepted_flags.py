"""Flags that are accepted without effect, each with the reason in at most 12 words."""

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
