"""Batches and schedule of verl's tree. verl counts generations where this project counts optimizer steps."""

from dataclasses import dataclass

from .keys import Keys
from .translation import Translation
from .verl_roles import Layout

ACTOR = "actor_rollout_ref.actor"
NEVER = 1_000_000_000  # steps between saves or evaluations that do not happen


@dataclass(frozen=True)
class Generation:
    """A generation: completions that are drawn at a time, and the steps that train on them."""

    prompts: int
    completions: int  # per prompt
    steps: int  # passes over the completions included
    text: str  # arithmetic of `steps`, for sources

    def times(self, keys: Keys, key: str) -> str:
        """Return the source of a number of generations in steps."""
        return f"{keys.source(key)} generations x {self.text}"


def set_batches(keys: Keys, translation: Translation) -> Generation:
    """Set the batch of a step and the steps of a generation."""
    count, mini = f"{ACTOR}.ppo_mini_batch_size", keys.integer(f"{ACTOR}.ppo_mini_batch_size", 256)
    prompts = keys.integer("data.train_batch_size", 1024)
    completions = keys.integer("actor_rollout_ref.rollout.n", 1)
    passes = keys.integer(f"{ACTOR}.ppo_epochs", 1)
    translation.set("num_generations", completions, translation.source(keys, "actor_rollout_ref.rollout.n"))
    source = f"{translation.source(keys, count)} {mini} prompts x rollout.n {completions}"
    translation.set("global_batch_size", mini * completions, source)
    if mini <= 0 or prompts % mini:
        translation.refuse(
            keys, "data.train_batch_size",
            f"{prompts} prompts are not a multiple of {count} {mini}. Set a multiple, or a divisor there",
        )  # fmt: skip
        return Generation(prompts, completions, max(passes, 1), f"{passes} steps")
    source = f"{translation.source(keys, 'data.train_batch_size')} {prompts} / ppo_mini_batch_size {mini}"
    translation.set("steps_per_generation", prompts // mini, source)
    if passes != 1:
        translation.set("num_iterations", passes, keys.source(f"{ACTOR}.ppo_epochs"))
    other = keys.integer("data.gen_batch_size")
    if other is not None and other != prompts:
        translation.note(
            keys, "data.gen_batch_size", f"as many prompts are drawn at a time as are missing of {prompts}"
        )
    elif other is not None:
        translation.ignore(keys, "data.gen_batch_size", "as data.train_batch_size")
    steps = prompts // mini * passes
    return Generation(prompts, completions, steps, f"{steps} steps" if steps != 1 else "1 step")


def set_micro_batches(
    keys: Keys, translation: Translation, layout: Layout, processes: int | None, longest: int
) -> None:
    """Set micro batches by number, or by tokens. longest: tokens of the longest prompt and completion."""
    size, tokens = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"
    whole = f"{ACTOR}.ppo_micro_batch_size"
    if keys.boolean(f"{ACTOR}.use_dynamic_bsz", False):
        for key in (size, whole):
            if key in keys:
                translation.ignore(keys, key, "use_dynamic_bsz counts tokens")
        _set_packs(keys, translation, tokens, layout, longest)
        return
    if tokens in keys:
        translation.ignore(keys, tokens, "read with use_dynamic_bsz alone")
    replicas = layout.replicas(processes) if processes else 0
    if size in keys:
        micro, source = max(keys.integer(size, 1), 1), keys.source(size)
        keys.take(whole)
    elif whole in keys and replicas:
        micro, source = max(keys.integer(whole, 1) // replicas, 1), f"{keys.source(whole)} / {replicas} ranks"
    else:
        return
    batch = translation.flags.get("global_batch_size")
    if replicas and isinstance(batch, int) and batch > 0 and batch % replicas == 0 and (batch // replicas) % micro:
        rank = batch // replicas
        divisors = [number for number in range(1, rank + 1) if rank % number == 0]
        below = max(number for number in divisors if number < micro or number == 1)
        above = min((number for number in divisors if number > micro), default=rank)
        translation.refuse(
            keys, size if size in keys else whole,
            f"does not divide the {rank} completions of a step on each of {replicas} data-parallel ranks. Set "
            f"{below} or {above}",
        )  # fmt: skip
        return
    translation.set("micro_batch_size", micro, source)


def _set_packs(keys: Keys, translation: Translation, key: str, layout: Layout, longest: int) -> None:
    tokens = keys.integer(key, 16384) * layout.context
    source = translation.source(keys, key)
    multiple = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
    length = tokens // multiple * multiple
    if length < longest:
        enough = -(-longest // multiple) * multiple // layout.context
        translation.refuse(
            keys, key, f"is less than the longest prompt and completion together, {longest} tokens. Set {key}={enough}"
        )
        return
    translation.set("packing", True, keys.source(f"{ACTOR}.use_dynamic_bsz"))
    translation.set(
        "packing_length", length, f"{source}{f' x context_parallel_size {layout.context}' * (layout.context > 1)}"
    )
    translation.set("micro_batch_size", 1, f"one pack, by {keys.source(f'{ACTOR}.use_dynamic_bsz')}")


def set_length(keys: Keys, translation: Translation, generation: Generation) -> None:
    """Set the length of the run, and when it saves."""
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    total = keys.integer(steps)
    if total is not None:
        translation.set("train_iters", total * generation.steps, generation.times(keys, steps))
        if epochs in keys:
            translation.ignore(keys, epochs, "total_training_steps is set")
    else:
        translation.set("num_train_epochs", keys.number(epochs, 30), translation.source(keys, epochs))
    every = keys.integer("trainer.save_freq", -1)
    if every > 0:
        translation.set("save_steps", every * generation.steps, generation.times(keys, "trainer.save_freq"))
    else:
        translation.set("save_steps", NEVER, f"{translation.source(keys, 'trainer.save_freq')} -1: the last step alone")
    limit = keys.integer("trainer.max_actor_ckpt_to_keep")
    if limit is not None:
        translation.set("save_total_limit", limit, keys.source("trainer.max_actor_ckpt_to_keep"))
    other = keys.integer("trainer.max_critic_ckpt_to_keep")
    if other is not None and other == limit:
        translation.ignore(keys, "trainer.max_critic_ckpt_to_keep", "the critic is saved with the policy")
    elif other is not None:
        translation.note(keys, "trainer.max_critic_ckpt_to_keep", "the critic is saved and kept with the policy")


def set_schedule(keys: Keys, translation: Translation, generation: Generation) -> None:
    """Set the warmup and decay of the learning rate, which verl changes after each generation, and Adam's betas."""
    optim = keys.view(f"{ACTOR}.optim")
    warmup = optim.integer("lr_warmup_steps", -1)
    share = optim.number("lr_warmup_steps_ratio", 0.0)
    if warmup > 0:
        translation.set("lr_warmup_iters", warmup * generation.steps, generation.times(optim, "lr_warmup_steps"))
        if share:
            translation.ignore(optim, "lr_warmup_steps_ratio", "lr_warmup_steps is set")
    elif share:
        translation.set("lr_warmup_fraction", share, optim.source("lr_warmup_steps_ratio"))
    for key, flag in (("lr_decay_steps", "lr_decay_iters"), ("lr_wsd_decay_steps", "lr_wsd_decay_iters")):
        number = optim.integer(key)
        if number is not None:
            translation.set(flag, number * generation.steps, generation.times(optim, key))
    ratio = optim.number("min_lr_ratio")
    if ratio and "min_lr" in optim:
        translation.ignore(optim, "min_lr_ratio", "min_lr is set")
    elif ratio:
        rate = optim.peek("lr")
        rate = float(rate) if isinstance(rate, int | float) else 1e-6
        translation.set("min_lr", rate * ratio, f"{optim.source('min_lr_ratio')} x lr {rate:g}")
    betas = optim.items("betas")
    if betas and (len(betas) != 2 or not all(isinstance(beta, float) for beta in betas)):
        translation.refuse(optim, "betas", "two numbers are needed")
    for flag, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=False):
        translation.set(flag, beta, optim.source("betas"))
    optimizer_key, actor_key = f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"
    clip = keys.number(optimizer_key)
    if clip is not None:
        translation.set("clip_grad", clip, keys.source(optimizer_key))
        if actor_key in keys and keys.number(actor_key) != clip:
            translation.note(
                keys, actor_key, f"gradients are clipped at optim.clip_grad {clip:g}, as Megatron actors do"
            )
        elif actor_key in keys:
            translation.ignore(keys, actor_key, "as optim.clip_grad")
    elif actor_key in keys:
        value = keys.number(actor_key, 1.0)
        translation.set("clip_grad", value, keys.source(actor_key))
        if value != 1.0:
            system = translation.dialect
            text = f"{system}'s Megatron actor reads optim.clip_grad (1.0) instead; here it clips at {value:g}"
            translation.note(keys, actor_key, text)
