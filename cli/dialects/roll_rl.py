"""Algorithm of ROLL's RLVR pipeline: generations, advantages, KL divergence and policy loss."""

import math
from dataclasses import dataclass

from ..flags import Scalar
from .keys import Keys
from .roll_roles import OptimizerStep
from .translation import Translation
from .verl_losses import AGGREGATIONS

KL_PENALTIES = {"kl": "k1", "mse": "k2", "abs": "abs"}  # kl_penalty -> --kl_estimator
# (adv_estimator, norm_mean_type, norm_std_type) -> flags. ROLL's grpo always has the norms of groups.
ADVANTAGES: dict[tuple[str, str | None, str | None], dict[str, str | bool]] = {
    ("grpo", "group", "group"): {},
    ("reinforce", "group", "group"): {},
    ("reinforce", "group", None): {"scale_rewards": "none"},
    ("reinforce", "group", "batch"): {"scale_rewards": "batch"},
    ("reinforce", None, None): {"advantage_estimator": "reinforce"},
    ("reinforce", "running", "running"): {"advantage_estimator": "reinforce", "normalize_rewards": True},
    ("gae", None, None): {},
    ("gae", "running", "running"): {"normalize_rewards": True},
}


KL_KEYS = ("kl_loss_coef", "init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
GROUP: tuple[str | None, ...] = ("group", "group")


@dataclass(frozen=True)
class RolloutSteps:
    """Completions that are drawn at a time, and the steps that train on them."""

    completions: int  # per prompt
    steps: int  # passes over the completions included

    def times(self, translation: Translation, keys: Keys, key: str) -> str:
        """Return the source of a number of generations in steps."""
        return f"{translation.source(keys, key)} generations x {self.steps} {'step' if self.steps == 1 else 'steps'}"


def set_lengths(keys: Keys, translation: Translation) -> tuple[int, int]:
    """Set the longest prompt and completion, and return them."""
    prompt = keys.integer("prompt_length", 1024)
    response, total = keys.integer("response_length"), keys.integer("sequence_length")
    if total is not None:
        completion, source = total - prompt, f"{keys.source('sequence_length')} {total} - prompt_length {prompt}"
        if response is not None and response != completion:
            text = f"is not sequence_length less prompt_length, {completion}, which ROLL takes. Set it to this"
            translation.refuse(keys, "response_length", text)
    elif response is not None:
        completion, source = response, keys.source("response_length")
    else:
        translation.refused.append("response_length: missing. Set it, or sequence_length")
        return prompt, 1
    if completion < 1:
        translation.refuse(keys, "sequence_length", f"not above prompt_length {prompt}. Set more")
    translation.set("max_length", prompt, translation.source(keys, "prompt_length"))
    translation.set("max_completion_length", completion, source)
    for key, value in (("val_prompt_length", prompt), ("val_sequence_length", prompt + completion)):
        if key in keys and keys.integer(key) != value:
            translation.refuse(keys, key, f"evaluations have the lengths of training. Set {value}")
        elif key in keys:
            translation.ignore(keys, key, "as in training")
    return prompt, completion


def set_sampling(keys: Keys, translation: Translation, engine: str, completions: int, length: int) -> None:
    """Set how completions are drawn."""
    view = keys.view(f"{engine}.generating_args")
    for name, default in (("temperature", 0.95), ("top_p", 0.7)):
        translation.set(name, view.number(name, default), translation.source(view, name))
    translation.set("top_k", view.integer("top_k", 50), translation.source(view, "top_k"))
    if view.boolean("do_sample", True) is False:
        translation.refuse(view, "do_sample", "completions must differ. Set true")
    elif "do_sample" in view:
        translation.ignore(view, "do_sample", "completions are sampled")
    for name, value, origin in (
        ("max_new_tokens", length, "sequence_length less prompt_length"),
        ("num_return_sequences", completions, "num_return_sequences_in_group"),
    ):
        if name in view and view.integer(name) != value:
            translation.refuse(view, name, f"ROLL takes {origin}, {value}. Set it to this, or remove it")
        elif name in view:
            translation.ignore(view, name, f"as {origin}")


def set_generation(keys: Keys, translation: Translation, step: OptimizerStep) -> RolloutSteps:
    """Set the steps of a generation and the length of the run."""
    prompts = keys.integer("rollout_batch_size", 128)
    completions = max(keys.integer("num_return_sequences_in_group", 1), 1)
    passes = max(keys.integer("ppo_epochs", 1), 1)
    drawn = prompts * completions
    if drawn % step.batch or not drawn:
        translation.refuse(
            keys, "rollout_batch_size",
            f"{prompts} x num_return_sequences_in_group {completions} = {drawn} completions are not a multiple of the "
            f"{step.batch} of a step ({step.text}). Change either",
        )  # fmt: skip
    steps = max(drawn // step.batch, 1)
    source = f"{translation.source(keys, 'rollout_batch_size')} {prompts} x {completions} / {step.batch}"
    if translation.flags["rlhf_type"] != "gkd":
        origin = translation.source(keys, "num_return_sequences_in_group")
        translation.set("num_generations", completions, origin)
        translation.set("steps_per_generation", steps, source)
        if passes != 1:
            translation.set("num_iterations", passes, keys.source("ppo_epochs"))
    generation = RolloutSteps(completions, steps * passes)
    set_length(keys, translation, generation)
    return generation


def set_length(keys: Keys, translation: Translation, generation: RolloutSteps) -> None:
    """Set the steps of the run and between checkpoints."""
    for key, flag, default in (("max_steps", "train_iters", 500), ("save_steps", "save_steps", 50)):
        count = keys.integer(key, default)
        translation.set(flag, count * generation.steps, generation.times(translation, keys, key))


def set_algorithm(keys: Keys, translation: Translation, generation: RolloutSteps) -> None:
    """Set rewards' way to advantages, and the policy loss."""
    has_critic = translation.flags["rlhf_type"] == "ppo"
    _set_advantages(keys, translation, generation)
    _set_kl(keys, translation)
    _set_critic_terms(keys, translation, generation, has_critic=has_critic)
    _set_masks(keys, translation, generation)
    _set_clipping(keys, translation)
    mode = keys.text("loss_agg_mode", "seq-mean-token-mean")
    if mode not in AGGREGATIONS or mode == "seq-mean-token-sum-norm":
        text = "choose one of token-mean, seq-mean-token-mean, seq-mean-token-sum"
        translation.refuse(keys, "loss_agg_mode", text)
        mode = "seq-mean-token-mean"
    loss_type, aggregation = AGGREGATIONS[mode]
    translation.set("loss_type", loss_type, translation.source(keys, "loss_agg_mode"))
    if aggregation:
        translation.set("loss_agg_mode", aggregation, keys.source("loss_agg_mode"))
    bonus = keys.number("entropy_loss_coef", 0.0)
    if bonus and mode != "token-mean":
        text = "the bonus is of the mean over tokens. Set 0, or loss_agg_mode=token-mean"
        translation.refuse(keys, "entropy_loss_coef", text)
    elif bonus:
        translation.set("entropy_coef", bonus, keys.source("entropy_loss_coef"))
    elif "entropy_loss_coef" in keys:
        translation.ignore(keys, "entropy_loss_coef", "no bonus")
    _set_correction(keys, translation)


def set_estimator(keys: Keys, translation: Translation) -> None:
    """Set the task: with a critic, or without."""
    estimator = keys.text("adv_estimator", "gae")
    source = translation.source(keys, "adv_estimator")
    if estimator not in ("gae", "grpo", "reinforce"):
        translation.refuse(keys, "adv_estimator", "is for agentic pipelines. Choose one of gae, grpo, reinforce")
    translation.set("rlhf_type", "ppo" if estimator == "gae" else "grpo", source)


def _set_advantages(keys: Keys, translation: Translation, generation: RolloutSteps) -> None:
    estimator, names = str(keys.peek("adv_estimator") or "gae"), ("norm_mean_type", "norm_std_type")
    norms = [keys.text(name) for name in names]
    norms = [None if norm in ("null", "None", "none") else norm for norm in norms]
    if estimator == "grpo":
        for name in names:
            if name in keys:
                translation.ignore(keys, name, "group, whatever it is, with adv_estimator grpo")
        norms = [*GROUP]
    source = ", ".join(translation.source(keys, name) for name in names if name in keys)
    flags = ADVANTAGES.get((estimator, norms[0], norms[1]))
    if flags is None and estimator in ("reinforce", "gae"):
        choices = [f"{mean} and {std}" for name, mean, std in ADVANTAGES if name == estimator]
        text = f"with adv_estimator {estimator} both must be one of {', '.join(choices)}".replace("None", "null")
        for name in names:
            if name in keys:
                translation.refuse(keys, name, text)
    for flag, value in (flags or {}).items():
        translation.set(flag, value, source or keys.source("adv_estimator"))
    if estimator == "grpo" and generation.completions == 1:
        text = "grpo compares the completions of a prompt. Set 2 or more, or adv_estimator=reinforce"
        translation.refuse(keys, "num_return_sequences_in_group", text)
    _set_reward_clip(keys, translation, generation, norms)
    is_whitened = keys.boolean("whiten_advantages", False)
    translation.set("whiten_advantages", is_whitened, translation.source(keys, "whiten_advantages"))
    bound = keys.number("advantage_clip")
    if bound is not None:
        translation.set("advantage_clip", bound, keys.source("advantage_clip"))


def _set_reward_clip(keys: Keys, translation: Translation, generation: RolloutSteps, norms: list[str | None]) -> None:
    """Set the bound of rewards, which ROLL applies after they were scaled, and this project before."""
    bound = keys.number("reward_clip")
    if not bound:
        if bound == 0:
            translation.ignore(keys, "reward_clip", "no bound")
        return
    if "group" not in norms:
        translation.set("reward_clip", bound, keys.source("reward_clip"))
        return
    n = generation.completions
    largest = (n - 1) / math.sqrt(n) if tuple(norms) == GROUP else 2.0
    if norms[1] != "batch" and bound >= largest:
        translation.ignore(keys, "reward_clip", f"scaled rewards of a group of {n} are within {largest:.3g}")
    else:
        text = "scaled rewards have no bound. Remove it, or set one on advantages: advantage_clip"
        translation.refuse(keys, "reward_clip", text)


def _set_kl(keys: Keys, translation: Translation) -> None:
    in_loss, in_reward = keys.boolean("use_kl_loss", False), keys.boolean("add_token_level_kl", False)
    has_critic, is_plain = translation.flags["rlhf_type"] == "ppo", "advantage_estimator" in translation.flags
    for key in KL_KEYS:
        is_read, switch = (in_loss, "use_kl_loss") if key == "kl_loss_coef" else (in_reward, "add_token_level_kl")
        if not is_read and key in keys:
            translation.ignore(keys, key, f"read with {switch} alone")
    if in_reward and in_loss:
        text = "cannot be used with use_kl_loss true. Set one of them"
    elif in_reward and not (has_critic or is_plain):
        text = "only with adv_estimator gae or reinforce, without norms of groups. Set false, and use_kl_loss=true"
    else:
        text = ""
    if text:
        translation.refuse(keys, "add_token_level_kl", text)
        for key in KL_KEYS:
            keys.take(key)
        return
    key = "kl_loss_coef" if in_loss else "init_kl_coef"
    beta = keys.number(key, 0.0 if in_loss else 0.2) if in_loss or in_reward else 0.0
    source = translation.source(keys, key if in_loss or in_reward else "use_kl_loss")
    translation.set("beta", beta, source if in_loss or in_reward else f"{source}: no KL divergence")
    if has_critic:
        translation.set("kl_in_reward", in_reward, translation.source(keys, "add_token_level_kl"))
    if not in_reward or not beta:
        for key in ("add_token_level_kl", "kl_penalty", "target_kl", "kl_horizon"):
            if key in keys and not has_critic:
                translation.ignore(keys, key, "there is no KL divergence in rewards")
        return
    translation.set("kl_in_reward", True, keys.source("add_token_level_kl"))
    penalty = keys.text("kl_penalty", "kl")
    if penalty in KL_PENALTIES:
        translation.set("kl_estimator", KL_PENALTIES[penalty], translation.source(keys, "kl_penalty"))
    else:
        translation.refuse(keys, "kl_penalty", f"choose one of {', '.join(KL_PENALTIES)}")
    target, horizon = keys.number("target_kl"), keys.integer("kl_horizon", 10_000)
    if target is not None:
        translation.set("target_kl", target, keys.source("target_kl"))
        translation.set("kl_horizon", horizon, translation.source(keys, "kl_horizon"))


def _set_critic_terms(keys: Keys, translation: Translation, generation: RolloutSteps, *, has_critic: bool) -> None:
    gamma = keys.number("gamma", 1.0)
    if not has_critic:
        if gamma != 1:
            translation.refuse(keys, "gamma", "discounts are for adv_estimator gae alone. Set 1")
        for key in ("gamma", "lambd", "value_clip", "critic_warmup"):
            if key in keys and not (key == "gamma" and gamma != 1):
                translation.ignore(keys, key, "read with adv_estimator gae alone")
        return
    translation.set("gamma", gamma, translation.source(keys, "gamma"))
    translation.set("lam", keys.number("lambd", 0.95), translation.source(keys, "lambd"))
    clip, source = keys.number("value_clip", 1e9), translation.source(keys, "value_clip")
    translation.set("cliprange_value", clip, source if "value_clip" in keys else f"{source}: no clipping")
    warmup = keys.integer("critic_warmup", 0)
    if warmup:
        source = generation.times(translation, keys, "critic_warmup")
        translation.set("critic_warmup", warmup * generation.steps, source)
    translation.notes.append(
        "adv_estimator gae: the critic's loss is a mean over all tokens of a step; ROLL's is one over completions."
    )


def _set_masks(keys: Keys, translation: Translation, generation: RolloutSteps) -> None:
    translation.set("overlong_filter", keys.boolean("max_len_mask", False), translation.source(keys, "max_len_mask"))
    low, high = (f"difficulty_{name}_threshold" for name in ("low", "high"))
    is_masked = keys.boolean("difficulty_mask", False) and generation.completions > 1
    if is_masked:
        bounds: list[Scalar] = [keys.number(low, 0.0), keys.number(high, 1.0)]
        source = ", ".join(translation.source(keys, key) for key in (low, high))
        translation.set("difficulty_range", bounds, source)
        return
    for key in ("difficulty_mask", low, high):
        if key in keys:
            why = "a prompt has one completion" if generation.completions == 1 else "read with difficulty_mask alone"
            translation.ignore(keys, key, "no prompt is left out" if key == "difficulty_mask" else why)


def _set_clipping(keys: Keys, translation: Translation) -> None:
    has_range = keys.boolean("use_pg_clip_range", False)
    both = keys.number("pg_clip", 0.2)
    bounds = {}
    for name, flag in (("pg_clip_low", "epsilon"), ("pg_clip_high", "epsilon_high")):
        key = name if has_range else "pg_clip"
        bounds[flag] = keys.number(key, 0.2)
        translation.set(flag, bounds[flag], translation.source(keys, key))
        if not has_range and name in keys:
            translation.ignore(keys, name, "read with use_pg_clip_range alone")
    is_dual = keys.boolean("dual_clip_loss", False)
    if is_dual:
        bound, source = 1 + 2 * both, f"{keys.source('dual_clip_loss')}: 1 + 2 x pg_clip {both:g}"
        if bound <= 1:
            translation.refuse(keys, "pg_clip", "dual_clip_loss needs it above 0. Set 0.2")
        else:  # the same function where the bound is above the clipping range
            translation.set("delta" if bound > 1 + bounds["epsilon_high"] else "dual_clip", bound, source)
    if has_range and "pg_clip" in keys and not is_dual:
        translation.ignore(keys, "pg_clip", "use_pg_clip_range is set")


def _set_correction(keys: Keys, translation: Translation) -> None:
    """Set weights for the difference between the engine's and the trainer's log-probabilities."""
    view = keys.view("train_infer_correction.is_weight")
    names = ("weight_type", "upper_bound")
    if not view.boolean("enabled", False):
        for name in ("enabled", *names):
            if name in view:
                translation.ignore(view, name, "read with enabled alone" if name in names else "no weights")
        return
    level = view.text("weight_type", "token")
    if level not in ("token", "sequence"):
        translation.refuse(view, "weight_type", "choose one of token, sequence")
        return
    translation.set("rollout_importance_sampling_mode", f"{level}_truncate", view.source("enabled"))
    bound = view.number("upper_bound", 1.2)
    translation.set("rollout_importance_sampling_threshold", bound, translation.source(view, "upper_bound"))
