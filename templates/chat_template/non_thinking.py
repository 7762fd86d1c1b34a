"""Empty thoughts before answers without one: `--add_non_thinking_prefix`."""

from dataclasses import replace

from ..formats.schemas import Conversation, UnusableRow
from .assistant_markers import PROBE, Spans
from .chat import ChatTemplate
from .reasoning_content import OPENING, thought_of

OFF = {"enable_thinking": False, "thinking": False}  # arguments by which chat templates disable thinking


def non_thinking_prefix(template: ChatTemplate, conversation: Conversation) -> str:
    """Return what the generation prompt adds where thinking is disabled; "" if it adds nothing."""
    probe = replace(conversation, messages=PROBE[:1])
    try:
        usual = template.render(probe, prompt=True)
        disabled = template.render(replace(probe, template_kwargs=probe.template_kwargs | OFF), prompt=True)
    except UnusableRow:
        return ""
    return disabled.removeprefix(usual) if disabled.startswith(usual) else ""


def add_prefixes(template: ChatTemplate, conversation: Conversation, text: str, turns: Spans) -> tuple[str, Spans]:
    """Return text and turns with the prefix in turns after the last question that have no thought, as part of the turn.

    The template drops the thoughts of earlier turns.
    """
    prefix = non_thinking_prefix(template, conversation)
    if not prefix:
        return text, turns
    roles = [message["role"] for message in conversation.messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    shifted, shift = [], 0
    for i, (start, end) in zip(answers, turns, strict=True):
        start, end = start + shift, end + shift
        turn = text[start:end].lstrip()
        has_thought = turn.startswith(prefix.strip()) or OPENING.match(turn) or thought_of(conversation.messages[i])
        if i > last_user and not has_thought and not text[:start].endswith(prefix):
            text, end, shift = text[:start] + prefix + text[start:], end + len(prefix), shift + len(prefix)
        shifted.append((start, end))
    return text, shifted
