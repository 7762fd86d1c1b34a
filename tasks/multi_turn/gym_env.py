"""Environments in ms-swift's style (gym), which plugins register in `envs`."""

from typing import Any

from ...templates.json_types import JsonObject
from .ms_swift_requests import RolloutInferRequest

envs: JsonObject = {}
context_managers: JsonObject = {}  # of ms-swift 3.x; --context_manager is refused


class Env:
    """Base class of environments. `env_config`: the column env_config of the row. Its methods may be sync or async."""

    def __init__(self, env_config: JsonObject):
        self.env_config = env_config

    async def reset(self, config: RolloutInferRequest) -> tuple[str, JsonObject, str]:
        """Start an episode. Return the first observation, information, and the system message."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `reset`")

    async def step(self, action: list[JsonObject]) -> tuple[str, float, bool, JsonObject]:
        """Act as the last message says. Return the next observation, the reward, whether it is over, information."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `step`")

    async def close(self) -> None:
        """Free what the episode holds."""


class ContextManager:
    """Base class of ms-swift 3.x's context managers, which rewrite the conversation before an answer."""

    def __init__(self, ctx_config: Any = None):
        self.ctx_config = ctx_config
