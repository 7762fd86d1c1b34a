"""Weights of an answer's parts, worked out by hand, and empty thoughts before answers."""

import json

import numpy as np
import pytest
from megaswift.templates.chat_template.loss_scale import PRESETS, LossScale
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.options import PrepareOptions, TemplateOptions
from megaswift.templates.prepare import prepare

EMPTY, THOUGHT = "<think>\n\n</think>\n\n", "<think>\nHm.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add"}\n</tool_call>'
CHANNEL = "<|channel>thought\n<channel|>"
REACT = "Thought: I add.\nAction: add\nAction Input: 1\nObservation: 2\nFinal Answer: 2"


@pytest.mark.parametrize(
    ("value", "answer", "expected"),
    [
        ("default", EMPTY + "Yes.", [(EMPTY + "Yes.", 1)]),
        ("ignore_empty_think", EMPTY + "Yes.", [(EMPTY, 0), ("Yes.", 1)]),
        ("ignore_empty_think", THOUGHT + "Yes.", [(THOUGHT + "Yes.", 1)]),
        ("ignore_empty_think", "Yes. " + EMPTY, [("Yes. " + EMPTY, 1)]),
        ("ignore_empty_think", "</think>\n\nYes.", [("</think>\n\n", 0), ("Yes.", 1)]),
        ("ignore_empty_think", f"{CHANNEL}Yes.", [(CHANNEL, 0), ("Yes.", 1)]),
        ("ignore_think_prefix", THOUGHT + "Yes.", [("<think>\n", 0), ("Hm.\n</think>\n\nYes.", 1)]),
        ("hermes", f"So {CALL}\n{CALL}!", [("So ", 1), (CALL, 2), ("\n", 1), (CALL, 2), ("!", 1)]),
        ("last_round+hermes+ignore_empty_think", EMPTY + CALL, [(EMPTY, 0), (CALL, 2)]),
        ("hermes+hermes", CALL, [(CALL, 4)]),
        (
            "react", REACT,
            [("Thought:", 1), (" I add.\n", 1), ("Action:", 2), (" add\n", 2), ("Action Input:", 2), (" 1\n", 2),
             ("Observation:", 2), (" 2\n", 0), ("Final Answer:", 1), (" 2", 1)],
        ),
        ("alpha_umi", "Go. Next: caller", [("Go. ", 1), ("Next:", 2), (" caller", 2)]),
        (
            "qwen", "✿FUNCTION✿: add ✿RESULT✿: 2 ✿RETURN✿: 2",
            [("✿FUNCTION✿:", 2), (" add ", 2), ("✿RESULT✿:", 2), (" 2 ", 0), ("✿RETURN✿:", 1), (" 2", 1)],
        ),
        ("agentflan", "Name: add", [("Name:", 1), (" add", 3)]),
    ],
)  # fmt: skip
def test_parts_by_hand(value, answer, expected):
    assert LossScale.parse(value).parts(answer, "q") == expected


def test_agentflan_reads_the_question():
    parts = LossScale.parse("agentflan").parts("Name: add", "What is the tool you want to use?")
    assert parts == [("Name: add", 3.0)]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"--loss_scale hermes\+x: 'x' is unknown.*ignore_empty_think"):
        LossScale.parse("hermes+x")
    for name in PRESETS:
        LossScale.parse(f"all+{name}")


def encode(tokenizer, row, stage="sft", **options) -> tuple[str, list[tuple[str, float]]]:
    """Return the text of the last document, and its runs of equal weight above 0."""
    [sample], dropped = Encoder(tokenizer, TemplateOptions(**options), stage, {}).encode([(0, "row 1", row)])
    assert not dropped.counts, dropped
    ids, runs = sample.documents[-1]
    weights = np.repeat([weight for _, weight in runs], [tokens for tokens, _ in runs])
    edges = np.flatnonzero(np.diff(weights)) + 1
    pieces = zip(np.split(ids, edges), np.split(weights, edges), strict=True)
    return tokenizer.decode(ids), [(tokenizer.decode(part), float(w[0])) for part, w in pieces if w[0]]


@pytest.mark.parametrize("template", ["chatml", "qwen3", "tagged"])
def test_tokens_get_the_weights_of_their_parts(make_tokenizer, template):
    row = {"query": "q", "response": f"So {CALL}"}
    start = EMPTY if template == "qwen3" else ""
    _, parts = encode(make_tokenizer(template), row, loss_scale="hermes")
    assert parts == [(f"{start}So ", 1), (CALL, 2), ("<|im_end|>", 1)]  # the token that ends the turn has the weight 1
    _, parts = encode(make_tokenizer(template), row, loss_scale="all+hermes")
    assert (CALL, 2) in parts
    assert "q" in parts[0][0]


def test_the_rounds_and_a_messages_own_weight(make_tokenizer):
    messages = [{"role": role, "content": CALL} for role in ("user", "assistant") * 2]
    tokenizer = make_tokenizer()
    assert encode(tokenizer, {"messages": messages}, loss_scale="hermes")[1] == [(CALL, 2), ("<|im_end|>", 1)] * 2
    last = encode(tokenizer, {"messages": messages}, loss_scale="last_round+hermes")[1]
    assert last == [(CALL, 2), ("<|im_end|>", 1)]
    messages[1] = messages[1] | {"loss": 0.5}
    own = encode(tokenizer, {"messages": messages}, loss_scale="last_round+hermes")[1]
    assert own == [(f"{CALL}<|im_end|>", 0.5), *last]


def test_preferences_take_the_parts_but_not_their_weights(make_tokenizer):
    """The losses of pairs sum log-probabilities: a part counts or not."""
    row = {"query": "q", "response": "x", "rejected_response": f"<think>\nHm. {CALL}"}
    options = {"loss_scale": "last_round+ignore_think_prefix+hermes"}
    assert encode(make_tokenizer(), row, "preference", **options)[1] == [(f"Hm. {CALL}<|im_end|>", 1)]


def test_the_divisor_is_the_sum_of_the_weights(make_tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "q", "response": f"So {CALL}"}) + "\n")
    options = PrepareOptions(dataset=[str(tmp_path / "rows.jsonl")], loss_scale="hermes")
    tokenizer = make_tokenizer()
    store = prepare(options, tokenizer, stage="sft").train
    tokens = [len(tokenizer.encode(text, add_special_tokens=False)) for text in ("So ", CALL)]
    assert store.weights[0] == tokens[0] + 2 * tokens[1] + 1


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "d"},
]


def test_empty_thoughts_after_the_last_question(make_tokenizer):
    """The template puts one into the last turn; the flag puts one into the calls before it, too."""
    tokenizer = make_tokenizer("qwen3")
    plain, flagged = (
        encode(tokenizer, {"messages": TURNS}, add_non_thinking_prefix=value, loss_scale="last_round")
        for value in (False, True)
    )
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    assert [text.lstrip("\n") for text, _ in plain[1]] == [call, f"{EMPTY}d<|im_end|>"]
    assert [part.split("\n\n</think>\n\n")[0] for part, _ in flagged[1]] == ["<think>", "<think>"]
    assert flagged[0].count(EMPTY) == plain[0].count(EMPTY) + 1
    assert flagged[0].replace(EMPTY, "") == plain[0].replace(EMPTY, "")
    masked = encode(tokenizer, {"messages": TURNS}, add_non_thinking_prefix=True, loss_scale="ignore_empty_think")
    assert masked[0] == flagged[0]
    assert [text.lstrip("\n") for text, _ in masked[1]] == ["b<|im_end|>", call, "d<|im_end|>"]


def test_a_thought_stays(make_tokenizer):
    row = {"query": "a", "response": THOUGHT + "b"}
    for options in ({}, {"add_non_thinking_prefix": True}):
        assert encode(make_tokenizer("qwen3"), row, **options)[1] == [(f"{THOUGHT}b<|im_end|>", 1)]


def test_a_template_without_thoughts_is_named(make_tokenizer):
    options = TemplateOptions(add_non_thinking_prefix=True)
    [note] = Encoder(make_tokenizer("chatml"), options, "sft", {}).renderer.notes()
    assert note.startswith("--add_non_thinking_prefix: no effect")
    assert not Encoder(make_tokenizer("qwen3"), options, "sft", {}).renderer.notes()
