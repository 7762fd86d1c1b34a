"""Algorithms of Trinity-RFT's configs: `algorithm.*` but for its optimizer."""

from dataclasses import dataclass, field

from ..flags import OptionValue
from .keys import Keys
from .table import Row, computed, needless, only, refused
from .translation import Translation
from .verl_losses import AGGREGATIONS, KL_ESTIMATORS

KEY = "algorithm.algorithm_type"


@dataclass(frozen=True)
class Algorithm:
    """Meaning of an `algorithm_type`, which other keys of `algorithm` may change."""

    kind: str  # value of --rlhf_type; "": sft
    repeat_times: int = 2
    advantage: str = "grpo"
    loss: str = "ppo"
    kl: str = "k2"
    flags: dict[str, OptionValue] = field(default_factory=dict)


ALGORITHMS = {
    "sft": Algorithm("", 1, "", "sft", "none"),
    "dpo": Algorithm("dpo", 1, "", "dpo", "k2"),
    "ppo": Algorithm("ppo", 1, "ppo"),
    "grpo": Algorithm("grpo"),
    "gspo": Algorithm("grpo", loss="gspo"),
    "dapo": Algorithm("grpo", 16, kl="none"),
    "sapo": Algorithm("grpo", loss="sapo"),
    "rloo": Algorithm("grpo", advantage="rloo"),
    "reinforceplusplus": Algorithm("grpo", advantage="reinforceplusplus"),
    "on_policy_distill": Algorithm("grpo", 8, "on_policy_distill", kl="none"),
}
# Algorithms that are not supported -> the nearest that is, and the difference.
OTHERS = {
    "cispo": "grpo is the nearest: Trinity-RFT's CISPO drops tokens beyond the range, which --loss_type cispo keeps",
    "remax": "rloo is the nearest",
    "opmd": "rloo is the nearest",
    "asymre": "reinforceplusplus is the nearest",
    "topr": "reinforceplusplus is the nearest",
    "sppo": "grpo is the nearest",
    "rec": "grpo is the nearest",
    "multi_step_grpo": "grpo is the nearest, with a scheduler (docs/grpo.md)",
    "gigpo": "grpo is the nearest, with a scheduler (docs/grpo.md)",
    "jsd": "on_policy_distill is the nearest, or `megatron rlhf --rlhf_type gkd`",
    "mix": "grpo is the nearest; expert data are not mixed in",
    "mix_chord": "grpo is the nearest; expert data are not mixed in",
    "raft": "sft is the nearest, on completions that were selected beforehand",
}
# advantage_fn -> flags of GRPO.
ADVANTAGES: dict[str, dict[str, OptionValue]] = {
    "grpo": {},
    "rloo": {"advantage_estimator": "rloo"},
    "reinforceplusplus": {"advantage_estimator": "reinforce", "whiten_advantages": True},
    "on_policy_distill": {},
}
# policy_loss_fn -> clipping below and above.
LOSSES: dict[str, tuple[float, float] | None] = {"ppo": (0.2, 0.2), "gspo": (0.0003, 0.0004), "sapo": None}

ROWS: tuple[Row, ...] = (
    computed(KEY, "rlhf_type", text="the command, the loss and the advantages, too"),
    computed("algorithm.repeat_times", "num_generations", text="left out: the algorithm's"),
    computed("algorithm.advantage_fn", "advantage_estimator", text="left out: the algorithm's"),
    computed("algorithm.advantage_fn_args.gamma", "gamma", text="with ppo; left out 1"),
    computed("algorithm.advantage_fn_args.lam", "lam", text="with ppo; left out 1"),
    computed("algorithm.advantage_fn_args.kl_coef", "teacher_kl_coef", text="with on_policy_distill; left out 1"),
    computed("algorithm.advantage_fn_args.std_cal_level", "scale_rewards", text="group or batch"),
    needless("algorithm.advantage_fn_args.epsilon", "a summand of the standard deviation below 1e-4"),
    refused("algorithm.advantage_fn_args.**", "is not supported. Remove it"),
    computed("algorithm.policy_loss_fn", "loss_type", text="left out: the algorithm's"),
    computed("algorithm.policy_loss_fn_args.clip_range", "epsilon", "epsilon_high", text="left out: the loss's"),
    computed("algorithm.policy_loss_fn_args.clip_range_low", "epsilon", text="left out: clip_range"),
    computed("algorithm.policy_loss_fn_args.clip_range_high", "epsilon_high", text="left out: clip_range"),
    computed("algorithm.policy_loss_fn_args.clip_ratio_c", "delta", "dual_clip", text="with ppo; left out 3"),
    computed("algorithm.policy_loss_fn_args.loss_agg_mode", "loss_type", text="where algorithm.loss_agg_mode is not"),
    computed("algorithm.policy_loss_fn_args.tau_pos", "tau_pos", text="with sapo; left out 1"),
    computed("algorithm.policy_loss_fn_args.tau_neg", "tau_neg", text="with sapo; left out 1.05"),
    computed("algorithm.policy_loss_fn_args.beta", "beta", text="with dpo; left out 0.1"),
    computed("algorithm.policy_loss_fn_args.label_smoothing", "label_smoothing", text="with dpo; left out 0"),
    only("algorithm.policy_loss_fn_args.enable_sequence_masking", False,
         fix="Set --off_policy_sequence_mask_delta, which compares the engine's log-probabilities"),
    needless("algorithm.policy_loss_fn_args.delta", "read with enable_sequence_masking alone"),
    refused("algorithm.policy_loss_fn_args.**", "is not supported. Remove it"),
    computed("algorithm.loss_agg_mode", "loss_type", "loss_agg_mode", text="left out: token-mean"),
    computed("algorithm.kl_loss_fn", "kl_estimator", text="left out: the algorithm's, mostly k2"),
    computed("algorithm.kl_loss_fn_args.kl_coef", "beta", text="left out 0.001; of dpo its beta"),
    only("algorithm.kl_loss_fn_args.adaptive", False, fix="Set it in kl_penalty_fn_args"),
    refused("algorithm.kl_loss_fn_args.**", "is read with adaptive alone. Remove it"),
    computed("algorithm.kl_penalty_fn", "kl_in_reward", "kl_estimator", text="none by default"),
    computed("algorithm.kl_penalty_fn_args.kl_coef", "beta", text="left out 0.001"),
    computed("algorithm.kl_penalty_fn_args.adaptive", "target_kl", text="true: target_kl and horizon"),
    computed("algorithm.kl_penalty_fn_args.target_kl", "target_kl", text="with adaptive"),
    computed("algorithm.kl_penalty_fn_args.horizon", "kl_horizon", text="with adaptive"),
    computed("algorithm.entropy_loss_fn", "entropy_coef", text="none: 0"),
    computed("algorithm.entropy_loss_fn_args.entropy_coef", "entropy_coef", text="left out 0"),
    only("algorithm.sample_strategy", "default", "warmup", fix="Batches are those of the generation. Set default"),
    refused("algorithm.sample_strategy_args.**", "is not supported. Remove it"),
    only("algorithm.add_strategy", "grpo", fix="Set algorithm.advantage_fn"),
    refused("algorithm.add_strategy_args.**", "is not supported. Remove it"),
    only("algorithm.use_token_level_loss", True, fix="The loss of sft is a mean over tokens. Set true"),
    computed("algorithm.enable_router_replay", "router_replay_mode", text="true: R3"),
    computed("algorithm.bypass_old_logprobs", text="the trainer's own; true is noted"),
    refused("algorithm.rollout_correction.**", "set --rollout_importance_sampling_mode, and take it away"),
)  # fmt: skip


def find_algorithm(keys: Keys, translation: Translation) -> Algorithm | None:
    """Set the command, and return the algorithm; None if it is not supported."""
    name = keys.text(KEY, "ppo").lower()
    if name not in ALGORITHMS:
        nearest = OTHERS.get(name, f"choose one of {', '.join(ALGORITHMS)}")
        translation.refuse(keys, KEY, f"no such algorithm here. Fix: {nearest}")
        return None
    algorithm = ALGORITHMS[name]
    translation.command = "rlhf" if algorithm.kind else "sft"
    if algorithm.kind:
        translation.set("rlhf_type", algorithm.kind, translation.source(keys, KEY))
    return algorithm


def set_preference(keys: Keys, translation: Translation) -> None:
    """Set DPO's loss, whose beta Trinity-RFT's documentation has in kl_loss_fn_args."""
    beta_key, coefficient_key = "algorithm.policy_loss_fn_args.beta", "algorithm.kl_loss_fn_args.kl_coef"
    key = beta_key if beta_key in keys else coefficient_key
    translation.set("beta", keys.number(key, 0.1), translation.source(keys, key))
    if beta_key in keys and keys.number(coefficient_key, keys.number(beta_key)) != keys.number(beta_key):
        translation.refuse(keys, coefficient_key, f"is not {beta_key}. Remove one of them")
    key = "algorithm.policy_loss_fn_args.label_smoothing"
    translation.set("label_smoothing", keys.number(key, 0.0), translation.source(keys, key))
    keys.text("algorithm.kl_loss_fn")
    for key in ("algorithm.repeat_times", "algorithm.entropy_loss_fn", "algorithm.entropy_loss_fn_args.entropy_coef"):
        keys.take(key)


def set_rl(keys: Keys, translation: Translation, algorithm: Algorithm) -> bool:
    """Set advantages, loss and KL divergence of RL. Return whether there is a reference."""
    _set_advantages(keys, translation, algorithm)
    _set_loss(keys, translation, algorithm)
    has_reference = _set_kl(keys, translation, algorithm)
    key = "algorithm.entropy_loss_fn"
    name = keys.text(key, "default")
    coefficient = keys.number("algorithm.entropy_loss_fn_args.entropy_coef", 0.0)
    if name not in ("default", "basic", "none"):
        translation.refuse(keys, key, "choose one of default, none")
    elif name != "none" and coefficient:
        translation.set("entropy_coef", coefficient, keys.source("algorithm.entropy_loss_fn_args.entropy_coef"))
    if keys.boolean("algorithm.enable_router_replay", False):
        translation.set("router_replay_mode", "R3", keys.source("algorithm.enable_router_replay"))
    if keys.boolean("algorithm.bypass_old_logprobs", False):
        text = "the trainer's log-probabilities are the old ones; the engine's differ by rounding"
        translation.note(keys, "algorithm.bypass_old_logprobs", text)
    return has_reference


def _set_advantages(keys: Keys, translation: Translation, algorithm: Algorithm) -> None:
    key, arguments = "algorithm.advantage_fn", keys.view("algorithm.advantage_fn_args")
    name = keys.text(key, algorithm.advantage)
    source = translation.source(keys, key if key in keys else KEY)
    is_ppo = algorithm.kind == "ppo"
    if (name == "ppo") != is_ppo or (name not in ADVANTAGES and not is_ppo):
        translation.refuse(keys, key, f"choose {'ppo' if is_ppo else f'one of {", ".join(ADVANTAGES)}'}")
        return
    for flag, value in ADVANTAGES.get(name, {}).items():
        translation.set(flag, value, source)
    if is_ppo:
        for flag in ("gamma", "lam"):
            translation.set(flag, arguments.number(flag, 1.0), translation.source(arguments, flag))
    elif name == "reinforceplusplus" and arguments.number("gamma", 1.0) != 1:
        translation.refuse(arguments, "gamma", "discounts are for algorithm_type ppo alone. Set 1")
    elif name == "on_policy_distill":
        source = translation.source(arguments, "kl_coef")
        translation.set("teacher_kl_coef", arguments.number("kl_coef", 1.0), source)
    elif name == "grpo" and (level := arguments.text("std_cal_level")):
        translation.set("scale_rewards", level, arguments.source("std_cal_level"))


def _set_loss(keys: Keys, translation: Translation, algorithm: Algorithm) -> None:
    key, arguments = "algorithm.policy_loss_fn", keys.view("algorithm.policy_loss_fn_args")
    name = keys.text(key, algorithm.loss)
    source = translation.source(keys, key if key in keys else KEY)
    if name not in LOSSES:
        translation.refuse(keys, key, f"choose one of {', '.join(LOSSES)}")
        return
    mode_key = "algorithm.loss_agg_mode"
    mode, other = keys.text(mode_key), arguments.text("loss_agg_mode")
    if mode and other and mode != other:
        translation.refuse(arguments, "loss_agg_mode", f"is not {mode_key} {mode}. Remove one of them")
    mode_source = arguments.source("loss_agg_mode") if other and not mode else translation.source(keys, mode_key)
    mode = mode or other or "token-mean"
    if mode not in AGGREGATIONS:
        translation.refuse(keys, mode_key, f"choose one of {', '.join(AGGREGATIONS)}")
        return
    loss_type, loss_agg_mode = AGGREGATIONS[mode]
    if name == "sapo":
        loss_type, loss_agg_mode = "sapo", mode
        for flag, default in (("tau_pos", 1.0), ("tau_neg", 1.05)):
            translation.set(flag, arguments.number(flag, default), translation.source(arguments, flag))
    translation.set("loss_type", loss_type, source if name == "sapo" else mode_source)
    if loss_agg_mode:
        translation.set("loss_agg_mode", loss_agg_mode, mode_source)
    if name == "gspo":
        # The gradient of GSPO-token, where all tokens of a completion have one advantage.
        translation.set(
            "importance_sampling_level", "sequence_token" if algorithm.kind == "ppo" else "sequence", source
        )
    if LOSSES[name]:
        _set_clipping(arguments, translation, name)


def _set_clipping(arguments: Keys, translation: Translation, name: str) -> None:
    bounds: dict[str, float] = dict(zip(("clip_range_low", "clip_range_high"), LOSSES[name] or (), strict=True))
    for key, flag in (("clip_range_low", "epsilon"), ("clip_range_high", "epsilon_high")):
        chosen = key if key in arguments else "clip_range"
        bounds[key] = arguments.number(chosen, bounds[key])
        translation.set(flag, bounds[key], translation.source(arguments, chosen))
    arguments.take("clip_range")
    if name != "ppo":
        return
    bound = arguments.number("clip_ratio_c", 3.0)
    flag = "delta" if bound > 1 + bounds["clip_range_high"] else "dual_clip"  # equal up to that bound
    translation.set(flag, bound, translation.source(arguments, "clip_ratio_c"))


def _set_kl(keys: Keys, translation: Translation, algorithm: Algorithm) -> bool:
    """Set the KL divergence in the loss, or in the reward. Return whether there is a reference."""
    loss_key, reward_key = "algorithm.kl_loss_fn", "algorithm.kl_penalty_fn"
    in_loss, in_reward = keys.text(loss_key, algorithm.kl), keys.text(reward_key, "none")
    tables = {loss_key: in_loss, reward_key: in_reward}
    for key, name in tables.items():
        if name != "none" and name not in KL_ESTIMATORS:
            translation.refuse(keys, key, f"choose one of none, {', '.join(KL_ESTIMATORS)}")
            return True
    if "none" not in (in_loss, in_reward):
        translation.refuse(keys, reward_key, f"cannot be used with {loss_key} {in_loss}. Set one of them to none")
        return True
    key = reward_key if in_reward != "none" else loss_key
    name, arguments = tables[key], keys.view(f"{key}_args")
    for other in tables:
        for argument in keys.under(f"{other}_args") if tables[other] == "none" else ():
            translation.ignore(keys, argument, f"{other} is none")
    if name == "none":
        translation.set("beta", 0.0, translation.source(keys, key if key in keys else KEY))
        return False
    beta = arguments.number("kl_coef", 0.001)
    translation.set("beta", beta, translation.source(arguments, "kl_coef"))
    if not beta:
        return False
    translation.set("kl_estimator", KL_ESTIMATORS[name], translation.source(keys, key if key in keys else KEY))
    if key == reward_key:
        translation.set("kl_in_reward", True, keys.source(key))
        if arguments.boolean("adaptive", False):
            translation.set("target_kl", arguments.number("target_kl"), arguments.source("target_kl"))
            translation.set("kl_horizon", arguments.integer("horizon"), arguments.source("horizon"))
    elif algorithm.kind == "ppo":
        translation.set("kl_in_reward", False, translation.source(keys, key if key in keys else KEY))
    return True
