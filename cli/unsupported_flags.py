"""Flags and values of unsupported features, each refused by the feature's name with a fix."""

from typing import NamedTuple


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
