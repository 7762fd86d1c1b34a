"""Rows of ROLL's pipelines: RLVR, SFT, DPO and distillation, read at 8eb27cc."""

from .roll_rows import ROLE_ROWS
from .table import Row, computed, needless, noted, only, refused, same, under, valued

RAY = "there are no Ray actors"
AGENTIC_TEXT = (
    "environments of agentic pipelines are not supported. Write them as a scheduler, and set --multi_turn_scheduler "
    "(docs/grpo.md)"
)
AGENTIC_TABLES = (
    "custom_env", "custom_envs", "train_env_manager", "val_env_manager", "reward_normalization", "env_monitor",
)  # fmt: skip
AGENTIC_KEYS = (
    "env_manager_cls", "agent_runner_cls", "agent_system_template", "agent_template", "action_pattern",
    "think_action_pattern", "all_response_pattern", "max_tokens_per_step", "max_actions_per_traj",
    "sokoban_format_penalty", "frozen_format_penalty", "webshop_format_penalty", "alfworld_format_penalty",
    "single_prompt_agent_system_template", "single_prompt_agent_template", "render_save_dir", "step_reward_weight",
    "step_reward_gamma", "episode_reward_weight", "reward_norm_grouping", "ratio_type", "batch_adjust_mode",
)  # fmt: skip
AGENTIC = (
    *(refused(f"{name}.**", AGENTIC_TEXT) for name in AGENTIC_TABLES),
    *(refused(name, AGENTIC_TEXT) for name in AGENTIC_KEYS),
)

RUN = (
    needless("hydra.**", "runs write to --output_dir"),
    computed("defaults", text="files beside this one, whose keys it has"),
    computed("exp_name", "wandb_exp_name", "swanlab_exp_name", text="name of the run, where it is tracked"),
    same("seed", "seed"),
    needless("logging_dir", "logs are in the run's folder"),
    computed("output_dir", "output_dir", text="without checkpoint_config.output_dir"),
    needless("base_dir", "checkpoints are in the run's folder"),
    computed("checkpoint_config.output_dir", "output_dir", text="goes before output_dir"),
    only("checkpoint_config.type", "file_system", fix="Set checkpoint_config.output_dir and file_system"),
    needless("checkpoint_config.async_upload", "--async_save writes checkpoints during training"),
    noted("system_envs.*", "no variables are set for a run. Set it in the environment"),
    needless("system_envs.RAY_PROFILING", RAY),
    needless("system_envs.RAY_DEBUG", RAY),
    computed("system_envs.USE_MODELSCOPE", "use_hf", text="1: ids of ModelScope; left out: of Hugging Face"),
    valued("model_download_type", "use_hf", {"MODELSCOPE": False, "HUGGINGFACE_HUB": True}),
    valued(
        "track_with", "report_to",
        {**{name: [name] for name in ("tensorboard", "wandb", "swanlab")}, "stdout": ["none"]},
        "left out: tensorboard",
    ),
    computed("tracker_kwargs.log_dir", "tensorboard_dir", text="with track_with tensorboard"),
    computed("tracker_kwargs.project", "wandb_project", "swanlab_project", text="with wandb or swanlab"),
    computed("tracker_kwargs.name", "wandb_exp_name", "swanlab_exp_name", text="goes before exp_name"),
    noted("tracker_kwargs.notes", "runs have no notes"),
    noted("tracker_kwargs.tags", "runs have no tags"),
    refused("tracker_kwargs.api_key", "set the variable WANDB_API_KEY or SWANLAB_API_KEY, and remove it"),
    refused("tracker_kwargs.login_kwargs.*", "set the variable SWANLAB_API_KEY, and remove it"),
    computed("num_gpus_per_node", text="processes of a node; left out: 8"),
    needless("num_nodes", "ROLL counts nodes by device_mapping"),
    computed("max_steps", "train_iters", text="generations x steps of each; left out: 500"),
    computed("save_steps", "save_steps", text="generations x steps of each; left out: 50"),
    computed("eval_steps", "eval_steps", "eval_on_start", text="generations x steps of each; left out: 10"),
    same("logging_steps", "logging_steps", "left out: 1"),
    computed("max_ckpt_to_keep", "save_total_limit", text="0: all"),
    computed("resume_from_checkpoint", "resume_from_checkpoint", text="true: auto"),
    computed("sequence_length", "max_length", text="SFT, DPO, distillation; RLVR: prompt and completion together"),
    same("max_grad_norm", "clip_grad", "left out: 1; distillation: 0, and divided by distill_loss_weight"),
    *(
        needless(name, RAY)
        for name in (
            "rpc_timeout", "local_rank", "max_running_requests", "generate_opt_level", "model_update_buffer_size_mb",
            "is_num_return_sequences_expand", "max_additional_running_prompts", "router_args.**",
            "transfer_backend.**", "val_batch_size",
        )
    ),
    needless("profiler_output_dir", "profiles are in the run's folder"),
    needless("length_profiler_dir", "profiles are in the run's folder"),
    needless("otlp_output_dir", "traces of requests are not written"),
    needless("report_length_and_rewards", "lengths and rewards are in logging.jsonl"),
    needless("save_logging_board_dir", "numbers are in logging.jsonl"),
    only("profiler_timeline", False, fix="Set --profile true on the command line"),
    only("profiler_memory", False, fix="Set --profile true on the command line"),
    noted("is_offload_states", "models and states are on the host where engines need the room", False),
    noted("is_offload_optimizer_states_in_train_step", "the state stays where it is while a step computes", False),
    refused("rollout_mock.**", "completions are always drawn. Remove it"),
    refused(
        "user_defined_rollout_loop_cls", "write a scheduler, and set --multi_turn_scheduler (docs/grpo.md)",
        "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",
    ),
    computed("global_template", "enable_thinking", text="goes before data_args.template"),
    refused("tag_to_template.*", "all rows have the tokenizer's own chat template. Remove it"),
)  # fmt: skip
GENERATIONS = (
    computed("pretrain", "model", text="or the trained role's model_args.model_name_or_path"),
    computed("reward_pretrain", "critic_model", text="with adv_estimator gae; rewards by rules need no model"),
    computed("rollout_batch_size", "steps_per_generation", text="x completions of a prompt / global batch"),
    computed("num_return_sequences_in_group", "num_generations", text="left out: 1"),
    computed("ppo_epochs", "num_iterations", text="passes over each generation"),
    computed("prompt_length", "max_length", text="left out: 1024"),
    computed("response_length", "max_completion_length", text="or sequence_length less prompt_length"),
    computed("val_prompt_length", text="as prompt_length"),
    computed("val_sequence_length", text="as sequence_length"),
    computed("async_generation_ratio", "async_generate", text="1: true"),
    computed("rollout_dump_dir", "log_completions", text="any folder: true"),
    only("is_use_additional_prompts", False, fix="Each generation has rollout_batch_size prompts. Set false"),
    only("val_greedy", False, fix="Set validation.generating_args.temperature=0"),
    only("val_n_sample", 1, fix="Set validation.generating_args.num_return_sequences"),
    refused("dataset_filter.*", "filter the rows beforehand, and remove it"),
)
ALGORITHM = (
    computed("adv_estimator", "rlhf_type", "advantage_estimator", text="gae: ppo; grpo; reinforce; left out: gae"),
    computed("norm_mean_type", "advantage_estimator", "normalize_rewards", text="for rewards, with reinforce and gae"),
    computed("norm_std_type", "scale_rewards", "normalize_rewards", text="for rewards, with reinforce and gae"),
    computed("use_kl_loss", "beta", text="true: kl_loss_coef, by k3"),
    computed("kl_loss_coef", "beta", text="with use_kl_loss; left out: 0"),
    computed("add_token_level_kl", "kl_in_reward", "beta", text="true: init_kl_coef"),
    computed("init_kl_coef", "beta", text="with add_token_level_kl; left out: 0.2"),
    computed("kl_penalty", "kl_estimator", text="with add_token_level_kl; kl: k1, mse: k2, abs"),
    computed("target_kl", "target_kl", text="with add_token_level_kl"),
    computed("kl_horizon", "kl_horizon", text="with target_kl"),
    computed("gamma", "gamma", text="with adv_estimator gae; else 1"),
    computed("lambd", "lam", text="with adv_estimator gae"),
    computed("value_clip", "cliprange_value", text="with adv_estimator gae; null: no clipping"),
    computed("critic_warmup", "critic_warmup", text="generations x steps of each, with adv_estimator gae"),
    computed("pg_clip", "epsilon", "epsilon_high", text="without use_pg_clip_range; left out: 0.2"),
    computed("use_pg_clip_range", "epsilon", "epsilon_high", text="true: pg_clip_low and pg_clip_high"),
    computed("pg_clip_low", "epsilon", text="with use_pg_clip_range"),
    computed("pg_clip_high", "epsilon_high", text="with use_pg_clip_range"),
    computed("dual_clip_loss", "delta", "dual_clip", text="true: 1 + 2 pg_clip"),
    computed("loss_agg_mode", "loss_type", "loss_agg_mode", text="left out: seq-mean-token-mean"),
    computed("entropy_loss_coef", "entropy_coef", text="with loss_agg_mode token-mean"),
    computed("whiten_advantages", "whiten_advantages", text="left out: false"),
    computed("advantage_clip", "advantage_clip", text="left out: none"),
    computed("reward_clip", "reward_clip", text="clips scaled rewards; no effect where they cannot exceed it"),
    computed("max_len_mask", "overlong_filter", text="left out: false"),
    computed("difficulty_mask", "difficulty_range", text="true: both thresholds"),
    computed("difficulty_low_threshold", "difficulty_range", text="with difficulty_mask; left out: 0"),
    computed("difficulty_high_threshold", "difficulty_range", text="with difficulty_mask; left out: 1"),
    valued("importance_sampling", "importance_sampling_level", {"token": "token", "seq": "sequence"}),
    computed(
        "train_infer_correction.is_weight.enabled", "rollout_importance_sampling_mode", text="true: weights, truncated"
    ),
    computed("train_infer_correction.is_weight.weight_type", "rollout_importance_sampling_mode", text="with enabled"),
    computed(
        "train_infer_correction.is_weight.upper_bound", "rollout_importance_sampling_threshold", text="with enabled"
    ),
    only("train_infer_correction.is_weight.detach", True, fix="Weights have no gradient. Set true"),
    only("train_infer_correction.filters[].enabled", False, fix="Set is_weight, or remove it"),
    refused("train_infer_correction.filters[].*", "set is_weight in its place"),
    needless("enable_reference", "there is a reference where a KL divergence needs it"),
    needless("enable_old_logprobs_recompute", "log-probabilities before the steps are computed where steps need them"),
    needless("force_disable_old_logprobs_recompute", "they are computed where steps need them"),
    only("use_policy_loss_type", "PPO", fix="Set PPO"),
    only("use_topr_loss", False, fix="Set --loss_type cispo or sapo in its place"),
    only("postive_loss_coef", 0, fix="Set 0"),
    only("use_topr_neg_loss_coef", 0, fix="Set 0"),
    only("rl_loss_coef", 1, fix="Scale actor_train.training_args.learning_rate"),
    only("mask_type", "loss", fix="Masked completions have no loss. Set loss"),
    only("minibatch_data_iter_num", 1, fix="Set ppo_epochs"),
    needless("balance_length", "ranks have batches of alike length"),
    only("difficulty_loss_weight", False, fix="Completions have equal weights. Set false"),
    only("length_loss_weight", False, fix="Completions have equal weights. Set false"),
    only("error_max_len_clip", False, fix="Set false, or write a reward (docs/grpo.md)"),
    needless("error_max_len_threshold", "read with error_max_len_clip alone"),
    only("whiten_rewards", False, fix="Set whiten_advantages"),
    only("use_reward_scaling", False, fix="Set norm_std_type: ROLL does not read it"),
    only("use_reward_norm", False, fix="Set norm_mean_type and norm_std_type: ROLL does not read it"),
    only("add_len_reward", False, fix="ROLL does not read it"),
    only("l2", 0, fix="Set weight_decay: ROLL does not read it"),
    refused("reward_norm", "ROLL does not read it. Set norm_mean_type and norm_std_type"),
    refused("reward_shift", "ROLL does not read it. Set norm_mean_type", False),
    refused("reward_scale", "ROLL does not read it. Set norm_std_type", False),
)
VALIDATION = under(
    "validation",
    (
        computed("data_args.file_name", "val_dataset", text="files or folders"),
        needless("data_args.template", "rows have the template of training"),
        needless("data_args.preprocessing_num_workers", "as in training"),
        needless("data_args.dataset_dir", "ROLL has no such setting: paths are relative to the working folder"),
        needless("data_args.messages", "the columns are those of training"),
        computed("eval_steps", text="stale in ROLL: eval_steps"),
        computed("generating_args.max_new_tokens", text="response_length"),
        needless("generating_args.max_length", "max_new_tokens bounds completions"),
        only("generating_args.num_beams", 1, fix="Completions are sampled. Set 1"),
        computed("generating_args.do_sample", "eval_temperature", text="false: 0"),
        computed("generating_args.num_return_sequences", "num_generations_eval", text="left out: 1"),
        computed("generating_args.temperature", "eval_temperature", text="left out: 0.95"),
        computed("generating_args.top_p", "eval_top_p", text="left out: 0.7"),
        computed("generating_args.top_k", "eval_top_k", text="left out: 50"),
        needless("generating_args.logprobs", "the engine always returns them"),
        needless("infer_batch_size", "evaluations have the micro batches of training"),
    ),
)
JUDGES = "the server of --judge_server has the judge"
REWARDS = under(
    "rewards.*",
    (
        computed("worker_cls", "source_rules", text="rule of a domain"),
        computed("tag_included", "source_rules", text="sources of a domain"),
        computed("reward_type", text="soft, of CrossThinkQA"),
        computed("response_length_penalty_coef", text="0, of CrossThinkQA"),
        computed("use_local", text="true, of code"),
        computed("judge_prompt", "judge_prompt", text="with the rule judge"),
        computed("judge_model_type", text="with the rule judge: inference or api"),
        computed("judge_api_url", "judge_server", text="with judge_model_type api"),
        computed("judge_model_name", "judge_model", text="with judge_model_type api"),
        refused("judge_api_key", "set the variable JUDGE_API_KEY, and remove it"),
        refused("code_url", "programs run in a sandbox here. Remove it, and set use_local true"),
        refused("format_pattern", "ROLL's rules do not score it. Remove it"),
        computed("query_filter_config.type", "dynamic_sample", text="std_filter with std_threshold 0: true"),
        computed("query_filter_config.filter_args.*", "dynamic_sample", text="bounds of the filter"),
        only("response_filter_config.type", "no_filter", fix="ROLL does not read it"),
        needless("response_filter_config.filter_args.*", "ROLL does not read it"),
        refused("reward_manager_config.**", "write the reward as a plugin (docs/grpo.md)"),
        needless("name", "rewards are named by their tables"),
        needless("data_args.template", "rules read text; the judge's server has its own template"),
        needless("model_args.*", f"rules need no model; {JUDGES}"),
        needless("generating_args.*", JUDGES),
        needless("strategy_args.**", JUDGES),
        needless("device_mapping", JUDGES),
        needless("num_gpus_per_worker", JUDGES),
        needless("infer_batch_size", "rewards are computed at once"),
        needless("world_size", "rules run in processes of their own"),
        needless("system_envs.*", RAY),
    ),
)
TASKS = (
    # DPO
    computed("beta", "beta", text="with DPO; left out: 0.1"),
    computed("label_smoothing", "label_smoothing", text="with DPO"),
    only("ipo", False, fix="ROLL's IPO compares sums of log-probabilities, --loss_type ipo means"),
    computed("chosen_key", "columns", text="column of the chosen answer"),
    computed("rejected_key", "columns", text="column of the rejected answer"),
    # SFT
    computed("system_key", "columns", text="column of the system prompt"),
    computed("prompt_key", "columns", text="column of the instruction"),
    computed("query_key", "columns", text="column of the input"),
    computed("response_key", "columns", text="column of the answer"),
    # distillation
    computed("student_pretrain", "model", text="or student.model_args.model_name_or_path"),
    computed("teacher_pretrain", "teacher_model", text="or teacher.model_args.model_name_or_path"),
    computed("question_key", "columns", text="column of the question"),
    computed("answer_key", "columns", text="column of the answer"),
    computed("logits_topk", "gkd_logits_topk", text="0: all; left out: 64"),
    computed("distill_loss_weight", "sft_alpha", "clip_grad", text="w: sft_alpha (1 - w) / w; left out: 0.5"),
    computed("kd_objective", "beta", text="forward_kl: 0, js_divergence: 0.5, reverse_kl: 1"),
    computed("kd_temperature", "temperature", text="as teacher_temperature; left out: 1"),
    computed("teacher_temperature", "temperature", text="as kd_temperature; left out: 1"),
    needless("adaptive_kl_alpha", "read with kd_objective adaptive_kl alone"),
    needless("skew_lambda", "read with skewed objectives alone"),
    only("distill_on_prompt", False, fix="Answers alone are trained on. Set false"),
    needless("logits_transfer_backend", "the teacher's logits stay on their GPUs"),
    # on-policy distillation
    only("pure_opd_pipeline_type", "rlvr", fix="Agents are not supported. Set rlvr"),
    computed("is_pure_opd", "rlhf_type", text="true: gkd, as student_train says"),
    computed("use_opd", "teacher_model", "teacher_kl_coef", text="true: rewards and a teacher"),
)
PRESETS = tuple(
    needless(f"{name}.**", "a preset of DeepSpeed; megatron-core trains, with the same numbers")
    for name in ("deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload")
)
ROWS: tuple[Row, ...] = (
    *RUN, *GENERATIONS, *ALGORITHM, *VALIDATION, *REWARDS, *TASKS, *PRESETS, *AGENTIC, *ROLE_ROWS,
)  # fmt: skip
