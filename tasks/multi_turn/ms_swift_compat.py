"""Schedulers of ms-swift's kind: classes with `step` and `check_finished`, over messages that `step` adds to."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from .registry import Turn

NOT_CALLED = ("run", "async_infer", "on_trajectory_start", "on_turn_end", "on_trajectory_end")


@dataclass
class InferRequest:
    messages: list[dict[str, Any]]
    data_dict: dict[str, Any] = field(default_factory=dict)  # the row's columns


@dataclass
class Message:
    content: str
    role: str = "assistant"
    tool_calls: Any = None


@dataclass
class ResponseChoice:
    message: Message
    finish_reason: str
    token_ids: list[int]
    index: int = 0
    logprobs: Any = None


class MultiTurnScheduler:
    """A subclass has `step`, which returns {"infer_request": ...} with messages added at its end, perhaps with
    "rollout_infos"; and may have a `check_finished` of its own. Both are called after each answer, and may not be
    async."""

    def __init__(self, infer_engine: Any = None, max_turns: int | None = None, **_: Any):
        self.infer_engine, self.max_turns = infer_engine, max_turns

    def step(self, infer_request: InferRequest, response_choice: ResponseChoice, current_turn: int) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a method `step`")

    def check_finished(self, infer_request: InferRequest, response_choice: ResponseChoice, current_turn: int) -> bool:
        return response_choice.finish_reason == "length" or bool(self.max_turns and current_turn >= self.max_turns)


class Adapter:
    """Calls one as our own schedulers are called."""

    def __init__(self, scheduler: MultiTurnScheduler):
        self.scheduler = scheduler

    def __call__(self, turn: Turn) -> list[dict[str, Any]] | None:
        request = turn.state.setdefault("request", InferRequest([], turn.columns))
        request.messages = deepcopy(turn.messages)
        choice = ResponseChoice(Message(turn.completion), turn.finish, turn.token_ids)
        if self.scheduler.check_finished(request, choice, turn.number) or turn.final:
            return None
        found = self.scheduler.step(request, choice, turn.number)
        turn.info.update(found.get("rollout_infos") or {})
        self._check_tokens(found, turn)
        messages, before = found["infer_request"].messages, turn.messages
        if messages[: len(before)] != before or len(messages) == len(before):
            raise ValueError("its step() has to add messages at the end, and to leave the others as they are")
        turn.state["request"] = found["infer_request"]
        return messages[len(before) :]

    @staticmethod
    def _check_tokens(found: dict[str, Any], turn: Turn) -> None:
        """What the model has drawn is trained on as it is."""
        other = list(found.get("response_token_ids") or turn.token_ids) != turn.token_ids
        if other or not all(found.get("response_loss_mask") or [1]):
            raise ValueError(
                "its step() returns response_token_ids or a response_loss_mask that are not the answer's own: "
                "all that the model has drawn is trained on, and nothing else. Leave them out"
            )
