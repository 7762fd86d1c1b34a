"""ms-swift's requests and responses, as its schedulers and environments read them."""

import uuid as uuids
from dataclasses import dataclass, field
from typing import Any

from ...templates.json_types import JsonObject

Message = JsonObject
Messages = list[JsonObject]
Tool = JsonObject


@dataclass
class InferRequest:
    """Conversation to answer."""

    messages: list[JsonObject]
    images: list[Any] = field(default_factory=list)
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    tools: list[JsonObject] | None = None
    objects: JsonObject = field(default_factory=dict)
    chat_template_kwargs: JsonObject = field(default_factory=dict)


@dataclass
class RolloutInferRequest(InferRequest):
    """Conversation of an episode."""

    data_dict: JsonObject = field(default_factory=dict)  # other columns of the row
    uuid: str | None = None  # of the episode
    add_eos: bool | str | None = None


@dataclass
class RequestConfig:
    """Sampling settings. A run's own flags (--temperature, ...) are what is used."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    n: int = 1


@dataclass
class ChatMessage:
    """Answer of the model."""

    role: str
    content: str
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """Answer of the model with its tokens."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[JsonObject]] | None = None
    token_ids: list[int] | None = None
    routed_experts: Any = None


@dataclass
class ChatCompletionResponse:
    """Response with its choices."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: Any = None
    id: str = field(default_factory=lambda: f"chatcmpl-{uuids.uuid4().hex}")
    object: str = "chat.completion"
    created: int = 0
    prompt_token_ids: list[int] | None = None


@dataclass
class RolloutOutput:
    """Episode as a scheduler's `run` returns it, which is not called here."""

    response: ChatCompletionResponse
    messages: list[JsonObject] | None = None
    response_token_ids: list[list[int]] = field(default_factory=list)
    response_loss_mask: list[list[int]] = field(default_factory=list)
    rollout_infos: JsonObject = field(default_factory=dict)
    rollout_logprobs: list[list[float]] = field(default_factory=list)
