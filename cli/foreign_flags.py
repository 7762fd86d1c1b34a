"""Flags of LLaMA-Factory, TRL and transformers' trainer, with the nearest flag of this project.

They serve hints and docs/flags.md, and are not accepted, because some differ in meaning.
"""

from typing import NamedTuple


class ForeignFlag(NamedTuple):
    """Nearest flag, and a remark."""

    flag: str  # nearest flag; "" if there is none
    note: str = ""  # one or two sentences


FOREIGN_FLAGS = {
    "model_name_or_path": ForeignFlag("model"),
    "adapter_name_or_path": ForeignFlag("adapters"),
    "tokenizer_name_or_path": ForeignFlag("", "The tokenizer is the one in the folder of --model."),
    "ref_model_name_or_path": ForeignFlag("ref_model"),
    "reward_model_name_or_path": ForeignFlag("reward_model"),
    "stage": ForeignFlag("", "The command says it: megatron pt, megatron sft, or megatron rlhf --rlhf_type dpo."),
    "do_train": ForeignFlag("", "megatron trains; set --val_dataset or --split_dataset_ratio to evaluate as well."),
    "do_eval": ForeignFlag("val_dataset", "It evaluates every --eval_steps."),
    "finetuning_type": ForeignFlag("tuner_type", "It is full or lora."),
    "use_peft": ForeignFlag("tuner_type", "Set --tuner_type lora."),
    "lora_target": ForeignFlag("target_modules"),
    "lora_target_modules": ForeignFlag("target_modules"),
    "lora_r": ForeignFlag("lora_rank"),
    "loraplus_lr_ratio": ForeignFlag("lorap_lr_ratio"),
    "pref_beta": ForeignFlag("beta"),
    "pref_loss": ForeignFlag("loss_type"),
    "cutoff_len": ForeignFlag("max_length"),
    "max_seq_length": ForeignFlag("max_length"),
    "max_prompt_length": ForeignFlag("max_length"),
    "dataset_name": ForeignFlag("dataset"),
    "dataset_train_split": ForeignFlag("dataset", "A hub id, a file or a folder; NAME#500 takes 500 rows."),
    "dataset_dir": ForeignFlag("dataset", "It takes the paths of files and folders."),
    "eval_dataset": ForeignFlag("val_dataset"),
    "val_size": ForeignFlag("split_dataset_ratio"),
    "max_samples": ForeignFlag("dataset", "Write --dataset NAME#500 to take 500 rows."),
    "preprocessing_num_workers": ForeignFlag("dataset_num_proc"),
    "overwrite_cache": ForeignFlag("load_from_cache_file", "Set --load_from_cache_file false."),
    "mix_strategy": ForeignFlag("dataset", "Write --dataset A#500 B#1000 to choose the shares."),
    "train_on_prompt": ForeignFlag("loss_scale", "Set --loss_scale all."),
    "assistant_only_loss": ForeignFlag("loss_scale", "It is the default of --loss_scale."),
    "completion_only_loss": ForeignFlag("loss_scale", "Set --loss_scale last_round."),
    "neat_packing": ForeignFlag("packing", "Packed samples never see each other."),
    "learning_rate": ForeignFlag("lr"),
    "lr_scheduler_type": ForeignFlag("lr_decay_style"),
    "warmup_ratio": ForeignFlag("lr_warmup_fraction"),
    "warmup_steps": ForeignFlag("lr_warmup_iters"),
    "max_steps": ForeignFlag("train_iters"),
    "max_grad_norm": ForeignFlag("clip_grad"),
    "adam_epsilon": ForeignFlag("adam_eps"),
    "optim": ForeignFlag("optimizer"),
    "per_device_train_batch_size": ForeignFlag("micro_batch_size"),
    "per_device_eval_batch_size": ForeignFlag("micro_batch_size"),
    "gradient_accumulation_steps": ForeignFlag("global_batch_size"),
    "gradient_checkpointing": ForeignFlag("recompute_granularity"),
    "attn_implementation": ForeignFlag("attention_backend"),
    "flash_attn": ForeignFlag("attention_backend"),
    "enable_liger_kernel": ForeignFlag("", "Fused kernels run where the machine has them."),
    "use_liger_kernel": ForeignFlag("", "Fused kernels run where the machine has them."),
    "deepspeed": ForeignFlag(
        "use_distributed_optimizer", "DeepSpeed is not used: megatron-core's distributed optimizer shards the state."
    ),
    "fsdp": ForeignFlag(
        "use_distributed_optimizer", "FSDP is not used: megatron-core's distributed optimizer shards the state."
    ),
    "neftune_noise_alpha": ForeignFlag("", "NEFTune is not available. Remove the flag."),
    "quantization_bit": ForeignFlag("", "Training on quantized weights is not available. Use --tuner_type lora."),
    "load_in_4bit": ForeignFlag("", "Training on quantized weights is not available. Use --tuner_type lora."),
    "trust_remote_code": ForeignFlag("", "Code of a model's folder is never run. Remove the flag."),
    "logging_dir": ForeignFlag("tensorboard_dir"),
    "run_name": ForeignFlag("wandb_exp_name"),
    "evaluation_strategy": ForeignFlag("eval_steps"),
    "eval_strategy": ForeignFlag("eval_steps"),
    "overwrite_output_dir": ForeignFlag("add_version", "A run writes to a new folder in --output_dir by default."),
    "save_only_model": ForeignFlag("no_save_optim"),
    "load_best_model_at_end": ForeignFlag("metric_for_best_model", "The link `best` leads to that checkpoint."),
    "hub_strategy": ForeignFlag("push_to_hub", "It uploads the last checkpoint when training ends."),
    "export_dir": ForeignFlag("output_dir"),
    "dataset": ForeignFlag("val_dataset"),
}
