"""Models of verl's tree and where they are: processes, layouts, offload, LoRA, and the engine that generates."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..flags import OptionValue, show
from .keys import Keys
from .translation import Translation
from .verl_rows import SIZES

POLICY = "actor_rollout_ref.actor.megatron"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
# Keys of LoRA in the model's table, and in its newer table `lora`, with their flags.
LORA_KEYS = {
    "lora_rank": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules",
    "lora_adapter_path": "adapters",
}  # fmt: skip
LORA_TABLE = {
    "lora.rank": "lora_rank", "lora.alpha": "lora_alpha", "lora.dropout": "lora_dropout",
    "lora.target_modules": "target_modules", "lora.dtype": "lora_dtype", "lora.adapter_path": "adapters",
}  # fmt: skip
LORA_DEFAULTS: dict[str, OptionValue] = {"lora_alpha": 16, "lora.alpha": 32, "lora.dropout": 0.0}
OTHER_ENGINES = ("sglang", "trtllm")  # in whose place vLLM generates
ENGINE_FLAGS = {
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "enforce_eager": "vllm_enforce_eager",
    "max_model_len": "vllm_max_model_len",
    "max_num_seqs": "vllm_max_num_seqs",
    "enable_prefix_caching": "vllm_enable_prefix_caching",
}
# Defaults of the policy's settings with which the critic's are compared, and such settings without one.
CRITIC_DEFAULTS: dict[str, OptionValue] = {
    "ppo_mini_batch_size": 256, "ppo_epochs": 1, "n": 1, "weight_decay": 0.01, "clip_grad": 1.0, "min_lr": 0.0,
    "lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0, "lr_warmup_init": 0.0, "optimizer": "adam",
    "betas": [0.9, 0.999], "lr_wsd_decay_style": "exponential",
}  # fmt: skip
CRITIC_SETTINGS = (
    "lr_decay_style", "lr_decay_steps", "lr_wsd_decay_steps", "min_lr_ratio",
    "override_optimizer_config.optimizer_cpu_offload", "override_optimizer_config.optimizer_offload_fraction",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Processes over which a copy of the policy is split."""

    tensor: int
    pipeline: int
    context: int

    def replicas(self, processes: int) -> int:
        """Return the number of data-parallel ranks."""
        return max(processes // (self.tensor * self.pipeline * self.context), 1)


def number_at(keys: Keys, key: str, default: int) -> int:
    """Return a whole number without taking it; the default where it is none."""
    value = keys.peek(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def policy_layout(keys: Keys) -> Layout:
    """Return the policy's layout, whose keys have rows of their own."""
    tensor, pipeline, context = (max(number_at(keys, f"{POLICY}.{size}", 1), 1) for size in SIZES[:3])
    return Layout(tensor, pipeline, context)


def set_processes(keys: Keys, translation: Translation) -> int:
    """Set the number of processes and nodes, and return the first."""
    nodes = keys.integer("trainer.nnodes", 1)
    per_node = keys.integer("trainer.n_gpus_per_node", 8)
    translation.nodes, translation.processes = nodes, nodes * per_node
    return nodes * per_node


def set_policy(keys: Keys, translation: Translation, *, sequence_parallel: bool) -> None:
    """Set what the policy's layout and memory need beside rows. sequence_parallel: the system's default."""
    key = f"{POLICY}.sequence_parallel"
    is_split = policy_layout(keys).tensor > 1
    is_sequence_parallel = keys.boolean(key, sequence_parallel)
    if is_split:
        source = translation.source(keys, key)
        translation.set("sequence_parallel", is_sequence_parallel, source)
    elif key in keys and is_sequence_parallel:
        translation.note(keys, key, "needs tensor_model_parallel_size above 1, and changes no number without it")
    key = "actor_rollout_ref.actor.freeze_vision_tower"
    is_frozen = keys.boolean(key, False)
    for flag in ("freeze_vit", "freeze_aligner"):
        translation.set(flag, is_frozen, translation.source(keys, key))
    set_recomputation(keys.view(f"{POLICY}.override_transformer_config"), translation)
    for names, flag in (
        (("param_offload", "grad_offload"), "offload_model"),
        (("optimizer_offload",), "offload_optimizer"),
    ):
        asked = [f"{POLICY}.{name}" for name in names if keys.boolean(f"{POLICY}.{name}", False)]
        stays_on_host = keys.peek("actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload")
        if asked and flag == "offload_optimizer" and stays_on_host:
            translation.ignore(keys, asked[0], "with optimizer_cpu_offload the state is always on the host")
        elif asked:
            translation.set(flag, True, keys.source(asked[0]))
    if keys.boolean(f"{POLICY}.use_dist_checkpointing", False):
        path = keys.text(f"{POLICY}.dist_checkpointing_path")
        translation.set("mcore_model", path, keys.source(f"{POLICY}.dist_checkpointing_path"))
        translation.note(keys, f"{MODEL}.path", "weights, config and tokenizer are those of dist_checkpointing_path")
    elif f"{POLICY}.dist_checkpointing_path" in keys:
        translation.ignore(keys, f"{POLICY}.dist_checkpointing_path", "read with use_dist_checkpointing alone")
    _set_lora(keys.view(MODEL), translation)


def set_recomputation(keys: Keys, translation: Translation) -> None:
    """Set how whole layers, or modules, are recomputed. keys: a view of the table of these."""
    granularity = keys.peek("recompute_granularity")
    for key, default in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
        if granularity != "full":
            if key in keys:
                translation.ignore(keys, key, "read with recompute_granularity full alone")
            continue
        source = keys.source(key) if key in keys else f"beside {keys.source('recompute_granularity')}"
        translation.set(key, keys.take(key, default), source)
    key = "moe_layer_recompute"
    if keys.boolean(key, False):
        if granularity == "full":
            translation.ignore(keys, key, "whole layers are recomputed")
            return
        source = keys.source(key)
        if granularity is None:
            translation.set("recompute_granularity", "selective", source)
        names = [name for item in keys.items("recompute_modules") for name in str(item).split(",")]
        modules = [name for name in names if name != "moe"]
        if modules:
            source += f", {keys.source('recompute_modules')}"
        translation.set("recompute_modules", [*modules, "moe"], source)


def _set_lora(keys: Keys, translation: Translation) -> None:
    tables = {"lora.rank": LORA_TABLE, "lora_rank": LORA_KEYS}
    rank = next((name for name in tables if keys.integer(name, 0) > 0), None)
    if rank:
        translation.set("tuner_type", "lora", keys.source(rank))
    for name, table in tables.items():
        for key, flag in table.items():
            if name != rank:
                if key in keys:
                    why = f"{keys.full(rank)} is set" if rank else "read with a LoRA rank above 0 alone"
                    translation.ignore(keys, key, why)
            elif key in keys or key in LORA_DEFAULTS:
                translation.set(flag, keys.take(key, LORA_DEFAULTS.get(key)), translation.source(keys, key))
    if rank == "lora_rank":
        translation.set("lora_dropout", 0.0, f"{translation.dialect} has no dropout on adapters")


def set_reference(keys: Keys, translation: Translation, *, is_used: bool) -> None:
    """Set the reference's layout where it differs from the policy's."""
    _set_role(keys, translation, "ref", "actor_rollout_ref.ref.megatron", is_used=is_used)


def set_critic(keys: Keys, translation: Translation, *, is_used: bool) -> None:
    """Set the critic's model, learning rate and layout, and refuse settings that differ from the policy's."""
    _set_role(keys, translation, "critic", "critic.megatron", is_used=is_used)
    if not is_used:
        if keys.boolean("critic.enable", False):
            translation.refuse(keys, "critic.enable", "needs algorithm.adv_estimator=gae. Set it, or remove this")
        _ignore_critic(keys, translation)
        return
    if keys.boolean("critic.enable", True) is False:
        translation.refuse(keys, "critic.enable", "algorithm.adv_estimator gae needs a critic. Remove it")
    if "critic.model.path" in keys:
        translation.set("critic_model", keys.take("critic.model.path"), keys.source("critic.model.path"))
    for key, flag, default in (
        ("critic.optim.lr", "critic_lr", 1e-5),
        ("critic.cliprange_value", "cliprange_value", 0.5),
    ):
        source = translation.source(keys, key)
        translation.set(flag, keys.number(key, default), source)
    _compare_critic(keys, translation)


def _compare_critic(keys: Keys, translation: Translation) -> None:
    """Refuse settings of the critic that are not the policy's, by which it is trained."""
    actor = "actor_rollout_ref.actor"
    pairs = [(f"critic.{name}", f"{actor}.{name}") for name in ("ppo_mini_batch_size", "ppo_epochs")]
    pairs.append(("critic.rollout_n", f"{ROLLOUT}.n"))
    pairs += [(key, f"{actor}.{key.removeprefix('critic.')}") for key in keys.under("critic.optim") if _is_setting(key)]
    for key, other in pairs:
        if key not in keys:
            continue
        value, policy = keys.take(key), keys.peek(other)
        if policy is None:
            policy = CRITIC_DEFAULTS.get(other.rpartition(".")[2])
        if policy is None or show(value) == show(policy):
            translation.ignore(keys, key, f"as {other}")
        else:
            translation.refuse(
                keys, key, f"the critic is trained as the policy, with {show(policy)}. Set {other}, or remove this"
            )
    key, micro = "critic.ppo_micro_batch_size_per_gpu", f"{actor}.ppo_micro_batch_size_per_gpu"
    if key in keys:
        if keys.peek(key) == keys.peek(micro):
            translation.ignore(keys, key, "the critic has the policy's micro batches")
        else:
            translation.note(keys, key, "the critic has the policy's micro batches, with the same numbers")
    key = "critic.loss_agg_mode"
    if keys.text(key, keys.peek(f"{actor}.loss_agg_mode") or "token-mean") != "token-mean":
        translation.refuse(keys, key, "the critic's loss is a mean over tokens. Set critic.loss_agg_mode=token-mean")
    elif key in keys:
        translation.ignore(keys, key, "the critic's loss is a mean over tokens")
    clip = "critic.grad_clip"
    if clip in keys:
        policy = keys.number(f"{actor}.optim.clip_grad", keys.number(f"{actor}.grad_clip", 1.0))
        if keys.number(clip) == policy:
            translation.ignore(keys, clip, "as the policy's")
        else:
            text = f"the critic's gradients are clipped as the policy's, at {show(policy)}. Remove it"
            translation.refuse(keys, clip, text)


def _is_setting(key: str) -> bool:
    """Return whether a key of the critic's optimizer is compared with the policy's."""
    return key.removeprefix("critic.optim.") in (*CRITIC_DEFAULTS, *CRITIC_SETTINGS)


def _ignore_critic(keys: Keys, translation: Translation) -> None:
    names = (
        "model.path", "optim.lr", "cliprange_value", "enable", "ppo_mini_batch_size", "ppo_epochs", "rollout_n",
        "loss_agg_mode", "grad_clip", "ppo_micro_batch_size_per_gpu",
    )  # fmt: skip
    optimizer = [key for key in keys.under("critic.optim") if _is_setting(key)]
    for key in [*(f"critic.{name}" for name in names), *optimizer]:
        if key in keys:
            translation.ignore(keys, key, "there is no critic without algorithm.adv_estimator gae")


def _set_role(keys: Keys, translation: Translation, role: str, table: str, *, is_used: bool) -> None:
    """Set the layout, checkpoint and offload of a model beside the policy."""
    parked = {"ref": "offload_ref_model", "critic": "offload_critic"}[role]
    names = (*SIZES, "virtual_pipeline_model_parallel_size", "param_offload", "grad_offload", "optimizer_offload",
             "use_dist_checkpointing", "dist_checkpointing_path")  # fmt: skip
    set_names = [name for name in names if f"{table}.{name}" in keys]
    if not is_used:
        for name in set_names:
            translation.ignore(keys, f"{table}.{name}", f"there is no {'reference' if role == 'ref' else 'critic'}")
        return
    for size in SIZES:
        key = f"{table}.{size}"
        if key not in keys:
            continue
        if keys.integer(key, 1) == number_at(keys, f"{POLICY}.{size}", 1):
            translation.ignore(keys, key, "as the policy's")
        else:
            translation.set(f"{role}_{size}", keys.integer(key, 1), keys.source(key))
    key = f"{table}.virtual_pipeline_model_parallel_size"
    if key in keys:
        if keys.peek(key) == keys.peek(f"{POLICY}.virtual_pipeline_model_parallel_size"):
            translation.ignore(keys, key, "as the policy's")
        else:
            translation.note(keys, key, "its stages are not cut into chunks of their own, with the same numbers")
    offloads = [
        name
        for name in ("param_offload", "grad_offload", "optimizer_offload")
        if keys.boolean(f"{table}.{name}", False)
    ]
    if role == "ref":
        offloads = [name for name in offloads if name == "param_offload"]
    if offloads:
        translation.set(parked, True, keys.source(f"{table}.{offloads[0]}"))
    path = f"{table}.dist_checkpointing_path"
    if keys.boolean(f"{table}.use_dist_checkpointing", False):
        translation.set(f"mcore_{role}_model", keys.text(path), keys.source(path))
    elif path in keys:
        translation.ignore(keys, path, "read with use_dist_checkpointing alone")


def set_engine(keys: Keys, translation: Translation, *, gpus_of_node: int | None = None) -> None:
    """Set the engine that generates, in the training processes."""
    name = keys.text(f"{ROLLOUT}.name", "vllm")
    source = translation.source(keys, f"{ROLLOUT}.name")
    if name not in ("vllm", "hf", *OTHER_ENGINES):
        translation.refuse(keys, f"{ROLLOUT}.name", "no such engine. Set vllm or hf")
    translation.set("use_vllm", name != "hf", source)
    if name in OTHER_ENGINES:
        translation.note(keys, f"{ROLLOUT}.name", "vLLM generates, with the same sampling")
    replay = f"{ROLLOUT}.enable_rollout_routing_replay"
    if keys.boolean(replay, False):
        translation.set("router_replay_mode", "R3", keys.source(replay))
    keys = keys.view(ROLLOUT)
    engine_keys = [*ENGINE_FLAGS, "tensor_model_parallel_size", "free_cache_engine", *keys.under("engine_kwargs.vllm")]
    if name == "hf":
        for key in engine_keys:
            if key in keys:
                translation.ignore(keys, key, "transformers generates")
        return
    translation.set("vllm_mode", "colocate", source)
    for key, flag in ENGINE_FLAGS.items():
        if key in keys:
            translation.set(flag, keys.take(key), keys.source(key))
    tensor = keys.integer("tensor_model_parallel_size")
    if tensor is not None:
        if gpus_of_node and tensor > gpus_of_node:
            translation.refuse(
                keys, "tensor_model_parallel_size",
                f"an engine does not go beyond a node of {gpus_of_node}. Set {gpus_of_node} or less, or start a "
                "`swift rollout` and set --vllm_mode server (docs/grpo.md)",
            )  # fmt: skip
        else:
            translation.set("vllm_tensor_parallel_size", tensor, keys.source("tensor_model_parallel_size"))
    if keys.boolean("free_cache_engine", True) is False:
        translation.set("sleep_level", 0, keys.source("free_cache_engine"))
    _set_engine_fields(keys, translation, keys.under("engine_kwargs.vllm"))


def _set_engine_fields(keys: Keys, translation: Translation, names: Sequence[str]) -> None:
    fields = {key.removeprefix("engine_kwargs.vllm."): keys.take(key) for key in names}
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields:
        translation.set("vllm_engine_kwargs", fields, keys.source("engine_kwargs.vllm"))
