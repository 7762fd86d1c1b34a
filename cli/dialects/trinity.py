"""Trinity-RFT's configs: `algorithm`, `model`, `cluster`, `buffer`, `explorer`, `trainer`, `synchronizer`.

Read at modelscope/Trinity-RFT e3f5924 and 40654867, and at agentscope-ai/Trinity-RFT 1d7fae4. `trainer.trainer_config`
is verl's tree, of which older versions have more keys, and newer ones keys in `algorithm.optimizer` and `trainer`.
"""

import math
import posixpath
from dataclasses import dataclass
from pathlib import Path

from ..flags import UsageError
from .keys import Keys, general, read_tree
from .translation import Dialect, Translation, find_row, take_computed
from .trinity_algorithm import KEY, Algorithm, find_algorithm, set_preference, set_rl
from .trinity_data import set_supervised_data, set_tasksets
from .trinity_placement import ENGINE, set_placement, set_teacher
from .trinity_rows import ROWS
from .verl_batches import NEVER, Generation, set_micro_batches, set_schedule
from .verl_roles import policy_layout, set_critic, set_policy, set_reference
from .verl_rows import SIZES

TREE = "trainer.trainer_config"
ACTOR = "actor_rollout_ref.actor"
# Tables of verl's tree that Trinity-RFT fills from its own keys.
UNREAD = ("data.", "algorithm.", "reward_model.", "custom_reward_function.", "trainer.", "actor_rollout_ref.rollout.")
MONITORS = ("tensorboard", "wandb", "swanlab", "mlflow")
OPERATORS = {"mask_response_truncated": "overlong_filter", "dapo_dynamic_sampling": "dynamic_sample"}


class TrainerStep(Generation):
    """Generation of one step: Trinity-RFT counts steps of the optimizer."""

    def times(self, keys: Keys, key: str) -> str:
        return keys.source(key)


STEP = TrainerStep(1, 1, 1, "")


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt, completion, and both."""

    prompt: int | None
    completion: int | None
    total: int | None


def _compute(keys: Keys, translation: Translation) -> None:
    algorithm = find_algorithm(keys, translation)
    if algorithm is None:
        take_computed(keys, TRINITY.rows)
        return
    _add_trainer_file(keys, translation)
    tree = keys.view(TREE)
    translation.set("use_hf", True, "Trinity-RFT reads Hugging Face's hub")
    is_supervised = algorithm.loss in ("sft", "dpo")
    processes = set_placement(keys, translation, algorithm, is_supervised=is_supervised)
    lengths = _lengths(keys, translation)
    _derive(keys, tree, translation, lengths)
    has_reference = algorithm.kind == "dpo"
    if is_supervised:
        set_supervised_data(keys, translation, algorithm.kind)
        if algorithm.kind == "dpo":
            set_preference(keys, translation)
        else:
            _leave_sft(keys, translation)
        if lengths.total:
            translation.set("max_length", lengths.total, keys.source("model.max_model_len"))
        _set_supervised_batch(keys, translation)
    else:
        _set_lengths(keys, translation, lengths)
        has_data = set_tasksets(keys, translation)
        has_reference = set_rl(keys, translation, algorithm)
        _set_batches(keys, translation, algorithm)
        _set_evaluation(keys, translation, has_data=has_data)
        _set_operators(keys, translation)
        if algorithm.advantage == "on_policy_distill":
            set_teacher(keys, translation)
    set_micro_batches(tree, translation, policy_layout(tree), processes, lengths.total or 0)
    _set_length(keys, translation)
    set_schedule(tree, translation, STEP)
    for key in (f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"):
        tree.take(key)
    set_policy(tree, translation, sequence_parallel=True)
    set_reference(tree, translation, is_used=has_reference)
    _set_critic(keys, tree, translation, is_used=algorithm.kind == "ppo")
    _set_adapter(keys, translation)
    _set_run(keys, tree, translation)
    _leave_unread(tree, translation)
    _set_defaults(tree, translation)


def _add_trainer_file(keys: Keys, translation: Translation) -> None:
    """Read the second file of older versions, whose keys are those of `trainer.trainer_config`."""
    key = "trainer.trainer_config_path"
    name = keys.text(key)
    if not name:
        return
    if any(not keys.is_overridden(other) for other in keys.under(TREE)):
        translation.needless[key] = f"{TREE} goes before"
        return
    paths = [Path(name).expanduser(), Path(keys.file).parent / Path(name).name]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        translation.refuse(keys, key, f"no such file, nor {paths[1]}. Fix it")
        return
    try:
        tree, problems = read_tree(str(path), [])
    except UsageError as error:
        translation.refuse(keys, key, str(error))
        return
    keys.view(TREE).add_file(tree, str(path))
    translation.refused += [f"{path}: {problem}" for problem in problems]


def _length_key(keys: Keys, name: str) -> str:
    """Return the key of a length, which older versions have in the engine's table."""
    return f"{ENGINE}.{name}" if f"{ENGINE}.{name}" in keys else f"model.{name}"


def _lengths(keys: Keys, translation: Translation) -> Lengths:
    """Return the lengths, of which one follows from the two others."""
    total = keys.integer("model.max_model_len")
    prompt, completion = (keys.integer(_length_key(keys, f"max_{name}_tokens")) for name in ("prompt", "response"))
    for name in ("prompt", "response"):
        keys.take(f"model.max_{name}_tokens")
    if total is None:
        total = prompt + completion if prompt and completion else None
    elif prompt is None and completion is None:
        prompt = total // 2
        completion = total - prompt
    elif prompt is None and completion is not None:
        prompt = max(total - min(completion, total - 1), 1)
        completion = total - prompt
    elif completion is None and prompt is not None:
        completion = total - prompt
    elif prompt is not None and completion is not None and prompt + completion > total:
        text = "is less than max_prompt_tokens and max_response_tokens together. Set their sum"
        translation.refuse(keys, "model.max_model_len", text)
    return Lengths(prompt, completion, total)


def _set_lengths(keys: Keys, translation: Translation, lengths: Lengths) -> None:
    for flag, value, name in (
        ("max_length", lengths.prompt, "max_prompt_tokens"),
        ("max_completion_length", lengths.completion, "max_response_tokens"),
    ):
        key = _length_key(keys, name)
        if value is not None:
            source = keys.source(key) if key in keys else f"{keys.source('model.max_model_len')}, less the other"
            translation.set(flag, value, source)
        else:
            translation.refused.append(f"{key}: has no value, and model.max_model_len neither. Set one of them")


def _derive(keys: Keys, tree: Keys, translation: Translation, lengths: Lengths) -> None:
    """Derive keys of verl's tree from those of the newer versions."""
    optim = f"{ACTOR}.optim"
    older = f"{optim}.warmup_style"
    names = {
        "lr": "lr", "lr_scheduler_type": "lr_decay_style", "warmup_style": "lr_decay_style",
        "lr_warmup_steps": "lr_warmup_steps", "lr_warmup_steps_ratio": "lr_warmup_steps_ratio",
        "min_lr_ratio": "min_lr_ratio", "betas": "betas", "weight_decay": "weight_decay",
        "clip_grad": "clip_grad", "optimizer_type": "optimizer",
    }  # fmt: skip
    if tree.peek(older) is not None:
        tree.derive(f"{optim}.lr_decay_style", tree.take(older), tree.full(older))
    pairs = [(f"algorithm.optimizer.{name}", f"{optim}.{other}") for name, other in names.items()]
    pairs += [("trainer.grad_clip", f"{optim}.clip_grad"), ("trainer.actor_grad_clip", f"{optim}.clip_grad")]
    pairs.append(("trainer.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"))
    for name in ("max_token_len_per_gpu", "ppo_max_token_len_per_gpu"):
        pairs.append((f"trainer.{name}", f"{ACTOR}.ppo_max_token_len_per_gpu"))
    layout = (*SIZES, "virtual_pipeline_model_parallel_size", "sequence_parallel")
    pairs += [(f"trainer.megatron.{name}", f"{ACTOR}.megatron.{name}") for name in layout]
    for key, other in pairs:
        if key not in keys:
            continue
        value = keys.take(key)
        if other in tree and tree.peek(other) != value:
            translation.refuse(keys, key, f"{tree.full(other)} is another. Remove one of them")
        tree.derive(other, value, key)
    clip = f"{ACTOR}.grad_clip"
    if clip in tree:  # the clipping of older versions, whatever the strategy
        value = tree.take(clip)
        if f"{optim}.clip_grad" in tree and tree.peek(f"{optim}.clip_grad") != value:
            translation.refuse(tree, clip, f"{tree.full(optim)}.clip_grad is another. Remove one of them")
        tree.derive(f"{optim}.clip_grad", value, tree.full(clip))
    if tree.peek(f"{optim}.lr_decay_style") == "cosine":
        tree.derive(f"{optim}.min_lr_ratio", 0.01, "algorithm.optimizer.min_lr_ratio")
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if tree.peek(f"{ACTOR}.use_dynamic_bsz") and lengths.total:
        tree.derive(tokens, 16384, "trainer.max_token_len_per_gpu")
        size = tree.peek(tokens)
        if isinstance(size, int) and size < lengths.total:
            source = tree.source(tokens).rpartition(": ")[2]
            translation.notes.append(f"{source} {size}: is raised to model.max_model_len {lengths.total}, as there.")
            tree.derive(tokens, lengths.total, "model.max_model_len", replaces=True)


def _set_batches(keys: Keys, translation: Translation, algorithm: Algorithm) -> None:
    key = "algorithm.repeat_times"
    count = keys.integer(key, algorithm.repeat_times)
    translation.set("num_generations", count, translation.source(keys, key))
    prompts, total = keys.integer("buffer.batch_size", 1), keys.integer("buffer.train_batch_size", 0)
    if total:
        translation.set("global_batch_size", total, keys.source("buffer.train_batch_size"))
    else:
        total = prompts * count
        source = f"{translation.source(keys, 'buffer.batch_size')} {prompts} x {key} {count}"
        translation.set("global_batch_size", total, source)
    passes = f"{TREE}.{ACTOR}.ppo_epochs"
    if keys.integer(passes, 1) != 1:
        translation.set("num_iterations", keys.integer(passes, 1), keys.source(passes))
    interval = keys.integer("synchronizer.sync_interval", 1)
    source = translation.source(keys, "synchronizer.sync_interval")
    translation.set("steps_per_generation", interval, source)
    if count > 0 and interval * total % count:
        text = f"{interval} x {total} completions are of no whole number of prompts. Set a multiple of {count}"
        translation.refuse(keys, "buffer.train_batch_size", text)
    offset = keys.integer("synchronizer.sync_offset", 0)
    if offset == interval:
        translation.set("async_generate", True, keys.source("synchronizer.sync_offset"))
    elif offset:
        text = f"choose 0, or sync_interval {interval}: a generation is drawn while the last is trained on"
        translation.refuse(keys, "synchronizer.sync_offset", text)


def _set_supervised_batch(keys: Keys, translation: Translation) -> None:
    newer, older = "buffer.train_batch_size", "buffer.batch_size"
    key = newer if newer in keys else older
    total = keys.integer(key)
    if total is None:
        translation.refused.append(f"{newer}: has no value. Set it")
    else:
        translation.set("global_batch_size", total, keys.source(key))
    for other in (older, "synchronizer.sync_interval", "synchronizer.sync_offset"):
        if other in keys and other != key:
            translation.ignore(keys, other, "nothing is generated")


def _leave_sft(keys: Keys, translation: Translation) -> None:
    for key in keys.under("algorithm"):
        if key != KEY and not key.startswith("algorithm.optimizer"):
            translation.ignore(keys, key, "read by other algorithms alone")


def _set_length(keys: Keys, translation: Translation) -> None:
    """Set the steps or epochs of the run, and the steps between checkpoints."""
    steps, generations = keys.integer("trainer.total_steps"), keys.integer("buffer.total_steps")
    epochs = keys.number("buffer.total_epochs", 1)
    if steps is not None:
        translation.set("train_iters", steps, keys.source("trainer.total_steps"))
    elif generations is not None:
        total = translation.flags.get("global_batch_size")
        prompts = keys.peek("buffer.batch_size")
        ratio = 1.0
        if isinstance(total, int) and isinstance(prompts, int) and "num_generations" in translation.flags:
            ratio = prompts * int(str(translation.flags["num_generations"])) / total
        translation.set("train_iters", math.ceil(generations * ratio), keys.source("buffer.total_steps"))
    else:
        translation.set("num_train_epochs", epochs, translation.source(keys, "buffer.total_epochs"))
    if (steps or generations) and "buffer.total_epochs" in keys:
        translation.needless["buffer.total_epochs"] = "total_steps goes before"
    key = "trainer.save_interval"
    every = keys.integer(key, 0)
    source = translation.source(keys, key)
    translation.set("save_steps", every or NEVER, source if every else f"{source} 0: the last step alone")


def _set_evaluation(keys: Keys, translation: Translation, *, has_data: bool) -> None:
    key, start = "explorer.eval_interval", "explorer.eval_on_startup"
    if has_data or key in keys:
        translation.set("eval_steps", keys.integer(key, 100), translation.source(keys, key))
    starts = keys.boolean(start, True)
    if has_data:
        translation.set("eval_on_start", starts, translation.source(keys, start))


def _set_operators(keys: Keys, translation: Translation) -> None:
    for table in keys.names("data_processor.experience_pipeline.operators"):
        name = keys.text(f"{table}.name", "")
        if name in OPERATORS:
            translation.set(OPERATORS[name], True, keys.source(f"{table}.name"))
        else:
            fix = f"is a Python class of Trinity-RFT's. Only {', '.join(OPERATORS)} are supported"
            translation.refuse(keys, f"{table}.name", fix)


def _set_critic(keys: Keys, tree: Keys, translation: Translation, *, is_used: bool) -> None:
    key, warmup = "model.critic_model_path", "trainer.critic_warmup"
    path, steps = keys.text(key), keys.integer(warmup, 0)
    older = tree.integer("trainer.critic_warmup", 0)
    if is_used:
        tree.derive("critic.optim.lr", 1e-6, f"default of {tree.full('critic.optim.lr')}")
        if path:
            translation.set("critic_model", path, keys.source(key))
        if (steps or older) > 1:
            source = keys.source(warmup) if steps else tree.source("trainer.critic_warmup")
            translation.set("critic_warmup", (steps or older) - 1, f"{source}, less the first step of the policy")
        for name in SIZES:
            tree.derive(f"critic.megatron.{name}", keys.peek(f"trainer.megatron.{name}"), f"trainer.megatron.{name}")
    elif path:
        translation.ignore(keys, key, "there is no critic")
    set_critic(tree, translation, is_used=is_used)


def _set_adapter(keys: Keys, translation: Translation) -> None:
    tables = keys.names("model.lora_configs")
    if not tables:
        return
    table = keys.view(tables[0])
    translation.set("tuner_type", "lora", keys.source(tables[0]))
    for name, flag, default in (
        ("lora_rank", "lora_rank", 32),
        ("lora_alpha", "lora_alpha", 32),
        ("target_modules", "target_modules", "all-linear"),
    ):
        translation.set(flag, table.take(name, default), translation.source(table, name))
    if path := table.text("path"):
        translation.set("adapters", [path], table.source("path"))
    if len(tables) > 1:
        translation.refuse(keys, f"{tables[1]}.lora_rank", "one adapter is trained. Remove the others")


def _set_run(keys: Keys, tree: Keys, translation: Translation) -> None:
    """Set the folder of the run, its reporters, and what becomes of its checkpoints."""
    names = [keys.text("checkpoint_root_dir", ""), keys.text("project", "Trinity-RFT"), keys.text("group", "")]
    names.append(keys.text("name", "rft"))
    folder = posixpath.join(*(name for name in names if name))
    translation.set("output_dir", folder, f"{keys.file}: checkpoint_root_dir/project/group/name")
    key = "monitor.monitor_type"
    monitor = keys.text(key, "tensorboard")
    if monitor not in MONITORS:
        translation.refuse(keys, key, f"choose one of {', '.join(MONITORS)}")
    else:
        translation.set("report_to", [monitor], translation.source(keys, key))
    reporter = "swanlab" if monitor == "swanlab" else "wandb"
    for name, flag in (("project", f"{reporter}_project"), ("name", f"{reporter}_exp_name")):
        if name in keys:
            translation.set(flag, keys.peek(name), keys.source(name))
    if keys.boolean("continue_from_checkpoint", True):
        translation.set("resume_from_checkpoint", "auto", translation.source(keys, "continue_from_checkpoint"))
    limit, older = keys.integer("trainer.max_checkpoints_to_keep", 0), "trainer.max_actor_ckpt_to_keep"
    if limit or tree.peek(older):
        source = keys.source("trainer.max_checkpoints_to_keep") if limit else tree.source(older)
        translation.set("save_total_limit", limit or tree.integer(older), source)
    for name in (older, "trainer.max_critic_ckpt_to_keep"):
        if name in tree:
            translation.ignore(tree, name, "policy and critic are saved together")
    saved = f"{ACTOR}.checkpoint.save_contents"
    if saved in tree and "optimizer" not in tree.items(saved):
        translation.set("no_save_optim", True, tree.source(saved))
    rope = keys.under("model.rope_scaling")
    if rope:
        translation.set("rope_scaling", keys.tree["model"]["rope_scaling"], keys.source("model.rope_scaling"))
        keys.drop("model.rope_scaling")


def _leave_unread(tree: Keys, translation: Translation) -> None:
    """Leave keys of verl's tree aside that Trinity-RFT replaces by its own, or does not read."""
    rows = {row.key: row for row in ROWS}
    for key in tree.untaken():
        row = find_row(general(tree.full(key)), rows)
        if row is not None and row.kind != "needless" and (row.kind == "computed" or key.startswith(UNREAD)):
            translation.ignore(tree, key, "Trinity-RFT does not read it there, but its own keys")


def _set_defaults(tree: Keys, translation: Translation) -> None:
    """Set Trinity-RFT's defaults that differ from ours, where no key sets them."""
    for flag, value, key in (
        ("lr", 1e-6, "lr"),
        ("lr_decay_style", "constant", "lr_decay_style"),
        ("weight_decay", 0.01, "weight_decay"),
        ("adam_beta2", 0.999, "betas"),
    ):
        if f"{ACTOR}.optim.{key}" not in tree:
            translation.set(flag, value, f"{translation.dialect}'s default of algorithm.optimizer.{key}")


TRINITY = Dialect("Trinity-RFT", ROWS, _compute, tree=TREE)
