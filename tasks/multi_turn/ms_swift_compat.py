"""ms-swift's schedulers: classes with `step` and `check_finished`, and hooks at the start and after each answer."""

import inspect
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from ...templates.json_types import JsonObject
from .call import EpisodeStart
from .ms_swift_requests import ChatCompletionResponseChoice, ChatMessage, RolloutInferRequest
from .registry import EditedAnswer, Turn

NOT_CALLED = ("run", "async_infer", "on_trajectory_end")  # methods of a scheduler that generates on its own


class RolloutScheduler:
    """Base class of all of ms-swift's schedulers. `infer_engine` is None: the trainer generates the answers."""

    def __init__(self, infer_engine: object = None, max_turns: int | None = None, *_: object, **settings: Any):
        self.infer_engine, self.max_turns = infer_engine, max_turns
        self._tokenizer = settings.get("tokenizer")

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Run before the first answers. It may change the messages of each request."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> JsonObject:
        """Run after each answer. It may return `rollout_infos`, and `done`, which decides instead of check_finished."""
        return {}


class MultiTurnScheduler(RolloutScheduler):
    """Base class of ms-swift's schedulers.

    A subclass implements `step`, and may override `check_finished`. `step` returns {"infer_request": ...} with messages
    appended, or with text appended to the answer, optionally with "response_token_ids", "response_loss_mask" and
    "rollout_infos".
    """

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> JsonObject:
        raise NotImplementedError(f"{type(self).__name__} needs a method `step`")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        return response_choice.finish_reason == "length" or bool(self.max_turns and current_turn >= self.max_turns)

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """Return no log-probabilities: those of kept tokens are kept without the scheduler."""
        return []


class MsSwiftAdapter:
    """Adapter that calls an ms-swift scheduler as a scheduler of this project."""

    def __init__(self, scheduler: MultiTurnScheduler):
        self.scheduler = scheduler
        self.starts_episodes = type(scheduler).on_trajectory_start is not RolloutScheduler.on_trajectory_start
        self._requests: dict[str, RolloutInferRequest] = {}  # of episodes that wait for their first answer

    async def start(self, episodes: Sequence[EpisodeStart]) -> None:
        requests = [
            RolloutInferRequest(episode.messages, data_dict=episode.columns, uuid=episode.request_id)
            for episode in episodes
        ]
        await awaited(self.scheduler.on_trajectory_start(requests))
        for episode, request in zip(episodes, requests, strict=True):
            episode.messages = request.messages
            self._requests[episode.request_id] = request

    async def __call__(self, turn: Turn) -> list[JsonObject] | EditedAnswer | None:
        request = turn.state.get("request") or self._requests.pop(turn.request_id, None)
        request = request or RolloutInferRequest([], data_dict=turn.columns, uuid=turn.request_id)
        request.messages = deepcopy(turn.messages)
        choice = ChatCompletionResponseChoice(
            0, ChatMessage("assistant", turn.completion), turn.finish, token_ids=list(turn.token_ids)
        )
        end = await awaited(self.scheduler.on_turn_end(request, choice, turn.number)) or {}
        turn.info.update(end.get("rollout_infos") or {})
        is_over = self.scheduler.check_finished(request, choice, turn.number)
        if end.get("done", is_over) or turn.final:
            await awaited(self._close(request))
            return None
        result = self.scheduler.step(request, choice, turn.number)
        turn.info.update(result.get("rollout_infos") or {})
        turn.state["request"] = result["infer_request"]
        return self._reply(result, turn)

    def _close(self, request: RolloutInferRequest) -> Any:
        """Call `close_episode` of schedulers that hold something for each episode."""
        close = getattr(self.scheduler, "close_episode", None)
        return close(request) if close else None

    def _reply(self, result: JsonObject, turn: Turn) -> list[JsonObject] | EditedAnswer:
        """Return the messages that step() has appended, with what it has made of the answer."""
        previous, messages = turn.messages, result["infer_request"].messages
        count = len(previous)
        if len(messages) > count and messages[-1].get("role") == "assistant" and not messages[-1].get("content"):
            messages = messages[:-1]  # a placeholder for the answer to come
        if messages[: count - 1] != previous[:-1] or [m.get("role") for m in messages[count - 1 : count]] != [
            "assistant"
        ]:
            raise ValueError("its step() must keep the messages before the answer, and the answer")
        answer, replies = str(messages[count - 1]["content"] or ""), messages[count:]
        tokens, mask = self._tokens(result, turn, answer)
        if tokens == turn.token_ids and all(mask):
            if not replies:
                raise ValueError("its step() must append messages, or text to the answer")
            if answer != previous[-1]["content"]:
                raise ValueError(
                    "its step() changes the answer's text and not its tokens. Return response_token_ids and "
                    "response_loss_mask, too"
                )
            return replies
        return EditedAnswer(answer, tokens, mask, replies)

    def _tokens(self, result: JsonObject, turn: Turn, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the edited answer, and their loss mask. Only generated tokens may be trained on."""
        generated, text = turn.token_ids, str(turn.messages[-1]["content"])
        tokens, mask = result.get("response_token_ids"), result.get("response_loss_mask")
        if tokens is None and answer != text and answer.startswith(text):
            tokens = [*generated, *self.scheduler.tokenizer.encode(answer[len(text) :], add_special_tokens=False)]
        tokens = list(generated if tokens is None else tokens)
        kept = next((i for i, (a, b) in enumerate(zip(tokens, generated, strict=False)) if a != b), len(generated))
        kept = min(kept, len(tokens))
        mask = [int(i < kept) for i in range(len(tokens))] if mask is None else list(mask)
        if len(mask) != len(tokens) or not set(mask) <= {0, 1}:
            raise ValueError("its step() must return a response_loss_mask with 0 or 1 for each of response_token_ids")
        if any(mask[kept:]):
            raise ValueError(
                "its step() returns a response_loss_mask of 1 for tokens that the model has not generated, which have "
                "no log-probability. Set 0 for them"
            )
        return tokens, mask


async def awaited(value: Any) -> Any:
    """Return the result of a method that may be async."""
    return await value if inspect.isawaitable(value) else value
