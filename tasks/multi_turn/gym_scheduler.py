"""Scheduler of environments (--multi_turn_scheduler gym_scheduler): each episode has an environment of its own."""

import asyncio
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ...templates.json_types import JsonObject
from .gym_env import Env, envs
from .ms_swift_compat import MultiTurnScheduler, awaited
from .ms_swift_requests import ChatCompletionResponseChoice, RolloutInferRequest
from .registry import multi_turns


@dataclass
class EnvironmentEpisode:
    """Environment of an episode, and what it has given so far."""

    env: Env
    rewards: list[float] = field(default_factory=list)
    observation: str | None = None  # to send to the model


class GYMScheduler(MultiTurnScheduler):
    """Scheduler that sends the observations of an environment, and sums up its rewards as `total_reward`.

    The environment is that of the column `env_config` of the row, `{"name": ..., ...}`, else --gym_env. `env_config`
    is its argument.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.gym_env_name = settings.get("gym_env")
        self._episodes: dict[str, EnvironmentEpisode] = {}  # by request id

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Make an environment for each request. Its first observation is the prompt."""
        await asyncio.gather(*map(self._start, requests))

    async def _start(self, request: RolloutInferRequest) -> None:
        await self.close_episode(request)
        env = self._create_env(request.data_dict.get("env_config") or {})
        observation, _, system = await awaited(env.reset(request))
        system_messages = [{"role": "system", "content": system}] if system else []
        request.messages = [*system_messages, {"role": "user", "content": observation}]
        self._episodes[request.uuid or ""] = EnvironmentEpisode(env)

    def _create_env(self, env_config: JsonObject) -> Env:
        name = env_config.get("name", self.gym_env_name)
        if name not in envs:
            raise ValueError(
                f"no environment {name}. Set --gym_env, or `name` in the column env_config, to one of "
                f"{', '.join(envs) or 'those registered in --external_plugins'}"
            )
        return envs[name](env_config)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> JsonObject:
        """Act in the environment as the answer says."""
        episode = self._episodes[infer_request.uuid or ""]
        observation, reward, is_done, _ = await awaited(episode.env.step(deepcopy(infer_request.messages)))
        episode.rewards.append(float(reward))
        episode.observation = None if is_done else observation
        infos = {"total_reward": sum(episode.rewards), "step_rewards": list(episode.rewards), "gym_done": bool(is_done)}
        return {"done": bool(is_done), "rollout_infos": infos}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> JsonObject:
        """Send the observation."""
        observation = self._episodes[infer_request.uuid or ""].observation
        infer_request.messages.append({"role": "user", "content": observation})
        return {"infer_request": infer_request}

    async def close_episode(self, request: RolloutInferRequest) -> None:
        """Close the environment of an episode that is over."""
        episode = self._episodes.pop(request.uuid or "", None)
        if episode is not None:
            await awaited(episode.env.close())


multi_turns["gym_scheduler"] = GYMScheduler
