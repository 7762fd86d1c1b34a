"""Rows of verl's and siiRL's tree: models and their layouts, optimizers, engine.

The tree is read at verl b178a3c (`ppo_megatron_trainer.yaml`) and siiRL af00a77 (`siirl/params`). verl_task_rows.py has
the rows of data, rewards, algorithm and trainer.
"""

from .table import Row, computed, needless, noted, only, refused, same, under, valued

FORWARD = "forward passes have the micro batches of training"
LAYOUT = "where it differs from the policy's; unset sizes are the policy's"
PROFILER = "profiling is by --profile"
IN_TREE = "weights are read from Hugging Face folders"
SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
# Fields of megatron-core's TransformerConfig with flags of the same names.
TRANSFORMER_FLAGS = (
    "recompute_granularity", "recompute_modules", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "apply_rope_fusion",
    "attention_backend", "attention_dropout", "bias_activation_fusion", "bias_dropout_fusion", "cp_comm_type",
    "cpu_offloading", "cpu_offloading_num_layers", "deterministic_mode", "gradient_accumulation_fusion",
    "hidden_dropout", "microbatch_group_size_per_vp_stage", "moe_aux_loss_coeff", "moe_expert_capacity_factor",
    "moe_grouped_gemm", "moe_pad_expert_input_to_capacity", "moe_permute_fusion", "moe_router_dtype",
    "moe_router_load_balancing_type", "moe_shared_expert_overlap", "moe_token_dispatcher_type",
    "moe_token_drop_policy", "moe_z_loss_coeff", "mtp_loss_scaling_factor", "mtp_num_layers", "overlap_p2p_comm",
    "batch_p2p_comm",
)  # fmt: skip

TRANSFORMER = (
    *(same(name, name) for name in TRANSFORMER_FLAGS),
    same("num_layers_in_first_pipeline_stage", "decoder_first_pipeline_num_layers"),
    same("num_layers_in_last_pipeline_stage", "decoder_last_pipeline_num_layers"),
    computed("recompute_method", "recompute_method", text="with recompute_granularity full; full alone: uniform"),
    computed("recompute_num_layers", "recompute_num_layers", text="with recompute_granularity full; full alone: 1"),
    computed("moe_layer_recompute", "recompute_granularity", "recompute_modules", text="true: selective, module moe"),
    noted("moe_enable_deepep", "tokens reach their experts without DeepEP, with the same numbers", False),
    needless("deallocate_pipeline_outputs", "outputs of pipeline stages are always freed"),
    needless("masked_softmax_fusion", "attention's softmax is inside its kernel"),
    needless("persist_layer_norm", "norms have one kernel"),
    needless("use_flash_attn", "attention's kernel is --attention_backend's"),
    needless("use_fused_rotary_pos_emb", "the rotary embedding's kernel is --apply_rope_fusion's"),
    needless("seq_length", "data.max_prompt_length and data.max_response_length bound samples"),
    needless("variable_seq_lengths", "lengths of micro batches are always variable"),
    needless("sequence_parallel", "megatron.sequence_parallel sets it"),
    refused("moe_router_bias_update_rate", "biases of routers are not changed in training. Remove it", 0),
    refused(
        "freeze_moe_router", "set --freeze_parameters_regex 'mlp\\.router' on the command line, and remove it", False
    ),
)
OPTIMIZER_CONFIG = (
    same("optimizer_cpu_offload", "optimizer_cpu_offload"),
    same("optimizer_offload_fraction", "optimizer_offload_fraction"),
    needless("overlap_cpu_optimizer_d2h_h2d", "the step on the host overlaps its copies"),
    needless("use_torch_optimizer_for_cpu_offload", "the step on the host is torch's"),
    needless(
        "use_precision_aware_optimizer", "types of the optimizer's states are --exp_avg_dtype's and its siblings'"
    ),
    only("decoupled_weight_decay", True, fix="Remove it: the optimizer is AdamW"),
)
# Experts that an earlier pass chose.
REPLAY = (
    same("router_replay.mode", "router_replay_mode"),
    only("router_replay.record_file", fix="Choices are kept in memory. Remove it"),
    only("router_replay.replay_file", fix="Choices are kept in memory. Remove it"),
)
ROLE_REPLAY = (
    only("router_replay.mode", "disabled", fix="Only the policy's choice of experts is replayed"),
    *REPLAY[1:],
)
# Tables that are alike for the policy, the reference, the critic and the reward model.
MEGATRON_SWITCHES = (
    needless("use_mbridge", IN_TREE),
    needless("vanilla_mbridge", IN_TREE),
    needless("dist_checkpointing_prefix", IN_TREE),
    needless("forward_only", "only the trained models have an optimizer"),
    needless("use_remove_padding", "samples are never padded"),
    only("use_megatron_fsdp", False, fix="Remove it: megatron.use_distributed_optimizer shards the optimizer's state"),
    refused("override_mcore_model_config.**", "the model's config.json describes it. Remove it"),
    refused("extra.**", "fields of other engines. Remove it"),
)
POLICY_MEGATRON = (
    same("tensor_model_parallel_size", "tensor_model_parallel_size"),
    same("pipeline_model_parallel_size", "pipeline_model_parallel_size"),
    same("virtual_pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    same("context_parallel_size", "context_parallel_size"),
    same("expert_model_parallel_size", "expert_model_parallel_size"),
    same("expert_tensor_parallel_size", "expert_tensor_parallel_size", "left out: 1"),
    computed(
        "sequence_parallel", "sequence_parallel", text="with tensor_model_parallel_size above 1; verl: left out true"
    ),
    same("use_distributed_optimizer", "use_distributed_optimizer"),
    same("dtype", "torch_dtype", "left out: the checkpoint's"),
    same("param_dtype", "torch_dtype", "siiRL's name of dtype"),
    same("seed", "seed"),
    computed("param_offload", "offload_model", text="true: the policy is on the host while completions are drawn"),
    computed("grad_offload", "offload_model", text="gradients have no memory while completions are drawn"),
    computed(
        "optimizer_offload", "offload_optimizer", text="true, but with optimizer_cpu_offload, which keeps it there"
    ),
    computed("use_dist_checkpointing", "mcore_model", text="true: dist_checkpointing_path in the place of model.path"),
    computed("dist_checkpointing_path", "mcore_model", text="with use_dist_checkpointing"),
    same("override_ddp_config.overlap_grad_reduce", "overlap_grad_reduce"),
    same("override_ddp_config.overlap_param_gather", "overlap_param_gather"),
    same("override_ddp_config.grad_reduce_in_fp32", "accumulate_allreduce_grads_in_fp32"),
    needless("override_ddp_config.average_in_collective", "sums of gradients are divided beforehand"),
    *REPLAY,
    *under("override_transformer_config", TRANSFORMER),
    *MEGATRON_SWITCHES,
)
ROLE_SWITCHES = (
    needless("sequence_parallel", "on above tensor_model_parallel_size 1, with the same numbers"),
    needless("use_distributed_optimizer", "as the policy's"),
    needless("seed", "the policy's seed is that of the run"),
    noted("dtype", "all models have the policy's type", "bfloat16"),
    noted("param_dtype", "all models have the policy's type", "bfloat16"),
    *under(
        "override_transformer_config",
        (needless(row.key, "kernels and recomputation are the policy's") for row in TRANSFORMER),
    ),
    needless("override_ddp_config.overlap_grad_reduce", "as the policy's"),
    needless("override_ddp_config.overlap_param_gather", "as the policy's"),
    needless("override_ddp_config.grad_reduce_in_fp32", "as the policy's"),
    needless("override_ddp_config.average_in_collective", "as the policy's"),
    *ROLE_REPLAY,
    *MEGATRON_SWITCHES,
)


def role_rows(role: str, parked: str) -> tuple[Row, ...]:
    """Return the rows of the `megatron` table of the reference or the critic. parked: flag of its offload."""
    return (
        *(computed(size, f"{role}_{size}", text=LAYOUT) for size in SIZES),
        computed("virtual_pipeline_model_parallel_size", text="the policy's; another number is noted"),
        computed("param_offload", parked, text="true: in host memory between uses"),
        computed("grad_offload", text="with param_offload"),
        computed("optimizer_offload", *((parked,) if role == "critic" else ()), text="with param_offload"),
        computed("use_dist_checkpointing", f"mcore_{role}_model", text="true: dist_checkpointing_path"),
        computed("dist_checkpointing_path", f"mcore_{role}_model", text="with use_dist_checkpointing"),
        *ROLE_SWITCHES,
    )


LORA = (
    computed("rank", "tuner_type", "lora_rank", text="above 0: --tuner_type lora"),
    computed("alpha", "lora_alpha", text="with a rank above 0"),
    computed("dropout", "lora_dropout", text="with a rank above 0"),
    computed("target_modules", "target_modules", text="with a rank above 0"),
    computed("dtype", "lora_dtype", text="with a rank above 0"),
    computed("adapter_path", "adapters", text="adapter to continue with"),
    only("type", "lora", fix="Set lora"),
    needless("merge", "the engine is sent merged weights, or the adapter with --vllm_enable_lora true"),
    only("exclude_modules", [], fix="Name those to adapt: target_modules"),
    only("dropout_position", "pre", fix="Dropout is on the adapters' input"),
    only("lora_A_init_method", "xavier", "kaiming", fix="PEFT's initialization is taken"),
    only("lora_B_init_method", "zero", fix="PEFT's initialization is taken"),
    only("a2a_experimental", False, fix="Remove it"),
    only("freeze_vision_model", True, fix="Set --tuner_type lora_llm on the command line, and remove it"),
    only("freeze_vision_projection", True, fix="Set --tuner_type lora_llm on the command line, and remove it"),
    needless("freeze_language_model", "its weights beneath adapters are frozen"),
)
MTP = (
    only("enable", False, fix="Set --mtp_num_layers on the command line, which trains them too, and remove it"),
    only("enable_train", False, fix="Set --mtp_num_layers on the command line, and remove it"),
    only("enable_rollout", False, fix="Speculative decoding is not supported. Remove it"),
    needless("*", "read with mtp.enable alone"),
)
MODEL = (
    same("path", "model"),
    noted("trust_remote_code", "models are this project's own code, and none of the hub's is run", False),
    needless("use_remove_padding", "samples are never padded"),
    needless("use_fused_kernels", "the loss is always fused"),
    needless("enable_gradient_checkpointing", "with Megatron, override_transformer_config.recompute_* decides"),
    needless("gradient_checkpointing_kwargs.**", "with Megatron, override_transformer_config.recompute_* decides"),
    needless("enable_activation_offload", "with Megatron, override_transformer_config.cpu_offloading decides"),
    needless("use_shm", "weights are read once, by the processes that need them"),
    needless("use_liger", "kernels are megatron-core's"),
    needless("tokenizer_path", "the tokenizer is the checkpoint's"),
    only("external_lib", fix="Families of models are this project's own (docs/models.md). Remove it"),
    only("custom_chat_template", fix="Write it to the chat_template.jinja of the model's folder"),
    same("override_config.model_config.max_position_embeddings", "max_model_len"),
    same("override_config.max_position_embeddings", "max_model_len"),
    needless("override_config.attn_implementation", "attention's kernel is --attention_backend's"),
    only(
        "override_config.moe_config.freeze_moe_router", False, fix="Set --freeze_parameters_regex on the command line"
    ),
    refused("override_config.**", "the model's config.json describes it. Change that"),
    same("model_revision", "model_revision"),
    same("hf_hub_token", "hub_token"),
    computed("lora_rank", "tuner_type", "lora_rank", text="above 0: --tuner_type lora"),
    computed("lora_alpha", "lora_alpha", text="with lora_rank above 0; left out 16"),
    computed("target_modules", "target_modules", text="with lora_rank above 0; left out all-linear"),
    computed("lora_adapter_path", "adapters", text="adapter to continue with"),
    only("exclude_modules", [], fix="Name those to adapt: target_modules"),
    *under("lora", LORA),
    *under("mtp", MTP),
    only("tiled_mlp.enabled", False, fix="Set --recompute_granularity full, which saves more memory, and remove it"),
    needless("tiled_mlp.num_shards", "read with tiled_mlp.enabled alone"),
    needless("fused_kernel_options.impl_backend", "the loss is always fused"),
    only("hf_config_path", fix="The config is that of the model's folder"),
    only("model_type", "llm", "language_model", fix="Only language models are trained so"),
)
OPTIMIZER = (
    computed("lr_warmup_steps", "lr_warmup_iters", text="generations: x steps of a generation; 0 and below: the ratio"),
    computed("lr_warmup_steps_ratio", "lr_warmup_fraction", text="without lr_warmup_steps above 0"),
    computed("lr_decay_steps", "lr_decay_iters", text="generations: x steps of a generation"),
    computed("lr_wsd_decay_steps", "lr_wsd_decay_iters", text="generations: x steps of a generation"),
    computed("min_lr_ratio", "min_lr", text="lr x min_lr_ratio, without min_lr"),
    computed("betas", "adam_beta1", "adam_beta2", text="left out: 0.9 and 0.999"),
    same("lr", "lr", "left out: 1e-6"),
    same("min_lr", "min_lr"),
    same("weight_decay", "weight_decay", "left out: 0.01"),
    same("lr_warmup_init", "lr_warmup_init"),
    same("lr_wsd_decay_style", "lr_wsd_decay_style"),
    valued(
        "lr_decay_style",
        "lr_decay_style",
        {n: n for n in ("constant", "linear", "cosine", "inverse-square-root", "WSD")},
        "left out: constant (siiRL: linear)",
    ),
    valued("optimizer", "optimizer", {"adam": "adam", "sgd": "sgd"}),
    computed("clip_grad", "clip_grad", text="left out: actor.grad_clip"),
    *under("override_optimizer_config", OPTIMIZER_CONFIG),
)
OPTIMIZER_SWITCHES = (
    only("warmup_style", "constant", fix="Megatron's schedule is lr_decay_style"),
    only("weight_decay_incr_style", "constant", fix="The weight decay stays what it is"),
    only("use_checkpoint_opt_param_scheduler", False, fix="A run that is resumed goes on with its schedule"),
    needless("total_training_steps", "the trainer sets it"),
    needless("num_cycles", "no schedule here has cycles"),
)
# The critic's optimizer has the policy's settings but for its learning rate.
CRITIC_OPTIMIZER = (
    computed("lr", "critic_lr", text="left out: 1e-5"),
    *(
        computed(row.key, text="the policy's; another value is refused")
        for row in OPTIMIZER
        if row.key != "lr" and not row.key.startswith("override_optimizer_config")
    ),
    *under(
        "override_optimizer_config",
        (computed(row.key, text="the policy's; another value is refused") for row in OPTIMIZER_CONFIG[:2]),
    ),
    *under("override_optimizer_config", OPTIMIZER_CONFIG[2:]),
    *OPTIMIZER_SWITCHES,
)
CHECKPOINT = (
    computed("save_contents", "no_save_optim", text="without optimizer: true"),
    computed("contents", "no_save_optim", text="older name of save_contents"),
    needless("load_contents", "a checkpoint is read as it was saved"),
    needless("strict", "every tensor is checked"),
)
# Switches of each role that change no number.
ROLE = (
    noted("strategy", "all models are trained by megatron-core", "megatron"),
    needless("use_torch_compile", "kernels are megatron-core's"),
    needless("use_fused_kernels", "the loss is always fused"),
    needless("use_remove_padding", "samples are never padded"),
    needless("nccl_timeout", "--ddp_timeout ends a run without progress"),
    needless("data_loader_seed", "data.seed is the seed of the order"),
    only("load_weight", True, fix="Training begins with weights"),
    needless("profile.**", PROFILER),
    needless("profiler.**", PROFILER),
    needless("fsdp_config.**", "parameters of FSDP, which does not train here"),
    noted("ulysses_sequence_parallel_size", "is FSDP's; long samples are split by megatron.context_parallel_size", 1),
)
FORWARD_BATCHES = (
    *(needless(name, FORWARD) for name in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")),
    *(needless(name, FORWARD) for name in ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")),
)
ACTOR = (
    computed("ppo_mini_batch_size", "global_batch_size", text="prompts of a step, x rollout.n; left out 256"),
    computed("ppo_micro_batch_size_per_gpu", "micro_batch_size", text="without use_dynamic_bsz"),
    computed("ppo_micro_batch_size", "micro_batch_size", text="divided by the data-parallel ranks"),
    computed("use_dynamic_bsz", "packing", text="true: packs, one in a micro batch"),
    computed("ppo_max_token_len_per_gpu", "packing_length", text="with use_dynamic_bsz, x context_parallel_size"),
    computed("ppo_epochs", "num_iterations", text="left out 1"),
    only("shuffle", False, fix="Samples of a generation are trained on in their order"),
    computed("clip_ratio", "epsilon", "epsilon_high", text="without clip_ratio_low and _high; left out 0.2"),
    computed("clip_ratio_low", "epsilon", text="left out: clip_ratio"),
    computed("clip_ratio_high", "epsilon_high", text="left out: clip_ratio"),
    computed("clip_ratio_c", "delta", "dual_clip", text="above 1 + clip_ratio_high --delta, which is equal there"),
    computed("grad_clip", "clip_grad", text="without optim.clip_grad, which Megatron actors read in its place"),
    computed(
        "loss_agg_mode",
        "loss_type",
        "loss_agg_mode",
        text="token-mean: dapo; seq-mean-token-mean: grpo; seq-mean-token-sum; seq-mean-token-sum-norm: dr_grpo",
    ),
    computed(
        "policy_loss.loss_mode",
        "importance_sampling_level",
        "loss_type",
        text="vanilla; gspo: sequence, grpo; cispo, sapo",
    ),
    needless("policy_loss.clip_cov_ratio", "read with loss_mode clip_cov alone"),
    needless("policy_loss.clip_cov_lb", "read with loss_mode clip_cov alone"),
    needless("policy_loss.clip_cov_ub", "read with loss_mode clip_cov alone"),
    needless("policy_loss.kl_cov_ratio", "read with loss_mode kl_cov alone"),
    needless("policy_loss.ppo_kl_coef", "read with loss_mode kl_cov alone"),
    computed("use_kl_loss", "beta", text="true: kl_loss_coef; false: 0"),
    computed("kl_loss_coef", "beta", text="with use_kl_loss; left out 0.001"),
    computed("kl_loss_type", "kl_estimator", text="with use_kl_loss: low_var_kl or k3, kl or k1, mse or k2, abs"),
    computed("entropy_coeff", "entropy_coef", text="above 0 with loss_agg_mode token-mean alone"),
    computed(
        "tis_imp_ratio_cap",
        "rollout_importance_sampling_mode",
        "rollout_importance_sampling_threshold",
        text="above 0: token_truncate",
    ),
    computed("tau_pos", "tau_pos", text="with policy_loss.loss_mode sapo"),
    computed("tau_neg", "tau_neg", text="with policy_loss.loss_mode sapo"),
    only("loss_scale_factor", fix="seq-mean-token-sum-norm divides by data.max_response_length"),
    computed("calculate_entropy", "log_entropy", text="true: the mean entropy is in the log"),
    only("use_prefix_grouper", False, fix="Remove it"),
    needless("rollout_n", "rollout.n is their number"),
    only("use_cpgd_loss", False, fix="CPGD is not supported. Set policy_loss.loss_mode=vanilla"),
    needless("policy_drift_coeff", "read by CPGD alone"),
    only("recompute_old_log_prob", True, fix="Old log-probabilities are always the trainer's"),
    needless("entropy_checkpointing", "entropies are computed in pieces"),
    needless("entropy_from_logits_with_chunking", "entropies are computed in pieces"),
    computed("freeze_vision_tower", "freeze_vit", "freeze_aligner", text="left out false; the critic's too"),
    *REPLAY,
    same("checkpoint.async_save", "async_save"),
    *under("checkpoint", CHECKPOINT),
    *under("optim", (*OPTIMIZER, *OPTIMIZER_SWITCHES)),
    *under("megatron", POLICY_MEGATRON),
    *ROLE,
)
REFERENCE = (
    *under("megatron", role_rows("ref", "offload_ref_model")),
    *FORWARD_BATCHES,
    *(needless(name, FORWARD) for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")),
    only("sync_actor", False, fix="Set --sync_ref_model true on the command line"),
    needless("shuffle", "the reference is not trained"),
    needless("rollout_n", "rollout.n is their number"),
    *ROLE_REPLAY,
    *ROLE,
)
CRITIC = (
    computed("model.path", "critic_model", text="with algorithm.adv_estimator gae"),
    *under("model", (row for row in MODEL if row.kind == "needless")),
    noted("model.trust_remote_code", "models are this project's own code, and none of the hub's is run", False),
    only("model.external_lib", fix="Remove it"),
    only("model.lora.rank", 0, fix="The critic is trained on all parameters"),
    needless("model.lora.*", "read with model.lora.rank above 0 alone"),
    only("model.lora_rank", 0, fix="The critic is trained on all parameters"),
    only("model.override_config.moe_config.freeze_moe_router", False, fix="The critic is trained on all parameters"),
    computed("optim.lr", "critic_lr", text="left out: 1e-5"),
    *under("optim", CRITIC_OPTIMIZER[1:]),
    *under("megatron", role_rows("critic", "offload_critic")),
    computed("cliprange_value", "cliprange_value", text="left out: 0.5"),
    computed("enable", text="true with algorithm.adv_estimator gae"),
    computed("ppo_mini_batch_size", text="actor.ppo_mini_batch_size; another number is refused"),
    computed("ppo_epochs", text="actor.ppo_epochs; another number is refused"),
    computed("rollout_n", text="rollout.n; another number is refused"),
    computed("loss_agg_mode", text="token-mean; another is refused"),
    computed("grad_clip", text="the policy's; another number is refused"),
    computed("ppo_micro_batch_size_per_gpu", text="actor.ppo_micro_batch_size_per_gpu; another number is noted"),
    needless("ppo_micro_batch_size", "the critic has the policy's micro batches"),
    needless("forward_micro_batch_size", FORWARD),
    needless("forward_micro_batch_size_per_gpu", FORWARD),
    needless("use_dynamic_bsz", "the critic has the policy's packs"),
    needless("ppo_max_token_len_per_gpu", "the critic has the policy's packs"),
    needless("forward_max_token_len_per_gpu", "the critic has the policy's packs"),
    only("shuffle", False, fix="Samples of a generation are trained on in their order"),
    needless("checkpoint.async_save", "the critic is saved with the policy"),
    *under("checkpoint", (needless(row.key, "the critic is saved with the policy") for row in CHECKPOINT)),
    *ROLE,
)
