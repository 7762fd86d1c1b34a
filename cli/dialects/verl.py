"""verl's and siiRL's configs: `actor_rollout_ref`, `critic`, `data`, `algorithm`, `trainer`.

Both have one tree, and different defaults. Trinity-RFT (`trainer.trainer_config`) and Oumi
(`training.verl_config_overrides`) have the tree under a prefix. Their dialects add `under(PREFIX, ROWS)` to their rows,
and in `compute` call `translate_tree(keys.view(PREFIX), translation, VERL_DEFAULTS)` for a whole tree, or those of its
parts whose keys they have:

- verl_roles.py: `set_policy`, `set_reference`, `set_critic`, `set_engine`, `set_processes`
- verl_batches.py: `set_batches`, `set_micro_batches`, `set_length`, `set_schedule`
- verl_losses.py: `set_algorithm`, `set_kl`, `set_policy_loss`, `set_rewards`
- verl_data.py: `set_lengths`, `set_data`, `set_evaluation`, `set_run`

A part takes its keys and no others. `Keys.view` takes them of the whole config, whose messages have their full names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..flags import UsageError
from .keys import Keys, Tree
from .run_words import PACKAGED
from .translation import Default, Dialect, Translation
from .verl_batches import set_batches, set_length, set_micro_batches, set_schedule
from .verl_data import set_data, set_evaluation, set_lengths, set_run
from .verl_losses import set_algorithm, set_critic_warmup, set_kl, set_policy_loss, set_rewards
from .verl_roles import policy_layout, set_critic, set_engine, set_policy, set_processes, set_reference
from .verl_task_rows import ROWS

DECAY = "actor_rollout_ref.actor.optim.lr_decay_style"
# Keys and tables that only one system has. The last three are in some versions of siiRL, too.
SIIRL_ONLY = (
    "dag", "profiler", "algorithm.workflow_type", "algorithm.algorithm_name", "algorithm.weight_factor_in_cpgd",
    "actor_rollout_ref.actor.policy_drift_coeff", "actor_rollout_ref.actor.use_cpgd_loss",
    "actor_rollout_ref.actor.megatron.param_dtype", "data.num_loader_workers", "data.auto_repeat", "trainer.seed",
)  # fmt: skip
VERL_ONLY = (
    "defaults", "hydra", "ray_init", "ray_kwargs", "global_profiler", "transfer_queue",
    "actor_rollout_ref.actor.megatron.dtype", "actor_rollout_ref.actor.optim.optimizer",
    "algorithm.rollout_correction", "trainer.esi_redundant_time", "data.custom_cls", "data.validation_shuffle",
    "actor_rollout_ref.rollout.mode", "reward_model.reward_kwargs",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
)  # fmt: skip


@dataclass(frozen=True)
class TreeDefaults:
    """Defaults in which systems of this tree differ."""

    lr_decay_style: str
    sequence_parallel: bool
    kl_horizon: int
    first_generation: int  # number from which generations are counted for trainer.critic_warmup


VERL_DEFAULTS = TreeDefaults("constant", sequence_parallel=True, kl_horizon=10_000, first_generation=1)
SIIRL_DEFAULTS = TreeDefaults("linear", sequence_parallel=False, kl_horizon=1_000, first_generation=0)


def translate_tree(keys: Keys, translation: Translation, defaults: TreeDefaults) -> None:
    """Set every flag of a whole tree that is more than one key's value. keys: a view of the tree."""
    processes = set_processes(keys, translation)
    layout = policy_layout(keys)
    has_critic = set_algorithm(keys, translation)
    prompt_length, completion_length = set_lengths(keys, translation)
    generation = set_batches(keys, translation)
    set_micro_batches(keys, translation, layout, processes, prompt_length + completion_length)
    set_length(keys, translation, generation)
    set_schedule(keys, translation, generation)
    has_reference = set_kl(keys, translation, horizon=defaults.kl_horizon)
    set_policy_loss(keys, translation, has_critic=has_critic)
    set_rewards(keys, translation, completion_length=completion_length)
    set_evaluation(keys, translation, generation, has_data=set_data(keys, translation))
    set_policy(keys, translation, sequence_parallel=defaults.sequence_parallel)
    set_reference(keys, translation, is_used=has_reference)
    set_critic(keys, translation, is_used=has_critic)
    if has_critic:
        set_critic_warmup(keys, translation, generation, first=defaults.first_generation)
    set_engine(keys, translation, gpus_of_node=processes // max(translation.nodes, 1))
    set_run(keys, translation)
    for key in keys.untaken():
        if key.endswith("._target_"):
            translation.ignore(keys, key, "names a class of verl")


def _compute(keys: Keys, translation: Translation, defaults: TreeDefaults) -> None:
    translate_tree(keys, translation, defaults)
    packaged = [item.lstrip("/") if isinstance(item, str) else "" for item in keys.items("defaults")]
    if any(name not in (*PACKAGED, "_self_") for name in packaged):
        names = ", ".join(PACKAGED)
        translation.refuse(keys, "defaults", f"only verl's own configs are known: {names}. Write their keys here")


def tree_defaults(defaults: TreeDefaults) -> dict[str, Default]:
    """Return the defaults of the tree that differ from ours, by flag."""
    optim = "actor_rollout_ref.actor.optim"
    return {
        "use_hf": Default(True, "actor_rollout_ref.model.path"),
        "lr": Default(1e-6, f"{optim}.lr"),
        "lr_decay_style": Default(defaults.lr_decay_style, DECAY),
        "weight_decay": Default(0.01, f"{optim}.weight_decay"),
        "adam_beta1": Default(0.9, f"{optim}.betas"),
        "adam_beta2": Default(0.999, f"{optim}.betas"),
        "temperature": Default(1.0, "actor_rollout_ref.rollout.temperature"),
    }


def system_of(tree: Tree, file: str) -> str:
    """Return the dialect of a file of this tree, verl or siirl. Raises UsageError where it makes a difference."""
    for system, names in (("siirl", SIIRL_ONLY), ("verl", VERL_ONLY)):
        if any(_has(tree, name.split(".")) for name in names):
            return system
    if _has(tree, DECAY.split(".")):
        return "verl"  # the other defaults change no number
    raise UsageError(
        f"{file}: {DECAY} is missing, whose default is constant in verl and linear in siiRL. Set it, or name the "
        f"system: megatron run verl.trainer.main_ppo {file}, or siirl.main_dag {file}."
    )


def _has(tree: object, names: Sequence[str]) -> bool:
    if not names:
        return True
    return isinstance(tree, Mapping) and names[0] in tree and _has(tree[names[0]], names[1:])


VERL = Dialect("verl", ROWS, partial(_compute, defaults=VERL_DEFAULTS), tree_defaults(VERL_DEFAULTS))
SIIRL = Dialect("siiRL", ROWS, partial(_compute, defaults=SIIRL_DEFAULTS), tree_defaults(SIIRL_DEFAULTS))
