"""Checks of the way from rewards to advantages, and of the sampling of evaluations."""

from collections.abc import Mapping

from ...bridge.option_groups import flag_value
from ...tasks.options import GrpoOptions
from ...tasks.options.groups import TEMPERATURES
from ..flags import UsageError, show
from .generation import as_flag, is_set_by_user
from .resume import evaluates
from .teacher import check_token_advantages

# flags that read rewards
OF_REWARDS = ("whiten_advantages", "advantage_clip", "normalize_rewards", "reward_clip", "difficulty_range")
OF_RULES = ("source_rules", "judge_server", "judge_model", "judge_prompt")
OF_EVALUATION = ("eval_temperature", "eval_top_p", "eval_top_k")


def check_advantages(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for options of advantages that cannot be used together."""
    from ...tasks.rewards.load import reward_names

    if not reward_names(options.rewards):
        for name in OF_REWARDS:
            if is_set_by_user(name, sources) and flag_value(options, name):
                raise UsageError(f"{as_flag(name, options)}: there are no rewards. Set --reward_funcs, or remove it.")
    for name in OF_RULES:
        if flag_value(options, name) and "by_source" not in options.rewards.reward_funcs:
            raise UsageError(f"{as_flag(name, options)}: only for --reward_funcs by_source. Add it, or remove this.")
    for name in ("judge_model", "judge_prompt"):
        if flag_value(options, name) and not options.rewards.judge_server:
            raise UsageError(f"{as_flag(name, options)}: only for --judge_server. Set it, or remove this.")
    _check_difficulty(options)
    _check_reinforce(options, sources)
    _check_penalty(options, sources)
    for name in OF_EVALUATION:
        if flag_value(options, name) is not None and not evaluates(options):
            raise UsageError(
                f"{as_flag(name, options)}: nothing is evaluated. Set --val_dataset or --split_dataset_ratio, or "
                "remove it."
            )
    temperature = options.sampling.eval_temperature
    if temperature and temperature < TEMPERATURES[0]:
        raise UsageError(f"--eval_temperature {temperature}: must be 0, or at least {TEMPERATURES[0]}.")


def _check_difficulty(options: GrpoOptions) -> None:
    bounds = options.advantages.difficulty_range
    if not bounds:
        return
    flag = f"--difficulty_range {show(bounds)}"
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise UsageError(f"{flag}: not a lower and an upper bound. Set two, as in --difficulty_range 0.1 0.95.")
    if options.sampling.num_generations == 1:
        raise UsageError(
            f"{flag} cannot be used with --num_generations 1: the mean reward of a prompt is of several completions. "
            "Remove one of them."
        )


def _check_reinforce(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for options that need a baseline, or one advantage for all tokens of a completion."""
    if options.advantage_estimator != "reinforce":
        return
    flag = "--advantage_estimator reinforce"
    if is_set_by_user("scale_rewards", sources) and options.scale_rewards != "none":
        raise UsageError(
            f"{as_flag('scale_rewards', options)} cannot be used with {flag}, whose rewards have no baseline. Set "
            "--whiten_advantages true or --normalize_rewards true in its place."
        )
    if options.policy.loss_type == "real":
        raise UsageError(f"--loss_type real cannot be used with {flag}: it compares completions. Remove one of them.")
    if options.kl_in_reward:
        check_token_advantages(options, f"{flag} and --kl_in_reward true")


def _check_penalty(options: GrpoOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for options of a KL penalty or a clipping that does not take place."""
    advantages, policy = options.advantages, options.policy
    if advantages.target_kl is not None and not (options.kl_in_reward and options.beta):
        raise UsageError(
            f"--target_kl {advantages.target_kl}: only for --kl_in_reward true with --beta above 0, whose coefficient "
            "it adapts. Set both, or remove this."
        )
    if is_set_by_user("kl_horizon", sources) and advantages.target_kl is None:
        raise UsageError(f"--kl_horizon {advantages.kl_horizon}: only for --target_kl. Set it, or remove this.")
    if policy.dual_clip is not None and policy.delta is not None:
        raise UsageError(
            f"--dual_clip {policy.dual_clip} cannot be used with --delta {policy.delta}: both bound the loss of a "
            "token with a negative advantage. Remove one of them."
        )
    if policy.entropy_coef and policy.top_entropy_quantile < 1:
        raise UsageError(
            f"--entropy_coef {policy.entropy_coef} cannot be used with --top_entropy_quantile "
            f"{policy.top_entropy_quantile}: its bonus is of all tokens. Remove one of them."
        )
