"""Rendering of rows by stage: the texts of their documents, spans in them, and labels.

A reranker's documents have the form that Qwen3-Reranker was published with (Zhang et al. 2025, arXiv:2506.05176).
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from ..formats.dataset_names import text_of
from ..formats.paired_rows import (
    Passage,
    binary,
    label_of_one,
    number,
    numbers,
    to_answer,
    to_answered,
    to_contrastive,
    to_pair,
)
from ..formats.schemas import (
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
)
from ..json_types import JsonObject
from ..options import TemplateOptions
from ..tokenizer import Tokenizer
from .chat import ChatTemplate
from .token_offsets import Span

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"


class Text(NamedTuple):
    """Text of a document, with spans of characters."""

    text: str
    turns: Sequence[Span] = ()  # of the assistant
    weights: Sequence[float] = ()  # loss weight of each turn
    base_weight: float = 1.0  # loss weight outside the turns
    answer: Span | None = None  # preference, kto, answered: all after the prompt
    body: Span | None = None  # part that may be truncated; None: all
    special: bool = False  # to be tokenized with the tokenizer's special tokens, which are not truncated


Rendered = tuple[list[Text], list[float]]  # a sample: documents and label


class Renderer:
    """Renderer of rows. Raises ValueError if the options, the stage and the tokenizer do not fit together."""

    def __init__(
        self, tokenizer: Tokenizer, options: TemplateOptions, stage: Stage, tools: list[JsonObject] | None = None
    ):
        if stage == "pt" and (options.system or options.enable_thinking is not None):
            raise ValueError(
                "--system, --enable_thinking: for conversations, and megatron pt takes plain text. Remove the flag."
            )
        if stage == "embedding" and options.enable_thinking is not None:
            raise ValueError(
                "--enable_thinking: cannot be used with --task_type embedding, which uses no chat template. Remove it."
            )
        self.stage: Stage = stage
        self.tools = tools  # for prompts whose rows have none
        self.loss_scale, self.system = options.loss_scale, text_of("--system", options.system)
        thinking = False if options.enable_thinking is None and stage == "reranker" else options.enable_thinking
        self.chat = None
        if stage not in ("pt", "embedding") and (tokenizer.chat_template or stage != "seq_cls"):
            self.chat = ChatTemplate(tokenizer, **({} if thinking is None else {"enable_thinking": thinking}))

    def __call__(self, row: JsonObject) -> list[Rendered]:
        """Return the samples of a row. Raises UnusableRow."""
        match self.stage:
            case "sft":
                return [([self._scored(to_conversation(row))], [])]
            case "pt":
                if not (text := to_text(row)).strip():
                    raise UnusableRow("it is empty")
                return [([Text(text, special=True)], [])]
            case "preference":
                margin = row.get("margin")
                texts = [self._scored(conversation) for conversation in to_pair(row)]
                return [(texts, [] if margin is None else [number(margin, "margin")])]
            case "kto":
                return [([self._scored(to_answer(row))], [binary(row.get("label"))])]
            case "seq_cls":
                return [([self._classified(row)], numbers(row.get("label"), "label"))]
            case "embedding":
                return self._embedded(row)
            case "reranker":
                return self._ranked(row)
            case "prompts" | "answered" | "asked":
                prompt = Text(self._template.render(self._prompt(row), prompt=True))
                answered = None
                if self.stage != "prompts":
                    answered = to_answered(row, needed=self.stage == "answered")
                return [([prompt, *([self._scored(answered)] if answered else [])], [])]

    def columns(self, row: JsonObject) -> bytes:
        """Return the row of a prompt as JSON, for reward functions; its messages are those of the prompt."""
        others = {name: value for name, value in drop_missing(row).items() if name not in MESSAGES}
        messages = self._prompt(row).messages
        return json.dumps(others | {"messages": messages}, ensure_ascii=False, default=str).encode()

    def notes(self) -> list[str]:
        """Return notes for the log on deviations of the trained text from the chat template's."""
        return self.chat.notes() if self.chat and self.stage not in (*POOLED, "prompts") else []

    def _prompt(self, row: JsonObject) -> Conversation:
        conversation = to_prompt(row)
        conversation.tools = conversation.tools or self.tools
        self._add_system(conversation)
        return conversation

    def _scored(self, conversation: Conversation) -> Text:
        """Return a conversation with the loss weights of its answers: a message's own, else by --loss_scale."""
        self._add_system(conversation)
        roles = [message["role"] for message in conversation.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        first = last_user if self.loss_scale == "last_round" else -1
        weights = [
            float(i > first) if weight is None else weight
            for i, (role, weight) in enumerate(zip(roles, conversation.weights, strict=True))
            if role == "assistant"
        ]
        if self.stage == "sft":
            _check_answers(conversation, weights)
        text, turns = self._template.assistant_turns(conversation)
        answer = None
        if self.stage != "sft":
            answer = turns[roles[: last_user + 1].count("assistant")][0], len(text)
        return Text(text, turns, weights, float(self.loss_scale == "all"), answer)

    def _classified(self, row: JsonObject) -> Text:
        if row.get("text") is not None and row.get("messages") is None:
            if not (text := to_text(row)).strip():
                raise UnusableRow("it is empty")
            return Text(text, special=True)
        conversation = to_conversation(row, answered=False)
        self._add_system(conversation)
        return Text(self._template.render(conversation))

    def _embedded(self, row: JsonObject) -> list[Rendered]:
        """Return the texts that sentence-transformers' encode tokenizes: the prompt, if any, followed by the text."""
        contrastive = to_contrastive(row)
        label = label_of_one(row, contrastive, "label", "score")
        anchor = contrastive.anchor._replace(system=contrastive.anchor.system or self.system or "")
        anchor, *negatives = (Text("".join(passage), special=True) for passage in (anchor, *contrastive.negatives))
        positives = [Text("".join(passage), special=True) for passage in contrastive.positives]
        labels = [] if label is None else [number(label, "label")]
        return [([anchor, positive, *negatives], labels) for positive in positives]

    def _ranked(self, row: JsonObject) -> list[Rendered]:
        contrastive = to_contrastive(row)
        label = label_of_one(row, contrastive, "label")
        positives, negatives = (
            [self._reranked(contrastive.anchor, passage) for passage in passages]
            for passages in (contrastive.positives, contrastive.negatives)
        )
        if label is not None:
            return [(positives, [binary(label)])]
        if not negatives:
            raise UnusableRow("it has neither negative texts nor a label: add negative_messages, negative or label")
        return [([positive, *negatives], [1.0, *(0.0 for _ in negatives)]) for positive in positives]

    def _reranked(self, query: Passage, document: Passage) -> Text:
        if document.system:
            raise UnusableRow("a document has a system prompt: move the instructions to the query's")
        instruct = query.system or self.system or INSTRUCT
        request = f"<Instruct>: {instruct}\n<Query>: {query.text}\n<Document>: {document.text}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": request}]
        text = self._template.render(Conversation(messages, [None, None]), prompt=True)
        start = text.find(request.strip())
        return Text(text, body=(start, start + len(request.strip())) if start >= 0 else (0, 0))

    def _add_system(self, conversation: Conversation) -> None:
        if self.system:
            conversation.add_system(self.system)

    @property
    def _template(self) -> ChatTemplate:
        if self.chat is None:
            raise UnusableRow("the tokenizer has no chat template, which messages need: use rows with a column `text`")
        return self.chat


def _check_answers(conversation: Conversation, weights: list[float]) -> None:
    """Raise UnusableRow if the model would learn to answer nothing."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if any(weight and is_empty_answer(answer) for answer, weight in zip(answers, weights, strict=True)):
        raise UnusableRow("its answer is empty" if len(answers) == 1 else "one of its answers is empty")
