"""Used part of the interface of transformers' fast tokenizers, whose own annotations are too wide."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .json_types import JsonObject

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    is_fast: bool
    name_or_path: str
    chat_template: str | dict[str, str] | None
    split_special_tokens: bool
    bos_token: str | None
    eos_token_id: int | None
    special_tokens_map: dict[str, str]
    all_special_tokens: list[str]
    added_tokens_decoder: "Mapping[int, tokenizers.AddedToken]"
    backend_tokenizer: "tokenizers.Tokenizer"

    def __call__(self, text: str, **options: bool) -> Mapping[str, Any]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def get_chat_template(self, chat_template: None, tools: list[JsonObject] | None) -> str: ...
