"""Flags and values of unsupported features, each refused by the feature's name with a fix."""

from typing import NamedTuple


class UnsupportedFlag(NamedTuple):
    """Flag of an unsupported feature."""

    feature: str
    fix: str
    neutral: tuple[str, ...] = ()  # accepted values, which have no effect; numbers are compared as numbers

    def accepts(self, text: str) -> bool:
        """Return whether a value asks for nothing."""
        return text in self.neutral or (_is_number(text) and any(_equal(text, value) for value in self.neutral))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _equal(text: str, value: str) -> bool:
    return _is_number(value) and float(text) == float(value)


def _unsupported(feature: str, fix: str, **neutral: tuple[str, ...] | str) -> dict[str, UnsupportedFlag]:
    return {name: UnsupportedFlag(feature, fix, (v,) if isinstance(v, str) else v) for name, v in neutral.items()}


NONE: tuple[str, ...] = ()
ANY_BOOLEAN = ("true", "false")
ARCHITECTURE = ("architectures other than that of config.json", "Remove it, or edit the model's config.json.")
SGLANG = ("SGLang", "Remove it, and set --infer_backend vllm.")
LLM_COMPRESSOR = (
    "Set --quant_method fp8, or export to a folder and quantize that: pip install llmcompressor, and its oneshot(model="
    "FOLDER, dataset=..., recipe=...), whose recipes are AWQModifier and GPTQModifier."
)
LMDEPLOY = ("LMDeploy", "Remove it, and set --infer_backend vllm.")

_MODELS = {
    **_unsupported(*ARCHITECTURE, num_layers=NONE, hidden_size=NONE, ffn_hidden_size=NONE, num_attention_heads=NONE,
                   group_query_attention=NONE, num_query_groups=NONE, kv_channels=NONE, position_embedding_type=NONE,
                   rotary_base=NONE, rotary_percent=NONE, rotary_interleaved=NONE,
                   original_max_position_embeddings=NONE, normalization=NONE, norm_epsilon=NONE, swiglu=NONE,
                   quick_geglu=NONE, activation_func_clamp_value=NONE, glu_linear_offset=NONE,
                   untie_embeddings_and_output_weights=NONE, disable_bias_linear=NONE, add_bias_linear=NONE,
                   add_qkv_bias=NONE, qk_layernorm=NONE, qk_l2_norm=NONE, no_rope_freq=NONE, window_size=NONE,
                   window_attn_skip_freq=NONE, softmax_type=NONE, apply_query_key_layer_scaling="false",
                   moe_apply_probs_on_input="false"),
    **_unsupported(*ARCHITECTURE, num_experts=NONE, moe_layer_freq=NONE, moe_ffn_hidden_size=NONE,
                   moe_shared_expert_intermediate_size=NONE, moe_router_topk=NONE, moe_router_num_groups=NONE,
                   moe_router_group_topk=NONE, moe_router_pre_softmax=NONE, moe_router_score_function=NONE,
                   moe_router_enable_expert_bias=NONE, moe_router_topk_scaling_factor=NONE,
                   multi_latent_attention=NONE, q_lora_rank=NONE, kv_lora_rank=NONE, qk_head_dim=NONE,
                   qk_pos_emb_head_dim=NONE, v_head_dim=NONE, mscale=NONE, mscale_all_dim=NONE,
                   mtp_decoder_input_detach="false", mtp_shared_weights="false"),
    **_unsupported("changes of the router's biases while training", "Remove it.", moe_router_bias_update_rate="0"),
    **_unsupported("sparse attention (DSA, CSA), hyper-connections and engrams", "Use a model without them.",
                   apply_dsa_kernel_fusion="false", csa_dense_mode="false", use_fused_mhc="false",
                   mhc_recompute_layer_num=NONE, engram_tokenizer_map=NONE),
    **_unsupported("revisions of a teacher", "Download it, and set --teacher_model to the folder.",
                   teacher_model_revision=NONE),
    **_unsupported("plugins", "Remove it.", custom_register_path=NONE, custom_dataset_info=NONE),
}  # fmt: skip

_TRAINING = {
    **_unsupported("other LoRA implementations", "Remove it.", tuner_backend="peft", use_swift_lora="false"),
    **_unsupported("CUDA graphs of the optimizer", "Remove it.", optimizer_cuda_graph="false"),
    **_unsupported("offload of weights while training", "Set --optimizer_cpu_offload true.",
                   cpu_offloading_weights="false"),
    **_unsupported("offload of something else than activations", "Remove it.", cpu_offloading_activations="true"),
    **_unsupported("gradients in another type than they are summed in",
                   "Set --accumulate_allreduce_grads_in_fp32 false for gradients in bf16.",
                   main_grads_dtype=("fp32", "float32")),
    **_unsupported("weight decay that changes while training", "Set --weight_decay.",
                   weight_decay_incr_style="constant", start_weight_decay=NONE, end_weight_decay=NONE),
    **_unsupported("another optimizer than AdamW beside Muon", "Remove it.", muon_scalar_optimizer="adam"),
    **_unsupported("FP4", "Remove it.", fp4_format=NONE, fp4_recipe=NONE, fp4_param_gather="false"),
    **_unsupported("FSDP", "Remove it: --use_distributed_optimizer shards the optimizer's state.",
                   use_megatron_fsdp="false"),
    **_unsupported("DeepEP", "Set --moe_token_dispatcher_type alltoall.", moe_enable_deepep="false"),
    **_unsupported("layers per virtual stage", "Set the number of chunks: --virtual_pipeline_model_parallel_size.",
                   num_layers_per_virtual_pipeline_stage=NONE),
    **_unsupported("sequence parallelism of ms-swift's transformers backend", "Set --context_parallel_size.",
                   sequence_parallel_size="1"),
    **_unsupported("context parallelism that changes with the batch", "Set --context_parallel_size.",
                   sequence_packing_scheduler=NONE),
    **_unsupported("Ray in this command", "Remove it: `megatron pt`, `sft` and `rlhf` start on Ray.", use_ray="false"),
    **_unsupported("groups of Ray's processes",
                   "Set NPROC_PER_NODE, NNODES and --rollout_num_gpus (docs/many-nodes.md).",
                   device_groups=NONE, ray_exp_name=NONE, colocate_groups=NONE),
    **_unsupported("options of a training run in other commands",
                   "Remove it: the checkpoint's folder says how it is read, and --load_data_args takes its data.",
                   load_args="false"),
    **_unsupported("checkpoints for megatron-core before 0.14", "Remove it.", dist_ckpt_save_pre_mcore_014="false"),
    **_unsupported("reference adapters in megatron-core's format",
                   "Convert it with `swift export --to_hf true --merge_lora false`, and set it as --ref_adapters.",
                   mcore_ref_adapter=NONE),
}  # fmt: skip

_DATA = {
    **_unsupported("other templates than the tokenizer's", "Write the template to the model's chat_template.jinja.",
                   response_prefix=NONE),
    **_unsupported("a choice of which turns keep their thoughts", "The chat template decides: edit it.",
                   preserve_thinking=NONE),
    **_unsupported("weights of the loss that are rounded to 0 and 1", "Set --loss_scale without such weights.",
                   is_binary_loss_scale="false"),
    **_unsupported("columns that are not matched by name", "Set --columns.", disable_auto_column_mapping="false"),
    **_unsupported("repeated downloads of a dataset", "Delete its folder in the hub's cache.",
                   download_mode="reuse_dataset_if_exists"),
    **_unsupported("augmentation of decision datasets", "Remove it, and augment the rows.",
                   decision_drop_instructions="0", decision_state_as_text="0", decision_subsample_options="0",
                   decision_shuffle_fields="false"),
}  # fmt: skip

_REINFORCEMENT = {
    **_unsupported("context managers, which rewrite what the model has said",
                   "Remove it, and send messages from a scheduler (--multi_turn_scheduler).", context_manager=NONE),
    **_unsupported("a length per answer of an episode", "--max_completion_length bounds the episode.",
                   completion_length_limit_scope="total"),
    **_unsupported("plugins of reward models", "Write it as a reward function, and set --reward_funcs.",
                   reward_model_plugin=NONE),
    **_unsupported("several teachers", "Use one --teacher_model.", teacher_tag_key="dataset"),
    **_unsupported("a value loss within the policy's", "Remove it: the critic learns by --critic_lr.", vf_coef=NONE),
    **_unsupported("whitening of the rewards of tokens", "Set --normalize_rewards true.", whiten_rewards="false"),
    **_unsupported("a number of minibatches", "Set --steps_per_generation.", num_mini_batches="1"),
    **_unsupported("a number of logged samples", "Set --log_completions true.", num_sample_generations=NONE),
    **_unsupported("penalties of completions without an end", "Set --overlong_filter true.", missing_eos_penalty=NONE),
    **_unsupported("offload of the bridge, which holds no memory", "Remove it: --offload_model, --offload_optimizer.",
                   offload_bridge="false"),
    **_unsupported("engines split by experts", "Set --vllm_tensor_parallel_size.", vllm_enable_expert_parallel="false"),
    **_unsupported("engines split by layers", "Set --vllm_tensor_parallel_size.", vllm_pipeline_parallel_size="1"),
    **_unsupported("speculative decoding", "Remove it.", vllm_speculative_config=NONE),
    **_unsupported("TLS", "Put a proxy with TLS before the server.", ssl_keyfile=NONE, ssl_certfile=NONE),
}  # fmt: skip

_INFERENCE_AND_EXPORT = {
    **_unsupported("beam search", "Remove it.", num_beams="1"),
    **_unsupported("structured outputs", "Remove it.", structured_outputs_regex=NONE),
    **_unsupported("log-probabilities in results", "Remove it.", logprobs="false", top_logprobs=NONE),
    **_unsupported("samples of a dataset", "Set NAME#rows in --val_dataset.", val_dataset_sample=NONE),
    **_unsupported("rerankers in swift infer", "Remove it.", reranker_use_activation=ANY_BOOLEAN),
    **_unsupported(*LMDEPLOY, lmdeploy_tp=NONE, lmdeploy_session_len=NONE, lmdeploy_cache_max_entry_count=NONE,
                   lmdeploy_quant_policy=NONE, lmdeploy_vision_batch_size=NONE),
    **_unsupported(*SGLANG, sglang_tp_size=NONE, sglang_pp_size=NONE, sglang_dp_size=NONE, sglang_ep_size=NONE,
                   sglang_enable_ep_moe=NONE, sglang_mem_fraction_static=NONE, sglang_context_length=NONE,
                   sglang_disable_cuda_graph=NONE, sglang_quantization=NONE, sglang_kv_cache_dtype=NONE,
                   sglang_enable_dp_attention=NONE, sglang_disable_custom_all_reduce=NONE,
                   sglang_speculative_algorithm=NONE, sglang_speculative_num_steps=NONE,
                   sglang_speculative_eagle_topk=NONE, sglang_speculative_num_draft_tokens=NONE),
    **_unsupported("quantization that needs data (AWQ, GPTQ)", LLM_COMPRESSOR, quant_n_samples=NONE,
                   quant_batch_size=NONE, group_size=NONE),
    **_unsupported("a choice of bits", "Remove it: --quant_method fp8 has 8.", quant_bits="8"),
    **_unsupported("exports other than to_mcore and to_hf", "Remove it.", to_peft_format="false",
                   to_ollama="false", to_cached_dataset="false", template_mode=NONE, test_convert_dtype=NONE),
    **_unsupported("a number of files", "Set --max_shard_size.", thread_count=NONE),
}  # fmt: skip

UNSUPPORTED: dict[str, UnsupportedFlag] = {**_MODELS, **_TRAINING, **_DATA, **_REINFORCEMENT, **_INFERENCE_AND_EXPORT}

# Unsupported values of flags.
UNSUPPORTED_VALUES: dict[tuple[str, str], UnsupportedFlag] = {
    ("quant_method", "awq"): UnsupportedFlag("AWQ", LLM_COMPRESSOR),
    ("quant_method", "gptq"): UnsupportedFlag("GPTQ", LLM_COMPRESSOR),
    ("quant_method", "gptq_v2"): UnsupportedFlag("GPTQ", LLM_COMPRESSOR),
    ("quant_method", "bnb"): UnsupportedFlag(
        "bitsandbytes", "Set --quant_method fp8, or give transformers' BitsAndBytesConfig when the folder is loaded."
    ),
    ("infer_backend", "sglang"): UnsupportedFlag(SGLANG[0], "Set --infer_backend vllm."),
    ("infer_backend", "lmdeploy"): UnsupportedFlag(LMDEPLOY[0], "Set --infer_backend vllm."),
}
