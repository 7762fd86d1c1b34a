"""Rendering of rows by stage to the texts of their documents, with spans and labels."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from ..formats.dataset_names import resolve_text
from ..formats.media_rows import to_media_conversation, to_media_text
from ..formats.medium import SENTINELS, Medium, has_sentinels, media_columns, source_name, to_tags
from ..formats.paired_media_rows import (
    to_classified,
    to_media_answer,
    to_media_contrastive,
    to_media_pair,
    to_media_prompt,
    to_media_question,
)
from ..formats.paired_rows import (
    ContrastiveRow,
    Passage,
    label_of_pair,
    parse_binary,
    parse_number,
    parse_numbers,
    to_answer,
    to_answered,
    to_contrastive,
    to_pair,
)
from ..formats.schemas import (
    MEDIA,
    MESSAGES,
    POOLED,
    Conversation,
    Stage,
    UnusableRow,
    drop_missing,
    is_empty_answer,
    to_conversation,
    to_prompt,
    to_text,
    without_answer,
)
from ..json_types import JsonObject
from ..media.grounding import name_objects
from ..media.processor import VisionProcessor
from ..options import TemplateOptions
from ..tokenizer import Tokenizer
from .chat import ChatTemplate
from .loss_scale import LossScale
from .non_thinking import add_prefixes, non_thinking_prefix
from .retrieval import embedding_messages, judge_messages, reranker_request
from .token_offsets import Span


class Text(NamedTuple):
    """Text of a document, with spans of characters."""

    text: str
    turns: Sequence[Span] = ()  # of the assistant
    weights: Sequence[float] = ()  # loss weight of each turn
    base_weight: float = 1.0  # loss weight outside the turns
    answer: Span | None = None  # preference, kto, answered: text after the prompt
    body: Span | None = None  # text that may be truncated; None: all
    special: bool = False  # whether the tokenizer adds its special tokens, which are not truncated
    media: Sequence[Medium] = ()  # in the order of their placeholders


Rendered = tuple[list[Text], list[float]]  # a sample: documents and label


class Renderer:
    """Renderer of rows. Raises ValueError if options, stage and tokenizer do not fit together."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: TemplateOptions,
        stage: Stage,
        tools: list[JsonObject] | None = None,
        vision: VisionProcessor | None = None,
    ):
        if stage == "pt" and (options.system or options.enable_thinking is not None):
            raise ValueError(
                "--system, --enable_thinking: for conversations, and megatron pt takes plain text. Remove the flag."
            )
        if stage == "embedding" and options.enable_thinking is not None:
            raise ValueError(
                "--enable_thinking: cannot be used with --task_type embedding, whose models do not think. Remove it."
            )
        self.stage: Stage = stage
        self.tools = tools  # for prompts without tools in their row
        self.vision = vision
        self.loss_scale, self.system = LossScale.parse(options.loss_scale), resolve_text("--system", options.system)
        self.adds_non_thinking_prefix = options.add_non_thinking_prefix
        thinking = False if options.enable_thinking is None and stage == "reranker" else options.enable_thinking
        self.chat = None
        self.has_vision_prompts = vision is not None and vision.family.has_retrieval_prompts
        is_plain = stage == "pt" or (stage == "embedding" and not self.has_vision_prompts)
        if not is_plain and (tokenizer.chat_template or stage != "seq_cls"):
            self.chat = ChatTemplate(tokenizer, **({} if thinking is None else {"enable_thinking": thinking}))

    def __call__(self, row: JsonObject) -> list[Rendered]:
        """Return the samples of a row. Raises UnusableRow."""
        match self.stage:
            case "sft":
                return [([self._with_loss_weights(self._conversation(row))], [])]
            case "pt":
                text, media = to_media_text(row) if self.vision else (to_text(row), [])
                return [([self._plain_text(text, media)], [])]
            case "preference":
                margin = row.get("margin")
                texts = [self._with_loss_weights(conversation) for conversation in self._pair(row)]
                return [(texts, [] if margin is None else [parse_number(margin, "margin")])]
            case "kto":
                return [([self._with_loss_weights(self._answer(row))], [parse_binary(row.get("label"))])]
            case "seq_cls":
                return [([self._classification_text(row)], parse_numbers(row.get("label"), "label"))]
            case "embedding":
                return self._embedding_samples(row)
            case "reranker":
                return self._reranker_samples(row)
            case "prompts" | "answered" | "asked":
                conversation, answered = self._prompt_and_answer(row)
                text = self._template.render(conversation, prompt=True)
                prompt = self._checked(Text(text, media=conversation.media))
                return [([prompt, *([self._with_loss_weights(answered)] if answered else [])], [])]

    def columns(self, row: JsonObject) -> bytes:
        """Return the row of a prompt as JSON, for reward functions, with the messages of the prompt."""
        others = {name: value for name, value in drop_missing(row).items() if name not in (*MESSAGES, *MEDIA)}
        prompt = self._prompt_and_answer(row)[0]
        messages = [message | {"content": to_tags(message["content"])} for message in prompt.messages]
        others |= media_columns(prompt.media, source_name)
        return json.dumps(others | {"messages": messages}, ensure_ascii=False, default=str).encode()

    def notes(self) -> list[str]:
        """Return notes for the log on deviations of the trained text from the chat template's."""
        if not self.chat or self.stage in (*POOLED, "prompts"):
            return []
        notes = self.chat.notes()
        if self.adds_non_thinking_prefix and not non_thinking_prefix(self.chat, Conversation([], [])):
            notes.append("--add_non_thinking_prefix: no effect, the chat template has no empty thought to add")
        return notes

    def _conversation(self, row: JsonObject) -> Conversation:
        """Return the conversation of a row, with its media and with its objects as text."""
        if not self.vision:
            return to_conversation(row)
        conversation, objects = to_media_conversation(row)
        if objects:
            name_objects(conversation, objects, self.vision)
        return conversation

    def _pair(self, row: JsonObject) -> tuple[Conversation, Conversation]:
        if not self.vision:
            return to_pair(row)
        pair, objects = to_media_pair(row)
        if objects:
            for conversation in pair:
                name_objects(conversation, objects, self.vision)
        return pair

    def _answer(self, row: JsonObject) -> Conversation:
        if not self.vision:
            return to_answer(row)
        conversation, objects = to_media_answer(row)
        if objects:
            name_objects(conversation, objects, self.vision)
        return conversation

    def _contrastive(self, row: JsonObject) -> ContrastiveRow:
        return to_media_contrastive(row) if self.vision else to_contrastive(row)

    def _plain_text(self, text: str, media: Sequence[Medium]) -> Text:
        """Return a text that the tokenizer adds its special tokens to, with the placeholders of its media."""
        if not text.strip():
            raise UnusableRow("it is empty")
        return Text(self._with_placeholders(text), special=True, media=media)

    def _with_placeholders(self, text: str) -> str:
        if self.vision and has_sentinels(text):
            for kind, sentinel in SENTINELS.items():
                if sentinel in text:
                    text = text.replace(sentinel, self.vision.placeholder_text(kind))
        return text

    def _prompt_and_answer(self, row: JsonObject) -> tuple[Conversation, Conversation | None]:
        """Return the prompt of a row, and the conversation with its answer, where the stage reads it and it has one."""
        answered = None
        if self.vision and self.stage == "prompts":
            prompt, objects = to_media_question(row)
            if objects:
                name_objects(prompt, objects, self.vision)
        elif self.vision:
            conversation, is_answered, objects = to_media_prompt(row, needs_answer=self.stage == "answered")
            if objects:
                name_objects(conversation, objects, self.vision)
            prompt, answered = without_answer(conversation), conversation if is_answered else None
        else:
            prompt = to_prompt(row)
            if self.stage != "prompts":
                answered = to_answered(row, is_required=self.stage == "answered")
        prompt.tools = prompt.tools or self.tools
        self._add_system(prompt)
        return prompt, answered

    def _with_loss_weights(self, conversation: Conversation) -> Text:
        """Return a conversation's text with the loss weights of its answers, from messages or --loss_scale."""
        self._add_system(conversation)
        roles = [message["role"] for message in conversation.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        context_end = last_user if self.loss_scale.strategy == "last_round" else -1
        weights = [
            float(i > context_end) if weight is None else weight
            for i, (role, weight) in enumerate(zip(roles, conversation.weights, strict=True))
            if role == "assistant"
        ]
        if self.stage == "sft":
            _check_answers(conversation, weights)
        text, turns = self._template.assistant_turns(conversation)
        if self.adds_non_thinking_prefix:
            text, turns = add_prefixes(self._template, conversation, text, turns)
        answer = None
        if self.stage != "sft":
            answer = turns[roles[: last_user + 1].count("assistant")][0], len(text)
        if self.loss_scale.presets:
            turns, weights = self._weigh_parts(conversation, text, turns, weights)
        base_weight = float(self.loss_scale.strategy == "all")
        return self._checked(Text(text, turns, weights, base_weight, answer, media=conversation.media))

    @staticmethod
    def _checked(text: Text) -> Text:
        """Return a rendered text. Raises UnusableRow if it has no placeholder in place of a sentinel."""
        if has_sentinels(text.text):
            raise UnusableRow("the chat template has no place for an image or video in one of its messages")
        return text

    def _weigh_parts(
        self, conversation: Conversation, text: str, turns: Sequence[Span], weights: list[float]
    ) -> tuple[list[Span], list[float]]:
        """Return the parts of the turns by the presets of --loss_scale. A message's own weight goes before them."""
        spans, part_weights, query, pairs = [], [], "", iter(zip(turns, weights, strict=True))
        for message, own_weight in zip(conversation.messages, conversation.weights, strict=True):
            if message["role"] != "assistant":
                query = message["content"]
                continue
            (start, end), weight = next(pairs)
            body = start + len(self._template.without_end(text[start:end]))
            parts = self.loss_scale.parts(text[start:body], query) if own_weight is None and weight else []
            for part in parts:
                spans.append((start, start + len(part.text)))
                part_weights.append(weight * (part.weight if self.stage == "sft" else float(part.weight > 0)))
                start += len(part.text)
            if end > start:
                spans.append((start, end))
                part_weights.append(weight)
        return spans, part_weights

    def _classification_text(self, row: JsonObject) -> Text:
        is_plain = row.get("text") is not None and row.get("messages") is None
        if self.vision:
            source, media, objects = to_classified(row)
        else:
            source, media, objects = to_text(row) if is_plain else to_conversation(row, answered=False), [], None
        if isinstance(source, str):
            return self._plain_text(source, media)
        if objects and self.vision:
            name_objects(source, objects, self.vision)
        self._add_system(source)
        return self._checked(Text(self._template.render(source), media=media))

    def _embedding_samples(self, row: JsonObject) -> list[Rendered]:
        """Return the texts of a row: in Qwen3-VL-Embedding's prompt, or as sentence-transformers' encode has them."""
        contrastive = self._contrastive(row)
        label = label_of_pair(row, contrastive, "label", "score")
        anchor = contrastive.anchor._replace(system=contrastive.anchor.system or self.system or "")
        anchor, *negatives = (self._passage_text(passage) for passage in (anchor, *contrastive.negatives))
        positives = [self._passage_text(passage) for passage in contrastive.positives]
        labels = [] if label is None else [parse_number(label, "label")]
        return [([anchor, positive, *negatives], labels) for positive in positives]

    def _passage_text(self, passage: Passage) -> Text:
        if not self.has_vision_prompts:
            return self._plain_text(passage.system + passage.text, passage.media)
        text = self._prompt_text(embedding_messages(passage.text, passage.system), passage.text, passage.media)
        return text._replace(special=True)

    def _reranker_samples(self, row: JsonObject) -> list[Rendered]:
        contrastive = self._contrastive(row)
        label = label_of_pair(row, contrastive, "label")
        positives, negatives = (
            [self._reranker_text(contrastive.anchor, passage) for passage in passages]
            for passages in (contrastive.positives, contrastive.negatives)
        )
        if label is not None:
            return [(positives, [parse_binary(label)])]
        if not negatives:
            raise UnusableRow("it has neither negative texts nor a label: add negative_messages, negative or label")
        return [([positive, *negatives], [1.0, *(0.0 for _ in negatives)]) for positive in positives]

    def _reranker_text(self, query: Passage, document: Passage) -> Text:
        if document.system:
            raise UnusableRow("a document has a system prompt: move the instructions to the query's")
        instruct = query.system or self.system or ""
        request = reranker_request(query.text, document.text, instruct, has_vision=self.has_vision_prompts)
        return self._prompt_text(judge_messages(request), request, [*query.media, *document.media])

    def _prompt_text(self, messages: list[JsonObject], content: str, media: Sequence[Medium]) -> Text:
        """Return messages with the generation prompt. content: of the user, which may be truncated"""
        text = self._template.render(Conversation(messages, [None] * len(messages)), prompt=True)
        body = self._with_placeholders(content.strip())
        start = text.rfind(body)
        span = (start, start + len(body)) if start >= 0 else (0, 0)
        return self._checked(Text(text, body=span, media=media))

    def _add_system(self, conversation: Conversation) -> None:
        if self.system:
            conversation.add_system(self.system)

    @property
    def _template(self) -> ChatTemplate:
        if self.chat is None:
            raise UnusableRow("the tokenizer has no chat template, which messages need: use rows with a column `text`")
        return self.chat


def _check_answers(conversation: Conversation, weights: list[float]) -> None:
    """Raise UnusableRow for an empty answer that would be trained on."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if any(weight and is_empty_answer(answer) for answer, weight in zip(answers, weights, strict=True)):
        raise UnusableRow("its answer is empty" if len(answers) == 1 else "one of its answers is empty")
