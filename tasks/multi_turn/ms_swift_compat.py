"""ms-swift's schedulers: classes with `step`, which appends messages, and `check_finished`."""

from copy import deepcopy
from typing import Any

from ...templates.json_types import JsonObject
from .ms_swift_requests import ChatCompletionResponseChoice, ChatMessage, RolloutInferRequest
from .registry import Turn

NOT_CALLED = ("run", "async_infer", "on_trajectory_start", "on_turn_end", "on_trajectory_end")


class RolloutScheduler:
    """Base class of all of ms-swift's schedulers. `infer_engine` is None: the trainer generates the answers."""

    def __init__(self, infer_engine: object = None, max_turns: int | None = None, *_: object, **settings: Any):
        self.infer_engine, self.max_turns = infer_engine, max_turns
        self._tokenizer = settings.get("tokenizer")

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer


class MultiTurnScheduler(RolloutScheduler):
    """Base class of ms-swift's schedulers.

    A subclass implements `step`, and may override `check_finished`. `step` returns {"infer_request": ...} with messages
    appended, optionally with "rollout_infos". Both methods are called after each answer, and must be sync.
    """

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> JsonObject:
        raise NotImplementedError(f"{type(self).__name__} needs a method `step`")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        return response_choice.finish_reason == "length" or bool(self.max_turns and current_turn >= self.max_turns)


class MsSwiftAdapter:
    """Adapter that calls an ms-swift scheduler as a scheduler of this project."""

    def __init__(self, scheduler: MultiTurnScheduler):
        self.scheduler = scheduler

    def __call__(self, turn: Turn) -> list[JsonObject] | None:
        request = turn.state.setdefault("request", RolloutInferRequest([], data_dict=turn.columns))
        request.messages = deepcopy(turn.messages)
        choice = ChatCompletionResponseChoice(
            0, ChatMessage("assistant", turn.completion), turn.finish, token_ids=list(turn.token_ids)
        )
        if self.scheduler.check_finished(request, choice, turn.number) or turn.final:
            return None
        result = self.scheduler.step(request, choice, turn.number)
        turn.info.update(result.get("rollout_infos") or {})
        self._check_tokens(result, turn)
        messages, previous = result["infer_request"].messages, turn.messages
        if messages[: len(previous)] != previous or len(messages) == len(previous):
            raise ValueError("its step() must append messages, and keep the others unchanged")
        turn.state["request"] = result["infer_request"]
        return messages[len(previous) :]

    @staticmethod
    def _check_tokens(result: JsonObject, turn: Turn) -> None:
        """Raise ValueError if step() changes the tokens or the loss mask of the model's answer."""
        differs = list(result.get("response_token_ids") or turn.token_ids) != turn.token_ids
        if differs or not all(result.get("response_loss_mask") or [1]):
            raise ValueError(
                "its step() returns response_token_ids or a response_loss_mask that differ from the answer's: exactly "
                "the generated tokens are trained on. Remove them"
            )
