"""Names that plugins written for ms-swift import, and what each is here.

Keys are ms-swift's modules (those of 4.x, and `swift.plugin` and `swift.llm` of 3.x). Values name an object of this
project, as `module:object` below `megaswift.tasks`. ABSENT: a class that can be imported, as in type hints or as a
base class, and not instantiated.
"""

ABSENT = ""

REQUESTS = "multi_turn.ms_swift_requests:"
SCHEDULERS = "multi_turn.ms_swift_compat:"
UTILITIES = "system.plugin_utilities:"


def _of(prefix: str, names: str) -> dict[str, str]:
    return {name: f"{prefix}{name}" for name in names.split()}


def _absent(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), ABSENT)


_ORM = _of("rewards.registry:", "ORM AsyncORM orms")
_BUILT_IN_ORM = {
    **_of("rewards.ms_swift_rewards:", "Format MathAccuracy"),
    "CosineReward": "rewards.functions:Cosine",
    "RepetitionPenalty": "rewards.functions:Repetition",
    "SoftOverlong": "rewards.functions:SoftOverlong",
}
_PRM = _of("rewards.registry:", "PRM prms")
_RM_PLUGIN = _of("rewards.registry:", "rm_plugins") | _absent("DefaultRMPlugin GenRMPlugin")
_SCHEDULERS = _of(SCHEDULERS, "MultiTurnScheduler RolloutScheduler") | {
    "multi_turns": "multi_turn.registry:multi_turns"
}
_ENVS = _of("multi_turn.gym_env:", "Env envs")
_CONTEXTS = _of("multi_turn.gym_env:", "ContextManager context_managers")
_REQUESTS = _of(
    REQUESTS,
    "ChatCompletionResponse ChatCompletionResponseChoice ChatMessage InferRequest RequestConfig RolloutInferRequest "
    "RolloutOutput",
)
_ENGINES = _absent("InferClient InferEngine GRPOVllmEngine TransformersEngine PtEngine VllmEngine SglangEngine")
_MESSAGES = _of(REQUESTS, "Message Messages Tool")
_TEMPLATE = _MESSAGES | _absent("Template StdTemplateInputs TemplateInputs")
_UTILITIES = _of(UTILITIES, "get_dist_setting get_env_args get_logger is_master read_from_jsonl to_device")
_SAMPLES = _absent("GRPOBatch GRPOSample OnPolicySample")
_CALLBACKS = "train.callback_registry:"
_MODULES_OF_4 = {
    "swift.callbacks": _of(_CALLBACKS, "callbacks_map TrainerCallback"),
    "swift.callbacks.base": _of(_CALLBACKS, "TrainerCallback"),
    "swift.callbacks.mapping": _of(_CALLBACKS, "callbacks_map"),
    "swift.megatron": {},
    "swift.megatron.callbacks": _of(_CALLBACKS, "MegatronCallback megatron_callbacks_map"),
    "swift.megatron.callbacks.base": _of(_CALLBACKS, "MegatronCallback"),
    "swift.megatron.callbacks.mapping": _of(_CALLBACKS, "megatron_callbacks_map"),
    "swift.infer_engine": _REQUESTS | _ENGINES,
    "swift.infer_engine.protocol": _REQUESTS,
    "swift.rewards": _ORM | _PRM | _of("rewards.registry:", "rm_plugins"),
    "swift.rewards.orm": _ORM | _BUILT_IN_ORM,
    "swift.rewards.prm": _PRM,
    "swift.rewards.rm_plugin": _RM_PLUGIN,
    "swift.rl_core": {},
    "swift.rl_core.data": _SAMPLES,
    "swift.rollout": _SCHEDULERS | _ENVS,
    "swift.rollout.gym_env": _ENVS,
    "swift.rollout.multi_turn": _SCHEDULERS | _of("multi_turn.gym_scheduler:", "GYMScheduler"),
    "swift.template": _TEMPLATE,
    "swift.utils": _UTILITIES,
    "swift.utils.logger": _of(UTILITIES, "get_logger"),
}
_MODULES_OF_3 = {
    "swift.llm": _REQUESTS | _ENGINES | _TEMPLATE | _of(UTILITIES, "to_device"),
    "swift.llm.infer": _REQUESTS | _ENGINES,
    "swift.llm.infer.protocol": _REQUESTS,
    "swift.llm.template": _TEMPLATE,
    "swift.llm.utils": _MESSAGES,
    "swift.plugin": _ORM | _PRM | _RM_PLUGIN | _SCHEDULERS | _ENVS | _CONTEXTS,
    "swift.plugin.context_manager": _CONTEXTS,
    "swift.plugin.env": _ENVS,
    "swift.plugin.multi_turn": _SCHEDULERS | _of("multi_turn.gym_scheduler:", "GYMScheduler"),
    "swift.plugin.orm": _ORM | _BUILT_IN_ORM,
    "swift.plugin.prm": _PRM,
    "swift.plugin.rm_plugin": _RM_PLUGIN,
}
MODULES: dict[str, dict[str, str]] = {"swift": {}, **_MODULES_OF_4, **_MODULES_OF_3}
