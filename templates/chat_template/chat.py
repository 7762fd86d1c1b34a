"""Conversation -> text by the tokenizer's own chat template, and where in the text the assistant speaks.

What the assistant says in a turn runs from the end of the generation prompt to the token that ends the turn, included:
what the model must produce by itself. It is found in one of three ways:

1. The template says it, by `{% generation %}`.
2. By the template's literals (`<|im_start|>assistant\\n` ... `<|im_end|>`), learned once from a probe conversation.
   This takes one rendering, and holds for templates that rewrite the content or drop the thinking of earlier turns.
   Where a row's own text contains such a literal, a copy of the row in which these are masked by as many other
   characters is rendered too: positions are the same, and which literals are the template's shows.
3. By rendering the conversation up to each turn, where a template or a row resists: each must begin the whole.

A row that none of them explains is refused: training on the wrong tokens shows nowhere.

What is trained on is the template's text, but for two habits that would teach a model the wrong thing:
- Where a turn is ended by the token that opens the next one (GLM-4.5), that token is part of the turn, and the one that
  would follow is put behind the last: the model stops by it.
- Where the thought of a turn after the last question is left out (DeepSeek-R1), the turn is given it.
"""

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ..formats.schemas import Conversation, UnusableRow
from .assistant_markers import CALLS, PROBE, Dialect, Turns, joined, learn, with_calls_as
from .limits import excess_of
from .reasoning_content import CLOSING, OPENING, is_shut, shows_calls, thought_of, with_thought, without_thought


class ChatTemplate:
    """The chat template of a tokenizer. Raises ValueError where it has none."""

    def __init__(self, tokenizer, **template_kwargs: Any):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which messages need: take an instruction-tuned model's tokenizer, "
                "put a chat_template.jinja into the model's folder, or train on plain text with megatron pt"
            )
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        check_template(tokenizer)
        self._file = _template_file(tokenizer)
        self._special_tokens = dict(tokenizer.special_tokens_map)
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(t) for t in sorted(added, key=len, reverse=True)) or "(?!)")
        self._dialects: dict[tuple[bool, str], Dialect | None] = {}
        self._call_forms: dict[bool, tuple[bool, bool]] = {}

    def text(self, conversation: Conversation, *, messages: list[dict] | None = None, prompt: bool = False) -> str:
        """The conversation (or other messages under its tools) as text; `prompt` adds the generation prompt."""
        return self._render(conversation, messages or conversation.messages, prompt, tagged=False)[0]

    def turns(self, conversation: Conversation) -> tuple[str, Turns]:
        """The text, and for each message of the assistant where in it its turn is: [start, end) in characters.

        Raises UnusableRow where the template refuses the conversation or leaves out what is to be learned, or where a
        turn cannot be told from the rest.
        """
        text, turns = self._turns(conversation)
        roles = [message["role"] for message in conversation.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        answers = [i for i, role in enumerate(roles) if role == "assistant"]
        lost = []
        for i, part in zip(answers, self._parts(conversation, text, turns), strict=True):
            message = conversation.messages[i]
            if not shows_calls(part, message):
                raise UnusableRow(
                    "the chat template leaves out tool calls (all, or all but a turn's first, or those beside a text): "
                    "give each call a turn of its own, without text, or take a template that shows them"
                )
            if i > last_user and conversation.weights[i] != 0 and thought_of(message) not in part:
                lost.append(i)
        return self._with_thoughts(conversation, answers, lost) if lost else (text, turns)

    def notes(self) -> list[str]:
        """Where what is trained on is not the template's text to the letter: for the log."""
        notes, dialect = [], self._dialect(Conversation(PROBE, []))
        if dialect and any(dialect.closers):
            closers = " or ".join(dict.fromkeys(filter(None, dialect.closers)))
            notes.append(
                f"the chat template ends a turn by the next one's {closers}: a last answer is given it as well"
            )
        answer = {"role": "assistant", "content": "<think>\nxxthoughtxx\n</think>\n\nxxanswerxx"}
        with suppress(UnusableRow):
            text = self.text(Conversation([PROBE[0], answer], []))
            if "xxanswerxx" in text and "xxthoughtxx" not in text:
                notes.append(
                    "the chat template leaves out thinking: turns after the last question are given theirs back"
                )
        return notes

    def opening(self, conversation: Conversation) -> str:
        """What the generation prompt has behind the header of the assistant's turn, for the model to go on from:
        `<think>\\n`, of some. A thought that the template puts into every turn counts too."""
        try:
            asked = replace(conversation, messages=PROBE[:1])
            prompted = self.text(asked, prompt=True).rpartition(PROBE[0]["content"])[2]
        except UnusableRow:
            return ""
        dialect, thought = self._dialect(conversation), OPENING.search(prompted)
        opening = dialect.prompt.removeprefix(dialect.header) if dialect else ""
        thought = prompted[thought.start() :] if thought else ""
        return max(opening, thought, key=len)

    def _turns(self, conversation: Conversation) -> tuple[str, Turns]:
        count = sum(message["role"] == "assistant" for message in conversation.messages)
        if self._is_tagged(conversation):
            text, turns = self._render(conversation, conversation.messages, False, tagged=True)
            if len(turns) != count:
                raise UnusableRow(f"the chat template marks {len(turns)} generations in {count} turns")
            return text, turns
        dialect = self._dialect(conversation)
        text = self._closed(conversation, dialect)
        turns = dialect and self._by_literals(text, conversation, dialect)
        if dialect and turns and len(turns) != count:
            turns = joined(turns, text, dialect.header)
        if not turns or len(turns) != count:
            turns = self._by_prefixes(text, conversation, dialect)
        return text, turns

    def _is_tagged(self, conversation: Conversation) -> bool:
        return _marks_generations(self._tokenizer.get_chat_template(None, conversation.tools))

    def _closed(self, conversation: Conversation, dialect: Dialect | None) -> str:
        """The text, with what ends its last turn where the next one would."""
        text, last = self.text(conversation), conversation.messages[-1]
        if dialect is None or last["role"] != "assistant":
            return text
        return text + dialect.closers[bool(last.get("tool_calls"))]

    def _parts(self, conversation: Conversation, text: str, turns: Turns) -> list[str]:
        """What the text says of each turn. Tags need not be around all of it."""
        if not self._is_tagged(conversation):
            return [text[start:end] for start, end in turns]
        edges = [0, *(edge for turn in turns for edge in turn), len(text)]
        return [text[edges[2 * n] : edges[2 * n + 3]] for n in range(len(turns))]

    def _with_thoughts(self, conversation: Conversation, answers: list[int], lost: list[int]) -> tuple[str, Turns]:
        """Likewise as `turns`, these messages with their thoughts: words stand for their contents in the template."""
        refusal = UnusableRow(
            "the chat template leaves out the thinking of a turn after the last question: take it out of the row "
            "(reasoning_content, thinking), write it into the content as the model does, or end the row with that turn"
        )
        dialect, opening = self._dialect(conversation), self.opening(conversation)
        if CLOSING.search(opening) or (dialect and CLOSING.search(dialect.header)):
            raise refusal  # thinking is shut off
        messages, said = list(conversation.messages), {}
        for i in lost:
            if (whole := with_thought(messages[i], opening)) is None:
                raise refusal
            said[i] = f"xxthought{i}xx", whole
            messages[i] = without_thought(messages[i], said[i][0])
        text, turns = self._turns(replace(conversation, messages=messages))
        moved, grown = [], 0
        for i, (start, end) in zip(answers, turns, strict=True):
            start, end = start + grown, end + grown
            if i in said:
                word, whole = said[i]
                at = text.find(word, start, end)
                if at < 0 or text.count(word) != 1 or not shows_calls(text[start:end], messages[i]):
                    raise refusal
                # DeepSeek-V3.1 shuts the thinking of each turn.
                begin = start if is_shut(text[start:at]) else at
                text = text[:begin] + whole + text[at + len(word) :]
                grown += len(whole) - len(word) - (at - begin)
                end += len(whole) - len(word) - (at - begin)
                if begin == start and dialect and text.startswith(dialect.prompt, start - len(dialect.header)):
                    start += len(dialect.prompt) - len(dialect.header)
            moved.append((start, end))
        return text, moved

    def _render(
        self, conversation: Conversation, messages: list[dict], prompt: bool, tagged: bool
    ) -> tuple[str, Turns]:
        if any(message.get("tool_calls") for message in messages):
            messages = with_calls_as(messages, *self._call_form(conversation))
        return self._render_formed(conversation, messages, prompt, tagged)

    def _call_form(self, conversation: Conversation) -> tuple[bool, bool]:
        """How the template takes calls: whether with arguments as text, and whether with no content for an empty one.
        Found by showing it one; most take what they are given."""
        key = bool(conversation.tools)
        if key not in self._call_forms:
            self._call_forms[key] = (False, False)
            called = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}]
            for as_text, absent in product((False, True), repeat=2):
                messages = with_calls_as(called, as_text, absent)
                try:
                    text, _ = self._render_formed(conversation, messages, False, tagged=False)
                except UnusableRow:
                    continue
                if "xxname0xx" in text and "xxcall0xx" in text:
                    self._call_forms[key] = as_text, absent
                    break
        return self._call_forms[key]

    def _render_formed(
        self, conversation: Conversation, messages: list[dict], prompt: bool, tagged: bool
    ) -> tuple[str, Turns]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        tools: Any = conversation.tools  # functions too, says its signature
        turns: Any

        try:
            texts, turns = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(None, conversation.tools),
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=tagged,
                **{**self._special_tokens, **self._template_kwargs, **conversation.template_kwargs},
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise UnusableRow(f"the chat template ({self._file.name}) refuses it: {error}") from error
        return texts[0], turns[0] if tagged else []

    def _dialect(self, conversation: Conversation) -> Dialect | None:
        key = bool(conversation.tools), str(conversation.template_kwargs)
        if key not in self._dialects:
            # Some tokenizers have a template of its own for tools: it is chosen by there being any.
            tools = conversation.tools and conversation.tools[:1]
            probe = Conversation(PROBE, [], tools, conversation.template_kwargs)
            try:
                self._dialects[key] = learn(
                    lambda messages, prompt=False: self.text(probe, messages=messages, prompt=prompt),
                    self._special,
                    self._tokenizer.bos_token,
                )
            except UnusableRow:
                self._dialects[key] = None
        return self._dialects[key]

    def _by_literals(self, text: str, conversation: Conversation, dialect: Dialect) -> Turns | None:
        own = _strings([conversation.messages, conversation.tools or []])
        if any(literal in string for string in own for literal in dialect.literals):
            masks = {literal: chr(0xE000 + i) * len(literal) for i, literal in enumerate(dialect.literals)}
            masked = Conversation(
                _masked(conversation.messages, masks),
                [],
                _masked(conversation.tools, masks),
                conversation.template_kwargs,
            )
            original, text = text, self._closed(masked, dialect)
            restored = text
            for literal, mask in masks.items():
                restored = restored.replace(mask, literal)
            if restored != original or any(mask[0] in original for mask in masks.values()):
                return None
        turns: Turns = []
        at = text.find(dialect.header)
        while at >= 0:
            following = text.find(dialect.header, at + len(dialect.header))
            start = at + len(dialect.prompt if text.startswith(dialect.prompt, at) else dialect.header)
            ends = [(place, len(end)) for end in dialect.ends if (place := text.find(end, start)) >= 0]
            if not ends:
                return None
            end = sum(min(ends))
            if text.find(dialect.opener, start, end) >= 0:
                return None
            turns.append((start, end))
            at = following
        return turns

    def _by_prefixes(self, text: str, conversation: Conversation, dialect: Dialect | None) -> Turns:
        turns = []
        for i, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            prompt = self.text(conversation, messages=conversation.messages[:i], prompt=True) if i else ""
            whole = self.text(conversation, messages=conversation.messages[: i + 1])
            if dialect and not text.startswith(prompt) and prompt.endswith(dialect.prompt):
                prompt = prompt.removesuffix(dialect.prompt) + dialect.header  # what it opens, a call does not
            if not (text.startswith(prompt) and text.startswith(whole) and len(prompt) <= len(whole)):
                raise UnusableRow(_rewriting(text, prompt, conversation))
            said = whole[len(prompt) :]
            for special in self._special.finditer(said):
                if not said[special.end() :].strip():
                    said = said[: special.end()]
                    break
            end = len(prompt) + len(said)
            for closer in dialect.closers if dialect else ():
                if closer and text.startswith(closer, end):
                    end += len(closer)
                    break
            turns.append((len(prompt), end))
        return turns


def _rewriting(text: str, prompt: str, conversation: Conversation) -> str:
    """Why a text does not begin with the prompt of one of its turns."""
    first = conversation.messages[0]
    system = first["content"].strip() if first["role"] == "system" else ""
    if system and system in prompt and system not in text:
        return (
            "the chat template shows the system prompt only while the last question has no answer: write it into the "
            "user's message, or drop it"
        )
    return "the chat template rewrites earlier turns: what the assistant says cannot be told apart"


def check_template(tokenizer: Any) -> None:
    """Raise ValueError, naming the file, where a tokenizer's chat template is broken, whatever the rows are."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = tokenizer.chat_template
    cure = "Fix it, or copy the file again from the original checkpoint"
    context = {"messages": PROBE[:2], "add_generation_prompt": False, **tokenizer.special_tokens_map}
    for name, template in templates.items() if isinstance(templates, dict) else [("", templates)]:
        if excess := excess_of(template, json.dumps(context, default=str)):
            raise ValueError(f"{_template_file(tokenizer, name)}: the chat template cannot be used: {excess}. {cure}")
        try:
            render_jinja_template([PROBE[:2]], chat_template=template, **tokenizer.special_tokens_map)
        except TemplateSyntaxError as error:
            where = f"{_template_file(tokenizer, name)}: the chat template has a syntax error in line {error.lineno}"
            raise ValueError(f"{where} ({error.message}). {cure}") from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            continue  # what it refuses of these words, it may take of rows
        except (ArithmeticError, RecursionError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(
                f"{_template_file(tokenizer, name)}: the chat template cannot be used ({reason}). {cure}"
            ) from error


def _template_file(tokenizer: Any, name: str = "") -> Path:
    """Where a tokenizer's chat template, or the one of this name, is written: in a file, or among the settings."""
    folder = Path(tokenizer.name_or_path or "?")
    files = f"additional_chat_templates/{name}.jinja", "chat_template.jinja"
    return next((folder / file for file in files if (folder / file).is_file()), folder / "tokenizer_config.json")


@cache
def _marks_generations(template: str) -> bool:
    return bool(re.search(r"\{%-?\s*generation\s*-?%\}", template))


def _strings(value: Any) -> list[str]:
    """All strings in a nested value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [string for pair in value.items() for item in pair for string in _strings(item)]
    if isinstance(value, list):
        return [string for item in value for string in _strings(item)]
    return []


def _masked(value: Any, masks: dict[str, str]) -> Any:
    """The value with each literal in its strings masked."""
    if isinstance(value, str):
        for literal, mask in masks.items():
            value = value.replace(literal, mask)
        return value
    if isinstance(value, dict):
        return {key: _masked(item, masks) for key, item in value.items()}
    return [_masked(item, masks) for item in value] if isinstance(value, list) else value
