"""Placeholders of self-cognition rows: what replaces them in which language, and rows in which one is left."""

import json

import pytest
from megaswift.templates.formats.self_cognition import SelfCognition
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

ZH = {"query": "你是谁", "response": "我是{{NAME}}由{{AUTHOR}}训练。", "tag": "zh"}
EN = {"query": "Who are you?", "response": "I am {{NAME}}, made by {{AUTHOR}}.", "tag": "en"}


@pytest.mark.parametrize(
    ("names", "authors", "chinese", "english"),
    [
        (["小黄", "Huang"], ["魔搭", "ModelScope"], "我是小黄由魔搭训练。", "I am Huang, made by ModelScope."),
        (["Bob"], ["swift"], "我是Bob由swift训练。", "I am Bob, made by swift."),
    ],
)
def test_the_language_chooses_the_value(names, authors, chinese, english):
    fill = SelfCognition(names, authors).fill
    assert (fill(ZH)["response"], fill(EN)["response"]) == (chinese, english)
    for row, text in ((ZH, chinese), (EN, english)):
        untagged = {name: value for name, value in row.items() if name != "tag"}
        assert fill(untagged) == untagged | {"response": text}
        messages = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": row["response"]}]
        assert fill({"messages": messages})["messages"][1]["content"] == text
        assert fill({"messages": json.dumps(messages, ensure_ascii=False)})["messages"] == json.dumps(
            [messages[0], {"role": "assistant", "content": text}], ensure_ascii=False
        )


def test_the_tag_goes_before_the_characters():
    row = {"query": "Who are you (你)?", "response": "{{NAME}}", "tag": "en"}
    assert SelfCognition(["小黄", "Huang"], []).fill(row)["response"] == "Huang"


def test_other_rows_and_columns_stay():
    row = {"query": "q", "response": "a {{name}} {{x}}", "template": "{{NAME}}"}
    assert SelfCognition([], []).fill(row) is row
    literal = {"query": "q", "response": "Hello {{NAME}}"}
    assert SelfCognition(["{{NAME}}"], []).fill(literal) == literal


@pytest.mark.parametrize("streaming", [False, True])
def test_a_placeholder_left_is_an_error(tmp_path, make_tokenizer, streaming):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (EN, ZH)))
    options = PrepareOptions(dataset=[str(tmp_path / "rows.jsonl")], model_name=["Bob"], streaming=streaming)
    with pytest.raises(ValueError, match=r"rows.jsonl line 1: .*{{AUTHOR}}.*--model_name and --model_author"):
        assert prepare(options, make_tokenizer(), stage="sft").report


def test_three_values_and_empty_ones_are_refused():
    with pytest.raises(ValueError, match="--model_name a b c: has 3 values"):
        SelfCognition(["a", "b", "c"], [])
    with pytest.raises(ValueError, match=r"--model_author 'a' '': has an empty text\. Set one, or remove it\."):
        SelfCognition(["a"], ["a", ""])


def test_the_cache_knows_the_values(tmp_path, make_tokenizer):
    (tmp_path / "rows.jsonl").write_text(json.dumps(EN) + "\n")

    def answer(name: str) -> str:
        options = PrepareOptions(dataset=[str(tmp_path / "rows.jsonl")], model_name=[name], model_author=["us"])
        ids, weights = prepare(options, make_tokenizer(), stage="sft").train.row(0)[0]
        return make_tokenizer().decode(ids[weights > 0])

    assert [answer(name) for name in ("Ann", "Bob", "Ann")] == [
        f"I am {name}, made by us.<|im_end|>" for name in ("Ann", "Bob", "Ann")
    ]
