"""Oumi's VERL_GRPO: a config of verl that Oumi makes from its own keys and `training.verl_config_overrides`."""

from .keys import Keys
from .table import Row, under
from .translation import Translation
from .verl import VERL_DEFAULTS, tree_defaults
from .verl_batches import set_batches, set_length, set_micro_batches, set_schedule
from .verl_data import set_data, set_evaluation, set_lengths, set_run
from .verl_losses import set_algorithm, set_kl, set_policy_loss
from .verl_roles import policy_layout, set_engine, set_policy, set_processes, set_reference
from .verl_task_rows import ROWS as TREE_ROWS

PREFIX = "training.verl_config_overrides"
ROWS: tuple[Row, ...] = tuple(under(PREFIX, TREE_ROWS))
# Keys of Oumi that it does not give to verl.
UNREAD = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "warmup_ratio", "optimizer", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "sgd_momentum", "max_grad_norm", "seed", "data_seed", "logging_steps", "enable_tensorboard", "enable_mlflow",
    "trainer_kwargs",
)  # fmt: skip


def set_verl(keys: Keys, translation: Translation, table: str) -> None:
    """Set the flags of the config that Oumi gives to verl. table: of GRPO's keys."""
    for name in UNREAD:
        for key in keys.under(f"training.{name}"):
            translation.ignore(keys, key, "Oumi does not give it to verl")
    for key in [f"{table}.num_generations", f"{table}.max_prompt_length", f"{table}.vllm_mode", f"{table}.epsilon"]:
        if key in keys:
            translation.ignore(keys, key, f"Oumi does not give it to verl. Set it in {PREFIX}")
    tree = keys.view(PREFIX)
    _derive(keys, tree, translation, table)
    processes = set_processes(tree, translation)
    set_algorithm(tree, translation)
    longest = sum(set_lengths(tree, translation))
    generation = set_batches(tree, translation)
    set_micro_batches(tree, translation, policy_layout(tree), processes, longest)
    set_length(tree, translation, generation)
    set_schedule(tree, translation, generation)
    has_reference = set_kl(tree, translation, horizon=VERL_DEFAULTS.kl_horizon)
    set_policy_loss(tree, translation, has_critic=False)
    set_evaluation(tree, translation, generation, has_data=set_data(tree, translation))
    set_policy(tree, translation, sequence_parallel=VERL_DEFAULTS.sequence_parallel)
    set_reference(tree, translation, is_used=has_reference)
    set_engine(tree, translation, gpus_of_node=processes // max(translation.nodes, 1))
    set_run(tree, translation)
    for flag, default in tree_defaults(VERL_DEFAULTS).items():
        if flag not in translation.flags and default.key not in tree:
            translation.set(flag, default.value, f"verl's default of {default.key}")


def _derive(keys: Keys, tree: Keys, translation: Translation, table: str) -> None:
    """Derive verl's keys from Oumi's, as Oumi's VerlGrpoTrainer does."""
    rollout, trainer = "actor_rollout_ref.rollout", "trainer"
    tree.derive("algorithm.adv_estimator", "grpo", "training.trainer_type")
    tree.derive("data.train_files", translation.flags.get("dataset"), "data.train.datasets")
    tree.derive("data.val_files", translation.flags.get("val_dataset"), "data.validation.datasets")
    lr = "training.learning_rate"
    tree.derive("actor_rollout_ref.actor.optim.lr", keys.number(lr, 5e-5), lr)
    length = f"{table}.max_completion_length"
    tree.derive("data.max_response_length", keys.integer(length), length)
    use_vllm, share = f"{table}.use_vllm", f"{table}.vllm_gpu_memory_utilization"
    uses_vllm = keys.boolean(use_vllm, False)
    tree.derive(f"{rollout}.name", "vllm" if uses_vllm else "hf", use_vllm)
    tree.derive(f"{rollout}.temperature", keys.number(f"{table}.temperature", 0.9), f"{table}.temperature")
    if uses_vllm:
        tree.derive(f"{rollout}.gpu_memory_utilization", keys.number(share, 0.9), share)
    else:
        keys.take(share)
    steps = keys.integer("training.max_steps", -1)
    tree.derive(f"{trainer}.total_epochs", keys.integer("training.num_train_epochs", 3), "training.num_train_epochs")
    tree.derive(f"{trainer}.total_training_steps", steps if steps > 0 else None, "training.max_steps")
    interval = keys.integer("training.eval_steps", 500)
    evaluates = keys.text("training.eval_strategy", "no").lower() == "steps"
    tree.derive(f"{trainer}.test_freq", interval if evaluates else None, "training.eval_steps")
    saved = keys.integer("training.save_steps", 500)
    by_epoch = keys.boolean("training.save_epoch", False)
    tree.derive(f"{trainer}.save_freq", None if by_epoch else saved, "training.save_steps")
    keys.take("training.save_final_model")
    loggers = ["console", *(["wandb"] if keys.boolean("training.enable_wandb", False) else [])]
    tree.derive(f"{trainer}.logger", [*loggers], "training.enable_wandb")
    tree.derive(f"{trainer}.experiment_name", keys.text("training.run_name"), "training.run_name")
