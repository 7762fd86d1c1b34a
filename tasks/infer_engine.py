"""Interface of the engines of `swift infer`: messages in, text out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..bridge.checkpoint.pretrained import load_tokenizer
from ..templates.chat_template.chat import ChatTemplate
from ..templates.chat_template.non_thinking import OFF
from ..templates.dataset.placed_media import expand
from ..templates.dataset.tokenize import place_media
from ..templates.formats.medium import has_sentinels
from ..templates.formats.schemas import Conversation, UnusableRow
from ..templates.json_types import JsonObject
from ..templates.media.processor import VisionProcessor
from .infer_media import EncodedPrompt
from .options import InferOptions

Emit = Callable[[str], None]  # receives a piece of a response


@dataclass(frozen=True)
class AdapterFolder:
    folder: Path
    config: JsonObject  # adapter_config.json


class ChatEngine(ABC):
    """Engine of `swift infer`: token ids and media in, text out.

    vision: processor of media; None for a model that takes none
    most_videos: of a prompt; None: any number. takes_images: of the model
    """

    most_videos: int | None = None
    takes_images: bool = True

    def __init__(self, folder: Path, options: InferOptions, vision: VisionProcessor | None = None):
        self.tokenizer, self.vision = load_tokenizer(folder), vision
        if vision and vision.chat_template:  # it goes before the tokenizer's
            self.tokenizer.chat_template = vision.chat_template
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"--model {folder}: its tokenizer has no chat template. Set a model that was fine-tuned on "
                "conversations, or add a chat_template.jinja to the folder."
            )
        thinking = {} if options.enable_thinking is None else dict.fromkeys(OFF, options.enable_thinking)
        if thinking and not any(name in str(self.tokenizer.chat_template) for name in thinking):
            print("note: --enable_thinking has no effect: the chat template has no such variable.")
        self._template = ChatTemplate(self.tokenizer, **thinking)

    def encode(self, conversation: Conversation, row_name: str = "") -> EncodedPrompt:
        """Return the tokens of a conversation up to the start of its response, and its media."""
        try:
            text = self._template.render(conversation, prompt=True)
            if has_sentinels(text):
                raise UnusableRow("the chat template has no place for a medium in one of its messages")
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if self.vision is None:
                return EncodedPrompt(ids, name=row_name)
            placed = place_media(np.array(ids), conversation.media, self.vision)
        except UnusableRow as error:
            row = f"{row_name}: " if row_name else ""
            raise ValueError(f"--model {self.tokenizer.name_or_path}: {row}{error}") from error
        (expanded, _), placed = expand(np.array(ids), np.zeros(len(ids)), placed)
        return EncodedPrompt(expanded.tolist(), placed, row_name)

    @abstractmethod
    def generate(self, prompts: list[EncodedPrompt], emit: Emit | None = None) -> list[str]:
        """Return a response to each prompt. `emit` receives the pieces of a single prompt's response."""
