"""`swift infer` on a run's own evaluation data, its metrics, and what reaches the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.main import read_options
from megaswift.tasks import infer, infer_engine
from megaswift.tasks.infer_data import InferPrompt, RunData, read_prompts
from megaswift.tasks.infer_metrics import METRICS
from megaswift.tasks.options import InferOptions
from megaswift.tasks.run.args_json import save_args
from megaswift.templates.formats.schemas import Conversation
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

from tests.cli.conftest import DENSE, write_model
from tests.tasks.test_infer import TEMPLATE, dataset_of, model  # noqa: F401  (a fixture)

THINKING = TEMPLATE + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"  # fmt: skip  # noqa: E501


def rows_of(folder: Path, name: str, count: int) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"query": f"{name} {i}?", "response": str(i)}) + "\n" for i in range(count)))
    return str(file)


def questions(options: InferOptions) -> list[str]:
    prompts = read_prompts(options, RunData.of(options))
    return [prompt.conversation.messages[-1]["content"] for prompt in prompts]


@pytest.mark.parametrize("settings", [{}, {"data_seed": 7, "dataset_shuffle": False}])
def test_the_rows_are_those_that_training_set_aside(settings: dict, model, tmp_path, monkeypatch) -> None:  # noqa: F811
    """Of two datasets, of one of which some rows are taken: as `prepare` has them in its evaluation store."""
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    options = PrepareOptions(
        dataset=[rows_of(tmp_path, "one", 40) + "#30", rows_of(tmp_path, "two", 25)],
        split_dataset_ratio=0.2,
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    store = prepare(options, tokenizer, stage="sft").val
    assert store is not None
    texts = [tokenizer.decode(store.row(number)[0][0]) for number in range(len(store))]
    checkpoint = tmp_path / "run" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    save_args(checkpoint / "args.json", options, {})
    asked = questions(InferOptions(model=str(checkpoint), load_data_args=True))
    assert len(asked) == len(texts) == 6 + 5
    assert {question for question in asked if any(question in text for text in texts)} == set(asked)


def test_options_of_the_run_stand_where_none_is_set(tmp_path: Path) -> None:
    """ms-swift's args.json too, which is flat; the run's folder has it for its checkpoints."""
    (tmp_path / "checkpoint-5").mkdir()
    data = rows_of(tmp_path, "one", 3).removesuffix(".jsonl") + ".jsonl"
    Path(data).write_text('{"q": "Who are you, {{NAME}}?", "response": "I."}\n')
    run = {
        "dataset": ["/gone"], "val_dataset": [data], "columns": {"q": "query"}, "system": "Be brief.",
        "model_name": ["Swift"], "model_author": ["us"], "enable_thinking": False, "split_dataset_ratio": 0.0,
    }  # fmt: skip
    (tmp_path / "args.json").write_text(json.dumps(run))
    options = InferOptions(model=str(tmp_path / "checkpoint-5"), load_data_args=True)
    run_data = RunData.of(options)
    completed = run_data.complete(options)
    assert (completed.enable_thinking, completed.system) == (False, "Be brief.")
    (prompt,) = read_prompts(completed, run_data)
    assert prompt.conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you, Swift?"},
    ]
    assert prompt.label == "I."
    own = InferOptions(model=options.model, load_data_args=True, system="Mine.", enable_thinking=True)
    assert (run_data.complete(own).enable_thinking, run_data.complete(own).system) == (True, "Mine.")
    (tmp_path / "args.json").write_text(json.dumps(run | {"val_dataset": []}))
    with pytest.raises(ValueError, match="the run evaluated nothing"):
        questions(options)
    (tmp_path / "args.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no args\.json"):
        questions(options)


class Echo:
    """Engine that answers each prompt by its own length, and remembers the file's lines at each call."""

    def __init__(self, path: Path):
        self.path, self.calls = path, list[tuple[int, int]]()

    def encode(self, conversation: Conversation, row_name: str) -> list[int]:
        return [0] * len(conversation.messages[-1]["content"])

    def generate(self, prompts: list[list[int]]) -> list[str]:
        self.calls.append((len(prompts), len(self.path.read_text().splitlines())))
        return [str(len(prompt)) for prompt in prompts]


@pytest.mark.parametrize(
    ("write", "calls"),
    [
        (None, [(2, 0), (2, 2), (1, 4)]),
        (4, [(2, 0), (2, 0), (1, 4)]),
        (3, [(2, 0), (1, 0), (2, 3)]),
        (-1, [(2, 0), (2, 0), (1, 0)]),
    ],
)
def test_rows_are_written_together(write: int | None, calls: list, tmp_path: Path, capsys) -> None:
    path = tmp_path / "answers.jsonl"
    path.touch()
    prompts = [
        InferPrompt(Conversation([{"role": "user", "content": "x" * n}], [None]), str(n % 3)) for n in range(1, 6)
    ]
    engine: Any = Echo(path)
    infer.answer(engine, prompts, path, InferOptions(max_batch_size=2, write_batch_size=write, metric="acc"))
    assert engine.calls == calls
    assert [json.loads(line)["response"] for line in path.read_text().splitlines()] == ["1", "2", "3", "4", "5"]
    assert '{"acc": 0.4}' in capsys.readouterr().out
    unlabelled = [InferPrompt(prompt.conversation, None) for prompt in prompts]
    with pytest.raises(ValueError, match="--metric acc: no row of the dataset has a response"):
        infer.answer(engine, unlabelled, path, InferOptions(metric="acc"))


def test_rouge_worked_by_hand() -> None:
    """Six words of seven in common, four pairs, and a subsequence of three. A Chinese character is a word."""
    answer, label = "the cat sat on the mat", "on the mat the cat sat down"
    assert METRICS["rouge"]([(answer, label)]) == {
        "rouge-1": round(100 * 2 * 6 / 13, 6), "rouge-2": round(100 * 2 * 4 / 11, 6), "rouge-l": round(100 * 6 / 13, 6)
    }  # fmt: skip
    assert METRICS["rouge"]([("你好 吗", "你 好"), ("", "a")])["rouge-1"] == round(100 * (2 * 2 / 5 + 0) / 2, 6)
    assert METRICS["acc"]([("a", "a"), ("a ", "a"), ("b", "a"), ("", "")]) == {"acc": 0.5}


@pytest.mark.parametrize("thinking", [None, True, False])
def test_thinking_is_the_templates_variable(thinking: bool | None, model, tmp_path, monkeypatch, capsys) -> None:  # noqa: F811
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    monkeypatch.setattr(infer_engine, "load_tokenizer", lambda folder: tokenizer)
    messages = [{"role": "user", "content": "Why?"}]
    for template, note in ((THINKING, False), (TEMPLATE, thinking is not None)):
        tokenizer.chat_template = template
        engine = infer.TransformersChat(model, None, InferOptions(enable_thinking=thinking))
        given = {} if thinking is None else {"enable_thinking": thinking}
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)
        assert engine.encode(Conversation(messages, [None])).ids == expected["input_ids"]
        assert ("--enable_thinking has no effect" in capsys.readouterr().out) == note


def test_the_kernel_is_transformers(model) -> None:  # noqa: F811
    for backend, kernel in (("auto", "sdpa"), ("unfused", "eager")):
        engine = infer.TransformersChat(model, None, InferOptions(attention_backend=backend))  # pyright: ignore[reportArgumentType]
        assert engine.model.config._attn_implementation == kernel


def test_flags_of_ms_swift(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model", DENSE))
    words = "--load_data_args true --enable_thinking false --write_batch_size 1000 --metric acc --attn_impl flash_attn"
    options, *_ = read_options("swift", ["infer", "--model", folder, *words.split()])
    assert (options.load_data_args, options.enable_thinking, options.write_batch_size) == (True, False, 1000)
    assert (options.metric, options.attention_backend) == ("acc", "flash")
