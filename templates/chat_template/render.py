"""What a row becomes, by stage: the texts of its documents, where in them is what matters, and its label.

A reranker's documents have the form that Qwen3-Reranker was published with (Zhang et al. 2025, arXiv:2506.05176).
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..formats.dataset_names import text_of
from ..formats.paired_rows import (
    Passage,
    binary,
    label_of_one,
    number,
    numbers,
    to_answer,
    to_answered,
    to_comparison,
    to_pair,
)
from ..formats.schemas import (
    MESSAGES,
    POOLED,
    Conversation,
    Stage,
    UnusableRow,
    present,
    says_nothing,
    to_conversation,
    to_prompt,
    to_text,
)
from ..options import TemplateOptions
from .chat import ChatTemplate
from .token_offsets import Span

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"


class Text(NamedTuple):
    """A document. Spans are of characters."""

    text: str
    turns: Sequence[Span] = ()  # of the assistant
    weights: Sequence[float] = ()  # how much each of them is trained on
    elsewhere: float = 1.0  # and all else
    answer: Span | None = None  # preference, kto, answered: what follows the prompt
    body: Span | None = None  # what may be cut; none: all
    special: bool = False  # with the tokenizer's own special tokens, which are not cut


Rendered = tuple[list[Text], list[float]]  # a sample: documents and label


class Renderer:
    """Renders rows. Raises ValueError where the options, the stage and the tokenizer do not fit together."""

    def __init__(self, tokenizer, options: TemplateOptions, stage: Stage, tools: list[dict] | None = None):
        if stage == "pt" and (options.system or options.enable_thinking is not None):
            raise ValueError(
                "--system and --enable_thinking are for conversations; megatron pt takes plain text: drop it"
            )
        if stage == "embedding" and options.enable_thinking is not None:
            raise ValueError("--enable_thinking is for chat templates, and texts to embed go without one: drop it")
        self.stage: Stage = stage
        self.tools = tools  # of prompts whose rows have none
        self.loss_scale, self.system = options.loss_scale, text_of("--system", options.system)
        thinking = False if options.enable_thinking is None and stage == "reranker" else options.enable_thinking
        self.chat = None
        if stage not in ("pt", "embedding") and (tokenizer.chat_template or stage != "seq_cls"):
            self.chat = ChatTemplate(tokenizer, **({} if thinking is None else {"enable_thinking": thinking}))

    def __call__(self, row: dict[str, Any]) -> list[Rendered]:
        """The samples of a row. Raises UnusableRow."""
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
                prompt = Text(self._template.text(self._prompt(row), prompt=True))
                answered = None
                if self.stage != "prompts":
                    answered = to_answered(row, needed=self.stage == "answered")
                return [([prompt, *([self._scored(answered)] if answered else [])], [])]

    def columns(self, row: dict[str, Any]) -> bytes:
        """prompts: the row as JSON, for those who judge the answers; its messages are those of the prompt."""
        others = {name: value for name, value in present(row).items() if name not in MESSAGES}
        messages = self._prompt(row).messages
        return json.dumps(others | {"messages": messages}, ensure_ascii=False, default=str).encode()

    def notes(self) -> list[str]:
        """Where what is trained on is not the chat template's text to the letter: for the log."""
        return self.chat.notes() if self.chat and self.stage not in (*POOLED, "prompts") else []

    def _prompt(self, row: dict[str, Any]) -> Conversation:
        conversation = to_prompt(row)
        conversation.tools = conversation.tools or self.tools
        self._begin(conversation)
        return conversation

    def _scored(self, conversation: Conversation) -> Text:
        """A conversation whose answers are trained on: as a message says, else by --loss_scale."""
        self._begin(conversation)
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
        text, turns = self._template.turns(conversation)
        answer = None
        if self.stage != "sft":
            answer = turns[roles[: last_user + 1].count("assistant")][0], len(text)
        return Text(text, turns, weights, float(self.loss_scale == "all"), answer)

    def _classified(self, row: dict[str, Any]) -> Text:
        if row.get("text") is not None and row.get("messages") is None:
            if not (text := to_text(row)).strip():
                raise UnusableRow("it is empty")
            return Text(text, special=True)
        conversation = to_conversation(row, answered=False)
        self._begin(conversation)
        return Text(self._template.text(conversation))

    def _embedded(self, row: dict[str, Any]) -> list[Rendered]:
        """What sentence-transformers' encode tokenises: a prompt, where there is one, and the text."""
        comparison = to_comparison(row)
        label = label_of_one(row, comparison, "label", "score")
        anchor = comparison.anchor._replace(system=comparison.anchor.system or self.system or "")
        anchor, *negatives = (Text("".join(passage), special=True) for passage in (anchor, *comparison.negatives))
        positives = [Text("".join(passage), special=True) for passage in comparison.positives]
        labels = [] if label is None else [number(label, "label")]
        return [([anchor, positive, *negatives], labels) for positive in positives]

    def _ranked(self, row: dict[str, Any]) -> list[Rendered]:
        comparison = to_comparison(row)
        label = label_of_one(row, comparison, "label")
        positives, negatives = (
            [self._judged(comparison.anchor, passage) for passage in passages]
            for passages in (comparison.positives, comparison.negatives)
        )
        if label is not None:
            return [(positives, [binary(label)])]
        if not negatives:
            raise UnusableRow("it has neither negative texts nor a label: give negative_messages, negative or label")
        return [([positive, *negatives], [1.0, *(0.0 for _ in negatives)]) for positive in positives]

    def _judged(self, query: Passage, document: Passage) -> Text:
        if document.system:
            raise UnusableRow("a document has a system prompt: put instructions into the query's")
        instruct = query.system or self.system or INSTRUCT
        asked = f"<Instruct>: {instruct}\n<Query>: {query.text}\n<Document>: {document.text}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
        text = self._template.text(Conversation(messages, [None, None]), prompt=True)
        start = text.find(asked.strip())
        return Text(text, body=(start, start + len(asked.strip())) if start >= 0 else (0, 0))

    def _begin(self, conversation: Conversation) -> None:
        if self.system:
            conversation.begin_with(self.system)

    @property
    def _template(self) -> ChatTemplate:
        if self.chat is None:
            raise UnusableRow("the tokenizer has no chat template, which messages need: give rows with a column `text`")
        return self.chat


def _check_answers(conversation: Conversation, weights: list[float]) -> None:
    """Raise UnusableRow where the model would learn to say nothing."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if any(weight and says_nothing(answer) for answer, weight in zip(answers, weights, strict=True)):
        raise UnusableRow("its answer is empty" if len(answers) == 1 else "one of its answers is empty")
