"""Tokens between two answers, against the chat templates of known models and TRL."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
from megaswift.templates.chat_template.continuation import Continuation
from megaswift.templates.formats.schemas import UnusableRow
from trl import GRPOTrainer

USER = [{"role": "user", "content": "Again, please."}]
TOOL = [{"role": "tool", "name": "sum", "content": "42"}]
TOOLS = [*TOOL, {"role": "tool", "name": "sum", "content": "43"}]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Well?"}]
PUBLISHED = Path(trl.__file__).parent / "chat_templates"


def between(tokenizer, messages, answer, columns=None, **more) -> str:
    """As text."""
    ends = {tokenizer.convert_tokens_to_ids(end) for end in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")}
    return tokenizer.decode(Continuation(tokenizer, ends, **more)(messages, columns or {}, tokenizer.encode(answer)))


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
@pytest.mark.parametrize("messages", [USER, [*USER, *TOOL], TOOL])
def test_the_whole_conversation_is_the_template_s(name, messages, make_tokenizer):
    """Prompt, answers and the tokens between them equal the rendered conversation if the template rewrites nothing."""
    tokenizer = make_tokenizer(name)
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    said = [{"role": "assistant", "content": "No."}]
    whole = tokenizer.apply_chat_template([*ASKED, *said, *messages], add_generation_prompt=True, tokenize=False)
    assert prompt + f"No.{end}" + between(tokenizer, messages, f"No.{end}") == whole
    if (name, messages) == ("llama3", TOOL):  # whose calls end otherwise than what it says
        whole = whole.replace("No.<|eot_id|>", "No.<|eom_id|>")
    assert prompt + "No." + between(tokenizer, messages, "No.") == whole  # ended by a text, not by its end token


def test_thinking_that_the_template_drops_stays(make_tokenizer):
    """Qwen3's template takes the thinking out of turns before the last question: what was drawn is not looked at."""
    tokenizer = make_tokenizer("qwen3")
    thought = "<think>\nhm\n</think>\n\nNo."
    said = {"role": "assistant", "content": thought}
    assert "hm" not in tokenizer.apply_chat_template([*ASKED, said, *USER], tokenize=False)
    found = between(tokenizer, USER, f"{thought}<|im_end|>")
    assert found == "\n<|im_start|>user\nAgain, please.<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_of_the_template(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    shut = "<think>\n\n</think>\n\n"
    assert between(tokenizer, USER, "No.<|im_end|>", enable_thinking=False).endswith(shut)
    columns = {"chat_template_kwargs": {"enable_thinking": False}}
    assert between(tokenizer, USER, "No.<|im_end|>", columns).endswith(shut)
    assert not between(tokenizer, USER, "No.<|im_end|>").endswith(shut)


def test_other_ends(make_tokenizer):
    """One of the model's end tokens that is not the template's ends a turn as well."""
    tokenizer = make_tokenizer("chatml")
    assert between(tokenizer, USER, "No.<|endoftext|>") == between(tokenizer, USER, "No.<|im_end|>")


def test_a_turn_that_the_next_one_s_header_ends(make_tokenizer):
    """A template like GLM-4's, in which the next turn's first token ends a turn."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ('<|python_tag|>' if m.role == 'assistant' else '<|eom_id|>') + m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|python_tag|>' }}{% endif %}"
    )
    assert between(tokenizer, USER, "No.<|eom_id|>") == "Again, please.<|python_tag|>"
    assert between(tokenizer, USER, "No.<|im_end|>") == "<|eom_id|>Again, please.<|python_tag|>"


def test_what_a_template_refuses(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- endfor", "{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}{%- endfor"
    )
    assert between(tokenizer, USER, "No.<|im_end|>")
    with pytest.raises(UnusableRow, match=r"the chat template \(.*\) refuses it: no tools here"):
        between(tokenizer, TOOL, "No.<|im_end|>")


# Templates of models that call tools, and the tokens by which these end a turn.
MODELS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "gptoss": "<|call|>",
    "glm4moe": "<|observation|>",
    "nemotron_3_nano": "<|im_end|>",
    "lfm2": "<|im_end|>",
}


@pytest.mark.parametrize("name", MODELS)
def test_published_templates_as_trl_has_them(name, make_tokenizer):
    """TRL makes the tokens of a tool's results in a way of its own; of a template that rewrites turns, with one that it
    has mended."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = (PUBLISHED / f"{name}.jinja").read_text()
    special = {MODELS[name], "<tool_call>", "</tool_call>", "<|call|>", "<|end|>", "<|start|>", "<|message|>"}
    special |= {"<|channel|>", "<|return|>", "<|user|>", "<|assistant|>"}
    tokenizer.add_tokens(sorted(special - set(tokenizer.get_vocab())), special_tokens=True)
    tokenizer.eos_token = MODELS[name]
    schema = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {}}}
    theirs = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=None, chat_template_kwargs={}, _is_vlm=False
    )
    if name == "qwen3":
        theirs.chat_template = (PUBLISHED / "qwen3_training.jinja").read_text()
    wanted = tokenizer.decode(GRPOTrainer._get_tool_suffix_ids(theirs, TOOL))  # type: ignore[arg-type]
    ends = {tokenizer.eos_token_id}
    found = Continuation(tokenizer, ends)(TOOL, {"tools": json.dumps([schema])}, [5, tokenizer.eos_token_id])
    assert tokenizer.decode(found) == wanted
    assert "42" in wanted
