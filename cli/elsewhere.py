"""Flags of LLaMA-Factory, TRL and transformers' trainer: the flag here that does the same, or what to do instead.

Only for hints and the table in docs/flags.md: they are not accepted, since not all of them mean quite the same.
"""

from typing import NamedTuple


class Elsewhere(NamedTuple):
    flag: str  # the nearest flag here, empty if there is none
    note: str = ""  # one or two sentences


ELSEWHERE = {
    "model_name_or_path": Elsewhere("model"),
    "adapter_name_or_path": Elsewhere("adapters"),
    "tokenizer_name_or_path": Elsewhere("", "The tokenizer is the one in the folder of --model."),
    "ref_model_name_or_path": Elsewhere("ref_model"),
    "reward_model_name_or_path": Elsewhere("reward_model"),
    "stage": Elsewhere("", "The command says it: megatron pt, megatron sft, or megatron rlhf --rlhf_type dpo."),
    "do_train": Elsewhere("", "megatron trains; set --val_dataset or --split_dataset_ratio to evaluate as well."),
    "do_eval": Elsewhere("val_dataset", "It evaluates every --eval_steps."),
    "finetuning_type": Elsewhere("tuner_type", "It is full or lora."),
    "use_peft": Elsewhere("tuner_type", "Set --tuner_type lora."),
    "lora_target": Elsewhere("target_modules"),
    "lora_target_modules": Elsewhere("target_modules"),
    "lora_r": Elsewhere("lora_rank"),
    "loraplus_lr_ratio": Elsewhere("lorap_lr_ratio"),
    "pref_beta": Elsewhere("beta"),
    "pref_loss": Elsewhere("loss_type"),
    "cutoff_len": Elsewhere("max_length"),
    "max_seq_length": Elsewhere("max_length"),
    "max_prompt_length": Elsewhere("max_length"),
    "dataset_name": Elsewhere("dataset"),
    "dataset_train_split": Elsewhere("dataset", "A hub id, a file or a folder; NAME#500 takes 500 rows."),
    "dataset_dir": Elsewhere("dataset", "It takes the paths of files and folders."),
    "eval_dataset": Elsewhere("val_dataset"),
    "val_size": Elsewhere("split_dataset_ratio"),
    "max_samples": Elsewhere("dataset", "Write --dataset NAME#500 to take 500 rows."),
    "preprocessing_num_workers": Elsewhere("dataset_num_proc"),
    "overwrite_cache": Elsewhere("load_from_cache_file", "Set --load_from_cache_file false."),
    "mix_strategy": Elsewhere("dataset", "Write --dataset A#500 B#1000 to choose the shares."),
    "train_on_prompt": Elsewhere("loss_scale", "Set --loss_scale all."),
    "assistant_only_loss": Elsewhere("loss_scale", "It is the default of --loss_scale."),
    "completion_only_loss": Elsewhere("loss_scale", "Set --loss_scale last_round."),
    "neat_packing": Elsewhere("packing", "Packed samples never see each other."),
    "learning_rate": Elsewhere("lr"),
    "lr_scheduler_type": Elsewhere("lr_decay_style"),
    "warmup_ratio": Elsewhere("lr_warmup_fraction"),
    "warmup_steps": Elsewhere("lr_warmup_iters"),
    "max_steps": Elsewhere("train_iters"),
    "max_grad_norm": Elsewhere("clip_grad"),
    "adam_epsilon": Elsewhere("adam_eps"),
    "optim": Elsewhere("optimizer"),
    "per_device_train_batch_size": Elsewhere("micro_batch_size"),
    "per_device_eval_batch_size": Elsewhere("micro_batch_size"),
    "gradient_accumulation_steps": Elsewhere("global_batch_size"),
    "gradient_checkpointing": Elsewhere("recompute_granularity"),
    "attn_impl": Elsewhere("attention_backend"),
    "attn_implementation": Elsewhere("attention_backend"),
    "flash_attn": Elsewhere("attention_backend"),
    "enable_liger_kernel": Elsewhere("", "Fused kernels run where the machine has them."),
    "use_liger_kernel": Elsewhere("", "Fused kernels run where the machine has them."),
    "deepspeed": Elsewhere(
        "use_distributed_optimizer", "DeepSpeed is not used: megatron-core's distributed optimizer shards the state."
    ),
    "fsdp": Elsewhere(
        "use_distributed_optimizer", "FSDP is not used: megatron-core's distributed optimizer shards the state."
    ),
    "neftune_noise_alpha": Elsewhere("", "NEFTune is not available. Remove the flag."),
    "quantization_bit": Elsewhere("", "Training on quantized weights is not available. Use --tuner_type lora."),
    "load_in_4bit": Elsewhere("", "Training on quantized weights is not available. Use --tuner_type lora."),
    "trust_remote_code": Elsewhere("", "Code of a model's folder is never run. Remove the flag."),
    "logging_dir": Elsewhere("tensorboard_dir"),
    "run_name": Elsewhere("wandb_exp_name"),
    "evaluation_strategy": Elsewhere("eval_steps"),
    "eval_strategy": Elsewhere("eval_steps"),
    "overwrite_output_dir": Elsewhere("add_version", "A run writes to a new folder in --output_dir by default."),
    "save_only_model": Elsewhere("no_save_optim"),
    "load_best_model_at_end": Elsewhere("metric_for_best_model", "The link `best` leads to that checkpoint."),
    "hub_strategy": Elsewhere("", "Upload with `hf upload NAME checkpoint-500`."),
    "export_dir": Elsewhere("output_dir"),
    "dataset": Elsewhere("val_dataset"),
}
