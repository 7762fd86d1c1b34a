"""Rendering of conversations by the tokenizer's chat template, and location of the assistant's turns in the text.

An assistant turn extends from the end of the generation prompt through the token that ends the turn: all that the
model must generate. It is located in one of three ways:

1. By `{% generation %}` in the template.
2. By the template's literals (`<|im_start|>assistant\\n` ... `<|im_end|>`), learned once from a probe conversation.
   This takes one rendering, and works for templates that rewrite content or drop the thinking of earlier turns.
   If a row's text contains such a literal, a copy of the row with literals masked by text of the same length is
   rendered too, which shows the literals of the template.
3. By rendering the conversation up to each turn, each of which must be a prefix of the full text.

A row whose turns cannot be located is dropped, because training on wrong tokens would go unnoticed.

The trained text is the template's, with two corrections:
- If the token that starts the next turn also ends a turn (GLM-4.5), it is part of the turn, and is appended to the last
  turn, because the model stops by generating it.
- If the template omits the thought of a turn after the last question (DeepSeek-R1), the thought is inserted.
"""

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ..formats.medium import has_sentinels, to_blocks
from ..formats.schemas import Conversation, UnusableRow
from ..json_types import Json, JsonObject
from ..tokenizer import Tokenizer
from .assistant_markers import (
    CALLS,
    PROBE,
    AssistantMarkers,
    Spans,
    format_calls,
    learn_markers,
    merge_adjacent,
    special_tokens,
)
from .limits import exceeded_limit
from .reasoning_content import CLOSING, OPENING, is_closed, shows_calls, thought_of, with_thought, without_thought


class ChatTemplate:
    """Chat template of a tokenizer. Raises ValueError if it has none."""

    def __init__(self, tokenizer: Tokenizer, **template_kwargs: Json):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, which messages need. Use an instruction-tuned model's tokenizer, "
                "add a chat_template.jinja to the model's folder, or train on plain text with megatron pt."
            )
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        check_template(tokenizer)
        self._file = _template_file(tokenizer)
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._special = special_tokens(tokenizer)
        self._markers_by_probe: dict[tuple[bool, str], AssistantMarkers | None] = {}
        self._call_forms: dict[bool, tuple[bool, bool]] = {}

    def render(
        self, conversation: Conversation, *, messages: list[JsonObject] | None = None, prompt: bool = False
    ) -> str:
        """Return the conversation, or `messages` with its tools, as text; `prompt` adds the generation prompt."""
        return self._render(conversation, messages or conversation.messages, prompt, tagged=False)[0]

    def assistant_turns(self, conversation: Conversation) -> tuple[str, Spans]:
        """Return the text, and the span of each assistant message in it.

        Raises UnusableRow if the template refuses the conversation or omits trained content, or if a turn cannot be
        located.
        """
        text, turns = self._locate_turns(conversation)
        roles = [message["role"] for message in conversation.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        answers = [i for i, role in enumerate(roles) if role == "assistant"]
        omitted = []
        for i, turn_text in zip(answers, self._turn_texts(conversation, text, turns), strict=True):
            message = conversation.messages[i]
            if not shows_calls(turn_text, message):
                raise UnusableRow(
                    "the chat template omits tool calls (all, or all but a turn's first, or those beside a text): "
                    "write each call as a turn of its own, without text, or use a template that renders them"
                )
            if i > last_user and conversation.weights[i] != 0 and thought_of(message) not in turn_text:
                omitted.append(i)
        return self._insert_thoughts(conversation, answers, omitted) if omitted else (text, turns)

    def notes(self) -> list[str]:
        """Return notes for the log on deviations of the trained text from the template's."""
        notes, markers = [], self._markers(Conversation(PROBE, []))
        if markers and any(markers.closers):
            closers = " or ".join(dict.fromkeys(filter(None, markers.closers)))
            notes.append(f"the chat template ends a turn by the next one's {closers}: it is appended to a last answer")
        answer = {"role": "assistant", "content": "<think>\nxxthoughtxx\n</think>\n\nxxanswerxx"}
        with suppress(UnusableRow):
            text = self.render(Conversation([PROBE[0], answer], []))
            if "xxanswerxx" in text and "xxthoughtxx" not in text:
                notes.append("the chat template omits thinking: it is inserted into turns after the last question")
        return notes

    def answer_prefix(self, conversation: Conversation) -> str:
        """Return what the generation prompt adds after the assistant's header, such as `<think>\\n`.

        This includes a thought that the template inserts into every turn.
        """
        try:
            probe = replace(conversation, messages=PROBE[:1])
            prompted = self.render(probe, prompt=True).rpartition(PROBE[0]["content"])[2]
        except UnusableRow:
            return ""
        markers, thought = self._markers(conversation), OPENING.search(prompted)
        prefix = markers.prompt.removeprefix(markers.header) if markers else ""
        thought = prompted[thought.start() :] if thought else ""
        return max(prefix, thought, key=len)

    def without_end(self, turn: str) -> str:
        """Return the text of a turn without the special token that ends it."""
        body = turn.rstrip()
        end = next((token for token in self._tokenizer.all_special_tokens if token and body.endswith(token)), "")
        return body.removesuffix(end) if end else turn

    def _locate_turns(self, conversation: Conversation) -> tuple[str, Spans]:
        count = sum(message["role"] == "assistant" for message in conversation.messages)
        if self._has_generation_tags(conversation):
            text, turns = self._render(conversation, conversation.messages, False, tagged=True)
            if len(turns) != count:
                raise UnusableRow(f"the chat template marks {len(turns)} generations in {count} turns")
            return text, turns
        markers = self._markers(conversation)
        text = self._closed_text(conversation, markers)
        turns = markers and self._locate_by_literals(text, conversation, markers)
        if markers and turns and len(turns) != count:
            turns = merge_adjacent(turns, text, markers.header)
        if not turns or len(turns) != count:
            turns = self._locate_by_prefixes(text, conversation, markers)
        return text, turns

    def _has_generation_tags(self, conversation: Conversation) -> bool:
        return _marks_generations(self._tokenizer.get_chat_template(None, conversation.tools))

    def _closed_text(self, conversation: Conversation, markers: AssistantMarkers | None) -> str:
        """Return the text, with the token of the next turn that ends the last turn."""
        text, last = self.render(conversation), conversation.messages[-1]
        if markers is None or last["role"] != "assistant":
            return text
        return text + markers.closers[bool(last.get("tool_calls"))]

    def _turn_texts(self, conversation: Conversation, text: str, turns: Spans) -> list[str]:
        """Return the text of each turn and around it: `{% generation %}` need not enclose the whole turn."""
        if not self._has_generation_tags(conversation):
            return [text[start:end] for start, end in turns]
        edges = [0, *(edge for turn in turns for edge in turn), len(text)]
        return [text[edges[2 * n] : edges[2 * n + 3]] for n in range(len(turns))]

    def _insert_thoughts(self, conversation: Conversation, answers: list[int], omitted: list[int]) -> tuple[str, Spans]:
        """Return text and turns with the thoughts of the messages `omitted` inserted.

        The template renders placeholders instead of their contents.
        """
        refusal = UnusableRow(
            "the chat template omits the thinking of a turn after the last question: remove it from the row "
            "(reasoning_content, thinking), write it into the content as the model does, or end the row with that turn"
        )
        markers, prefix = self._markers(conversation), self.answer_prefix(conversation)
        if CLOSING.search(prefix) or (markers and CLOSING.search(markers.header)):
            raise refusal  # thinking is disabled
        messages, contents = list(conversation.messages), {}
        for i in omitted:
            if (content := with_thought(messages[i], prefix)) is None:
                raise refusal
            contents[i] = f"xxthought{i}xx", content
            messages[i] = without_thought(messages[i], contents[i][0])
        text, turns = self._locate_turns(replace(conversation, messages=messages))
        shifted_turns, shift = [], 0
        for i, (start, end) in zip(answers, turns, strict=True):
            start, end = start + shift, end + shift
            if i in contents:
                word, content = contents[i]
                position = text.find(word, start, end)
                if position < 0 or text.count(word) != 1 or not shows_calls(text[start:end], messages[i]):
                    raise refusal
                # DeepSeek-V3.1 closes the thinking of each turn.
                insertion = start if is_closed(text[start:position]) else position
                text = text[:insertion] + content + text[position + len(word) :]
                growth = len(content) - len(word) - (position - insertion)
                shift, end = shift + growth, end + growth
                if insertion == start and markers and text.startswith(markers.prompt, start - len(markers.header)):
                    start += len(markers.prompt) - len(markers.header)
            shifted_turns.append((start, end))
        return text, shifted_turns

    def _render(
        self, conversation: Conversation, messages: list[JsonObject], prompt: bool, tagged: bool
    ) -> tuple[str, Spans]:
        if any(message.get("tool_calls") for message in messages):
            messages = format_calls(messages, *self._call_form(conversation))
        return self._render_formatted(conversation, messages, prompt, tagged)

    def _call_form(self, conversation: Conversation) -> tuple[bool, bool]:
        """Return the arguments of `format_calls` for this template, found by rendering one call."""
        key = bool(conversation.tools)
        if key not in self._call_forms:
            self._call_forms[key] = (False, False)
            probe = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}]
            for form in product((False, True), (False, True)):
                try:
                    text, _ = self._render_formatted(conversation, format_calls(probe, *form), False, tagged=False)
                except UnusableRow:
                    continue
                if "xxname0xx" in text and "xxcall0xx" in text:
                    self._call_forms[key] = form
                    break
        return self._call_forms[key]

    def _render_formatted(
        self, conversation: Conversation, messages: list[JsonObject], prompt: bool, tagged: bool
    ) -> tuple[str, Spans]:
        messages = [_with_blocks(message, is_needed=self._needs_blocks) for message in messages]
        return self._render_messages(conversation, messages, prompt, tagged)

    @cached_property
    def _needs_blocks(self) -> bool:
        """Whether the template shows a text only in a list of blocks, as LLaVA's does."""
        text, is_shown = "xxtextxx", []
        for content in (text, to_blocks(text)):
            messages: list[JsonObject] = [{"role": "user", "content": content}]
            try:
                is_shown.append(text in self._render_messages(Conversation([], []), messages, False, tagged=False)[0])
            except UnusableRow:
                is_shown.append(False)
        return is_shown == [False, True]

    def _render_messages(
        self, conversation: Conversation, messages: list[JsonObject], prompt: bool, tagged: bool
    ) -> tuple[str, Spans]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        turns: Any  # transformers' annotation omits the spans

        try:
            texts, turns = render_jinja_template(
                conversations=[messages],
                tools=conversation.tools,  # pyright: ignore[reportArgumentType]  annotated as dicts or functions
                chat_template=self._tokenizer.get_chat_template(None, conversation.tools),
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=tagged,
                **{**self._special_tokens, **self._template_kwargs, **conversation.template_kwargs},
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise UnusableRow(f"the chat template ({self._file.name}) refuses it: {error}") from error
        return texts[0], turns[0] if tagged else []

    def _markers(self, conversation: Conversation) -> AssistantMarkers | None:
        key = bool(conversation.tools), str(conversation.template_kwargs)
        if key not in self._markers_by_probe:
            # Some tokenizers have a separate template for conversations with tools.
            tools = conversation.tools and conversation.tools[:1]
            probe = Conversation(PROBE, [], tools, conversation.template_kwargs)
            try:
                self._markers_by_probe[key] = learn_markers(
                    lambda messages, prompt=False: self.render(probe, messages=messages, prompt=prompt),
                    self._special,
                    self._tokenizer.bos_token,
                )
            except UnusableRow:
                self._markers_by_probe[key] = None
        return self._markers_by_probe[key]

    def _locate_by_literals(self, text: str, conversation: Conversation, markers: AssistantMarkers) -> Spans | None:
        strings = _strings([*conversation.messages, *(conversation.tools or [])])
        if any(literal in string for string in strings for literal in markers.literals):
            masks = {literal: chr(0xE000 + i) * len(literal) for i, literal in enumerate(markers.literals)}
            masked = Conversation(
                _mask(conversation.messages, masks),
                [],
                _mask(conversation.tools, masks),
                conversation.template_kwargs,
            )
            original, text = text, self._closed_text(masked, markers)
            restored = text
            for literal, mask in masks.items():
                restored = restored.replace(mask, literal)
            if restored != original or any(mask[0] in original for mask in masks.values()):
                return None
        turns: Spans = []
        header = text.find(markers.header)
        while header >= 0:
            next_header = text.find(markers.header, header + len(markers.header))
            start = header + len(markers.prompt if text.startswith(markers.prompt, header) else markers.header)
            ends = [(position, len(end)) for end in markers.ends if (position := text.find(end, start)) >= 0]
            if not ends:
                return None
            end = sum(min(ends))
            if text.find(markers.opener, start, end) >= 0:
                return None
            turns.append((start, end))
            header = next_header
        return turns

    def _locate_by_prefixes(self, text: str, conversation: Conversation, markers: AssistantMarkers | None) -> Spans:
        turns = []
        for i, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(conversation, messages=conversation.messages[:i], prompt=True) if i else ""
            prefix = self.render(conversation, messages=conversation.messages[: i + 1])
            if markers and not text.startswith(prompt) and prompt.endswith(markers.prompt):
                prompt = (
                    prompt.removesuffix(markers.prompt) + markers.header
                )  # a turn of calls lacks the answer's prefix
            if not (text.startswith(prompt) and text.startswith(prefix) and len(prompt) <= len(prefix)):
                raise UnusableRow(_rewrite_reason(text, prompt, conversation))
            turn = prefix[len(prompt) :]
            for special in self._special.finditer(turn):
                if not turn[special.end() :].strip():
                    turn = turn[: special.end()]
                    break
            end = len(prompt) + len(turn)
            for closer in markers.closers if markers else ():
                if closer and text.startswith(closer, end):
                    end += len(closer)
                    break
            turns.append((len(prompt), end))
        return turns


def _with_blocks(message: JsonObject, *, is_needed: bool) -> JsonObject:
    """Return a message with its images and videos as content blocks. is_needed: also without them"""
    content = message["content"]
    return {**message, "content": to_blocks(content)} if content and (is_needed or has_sentinels(content)) else message


def _rewrite_reason(text: str, prompt: str, conversation: Conversation) -> str:
    """Return the reason why a text does not start with the prompt of one of its turns."""
    first = conversation.messages[0]
    system = first["content"].strip() if first["role"] == "system" else ""
    if system and system in prompt and system not in text:
        return (
            "the chat template renders the system prompt only before the last question is answered: write it into the "
            "user's message, or remove it"
        )
    return "the chat template rewrites earlier turns: the assistant's turns cannot be located"


def check_template(tokenizer: Tokenizer) -> None:
    """Raise ValueError, naming the file, if a tokenizer's chat template fails for every row."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = tokenizer.chat_template
    fix = "Fix it, or copy the file again from the original checkpoint"
    special: dict[str, Any] = {**tokenizer.special_tokens_map}
    context = {"messages": PROBE[:2], "add_generation_prompt": False, **special}
    for name, template in templates.items() if isinstance(templates, dict) else [("", templates or "")]:
        file = _template_file(tokenizer, name)
        if limit := exceeded_limit(template, json.dumps(context, default=str)):
            raise ValueError(f"{file}: the chat template cannot be used: {limit}. {fix}")
        try:
            render_jinja_template([PROBE[:2]], chat_template=template, **special)
        except TemplateSyntaxError as error:
            problem = f"the chat template has a syntax error in line {error.lineno} ({error.message})"
            raise ValueError(f"{file}: {problem}. {fix}") from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            continue  # it may accept other messages
        except (ArithmeticError, RecursionError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{file}: the chat template cannot be used ({reason}). {fix}") from error


def _template_file(tokenizer: Tokenizer, name: str = "") -> Path:
    """Return the file of a tokenizer's chat template, or of its additional template `name`."""
    folder = Path(tokenizer.name_or_path or "?")
    files = f"additional_chat_templates/{name}.jinja", "chat_template.jinja"
    return next((folder / file for file in files if (folder / file).is_file()), folder / "tokenizer_config.json")


@cache
def _marks_generations(template: str) -> bool:
    return bool(re.search(r"\{%-?\s*generation\s*-?%\}", template))


def _strings(value: Json) -> list[str]:
    """Return all strings in a nested value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [string for pair in value.items() for item in pair for string in _strings(item)]
    if isinstance(value, list):
        return [string for item in value for string in _strings(item)]
    return []


def _mask[T](value: T, masks: dict[str, str]) -> T:
    """Return a nested value with each literal in its strings masked."""
    masked = value
    if isinstance(masked, str):
        for literal, mask in masks.items():
            masked = masked.replace(literal, mask)
    elif isinstance(masked, dict):
        masked = {key: _mask(item, masks) for key, item in masked.items()}
    elif isinstance(masked, list):
        masked = [_mask(item, masks) for item in masked]
    return masked  # pyright: ignore[reportReturnType]
