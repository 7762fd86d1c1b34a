"""Data of Trinity-RFT's configs: tasksets with their workflows and rewards, and data of SFT and DPO."""

from ...templates.formats.dataset_names import EXTENSIONS, expand_user, extension
from ..flags import OptionValue, Scalar
from .keys import Keys
from .table import Row, computed, needless, noted, only, refused, under
from .translation import Translation

INPUT = "buffer.explorer_input"
TASKSET = f"{INPUT}.taskset"
BUFFER = "buffer.trainer_input.experience_buffer"
SCHEDULER = "write the workflow as a scheduler (docs/grpo.md), and set --multi_turn_scheduler"
PLUGIN = "write it as a function in a file of --external_plugins, name it by --reward_funcs, and take this key away"
THINK_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n<answer> answer here </answer>.\n"
)
BOXED_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
DISTILL = ("on_policy_distill_workflow", "async_on_policy_distill_workflow")
# Workflows of one turn -> reward by default.
WORKFLOWS = {
    "simple_workflow": None,
    "async_simple_workflow": None,
    "math_workflow": "math_reward",
    "async_math_workflow": "math_reward",
    "math_boxed_workflow": "math_boxed_reward",
    "async_math_boxed_workflow": "math_boxed_reward",
    **dict.fromkeys(DISTILL),
}
# Rewards of Trinity-RFT -> ours, with weights.
REWARDS: dict[str, dict[str, float]] = {
    "accuracy_reward": {"accuracy": 1.0},
    "countdown_reward": {"countdown": 1.0},
    "format_reward": {"format": 0.2},
    "math_boxed_reward": {"accuracy": 1.0},
    "math_dapo_reward": {"accuracy": 2.0},
    "math_reward": {"accuracy": 1.0, "format": 0.2},
}
REWARD_NOTES = {
    "format_reward": "its 0.1 and -0.1 are 0.2 and 0 here, which is 0.1 more for every completion",
    "math_reward": "its 0.1 and -0.1 for the format are 0.2 and 0 here, which is 0.1 more for every completion, and "
    "answers are compared by math-verify",
    "math_dapo_reward": "its 1 and -1 are 2 and 0 here, which is 1 more for every completion, and answers are compared "
    "by math-verify",
}

FORMAT = (
    computed("prompt_key", "columns", text="to query"),
    computed("response_key", "columns", text="to solution; of sft to response"),
    computed("system_prompt", "system", text="left out: the workflow's"),
    computed("system_prompt_key", "columns", text="to system"),
    computed("tools_key", "columns", text="to tools"),
    computed("enable_thinking", "enable_thinking", text="must be the same for all data"),
    only("reply_prefix", "", fix="A completion begins where the chat template ends. Remove it"),
    only("image_key", "", fix="Rows name their images in a column images. Rename it by --columns"),
    only("video_key", "", fix="Rows name their videos in a column videos. Rename it by --columns"),
    only("workflow_key", "", fix="All rows have one workflow. Remove it"),
    only("reward_fn_key", "", fix="Set --reward_funcs by_source, which chooses by a column data_source"),
    only("enable_concatenated_multi_turn", False, True, fix="Every turn of a conversation is trained on"),
    only("chat_template", "", fix="Write it to the chat_template.jinja of the model's folder"),
)
PAIR_FORMAT = (
    computed("prompt_type", "columns", text="plaintext or messages"),
    computed("messages_key", "columns", text="to messages, with prompt_type messages"),
    computed("chosen_key", "columns", text="to response"),
    computed("rejected_key", "columns", text="to rejected_response"),
)
ROLLOUT = (
    computed("temperature", "temperature", text="in eval_tasksets: eval_temperature; left out model.temperature"),
    computed("top_p", "top_p", text="in eval_tasksets: eval_top_p; left out model.top_p"),
    computed("top_k", "top_k", text="in eval_tasksets: eval_top_k; left out model.top_k"),
    computed("max_tokens", text="model.max_response_tokens; another number is refused"),
    needless("logprobs", "that of the drawn token is always known"),
    needless("n", "algorithm.repeat_times sets it"),
)
SOURCE = (
    needless("name", "a label"),
    computed("path", "dataset", text="file, folder or hub id"),
    computed("subset_name", "dataset", text="NAME:subset"),
    computed("split", "dataset", text="NAME@split"),
    needless("enable_progress_bar", "the log has the progress"),
    needless("max_retry_times", "read with databases alone"),
    needless("max_retry_interval", "read with databases alone"),
    needless("index", "a resumed run goes on in its data"),
    needless("ray_namespace", "there is no Ray"),
    *under("format", FORMAT),
)
SELECTOR = (
    computed("selector_type", "train_dataloader_shuffle", text="shuffle: true; left out false"),
    computed("seed", "data_seed", text="with shuffle"),
    refused("**", "is not supported. Remove it"),
)
TASKSET_ROWS = (
    *SOURCE,
    *under("format", (needless(row.key, "read by sft and dpo alone") for row in PAIR_FORMAT)),
    only("storage_type", "file", fix="Write the tasks to a file"),
    computed("repeat_times", "num_generations_eval", text="in eval_tasksets; training has algorithm.repeat_times"),
    *under("rollout_args", ROLLOUT),
    computed("default_workflow_type", text="workflows of one turn: their prompts and rewards"),
    computed("default_eval_workflow_type", text="that of the training"),
    computed("default_reward_fn_type", "reward_funcs", text="left out: the workflow's"),
    only("workflow_args.use_base", False,
         fix="Prompts have the tokenizer's chat template: write the one you want there, or take this away"),
    only("workflow_args.with_think", False, fix="Set format.system_prompt, and --reward_funcs accuracy format"),
    needless("workflow_args.format_score_coef", "read with with_think alone"),
    only("workflow_args.temperature", 1.0, fix="A teacher's temperature is that of the sampling. Set 1"),
    refused("workflow_args.**", f"is an argument of a Python class: {SCHEDULER}"),
)  # fmt: skip
TRAIN_ROWS = (
    *TASKSET_ROWS,
    *under("data_selector", SELECTOR),
    *under("task_selector", SELECTOR),
    computed("reward_fn_args.enable_overlong_penalty", "reward_funcs", text="true: soft_overlong"),
    computed("reward_fn_args.penalty_factor", "reward_weights", text="weight of soft_overlong"),
    computed("reward_fn_args.max_response_length", "soft_max_length", text="with enable_overlong_penalty"),
    computed("reward_fn_args.cache_length", "soft_cache_length", text="with enable_overlong_penalty"),
    refused("reward_fn_args.**", f"is an argument of a Python class: {PLUGIN}"),
)
EVALUATION_ROWS = (
    *TASKSET_ROWS,
    needless("data_selector.**", "an evaluation takes all rows"),
    needless("task_selector.**", "an evaluation takes all rows"),
    needless("reward_fn_args.**", "rewards have the arguments of the training's"),
)
ROWS: tuple[Row, ...] = (
    *under(TASKSET, TRAIN_ROWS),
    *under(f"{INPUT}.tasksets[]", TRAIN_ROWS),
    *under(f"{INPUT}.eval_tasksets[]", EVALUATION_ROWS),
    computed(f"{INPUT}.default_workflow_type", text="for tasksets without one"),
    computed(f"{INPUT}.default_eval_workflow_type", text="that of the training"),
    computed(f"{INPUT}.default_reward_fn_type", "reward_funcs", text="for tasksets without one"),
    computed(f"{INPUT}.system_prompt", "system", text="for tasksets without one"),
    only(f"{INPUT}.reply_prefix", "", fix="A completion begins where the chat template ends. Remove it"),
    *under(BUFFER, SOURCE),
    *under(f"{BUFFER}.format", PAIR_FORMAT),
    *under(f"{BUFFER}.data_selector", SELECTOR),
    computed(f"{BUFFER}.storage_type", text="file for sft and dpo; a queue is needless"),
    needless(f"{BUFFER}.capacity", "each generation is trained on before the next"),
    needless(f"{BUFFER}.max_read_timeout", "each generation is trained on before the next"),
    only(f"{BUFFER}.use_priority_queue", False, fix="Completions are not used again. Set false"),
    only(f"{BUFFER}.replay_buffer.enable", False, fix="Completions are not used again. Set false"),
    needless(f"{BUFFER}.replay_buffer.**", "read with enable alone"),
    needless(f"{BUFFER}.reuse_cooldown_time", "completions are not used again"),
    needless(f"{BUFFER}.wrap_in_ray", "there is no Ray"),
    noted(f"{BUFFER}.schema_type", "the algorithm says it"),
    refused("buffer.trainer_input.auxiliary_buffers.**", "expert data are not mixed in. Remove it"),
    only("buffer.trainer_input.sft_warmup_steps", 0, fix="Run megatron sft first, for model.model_path"),
    refused("buffer.trainer_input.sft_warmup_dataset.**", "run megatron sft first. Remove it"),
)


def _name(keys: Keys, table: str) -> str:
    """Return the name in --dataset of a table's data."""
    path, subset, split = (keys.text(f"{table}.{name}") for name in ("path", "subset_name", "split"))
    if extension(expand_user(path or "")) in EXTENSIONS:  # a file has neither subsets nor splits
        return f"{path}"
    name = f"{path}:{subset}" if subset else f"{path}"
    return name if split in (None, "train") else f"{name}@{split}"


def set_supervised_data(keys: Keys, translation: Translation, kind: str) -> None:
    """Set the data of sft and dpo, which are those of the trainer's buffer."""
    if keys.text(f"{BUFFER}.storage_type", "file") != "file":
        translation.refuse(keys, f"{BUFFER}.storage_type", "is a store of Trinity-RFT's. Write the rows to a file")
    if f"{BUFFER}.path" in keys:
        translation.set("dataset", [_name(keys, BUFFER)], keys.source(f"{BUFFER}.path"))
    else:
        translation.refused.append(f"{BUFFER}.path: has no value. Set it")
    table = keys.view(f"{BUFFER}.format")
    is_plain = table.text("prompt_type", "messages").lower() == "plaintext"
    columns = {"messages_key": ("message", "messages")}
    if is_plain:
        columns = {"prompt_key": ("prompt", "query"), "response_key": ("response", "response")}
    if kind == "dpo":
        columns = {
            "prompt_key": ("prompt", "query"),
            "chosen_key": ("chosen", "response"),
            "rejected_key": ("rejected", "rejected_response"),
        }
        if not is_plain:
            translation.refuse(table, "prompt_type", "only plaintext is supported for dpo. Set it")
    _set_columns(translation, _columns(table, columns), table.full("prompt_key"))
    for name in ("prompt_key", "response_key", "chosen_key", "rejected_key", "messages_key"):
        if name in table and name not in columns:
            translation.ignore(table, name, "read for rows of another form alone")
    _set_texts(keys, translation, [f"{BUFFER}.format"], None)
    _set_order(keys, translation, BUFFER)
    for key in keys.under(INPUT):
        translation.ignore(keys, key, "nothing is generated")


def _columns(table: Keys, names: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Return the columns to rename. names: key -> its default, our column."""
    columns = {}
    for key, (default, target) in {
        **names,
        "system_prompt_key": ("", "system"),
        "tools_key": ("tools", "tools"),
    }.items():
        column = table.text(key, default)
        if column and column != target:
            columns[column] = target
    return columns


def _set_columns(translation: Translation, columns: dict[str, str], source: str) -> None:
    if columns:
        translation.set("columns", dict(sorted(columns.items())), source)


def _set_texts(keys: Keys, translation: Translation, formats: list[str], default: str | None) -> None:
    """Set the system prompt and whether the model thinks, which are one for all data."""
    general = keys.text(f"{INPUT}.system_prompt") or default
    prompts = {keys.text(f"{table}.system_prompt", general) for table in formats}
    first = f"{formats[0]}.system_prompt"
    if len(prompts) > 1:
        translation.refuse(keys, first, "--system is one for all data. Make those of all tasksets alike")
    elif (prompt := prompts.pop()) is not None:
        source = keys.source(first) if first in keys else "the workflow's own prompt"
        translation.set("system", prompt, source)
    for table in formats:
        if (key := f"{table}.enable_thinking") in keys:
            translation.set("enable_thinking", keys.boolean(key), keys.source(key))


def _set_order(keys: Keys, translation: Translation, table: str) -> None:
    """Set the order of the rows, which Trinity-RFT keeps unless a selector shuffles."""
    name = next((name for name in ("data_selector", "task_selector") if keys.under(f"{table}.{name}")), "data_selector")
    key = f"{table}.{name}.selector_type"
    selector = keys.text(key, "sequential")
    if selector not in ("sequential", "shuffle", "random"):
        translation.refuse(keys, key, "choose one of sequential, shuffle")
        return
    for flag in ("train_dataloader_shuffle", "dataset_shuffle"):
        translation.set(flag, selector != "sequential", translation.source(keys, key))
    seed = keys.integer(f"{table}.{name}.seed")
    if seed is not None and selector != "sequential":
        translation.set("data_seed", seed, keys.source(f"{table}.{name}.seed"))


def set_tasksets(keys: Keys, translation: Translation) -> bool:
    """Set the prompts, rewards and sampling of RL. Return whether there are data for evaluations."""
    training = keys.names(f"{INPUT}.tasksets") or [TASKSET]
    if training != [TASKSET] and keys.under(TASKSET):
        translation.refuse(keys, f"{TASKSET}.path", f"the config has {INPUT}.tasksets, too. Remove one of them")
    evaluations = keys.names(f"{INPUT}.eval_tasksets")
    columns: dict[str, str] = {}
    for flag, tables in (("dataset", training), ("val_dataset", evaluations)):
        names: list[Scalar] = []
        for table in tables:
            if f"{table}.path" not in keys:
                translation.refused.append(f"{table}.path: has no value. Set it")
                continue
            names.append(_name(keys, table))
            keys_of_columns = {"prompt_key": ("prompt", "query"), "response_key": ("response", "solution")}
            columns |= _columns(keys.view(f"{table}.format"), keys_of_columns)
        if names:
            translation.set(flag, names, keys.source(f"{tables[0]}.path"))
    _set_columns(translation, columns, keys.source(f"{training[0]}.format.prompt_key"))
    workflow = _workflow(keys, translation, [*training, *evaluations])
    reward = _reward(keys, translation, [*training, *evaluations], workflow)
    _set_rewards(keys, translation, training, reward)
    prompt = {"math_reward": THINK_PROMPT}.get(reward) if "boxed" not in workflow else BOXED_PROMPT
    _set_texts(keys, translation, [f"{table}.format" for table in (*training, *evaluations)], prompt)
    if "boxed" in workflow:
        translation.set("overlong_filter", True, f"{workflow} leaves truncated completions out")
    for table in training:
        _set_order(keys, translation, table)
        keys.take(f"{table}.repeat_times")
    _set_sampling(keys, translation, training[0], evaluations)
    for name in ("path", "subset_name", "split", "storage_type"):
        if (key := f"{BUFFER}.{name}") in keys:
            translation.ignore(keys, key, "each generation is trained on before the next")
    for key in (*keys.under(f"{BUFFER}.format"), *keys.under(f"{BUFFER}.data_selector")):
        translation.ignore(keys, key, "each generation is trained on before the next")
    return bool(evaluations)


def _workflow(keys: Keys, translation: Translation, tables: list[str]) -> str:
    """Return the workflow that all tasksets have."""
    default = f"{INPUT}.default_workflow_type"
    general = keys.text(default, "simple_workflow")
    names = {}
    for table in tables:
        key = f"{table}.default_workflow_type"
        names[key if key in keys else default] = keys.text(key, general)
    for key in [*(f"{table}.default_eval_workflow_type" for table in tables), f"{INPUT}.default_eval_workflow_type"]:
        if key in keys:
            names[key] = keys.text(key, "")
    first = next(iter(names.values()), "simple_workflow")
    for key, name in names.items():
        if name not in WORKFLOWS:
            translation.refuse(keys, key, f"is a Python class of Trinity-RFT's: {SCHEDULER}")
        elif name != first:
            translation.refuse(keys, key, f"is not {first}, the training's. Make them alike")
    return first if first in WORKFLOWS else "simple_workflow"


def _reward(keys: Keys, translation: Translation, tables: list[str], workflow: str) -> str:
    """Return the reward that all tasksets have; "" for none."""
    default = f"{INPUT}.default_reward_fn_type"
    fallback = keys.text(default) or WORKFLOWS[workflow] or ""
    names = {}
    for table in tables:
        key = f"{table}.default_reward_fn_type"
        names[key if key in keys else default] = keys.text(key, fallback)
    first = next(iter(names.values()), fallback)
    for key, name in names.items():
        if name and name not in REWARDS:
            translation.refuse(keys, key, f"is a Python class of Trinity-RFT's: {PLUGIN}")
        elif name != first:
            translation.refuse(keys, key, f"is not {first}, the training's. Make them alike")
    return first if first in REWARDS else ""


def _set_rewards(keys: Keys, translation: Translation, training: list[str], reward: str) -> None:
    table = keys.view(f"{training[0]}.reward_fn_args")
    for other in training[1:]:
        for key in keys.under(f"{other}.reward_fn_args"):
            translation.ignore(keys, key, "rewards have the arguments of the first taskset")
    weights = dict(REWARDS.get(reward, {}))
    key = next(
        (key for key in (f"{training[0]}.default_reward_fn_type", f"{INPUT}.default_reward_fn_type") if key in keys), ""
    )
    source = keys.source(key) if key else "the workflow's own reward"
    names = ("penalty_factor", "max_response_length", "cache_length")
    if table.boolean("enable_overlong_penalty", False):
        weights["soft_overlong"] = table.number("penalty_factor", 1.0)
        for name, flag in (("max_response_length", "soft_max_length"), ("cache_length", "soft_cache_length")):
            translation.set(flag, table.integer(name), table.source(name))
    else:
        for name in names:
            if name in table:
                translation.ignore(table, name, "read with enable_overlong_penalty alone")
    if not weights:
        return
    functions: list[Scalar] = [*weights]
    translation.set("reward_funcs", functions, source)
    if set(weights.values()) != {1.0}:
        translation.set("reward_weights", [*weights.values()], source)
    if reward == "countdown_reward":
        translation.set("countdown_format_score", 0.1, source)
    if reward in REWARD_NOTES:
        translation.notes.append(f"{key or 'reward of the workflow:'} {reward}: {REWARD_NOTES[reward]}.")


def _set_sampling(keys: Keys, translation: Translation, training: str, evaluations: list[str]) -> None:
    """Set temperature, top_p and top_k of the training and of evaluations."""
    defaults: dict[str, OptionValue] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    sampled: dict[str, OptionValue] = {}
    for name, default in defaults.items():
        key, general = f"{training}.rollout_args.{name}", f"model.{name}"
        source = keys.source(key) if key in keys else translation.source(keys, general)
        fallback = keys.take(general, default)
        sampled[name] = keys.take(key, fallback)
        if name == "temperature" or sampled[name] != default:
            translation.set(name, sampled[name], source)
        values = [keys.take(f"{table}.rollout_args.{name}", fallback) for table in evaluations]
        if any(value != values[0] for value in values):
            translation.refuse(keys, f"{evaluations[0]}.rollout_args.{name}", "is one for all eval_tasksets here")
        elif values and values[0] != sampled[name]:
            translation.set(
                f"eval_{name}", values[0], translation.source(keys, f"{evaluations[0]}.rollout_args.{name}")
            )
    for table in (training, *evaluations):
        key = f"{table}.rollout_args.max_tokens"
        if key in keys and keys.integer(key) != translation.flags.get("max_completion_length"):
            translation.refuse(keys, key, "is not model.max_response_tokens. Make them alike")
    counts = {keys.integer(f"{table}.repeat_times", 1) for table in evaluations}
    if len(counts) > 1:
        translation.refuse(keys, f"{evaluations[0]}.repeat_times", "is one for all eval_tasksets here")
    elif counts:
        source = translation.source(keys, f"{evaluations[0]}.repeat_times")
        translation.set("num_generations_eval", counts.pop(), source)
