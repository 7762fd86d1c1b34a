"""Algorithm of verl's tree: advantages, KL divergence, policy loss and rewards."""

from ..flags import OptionValue, Scalar
from .keys import Keys
from .translation import Translation
from .verl_batches import Generation

ACTOR = "actor_rollout_ref.actor"
# adv_estimator -> flags of GRPO
ESTIMATORS: dict[str, dict[str, OptionValue]] = {
    "grpo": {},
    "grpo_vectorized": {},
    "rloo": {"advantage_estimator": "rloo"},
    "rloo_vectorized": {"advantage_estimator": "rloo"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce", "whiten_advantages": True},
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus",
        "scale_rewards": "none",
        "whiten_advantages": True,
    },
}
# names of verl, ROLL and papers -> --kl_estimator
KL_ESTIMATORS = {
    "low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs",
}  # fmt: skip
AGGREGATIONS = {  # loss_agg_mode -> --loss_type, --loss_agg_mode
    "token-mean": ("dapo", None),
    "seq-mean-token-mean": ("grpo", None),
    "seq-mean-token-sum": ("grpo", "seq-mean-token-sum"),
    "seq-mean-token-sum-norm": ("dr_grpo", None),
}
OVERLONG = ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")  # tables of the penalty of long completions


def set_algorithm(keys: Keys, translation: Translation) -> bool:
    """Set the task and its advantages. Return whether it has a critic."""
    key = "algorithm.adv_estimator"
    estimator, source = keys.text(key, "gae"), translation.source(keys, key)
    has_critic = estimator == "gae"
    translation.set("rlhf_type", "ppo" if has_critic else "grpo", source)
    for name in ("gamma", "lam"):
        key = f"algorithm.{name}"
        if has_critic:
            translation.set(name, keys.number(key, 1.0), translation.source(keys, key))
        elif estimator.startswith("reinforce") and name == "gamma" and keys.number(key, 1.0) != 1:
            translation.refuse(keys, key, "discounts are for adv_estimator gae alone. Set 1")
        elif key in keys:
            translation.ignore(keys, key, "read with adv_estimator gae alone")
    if not has_critic:
        if estimator not in ESTIMATORS:
            names = ", ".join(["gae", *ESTIMATORS])
            translation.refuse(keys, "algorithm.adv_estimator", f"not supported. Choose one of {names}")
        for flag, value in ESTIMATORS.get(estimator, {}).items():
            translation.set(flag, value, source)
    key = "algorithm.norm_adv_by_std_in_grpo"
    if estimator.startswith("grpo"):
        if keys.boolean(key, True) is False:
            translation.set("scale_rewards", "none", keys.source(key))
    elif key in keys:
        translation.ignore(keys, key, "read with adv_estimator grpo alone")
    completions = keys.peek("actor_rollout_ref.rollout.n") or 1
    if completions == 1 and estimator.startswith(("grpo", "rloo")):
        translation.refuse(
            keys, "actor_rollout_ref.rollout.n", f"{estimator} compares the completions of a prompt. Set 2 or more"
        )
    _set_warmup(keys, translation, has_critic=has_critic)
    _set_groups(keys, translation)
    return has_critic


def _set_warmup(keys: Keys, translation: Translation, *, has_critic: bool) -> None:
    if not has_critic and "trainer.critic_warmup" in keys:
        translation.ignore(keys, "trainer.critic_warmup", "there is no critic without algorithm.adv_estimator gae")


def set_critic_warmup(keys: Keys, translation: Translation, generation: Generation, *, first: int) -> None:
    """Set the steps in which the critic alone learns: before generation `critic_warmup`, counted from `first`."""
    key = "trainer.critic_warmup"
    generations = keys.integer(key, 0) - first
    if generations > 0:
        start = f"{keys.source(key)} less {first}" if first else keys.source(key)
        translation.set("critic_warmup", generations * generation.steps, f"{start} generations x {generation.text}")


def _set_groups(keys: Keys, translation: Translation) -> None:
    """Set the filter of prompts whose completions have equal rewards."""
    groups = keys.view("algorithm.filter_groups")
    names = ("metric", "max_num_gen_batches")
    if not groups.boolean("enable", False):
        for name in names:
            if name in groups:
                translation.ignore(groups, name, "read with filter_groups.enable alone")
        return
    translation.set("dynamic_sample", True, groups.source("enable"))
    metric = groups.text("metric", "acc")
    has_penalty = any(keys.peek(f"reward_model.{table}.enable") for table in OVERLONG)
    if metric not in ("acc", "score", "seq_reward", "seq_final_reward") or (metric == "acc" and has_penalty):
        translation.refuse(groups, "metric", "prompts are compared by their rewards. Set seq_final_reward")
    batches = groups.integer("max_num_gen_batches", 10)
    if batches > 1:
        source = f"{translation.source(groups, 'max_num_gen_batches')} {batches} less the first"
        translation.set("max_resample_times", batches - 1, source)
    else:
        translation.set("max_resample_times", 1_000_000, f"{groups.source('max_num_gen_batches')}: no limit")


def set_kl(keys: Keys, translation: Translation, *, horizon: int) -> bool:
    """Set the KL divergence, in the loss or in the reward. Return whether there is a reference.

    horizon: the system's default of kl_ctrl.horizon
    """
    control = keys.view("algorithm.kl_ctrl")
    in_loss = keys.boolean(f"{ACTOR}.use_kl_loss", False)
    in_reward = keys.boolean("algorithm.use_kl_in_reward", False)
    unread = {
        f"{ACTOR}.kl_loss_coef": in_loss, f"{ACTOR}.kl_loss_type": in_loss, "algorithm.kl_penalty": in_reward,
        **{f"algorithm.kl_ctrl.{name}": in_reward for name in ("kl_coef", "type", "target_kl", "horizon")},
    }  # fmt: skip
    for key, is_read in unread.items():
        if not is_read and key in keys:
            switch = "actor.use_kl_loss" if key.startswith(ACTOR) else "use_kl_in_reward"
            translation.ignore(keys, key, f"read with {switch} alone")
    if in_loss and in_reward:
        translation.refuse(
            keys, "algorithm.use_kl_in_reward", "cannot be used with actor.use_kl_loss true. Set one of them"
        )
        return True
    if in_loss:
        key = f"{ACTOR}.kl_loss_coef"
        beta = keys.number(key, 0.001)
        _set_estimator(keys, translation, f"{ACTOR}.kl_loss_type", "low_var_kl", is_used=bool(beta))
        if translation.flags["rlhf_type"] == "ppo" and beta:
            translation.set("kl_in_reward", False, keys.source(f"{ACTOR}.use_kl_loss"))
    elif in_reward:
        key = "algorithm.kl_ctrl.kl_coef"
        beta = keys.number(key, 0.001)
        _set_estimator(keys, translation, "algorithm.kl_penalty", "kl", is_used=bool(beta))
        if beta:
            translation.set("kl_in_reward", True, keys.source("algorithm.use_kl_in_reward"))
        kind = control.text("type", "fixed")
        if kind == "adaptive":
            source = translation.source(control, "target_kl")
            translation.set("target_kl", control.number("target_kl", 0.1), source)
            translation.set("kl_horizon", control.integer("horizon", horizon), translation.source(control, "horizon"))
        elif kind != "fixed":
            translation.refuse(control, "type", "choose one of fixed, adaptive")
        else:
            for name in ("target_kl", "horizon"):
                if name in control:
                    translation.ignore(control, name, "read with type adaptive alone")
    else:
        key, beta = f"{ACTOR}.use_kl_loss", 0.0
    translation.set("beta", beta, f"{translation.source(keys, key)}{'' if in_loss or in_reward else ' false'}")
    return bool(beta)


def _set_estimator(keys: Keys, translation: Translation, key: str, default: str, *, is_used: bool) -> None:
    name = keys.text(key, default)
    if name not in KL_ESTIMATORS:
        translation.refuse(keys, key, f"choose one of {', '.join(KL_ESTIMATORS)}")
    elif is_used:
        translation.set("kl_estimator", KL_ESTIMATORS[name], translation.source(keys, key))


def set_policy_loss(keys: Keys, translation: Translation, *, has_critic: bool) -> None:
    """Set the policy loss: its clipping, its mean, its entropy bonus, and the correction of sampling."""
    actor = keys.view(ACTOR)
    mode = actor.text("policy_loss.loss_mode", "vanilla")
    aggregation = actor.text("loss_agg_mode", "token-mean")
    if aggregation not in AGGREGATIONS:
        translation.refuse(actor, "loss_agg_mode", f"choose one of {', '.join(AGGREGATIONS)}")
    loss_type, loss_agg_mode = AGGREGATIONS.get(aggregation, AGGREGATIONS["token-mean"])
    source = translation.source(actor, "loss_agg_mode")
    if mode == "gspo":
        source = actor.source("policy_loss.loss_mode")
        level = "sequence_token" if has_critic else "sequence"
        translation.set("importance_sampling_level", level, source)
        loss_type, loss_agg_mode = "grpo", None
    elif mode == "cispo":
        source = actor.source("policy_loss.loss_mode")
        loss_agg_mode = None if loss_type == "dapo" else aggregation
        loss_type = "cispo"
    elif mode == "sapo":
        source = actor.source("policy_loss.loss_mode")
        loss_type, loss_agg_mode = "sapo", None
        for name in ("tau_pos", "tau_neg"):
            if name in actor:
                translation.set(name, actor.number(name), actor.source(name))
    elif mode != "vanilla":
        translation.refuse(actor, "policy_loss.loss_mode", "not supported. Choose one of vanilla, gspo, cispo, sapo")
    for name in ("tau_pos", "tau_neg"):
        if name in actor and mode != "sapo":
            translation.ignore(actor, name, "read with policy_loss.loss_mode sapo alone")
    if mode in ("gspo", "sapo") and "loss_agg_mode" in actor and aggregation != "seq-mean-token-mean":
        translation.note(actor, "loss_agg_mode", f"{mode} takes seq-mean-token-mean, here as there")
    translation.set("loss_type", loss_type, source)
    if loss_agg_mode:
        translation.set("loss_agg_mode", loss_agg_mode, translation.source(actor, "loss_agg_mode"))
    _set_clipping(actor, translation, mode)
    if actor.boolean("calculate_entropy", False):
        translation.set("log_entropy", True, actor.source("calculate_entropy"))
    bonus = actor.number("entropy_coeff", 0.0)
    if bonus and aggregation != "token-mean":
        translation.refuse(
            actor, "entropy_coeff", "the bonus is of the mean over tokens. Set 0, or loss_agg_mode=token-mean"
        )
    elif bonus:
        translation.set("entropy_coef", bonus, actor.source("entropy_coeff"))
    _set_correction(keys, translation)


def _set_clipping(actor: Keys, translation: Translation, mode: str) -> None:
    both = actor.number("clip_ratio", 0.2)
    bounds: dict[str, float] = {}
    for name in ("clip_ratio_low", "clip_ratio_high"):
        key = name if name in actor else "clip_ratio"
        bounds[name] = actor.number(key, both)
        if name == "clip_ratio_low" and mode == "cispo":
            if bounds[name] < 1:
                translation.refuse(actor, name, "cispo has no lower bound here. Set clip_ratio_low=1, which is none")
            continue
        flag = "epsilon" if name == "clip_ratio_low" else "epsilon_high"
        value = 1 + bounds[name] if mode == "cispo" else bounds[name]
        source = translation.source(actor, key) + (" + 1" if mode == "cispo" else "")
        translation.set(flag, value, source)
    if "clip_ratio" in actor and "clip_ratio_low" in actor and "clip_ratio_high" in actor:
        translation.ignore(actor, "clip_ratio", "clip_ratio_low and clip_ratio_high are set")
    elif "clip_ratio" in actor and both != 0.2:
        translation.note(
            actor, "clip_ratio",
            f"{translation.dialect} reads clip_ratio_low and clip_ratio_high (0.2) instead; here it clips at {both:g}",
        )  # fmt: skip
    if mode != "vanilla" and "clip_ratio_c" not in actor:
        return
    bound, source = actor.number("clip_ratio_c", 3.0), translation.source(actor, "clip_ratio_c")
    if bound <= 1:
        translation.refuse(actor, "clip_ratio_c", "must be above 1. Set 3")
    elif mode in ("cispo", "sapo"):
        translation.ignore(actor, "clip_ratio_c", f"{mode} does not clip the objective")
    else:
        # The same function where the bound is above the clipping range, and the more widely known flag.
        translation.set("delta" if bound > 1 + bounds["clip_ratio_high"] else "dual_clip", bound, source)
        if mode == "gspo":
            text = f"{translation.dialect}'s gspo does not read it; here a ratio counts as {bound:g} at most"
            translation.note(actor, "clip_ratio_c", text)


def _set_correction(keys: Keys, translation: Translation) -> None:
    """Set weights for the difference between the engine's and the trainer's log-probabilities."""
    cap = f"{ACTOR}.tis_imp_ratio_cap"
    if keys.number(cap, -1.0) > 0:
        translation.set("rollout_importance_sampling_mode", "token_truncate", keys.source(cap))
        translation.set("rollout_importance_sampling_threshold", keys.number(cap), keys.source(cap))
    key, threshold = (f"algorithm.rollout_correction.{name}" for name in ("rollout_is", "rollout_is_threshold"))
    level = keys.text(key)
    if level is None:
        if threshold in keys:
            translation.ignore(keys, threshold, "read with rollout_is alone")
    elif level not in ("token", "sequence"):
        translation.refuse(keys, key, "choose one of token, sequence")
    else:
        translation.set("rollout_importance_sampling_mode", f"{level}_truncate", keys.source(key))
        source = translation.source(keys, threshold)
        translation.set("rollout_importance_sampling_threshold", keys.number(threshold, 2.0), source)


def set_rewards(keys: Keys, translation: Translation, *, completion_length: int) -> None:
    """Set the rewards: rules by the source of a row, and the penalty of long completions."""
    reward = keys.view("reward_model")
    if reward.boolean("enable", False):
        translation.set("reward_model", reward.take("model.path"), translation.source(reward, "model.path"))
        for name in (
            "reward_manager",
            *(f"{table}.{key}" for table in OVERLONG for key in ("enable", "len", "penalty_factor")),
        ):
            if name in reward:
                translation.ignore(reward, name, "the reward is the reward model's score")
        for name in ("path", "name"):
            key = f"custom_reward_function.{name}"
            if key in keys:
                translation.ignore(keys, key, "the reward is the reward model's score")
        return
    if "model.path" in reward:
        translation.ignore(reward, "model.path", "read with reward_model.enable alone")
    manager = reward.text("reward_manager", "naive")
    if keys.text("reward_manager.name", manager) != manager:
        text = f"is not reward_model.reward_manager {manager}. Remove one of them"
        translation.refuse(keys, "reward_manager.name", text)
    if manager not in ("naive", "dapo", "prime"):
        translation.refuse(
            reward, "reward_manager", "not supported. Set naive or dapo, or write a reward (docs/grpo.md)"
        )
    custom = keys.view("custom_reward_function")
    function, path = custom.text("name", "compute_score"), custom.text("path")
    functions: list[Scalar] = [function if path else "by_source"]
    weights: list[Scalar] = [1.0]
    source = translation.source(reward, "reward_manager")
    if path:
        source = translation.source(custom, "name")
        translation.set("external_plugins", [path], custom.source("path"))
    for table in OVERLONG:
        names = [f"{table}.{name}" for name in ("len", "penalty_factor")]
        if not reward.boolean(f"{table}.enable", False):
            for name in names:
                if name in reward:
                    translation.ignore(reward, name, f"read with {table}.enable alone")
            continue
        functions.append("soft_overlong")
        weights.append(reward.number(names[1], 1.0))
        source += f", {reward.source(f'{table}.enable')}"
        translation.set("soft_cache_length", reward.integer(names[0], 512), translation.source(reward, names[0]))
        longest = reward.integer("reward_kwargs.max_resp_len", completion_length)
        longest_source = translation.source(reward, "reward_kwargs.max_resp_len")
        translation.set("soft_max_length", longest, longest_source)
    if "reward_kwargs.max_resp_len" in reward and len(functions) == 1:
        translation.ignore(reward, "reward_kwargs.max_resp_len", "read with overlong_buffer_cfg.enable alone")
    translation.set("reward_funcs", functions, source)
    if weights[1:] and weights[1:] != [1.0]:
        translation.set("reward_weights", weights, source)
