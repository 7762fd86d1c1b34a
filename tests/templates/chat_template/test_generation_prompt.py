"""Answer prefixes under the chat templates of known models."""

from pathlib import Path

import pytest
import trl
from megaswift.templates.chat_template.generation_prompt import GenerationPrompts
from transformers import AutoTokenizer

from tests import tiny

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
ASKED = [{"role": "user", "content": "Well?"}]
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture
def tokenizer(tmp_path):
    tiny.save_tokenizer(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    found.add_tokens(["<think>", "</think>"])
    return found


def prompt(tokenizer, messages=ASKED, **given) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **given)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("qwen2_5", {}, ""),
        ("qwen3", {}, ""),
        ("qwen3", {"enable_thinking": False}, EMPTY),
        ("qwen3_5_think", {}, "<think>\n"),
        ("qwen3_5_think", {"enable_thinking": False}, EMPTY),
        ("qwen3_8", {}, "<think>\n"),  # every turn has a thought, an empty one too
        ("nemotron_3_nano", {}, "<think>\n"),  # likewise, without the line's end
        ("nemotron_3_nano", {"enable_thinking": False}, "<think></think>"),
        ("glm4moe", {}, ""),
        ("deepseek_r1_distill", {}, "<think>\n"),
        ("llama3_1", {}, ""),
    ],
)
def test_what_the_generation_prompt_opens(name, given, wanted, tokenizer):
    """By the run's arguments of the template, or by the row's own."""
    tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text()
    before = prompt(tokenizer, **given)
    assert tokenizer.decode(before).endswith(wanted)
    assert GenerationPrompts(tokenizer, **given)({}, before) == wanted
    assert GenerationPrompts(tokenizer)({"chat_template_kwargs": given, "system": "Be brief."}, before) == wanted


def test_what_else_a_template_may_open(tokenizer):
    """Any words; but the end of a line alone is none, and where it leaves them out they are not there."""
    plain = tokenizer.chat_template
    tokenizer.chat_template = plain.replace("assistant\n' }}", "assistant\nLet me see. <think>' }}")
    assert GenerationPrompts(tokenizer)({}, prompt(tokenizer)) == "Let me see. <think>"
    assert GenerationPrompts(tokenizer)({}, tokenizer.encode("What else?")) == ""
    tokenizer.chat_template = plain.replace("assistant\n' }}", "assistant\n\n\n' }}")
    assert GenerationPrompts(tokenizer)({}, prompt(tokenizer)) == ""


def test_behind_the_result_of_a_tool(tokenizer):
    """R1's template has no generation prompt there."""
    tokenizer.chat_template = (PUBLISHED / "deepseek_r1_distill.jinja").read_text()
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    before = prompt(tokenizer, [*ASKED, called, {"role": "tool", "content": "42"}])
    assert "<think>" not in tokenizer.decode(before)
    assert GenerationPrompts(tokenizer)({}, before) == ""


def test_special_tokens_are_left_out(make_tokenizer):
    """As of what is drawn."""
    tokenizer = make_tokenizer("qwen3")  # whose <think> is special
    before = prompt(tokenizer, enable_thinking=False)
    assert tokenizer.decode(before, skip_special_tokens=True).endswith("assistant\n\n\n\n\n")
    assert GenerationPrompts(tokenizer, enable_thinking=False)({}, before) == ""
    tokenizer.chat_template = tokenizer.chat_template.replace("'<think>\\n\\n</think>", "'<think>\\nNone.\\n</think>")
    before = prompt(tokenizer, enable_thinking=False)
    assert GenerationPrompts(tokenizer, enable_thinking=False)({}, before) == "\nNone.\n\n\n"
