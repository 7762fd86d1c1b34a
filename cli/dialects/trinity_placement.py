"""Placement of Trinity-RFT's configs: training processes, engines and the teacher."""

from ..flags import OptionValue
from .keys import Keys
from .translation import Translation
from .trinity_algorithm import KEY, Algorithm

ENGINE = "explorer.rollout_model"


def set_placement(keys: Keys, translation: Translation, algorithm: Algorithm, *, is_supervised: bool) -> int:
    """Set the training processes and the engines, and return the number of the first."""
    mode = keys.text("mode", "both")
    if (mode not in ("both", "colocate", "train")) or (mode == "train") != is_supervised:
        needed_mode = "train" if is_supervised else "both"
        translation.refuse(
            keys, "mode", f"with algorithm_type {keys.peek(KEY) or 'ppo'} only {needed_mode} is supported. Set it"
        )
        mode = needed_mode
    nodes, per_node = keys.integer("cluster.node_num", 1), keys.integer("cluster.gpu_per_node", 8)
    teacher_gpus = sum(
        keys.integer(f"{table}.engine_num", 1) * keys.integer(f"{table}.tensor_parallel_size", 1)
        for table in keys.names("explorer.auxiliary_models")
    )
    engine = keys.view(ENGINE)
    engines = engine.integer("engine_num", 1)
    size = engine.integer("tensor_parallel_size", 1) * engine.integer("data_parallel_size", 1)
    gpus = engines * size if mode == "both" else 0
    processes = nodes * per_node - gpus - (teacher_gpus if mode == "both" else 0)
    translation.nodes = nodes
    if is_supervised:
        for key in keys.under("explorer"):
            translation.ignore(keys, key, "nothing is generated")
    elif processes <= 0:
        translation.refuse(
            keys, f"{ENGINE}.engine_num", f"leaves none of {nodes * per_node} GPUs for the training. Set fewer engines"
        )
        processes = nodes * per_node
    if nodes > 1 and gpus:
        if per_node <= 0 or (gpus + teacher_gpus) % per_node:
            text = f"{gpus} GPUs of engines are no whole nodes of {per_node}. Set a number that is"
            translation.refuse(keys, f"{ENGINE}.engine_num", text)
        translation.nodes = max(processes // max(per_node, 1), 1)
    translation.processes = processes
    if not is_supervised:
        _set_engine(keys, translation, mode, gpus, nodes)
    if teacher_gpus:
        text = f"the teacher is in the training processes; its {teacher_gpus} GPUs stay free"
        translation.notes.append(f"explorer.auxiliary_models: {text}.")
    if algorithm.advantage != "on_policy_distill" and teacher_gpus:
        translation.refuse(keys, "explorer.auxiliary_models[0].model_path", "other models are not supported. Remove it")
    return processes


def _set_engine(keys: Keys, translation: Translation, mode: str, gpus: int, nodes: int) -> None:
    engine = keys.view(ENGINE)
    flags = {
        "tensor_parallel_size": "vllm_tensor_parallel_size",
        "enforce_eager": "vllm_enforce_eager",
        "enable_prefix_caching": "vllm_enable_prefix_caching",
        "gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "max_model_len": "vllm_max_model_len",
    }
    source = translation.source(engine, "engine_num")
    fields: dict[str, OptionValue] = {name: keys.peek(f"{ENGINE}.{name}") for name in engine.under("extra_engine_args")}
    if mode == "both" and not gpus:
        translation.set("use_vllm", False, f"{source}: no engines, transformers generate")
        for name in (*flags, *fields):
            if name in engine:
                translation.ignore(engine, name, "there is no vLLM engine")
        return
    translation.set("use_vllm", True, translation.source(engine, "engine_type"))
    translation.set("vllm_mode", "colocate" if mode == "colocate" else "server", translation.source(keys, "mode"))
    if mode == "both" and nodes == 1:
        translation.set("rollout_num_gpus", gpus, f"{source} x GPUs of an engine")
    elif mode == "both":
        translation.notes.append(
            f"{ENGINE}.engine_num: start `swift rollout` on the other nodes, with the engine's keys as flags, and name "
            "its addresses by --vllm_server_base_url."
        )
        for name in (*flags, *fields):
            if name in engine:
                translation.ignore(engine, name, "is a flag of `swift rollout`")
        return
    for name, flag in flags.items():
        if name in engine:
            translation.set(flag, engine.take(name), engine.source(name))
    length = keys.peek("model.max_model_len")
    if "max_model_len" not in engine and length is not None:
        translation.set("vllm_max_model_len", length, keys.source("model.max_model_len"))
    if fields:
        values = {name.removeprefix("extra_engine_args."): engine.take(name) for name in fields}
        translation.set("vllm_engine_kwargs", values, engine.source("extra_engine_args"))


def set_teacher(keys: Keys, translation: Translation) -> None:
    """Set the teacher of on-policy distillation."""
    tables = keys.names("explorer.auxiliary_models")
    if len(tables) != 1:
        translation.refused.append("explorer.auxiliary_models: on_policy_distill needs one teacher. Set one")
        return
    key = f"{tables[0]}.model_path"
    translation.set("teacher_model", keys.text(key), keys.source(key))
