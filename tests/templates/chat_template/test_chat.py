"""Tokens and trained spans of conversations, against transformers' apply_chat_template."""

import re
from itertools import product

import numpy as np
import pytest
from megaswift.templates.chat_template.chat import ChatTemplate
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.formats.schemas import to_conversation
from megaswift.templates.options import TemplateOptions

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
U1, A1 = {"role": "user", "content": "Is  it?\n"}, {"role": "assistant", "content": " \n\nIt is better. "}
U2, A2 = {"role": "user", "content": "Why <b>now</b>?"}, {"role": "assistant", "content": "\nNow é 漢 is better 🎈"}
THOUGHT = {"role": "assistant", "content": "<think>\nHard, so:\n</think>\n\nNever."}
SYSTEM = {"role": "system", "content": "Be flat."}
CONVERSATIONS = {
    "one turn": [U1, A1],
    "two turns": [U1, A1, U2, A2],
    "system": [SYSTEM, U1, A2],
    "thinking in both turns": [U1, THOUGHT, U2, THOUGHT],
    "thinking in the first turn": [SYSTEM, U1, THOUGHT, U2, A2],
    "assistant twice": [U1, A1, A2, U2, A2],
    "ends with the user": [U1, A1, U2],
    "the end token in a content": [{"role": "user", "content": "<|im_end|> and <|eot_id|>?"}, A1, U2, A2],
    "a whole turn in a content": [{"role": "user", "content": "<|im_start|>assistant\nHa!<|im_end|>\n"}, A1],
    "the end token in what the assistant says": [U1, {"role": "assistant", "content": "a<|im_end|>b"}, U2, A2],
}
TEMPLATES_TRIED = ["chatml", "llama3", "qwen3", "llama2", "tagged"]
TOOL_CONVERSATION = [
    U1, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, A1, U2, A2,
]  # fmt: skip


def encode(tokenizer, row: dict, **options) -> tuple[list[int], np.ndarray]:
    """Return the token ids and loss weights of a row from the code under test."""
    documents, dropped = Encoder(tokenizer, TemplateOptions(**options), "sft", {}).encode([(0, "row 1", row)])
    assert not dropped.counts, dropped
    [(ids, runs)] = documents[0].documents
    return ids.tolist(), np.repeat([weight for _, weight in runs], [tokens for tokens, _ in runs])


def said(tokenizer, row: dict, **options) -> list[str]:
    """Return the spans of text that are trained on."""
    ids, weights = encode(tokenizer, row, **options)
    edges = np.flatnonzero(np.diff(weights)) + 1
    return [
        tokenizer.decode(run) for run, w in zip(np.split(ids, edges), np.split(weights, edges), strict=True) if w[0]
    ]


@pytest.mark.parametrize(("template", "name"), list(product(TEMPLATES_TRIED, CONVERSATIONS)))
def test_ids_are_those_of_apply_chat_template(make_tokenizer, template, name):
    tokenizer, messages = make_tokenizer(template), CONVERSATIONS[name]
    if template == "llama2" and name == "ends with the user":
        messages = messages[:-1]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert encode(tokenizer, {"messages": messages})[0] == expected


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tagged_templates_train_on_what_transformers_masks(make_tokenizer, name):
    tokenizer, messages = make_tokenizer("tagged"), CONVERSATIONS[name]
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, weights = encode(tokenizer, {"messages": messages})
    assert ids == out["input_ids"]
    assert weights.tolist() == out["assistant_masks"]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_chatml_trains_on_what_its_tagged_sibling_masks(make_tokenizer, name):
    """transformers' mask for the template with generation tags is the reference for the one without."""
    plain, tagged = make_tokenizer("chatml"), make_tokenizer("tagged")
    tagged.chat_template = tagged.chat_template.replace("message.content | trim", "message.content")
    messages = CONVERSATIONS[name]
    out = tagged.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, weights = encode(plain, {"messages": messages})
    assert ids == out["input_ids"]
    assert weights.tolist() == out["assistant_masks"]


@pytest.mark.parametrize(("template", "name"), list(product(["chatml", "llama3"], CONVERSATIONS)))
def test_literals_and_prefixes_agree(make_tokenizer, template, name):
    """Turns located by literals equal those located by rendering the conversation up to each turn."""
    chat = ChatTemplate(make_tokenizer(template))
    conversation = to_conversation({"messages": CONVERSATIONS[name]})
    text = chat.render(conversation)
    markers = chat._markers(conversation)
    assert markers is not None
    assert chat._locate_by_literals(text, conversation, markers) == chat._locate_by_prefixes(
        text, conversation, markers
    )


def test_the_model_learns_what_it_must_produce(make_tokenizer):
    """Each trained span starts after the generation prompt and ends with its turn, even if history is rewritten."""
    qwen3 = make_tokenizer("qwen3")
    both = {"messages": CONVERSATIONS["thinking in both turns"]}
    assert said(qwen3, both) == ["Never.<|im_end|>", "<think>\nHard, so:\n</think>\n\nNever.<|im_end|>"]
    empty = {"messages": [U1, {"role": "assistant", "content": "Yes."}]}
    assert said(qwen3, empty) == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert said(qwen3, empty, enable_thinking=False) == ["Yes.<|im_end|>"]
    assert said(make_tokenizer("llama3"), empty) == ["Yes.<|eot_id|>"]
    assert said(make_tokenizer("llama2"), empty) == [" Yes. <|im_end|>"]
    twice = {"messages": [U1, THOUGHT, {"role": "assistant", "content": "Ever."}]}
    assert said(qwen3, twice)[-1] == "<think>\n\n</think>\n\nEver.<|im_end|>"


def test_a_prompt_that_opens_the_thinking(make_tokenizer):
    """Thinking models' prompts end in <think>: it is given in the last turn, and absent from the history."""
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = re.sub(
        r"\{\{- '<\|im_start\|>assistant\\n' \}\}\s*\{%- if enable_thinking.*?endif %\}",
        lambda _: "{{- '<|im_start|>assistant\\n<think>\\n' }}",
        tokenizer.chat_template,
    )
    prompt = tokenizer.apply_chat_template([U1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("assistant\n<think>\n")
    row = {"messages": CONVERSATIONS["thinking in both turns"]}
    assert said(tokenizer, row) == ["Never.<|im_end|>", "Hard, so:\n</think>\n\nNever.<|im_end|>"]


def test_tools(make_tokenizer):
    row = {"messages": TOOL_CONVERSATION, "tools": TOOLS}
    for template in ("qwen3", "llama3"):
        tokenizer = make_tokenizer(template)
        expected = tokenizer.apply_chat_template(TOOL_CONVERSATION, tools=TOOLS, tokenize=True, return_dict=False)
        assert encode(tokenizer, row)[0] == expected
    assert (
        said(make_tokenizer("qwen3"), row)[0]
        == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert said(make_tokenizer("llama3"), row)[:2] == [
        '<|python_tag|>{"name": "add", "arguments": {"a": 1}}<|eom_id|>', "It is better.<|eot_id|>",
    ]  # fmt: skip


def test_loss_scale_and_the_messages_own_loss(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    row = {"messages": [U1, A1, U2, A2]}
    first, second = A1["content"] + "<|im_end|>", A2["content"] + "<|im_end|>"
    assert [text.strip() for text in said(tokenizer, row)] == [first.strip(), second.strip()]
    assert said(tokenizer, row, loss_scale="last_round") == said(tokenizer, row)[1:]
    assert encode(tokenizer, row, loss_scale="all")[1].min() == 1
    after_a_tool = {"messages": [U1, A1, U2, A1, {"role": "tool", "content": "2"}, A2]}
    assert len(said(tokenizer, after_a_tool, loss_scale="last_round")) == 2

    silent = {"messages": [U1, A1, U2, {**A2, "loss": False}]}
    assert said(tokenizer, silent) == said(tokenizer, row)[:1]
    assert second.strip() not in "".join(said(tokenizer, silent, loss_scale="all"))
    loud = {"messages": [U1, {**A1, "loss": True}, U2, A2]}
    assert len(said(tokenizer, loud, loss_scale="last_round")) == 2
    half = {"messages": [U1, {**A1, "loss": 0.5}, U2, A2]}
    assert sorted(set(encode(tokenizer, half)[1].tolist())) == [0, 0.5, 1]


def test_system_prompt(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer("chatml")
    (tmp_path / "system.txt").write_text("Be dense.\n")
    for system, expected in (("Be flat.", "Be flat."), (str(tmp_path / "system.txt"), "Be dense.")):
        ids, _ = encode(tokenizer, {"query": "a", "response": "b"}, system=system)
        assert tokenizer.decode(ids).startswith(f"<|im_start|>system\n{expected}<|im_end|>")
    ids, _ = encode(tokenizer, {"query": "a", "response": "b", "system": "Mine."}, system="Be flat.")
    assert "Mine." in tokenizer.decode(ids)
    assert "flat" not in tokenizer.decode(ids)


def test_truncation(make_tokenizer):
    tokenizer, row = make_tokenizer("chatml"), {"messages": [U1, A1, U2, A2]}
    ids, weights = encode(tokenizer, row)
    for strategy, part in (("left", slice(-20, None)), ("right", slice(0, 40))):
        length = 20 if strategy == "left" else 40
        cut_ids, cut_weights = encode(tokenizer, row, max_length=length, truncation_strategy=strategy)
        assert cut_ids == ids[part]
        assert cut_weights.tolist() == weights[part].tolist()
    _, dropped = Encoder(tokenizer, TemplateOptions(max_length=9), "sft", {}).encode([(0, "x line 7", row)])
    assert str(dropped) == f"  1 row longer than --max_length 9 ({len(ids)} tokens) (x line 7)"
    right = TemplateOptions(max_length=5, truncation_strategy="right")
    assert "none of its tokens is trained on" in str(Encoder(tokenizer, right, "sft", {}).encode([(0, "", row)])[1])


@pytest.mark.parametrize("post_processor", [False, True])
def test_pretraining_text(make_tokenizer, post_processor):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(None)
    if post_processor:  # as Llama's, which puts <bos> first
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            "<|endoftext|> $A", None, [("<|endoftext|>", 0)]
        )
    text = "Flat is better than nested. " * 5
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    for row in ({"text": text}, {"messages": [{"role": "assistant", "content": text}]}):
        [(_, [(ids, runs)], *_)], _ = Encoder(tokenizer, TemplateOptions(), "pt", {}).encode([(0, "", row)])
        assert (ids.tolist(), runs) == (whole, [(len(whole), 1.0)])
    split = TemplateOptions(max_length=16, truncation_strategy="split")
    documents, _ = Encoder(tokenizer, split, "pt", {}).encode([(0, "", {"text": text})])
    pieces = [ids for sample in documents for ids, _ in sample.documents]
    assert [token for ids in pieces for token in ids] == whole
    assert {len(ids) for ids in pieces[:-1]} == {16}


def test_long_rows_are_tokenized_in_groups(make_tokenizer, monkeypatch):
    rows = [(i, "", {"query": "Is it?" * i, "response": "Never. " * i}) for i in range(1, 9)]
    whole, _ = Encoder(make_tokenizer(), TemplateOptions(), "sft", {}).encode(rows)
    monkeypatch.setattr("megaswift.templates.dataset.tokenize.GROUP_CHARACTERS", 150)
    groups, _ = Encoder(make_tokenizer(), TemplateOptions(), "sft", {}).encode(rows)
    found, expected = (
        [(number, ids.tolist(), runs) for number, [(ids, runs)], *_ in samples] for samples in (groups, whole)
    )
    assert found == expected


def test_what_does_not_fit_together(make_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        Encoder(make_tokenizer(None), TemplateOptions(), "sft", {})
    with pytest.raises(ValueError, match="truncation_strategy split: for plain text"):
        Encoder(make_tokenizer(), TemplateOptions(truncation_strategy="split"), "sft", {})
    with pytest.raises(ValueError, match="--system, --enable_thinking: for conversations"):
        Encoder(make_tokenizer(), TemplateOptions(system="Be flat."), "pt", {})


def test_a_template_that_refuses(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    _, dropped = Encoder(tokenizer, TemplateOptions(), "sft", {}).encode([(0, "x line 1", {"messages": [U1, A1]})])
    expected = "  1 row: the chat template (tokenizer_config.json) refuses it: roles must alternate (x line 1)"
    assert str(dropped) == expected


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for m in messages %}\n{{ m.content }}\n{% if %}",
            r"has a syntax error in line 3 \(Expected an expression",
        ),
        ("{{ messages", r"has a syntax error in line 1 \("),
        ("{% for i in range(100000000) %}x{% endfor %}", r"cannot be used \(Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"cannot be used \(maximum recursion depth"),
        ("{{ 1 // 0 }}", r"cannot be used \(integer "),
        ("{{ 'x' * 10**10 }}", r"cannot be used: it needs more than 2 GiB of memory"),
    ],
)
def test_a_broken_template_is_named_before_any_row(make_tokenizer, tmp_path, template, problem):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = template
    with pytest.raises(
        ValueError, match=rf"^\?/tokenizer_config\.json: the chat template {problem}.*\. Fix it, or copy"
    ):
        Encoder(tokenizer, TemplateOptions(), "sft", {})
    tokenizer.save_pretrained(tmp_path)
    tokenizer = type(tokenizer).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/chat_template\.jinja: the chat template {problem}"):
        Encoder(tokenizer, TemplateOptions(), "prompts", {})


def test_answers_that_are_empty_are_not_learned(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result, empty = {"role": "tool", "content": "2"}, {"role": "assistant", "content": " \n"}
    rows = [
        {"query": "q", "response": ""},
        {"messages": [U1, empty]},
        {"messages": [U1, empty, U2, A2]},
        {"messages": [U1, called, result, empty]},
        {"messages": [U1, called, result, A1], "tools": TOOLS},
        {"messages": [U1, called], "tools": TOOLS},
        {"messages": [U1, {**empty, "content": "<think>\nHard.\n</think>\n\n"}]},
        {"messages": [U1, {**empty, "loss": False}, U2, A2]},
    ]
    numbered = [(number, f"x line {number + 1}", row) for number, row in enumerate(rows)]
    samples, dropped = Encoder(tokenizer, TemplateOptions(), "sft", {}).encode(numbered)
    assert [sample.row for sample in samples] == [4, 5, 6, 7]
    assert dropped.places == {
        "its answer is empty": ["x line 1", "x line 2"],
        "one of its answers is empty": ["x line 3", "x line 4"],
    }
    last_round = Encoder(tokenizer, TemplateOptions(loss_scale="last_round"), "sft", {})
    assert [sample.row for sample in last_round.encode(numbered[2:3])[0]] == [2]


def test_how_long_dropped_rows_are(make_tokenizer):
    encoder = Encoder(make_tokenizer(None), TemplateOptions(max_length=9), "pt", {})
    rows = [(number, f"x line {number + 1}", {"text": "?" * number}) for number in (5, 1300, 12, 40)]
    assert str(encoder.encode(rows)[1]) == (
        "  3 rows longer than --max_length 9 (shortest 13, longest 1,301 tokens) (x line 1301, x line 13, x line 41)"
    )


def test_a_template_whose_turns_cannot_be_told(make_tokenizer):
    """A template that reverses the conversation: rows must be dropped."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages | reverse %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    _, dropped = Encoder(tokenizer, TemplateOptions(), "sft", {}).encode([(0, "", {"messages": [U1, A1, U2, A2]})])
    assert "cannot be located" in str(dropped)
