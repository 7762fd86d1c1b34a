"""Published chat templates with habits of their own. The reference is transformers under TRL's templates for training,
which mark what the assistant says, or under the template itself."""

# ruff: noqa: RUF001 (DeepSeek's tokens have wide bars)

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from megaswift.templates.chat_template.chat import ChatTemplate
from megaswift.templates.chat_template.continuation import Continuation
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.options import TemplateOptions
from megaswift.templates.prepare import PrepareOptions, prepare

from tests.templates.chat_template.test_chat import encode, said

PUBLISHED = Path(trl.__file__).parent / "chat_templates"
END = "<｜end▁of▁sentence｜>"
TOKENS = (
    "<|user|> <|assistant|> <|observation|> <|system|> [gMASK] <sop> <tool_call> </tool_call> <|start|> <|channel|> "
)
TOKENS += (
    "<|message|> <|end|> <|return|> <|call|> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
)
TOKENS += f"<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁end｜> {END}"


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é", "b": 2}}}
RESULT = {"role": "tool", "content": "42", "name": "add"}
THOUGHT = "<think>\nHard, so:\n</think>\n\nNever."
TWO = [user("Is it?"), answer("Never."), user("Why?"), answer("So.")]
THINKING = [user("Is it?"), answer(THOUGHT), user("Why?"), answer(THOUGHT)]
REASONED = [user("Is it?"), answer("Never."), user("Why?"), answer("Never.", reasoning_content="Hard, so:")]
CALLED = [user("Is it?"), answer("", tool_calls=[CALL]), RESULT, answer("Yes."), user("Why?"), answer("So.")]
TWICE = [user("Is it?"), answer("", tool_calls=[CALL, CALL]), RESULT, RESULT, answer("Yes.")]


@pytest.fixture
def published(make_tokenizer):
    def make(name, template=None):
        tokenizer = make_tokenizer("chatml")
        tokenizer.add_tokens(TOKENS.split(), special_tokens=True)
        tokenizer.chat_template = template or (PUBLISHED / f"{name}.jinja").read_text()
        return tokenizer

    return make


def refusal(tokenizer, row) -> str:
    samples, dropped = Encoder(tokenizer, TemplateOptions(), "sft", {}).encode([(0, "", row)])
    assert not samples
    return str(dropped)


def ids_of(tokenizer, messages, **more):
    return tokenizer.apply_chat_template(messages, return_dict=False, **more)


@pytest.mark.parametrize(
    "messages",
    [
        TWO, THINKING, REASONED, CALLED, CALLED[:2], TWICE, TWO[:3],
        [user("<|user|>?"), answer("A <|user|> is no <|observation|>.")],
    ],
)  # fmt: skip
def test_glm_learns_to_stop(messages, published):
    """No token of its own ends a turn: the next one's does, which TRL's template puts into the turn."""
    wanted = published("glm4moe_training").apply_chat_template(
        messages, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, weights = encode(published("glm4moe"), {"messages": messages, "tools": TOOLS})
    assert ids == wanted["input_ids"]
    assert weights.tolist() == wanted["assistant_masks"]


def test_glm_in_other_ways(published):
    """A second answer in turn has no such token before it. Prompts go as they are."""
    glm = published("glm4moe")
    twice = {"messages": [user("Is it?"), answer("Yes."), answer("No.")]}
    assert said(glm, twice) == ["\n<think></think>\nYes.", "\n<think></think>\nNo.<|user|>"]
    [(_, [(ids, _), (answered, _)], *_)], _ = Encoder(glm, TemplateOptions(), "answered", {}).encode(
        [(0, "", {"messages": TWO})]
    )
    assert ids.tolist() == ids_of(glm, TWO[:3], add_generation_prompt=True)
    assert answered.tolist() == [*ids_of(glm, TWO), glm.convert_tokens_to_ids("<|user|>")]


def test_the_log_says_so(published, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TWO}))
    options = PrepareOptions(dataset=[str(tmp_path / "rows.jsonl")])
    report = prepare(options, published("glm4moe"), stage="sft").report
    assert "ends a turn by the next one's <|user|> or <|observation|>: it is appended to a last answer" in report
    [note] = ChatTemplate(published("deepseekv3")).notes()
    assert "omits thinking" in note
    assert not any(ChatTemplate(published(name)).notes() for name in ("qwen3", "gptoss", "phi3_5", "llama3_1"))


@pytest.mark.parametrize(
    "messages", [THINKING[2:], REASONED[2:], [user("Why?"), answer("Hard, so:\n</think>\n\nNever.")]]
)
def test_r1_learns_its_thought(messages, published):
    """Its template drops it from each turn. TRL's for training leaves it where it is."""
    row = {"messages": messages}
    wanted = ids_of(published("deepseek_r1_distill_training"), THINKING[2:])
    for name in ("deepseek_r1_distill", "deepseekv3"):
        tokenizer = published(name)
        assert encode(tokenizer, row)[0] == wanted
        assert said(tokenizer, row) == [f"Hard, so:\n</think>\n\nNever.{END}"]
        prompt = ids_of(tokenizer, messages[:1], add_generation_prompt=True)
        assert wanted[: len(prompt)] == prompt
        earlier = {"messages": [*THINKING[:2], *messages]}
        assert said(tokenizer, earlier) == [f"\n\nNever.{END}", f"Hard, so:\n</think>\n\nNever.{END}"]


def test_r1_s_answers_that_differ_in_thinking_alone(published):
    row = {"messages": THINKING[2:], "rejected_response": "<think>\nEasy.\n</think>\n\nNever."}
    tokenizer = published("deepseek_r1_distill")
    samples, dropped = Encoder(tokenizer, TemplateOptions(), "preference", {}).encode([(0, "", row)])
    assert not dropped.counts
    chosen, rejected = (tokenizer.decode(ids) for ids, _ in samples[0].documents)
    assert "Hard" in chosen
    assert rejected == chosen.replace("Hard, so:", "Easy.")


def test_r1_thinks_between_calls(published):
    """Behind a tool's result the prompt opens no thought: it is in the turn."""
    row = {
        "messages": [user("?"), answer("", tool_calls=[CALL], thinking="Hm."), RESULT, answer("Yes.", thinking="So.")]
    }
    first, second = said(published("deepseekv3"), row)
    assert first.startswith("Hm.\n</think>\n\n<｜tool▁calls▁begin｜>")
    assert second == f"<think>\nSo.\n</think>\n\nYes.{END}"


def test_a_template_that_shuts_each_turn_s_thinking(published):
    """As DeepSeek-V3.1's: asked to think, the model goes on from <think>, and what it said lies behind </think>."""
    tokenizer = published(
        None,
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}"
        "{{ '<｜Assistant｜></think>' + m.content.split('</think>')[-1] + '" + END + "' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}",
    )
    row: dict[str, Any] = {"messages": [user("?"), answer("<think>Hm.</think>Yes.")]}
    assert "write it into the content" in refusal(tokenizer, row)
    row["chat_template_kwargs"] = {"thinking": True}
    assert tokenizer.decode(encode(tokenizer, row)[0]) == f"<｜User｜>?<｜Assistant｜><think>Hm.</think>Yes.{END}"
    assert said(tokenizer, row) == [f"Hm.</think>Yes.{END}"]
    row["messages"][1]["content"] = "Yes."
    assert said(tokenizer, row) == [f"</think>Yes.{END}"]


@pytest.mark.parametrize("key", ["thinking", "reasoning_content"])
def test_gpt_oss_learns_its_thought(key, published):
    """Of two headers: TRL marks the turn with its first one."""
    messages = [user("Is it?"), answer("Never."), user("Why?"), answer("So.", **{key: "Hm."})]
    theirs = [*messages[:3], answer("So.", thinking="Hm.")]
    tokenizer = published("gptoss")
    out = published("gptoss_training").apply_chat_template(theirs, return_dict=True, return_assistant_tokens_mask=True)
    ids, weights = encode(tokenizer, {"messages": messages})
    assert ids == out["input_ids"] == ids_of(tokenizer, theirs)
    headers = 2 * tokenizer.encode("<|start|>assistant")
    assert sum(out["assistant_masks"]) - sum(weights) == len(headers)
    assert said(tokenizer, {"messages": messages}) == [
        "<|channel|>final<|message|>Never.<|end|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
    ]


def test_gpt_oss_calls(published):
    tokenizer = published("gptoss")
    row = {"messages": CALLED, "tools": TOOLS}
    assert encode(tokenizer, row)[0] == ids_of(tokenizer, CALLED, tools=TOOLS)
    assert [text.rpartition("<|")[2] for text in said(tokenizer, row)] == ["call|>", "end|>", "return|>"]
    thought = [user("?"), answer("", tool_calls=[CALL], thinking="Hm.")]
    assert said(tokenizer, {"messages": thought, "tools": TOOLS})[0].startswith(
        "<|channel|>analysis<|message|>Hm.<|end|>"
    )
    assert "omits tool calls" in refusal(tokenizer, {"messages": TWICE, "tools": TOOLS})
    dropped = {"messages": [*thought, RESULT, answer("Yes.")], "tools": TOOLS}
    assert "omits the thinking of a turn after the last question" in refusal(tokenizer, dropped)
    silent = {"messages": [thought[0], {**thought[1], "loss": False}, RESULT, answer("Yes.")], "tools": TOOLS}
    assert len(said(tokenizer, silent)) == 1


def test_thoughts_that_a_template_does_not_know(published):
    tokenizer = published("qwen2_5")
    assert "remove it from the row" in refusal(tokenizer, {"messages": REASONED})
    assert said(tokenizer, {"messages": THINKING})[1] == f"{THOUGHT}<|im_end|>"


@pytest.mark.parametrize("name", ["phi3", "phi3_5"])
def test_phi_prints_an_end_but_before_answers(name, published):
    tokenizer = published(name)
    ids, _ = encode(tokenizer, {"messages": TWO})
    assert ids == ids_of(tokenizer, TWO)
    assert said(tokenizer, {"messages": TWO}) == ["Never.<|end|>", "So.<|end|>"]
    assert "omits tool calls" in refusal(tokenizer, {"messages": CALLED})


def test_a_system_prompt_that_an_answer_hides(published):
    """As of Mistral 7B v0.3 and Nemo."""
    tokenizer = published(
        None,
        "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    )
    assert said(tokenizer, {"messages": TWO}) == [" Never.<|im_end|>", " So.<|im_end|>"]
    system = {"role": "system", "content": "Be brief."}
    reason = refusal(tokenizer, {"messages": [system, *TWO]})
    assert "renders the system prompt only before the last question is answered" in reason
    assert "write it into the user's message" in reason


@pytest.mark.parametrize(("name", "messages"), [("deepseekv3", CALLED[:4]), ("deepseek_r1_distill", TWICE)])
def test_arguments_and_contents_as_deepseek_s_templates_take_them(name, messages, published):
    """JSON as text, and of R1's no content beside calls."""
    tokenizer = published(name)
    function = {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"], ensure_ascii=False)}
    calls = [{"type": "function", "function": function} for _ in messages[1]["tool_calls"]]
    theirs = [messages[0], {"role": "assistant", "content": None, "tool_calls": calls}, *messages[2:]]
    assert encode(tokenizer, {"messages": messages})[0] == ids_of(tokenizer, theirs)
    first, second = said(tokenizer, {"messages": messages})
    assert first.startswith("<｜tool▁calls▁begin｜>")
    assert first.endswith(f"<｜tool▁calls▁end｜>{END}")
    assert second == f"Yes.{END}"
    ends = {tokenizer.convert_tokens_to_ids(END)}
    assert "42" in tokenizer.decode(Continuation(tokenizer, ends)([RESULT], {}, [5, *ends]))


def test_calls_beside_a_text_that_r1_hides(published):
    messages = [user("?"), answer("Let me see.", tool_calls=[CALL]), RESULT, answer("Yes.")]
    assert "omits tool calls" in refusal(published("deepseek_r1_distill"), {"messages": messages})
    assert said(published("deepseekv3"), {"messages": messages})[0].startswith("Let me see.<｜tool▁calls▁begin｜>")
