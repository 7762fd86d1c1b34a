"""Named datasets: rows with the columns that the hubs have, converted as worked out by hand."""

import json
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from megaswift.templates.dataset.sources import open_source, open_sources
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.formats.dataset_names import DatasetName
from megaswift.templates.formats.media_rows import to_media_conversation
from megaswift.templates.formats.medium import AUDIO, IMAGE
from megaswift.templates.formats.presets import PRESETS, preset_of, preset_of_path
from megaswift.templates.options import PrepareOptions, TemplateOptions
from megaswift.templates.prepare import prepare

FIRST, SECOND = "Is it?", "It is better."
SENTENCES = {"sentence1": FIRST, "sentence2": SECOND, "score": 0.8}
CALL = """{"name": "add", "arguments": '{"a": 1}'}"""


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


# name -> stage of training, row as on the hub, texts that the tokens hold
ROWS = {
    "AI-ModelScope/alpaca-gpt4-data-zh": (
        "sft", {"instruction": "算", "input": "输入\uff1a一", "output": "二"}, ["算\n一<", "二"],
    ),
    "AI-ModelScope/alpaca-gpt4-data-en": (
        "sft", {"instruction": "Add.", "input": "1", "output": "2", "text": "Below is ..."}, ["Add.\n1<", "2"],
    ),
    "AI-ModelScope/LongAlpaca-12k": (
        "sft", {"instruction": "q", "input": "", "output": "Answer: a", "file": "f"}, ["\nq<", "\na<"],
    ),
    "swift/self-cognition:empty_think": (
        "sft", {"query": "q", "response": "I am {{NAME}}.", "tag": "en"}, ["\nq<", "<think>\n\n</think>\n\nI am Bob."],
    ),
    "swift/self-cognition:qwen3": (
        "sft", {"query": "q", "response": "a", "tag": "en"}, ["q /no_think<", "<think>\n\n</think>\n\na<"],
    ),
    "AI-MO/NuminaMath-TIR": (
        "prompts", {"problem": FIRST, "solution": "2", "messages": [user(FIRST), assistant("2")]}, [FIRST],
    ),
    "AI-MO/NuminaMath-1.5": (
        "sft", {"problem": FIRST, "solution": "So 2", "answer": "2", "source": "x"}, [FIRST, "\nSo 2<"],
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        "prompts", {"prompt": FIRST, "solution": "34", "data_source": "x", "source_prompt": [user("no")]}, [FIRST],
    ),
    "modelscope/gsm8k": ("sft", {"question": FIRST, "answer": "2 #### 2"}, [FIRST, "2 #### 2"]),
    "zouxuhong/Countdown-Tasks-3to4": (
        "prompts", {"target": 98, "nums": [44, 19, 35]}, ["numbers [44, 19, 35], create an equation that equals 98."],
    ),
    "openai/gsm8k:verl": (
        "prompts", {"question": FIRST, "answer": "2\n#### 2"},
        [f'{FIRST} Let\'s think step by step and output the final answer after "####".'],
    ),
    "d1shs0ap/countdown": (
        "prompts", {"target": 87, "nums": [79, 8]},
        ["the numbers [79, 8], create an equation that equals 87.", "step by step.\n<think>"],
    ),
    "AI-ModelScope/function-calling-chatml": (
        "sft",
        {
            "system_message": "s", "function_description": '{"name": "add"}\n\n{"name": "sub"}',
            "conversations": [
                {"from": "system", "value": "s"}, {"from": "human", "value": FIRST},
                {"from": "function-call", "value": CALL}, {"from": "function-response", "value": "2"},
                {"from": "gpt", "value": SECOND},
            ],
        },
        ['{"name": "sub"}', FIRST, '{"name": "add", "arguments": {"a": 1}}', SECOND],
    ),
    "LLM-Research/xlam-function-calling-60k": (
        "sft",
        {"id": 1, "query": FIRST, "answers": '[{"name": "add", "arguments": {"a": 1}}]', "tools": '[{"name": "add"}]'},
        ['{"type": "function", "function": {"name": "add"}}', FIRST, '{"name": "add", "arguments": {"a": 1}}'],
    ),
    "hjh0119/shareAI-Llama3-DPO-zh-en-emoji": (
        "preference", {"question": FIRST, "answer_zh": "漢\ufe0f", "answer_en": "no", "system": None}, [FIRST, "漢<"],
    ),
    "AI-ModelScope/orpo-dpo-mix-40k": (
        "preference",
        {"source": "x", "prompt": FIRST, "question": "", "chosen": [user(FIRST), assistant("a")],
         "rejected": [user(FIRST), assistant("b")]},
        [FIRST, "a<"],
    ),
    "AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto": (
        "kto", {"prompt": FIRST, "completion": SECOND, "label": True, "rating": 4}, [FIRST, SECOND],
    ),
    "AI-ModelScope/hh-rlhf": (
        "preference",
        {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
         "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: e"},
        ["\na<", "\nb<", "\nc<", "\nd<"],
    ),
    "AI-ModelScope/hh_rlhf_cn": (
        "preference",
        {"context": [{"role": "human", "text": "a"}], "chosen": {"role": "assistant", "text": "b"},
         "rejected": {"role": "assistant", "text": "c"}},
        ["\na<", "\nb<"],
    ),
    "HumanLLMs/Human-Like-DPO-Dataset": (
        "preference", {"prompt": "a", "chosen": "b", "rejected": "c"}, ["\na<", "\nb<"],
    ),
    "sentence-transformers/stsb": ("embedding", SENTENCES, [FIRST]),
    "sentence-transformers/stsb:positive": ("embedding", SENTENCES, [FIRST]),
    "sentence-transformers/stsb:generate": ("sft", SENTENCES, [f"1: {FIRST}\nSentence 2: {SECOND}", "\n0.8<"]),
    "sentence-transformers/stsb:reg": ("seq_cls", SENTENCES, [f"1: {FIRST}\nSentence 2: {SECOND}"]),
    "DAMO_NLP/jd": ("sft", {"sentence": FIRST, "label": 1.0, "dataset": "jd"}, [f"Sentence: {FIRST}", "\npositive<"]),
    "DAMO_NLP/jd:cls": ("seq_cls", {"sentence": FIRST, "label": 1.0, "dataset": "jd"}, [FIRST]),
    "MTEB/scidocs-reranking": (
        "reranker", {"query": FIRST, "positive": [SECOND], "negative": ["No."]}, [FIRST, SECOND],
    ),
    "AI-ModelScope/databricks-dolly-15k": (
        "sft", {"instruction": "i", "context": "c", "response": "r", "category": "x"}, ["information:\nc\ni<", "\nr<"],
    ),
    "AI-ModelScope/synthetic_text_to_sql": (
        "sft", {"sql_prompt": "p", "sql_context": "c", "sql": "s", "sql_explanation": "e"},
        ["\nc\np<", ":\ne\n", ":\ns<"],
    ),
    "sapientinc/sudoku-extreme-1k": (
        "sft", {"source": "x", "question": "12." * 27, "answer": "123" * 27, "rating": 1},
        ["\n120120120\n", "\n123123123\n"],
    ),
    "FreedomIntelligence/medical-o1-reasoning-SFT": (
        "sft", {"Question": FIRST, "Complex_CoT": "c", "Response": SECOND}, [FIRST, SECOND],
    ),
}  # fmt: skip


def write(tmp_path, dataset_id: str, rows: list[dict], file: str = "train.jsonl"):
    path = tmp_path / dataset_id / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(tokenizer, name: str, stage: str, **options) -> list[str]:
    """Return the first document of each sample of a dataset."""
    options = PrepareOptions(dataset=[name], dataset_shuffle=False, model_name=["Bob"], strict=True, **options)
    store = prepare(options, tokenizer, stage=stage).train
    return [tokenizer.decode(store.row(i)[0][0]) for i in range(len(store))]


@pytest.mark.parametrize("name", ROWS)
def test_rows_by_hand(tmp_path, make_tokenizer, name):
    stage, row, parts = ROWS[name]
    path = write(tmp_path, name.partition(":")[0], [row])
    folder = f"{path.parent}:{name.partition(':')[2]}".rstrip(":")
    tokenizer = make_tokenizer("qwen3" if "tools" in row or "function_description" in row else "chatml")
    [text] = texts(tokenizer, folder, stage)
    position = -1
    for part in parts:
        position = text.find(part, position + 1)
        assert position >= 0, (part, text)


def test_what_presets_leave_out(tmp_path):
    kept = {"source": "x", "chosen": [], "rejected": []}
    for name, rows in {
        "AI-ModelScope/orpo-dpo-mix-40k": [kept, kept | {"source": "toxic-dpo-v0.2"}],
        "sentence-transformers/stsb:positive": [SENTENCES, SENTENCES | {"score": 0.5}],
        "DAMO_NLP/jd:cls": [{"sentence": "s", "label": 0}, {"sentence": "s", "label": None}],
    }.items():
        source = open_source(
            f"{write(tmp_path, name.partition(':')[0], rows).parent}:{name.partition(':')[2]}".rstrip(":")
        )
        assert [bool(row.refusal) for _, _, row in source.rows(np.arange(2))] == [False, True]
        assert [bool(row.refusal) for _, _, row in source.stream()] == [False, True]
    pairs = open_source(f"{tmp_path}/sentence-transformers/stsb:positive")
    assert next(pairs.stream())[2] == {"anchor": FIRST, "positive": SECOND}  # InfoNCE refuses other labels than 1


def test_rewards_keep_their_columns(tmp_path, make_tokenizer):
    path = write(tmp_path, "AI-MO/NuminaMath-1.5", [{"problem": FIRST, "solution": "So 2", "answer": "2"}])
    store = prepare(PrepareOptions(dataset=[str(path.parent)]), make_tokenizer(), stage="prompts")
    assert {"solution", "answer"} <= set(store.columns)


def test_other_rows_and_folders_are_read_by_their_columns(tmp_path, make_tokenizer):
    converted = {"anchor": "a", "positive": "b", "label": 1}
    assert texts(make_tokenizer(), str(write(tmp_path, "sentence-transformers/stsb", [converted])), "embedding") == [
        "a"
    ]
    plain = write(tmp_path, "mine/alpaca-gpt4-data-zh", [{"instruction": "i", "input": "输入\uff1a1", "output": "o"}])
    assert "输入" in texts(make_tokenizer(), str(plain.parent), "sft")[0]


def test_columns_are_renamed_before_the_preset(tmp_path, make_tokenizer):
    path = write(tmp_path, "DAMO_NLP/jd", [{"text_a": FIRST, "label": 0}])
    assert texts(make_tokenizer(), str(path.parent), "sft", columns={"text_a": "sentence"})[0].count(FIRST) == 1


def test_paths_that_name_a_dataset():
    stsb = preset_of("sentence-transformers/stsb")
    for path in ("/data/sentence-transformers/stsb", "sentence-transformers/stsb/data/train.parquet"):
        assert preset_of_path(tuple(path.split("/"))) is stsb
    cached = "/hub/datasets--sentence-transformers--stsb/snapshots/0/train.jsonl"
    assert preset_of_path(tuple(cached.split("/"))) is stsb
    assert preset_of_path(("data", "stsb")) is None
    ids = [dataset_id for preset in PRESETS for dataset_id in {*preset.ids}]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", ("a/b", "", (), None, None)),
        ("a/b#5", ("a/b", "", (), None, 5)),
        ("hf::a/b:x/y@test:7", ("a/b", "hf", ("x", "y"), "test", 7)),
        ("a/b@train_sft#3", ("a/b", "", (), "train_sft", 3)),
    ],
)
def test_the_parts_of_a_name(name, expected):
    parsed = DatasetName.parse(name)
    assert (parsed.location, parsed.hub, parsed.subsets, parsed.split, parsed.rows) == expected


def test_what_exists_is_not_divided(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a@b:c").mkdir()
    assert DatasetName.parse("a@b:c") == DatasetName("a@b:c", "a@b:c")
    assert DatasetName.parse("a@b:c:x@y:3").location == "a@b:c"
    for wrong, problem in {"a/b@c:1#2": "two numbers", "a/b@c:0": "no row"}.items():
        with pytest.raises(ValueError, match=problem):
            DatasetName.parse(wrong)


def rows_of(name: str) -> list[str]:
    return [row["query"] for _, _, row in open_source(name).stream()]


def test_splits_and_subsets_of_a_folder(tmp_path):
    for file in ("train-00000-of-00001.jsonl", "train_sft-0.jsonl", "data/val.jsonl", "big/test.jsonl"):
        write(tmp_path, "x/y", [{"query": file, "response": "r"}], file)
    folder = str(tmp_path / "x" / "y")
    assert len(rows_of(folder)) == 4  # without a split: all files
    assert rows_of(f"{folder}@train") == ["train-00000-of-00001.jsonl"]
    assert rows_of(f"{folder}@train_sft") == ["train_sft-0.jsonl"]
    assert rows_of(f"{folder}@validation") == ["data/val.jsonl"]
    assert rows_of(f"{folder}:big@test") == ["big/test.jsonl"]
    assert rows_of(f"{folder}:data/big") == ["data/val.jsonl", "big/test.jsonl"]
    for wrong, problem in {
        "@dev2": "no file is of this split, only big/test.jsonl",
        ":small": "no file is of this",
    }.items():
        with pytest.raises(ValueError, match=problem):
            open_source(folder + wrong)
    with pytest.raises(ValueError, match="a file has neither subsets nor splits"):
        open_source(f"{folder}/train_sft-0.jsonl@train")
    (tmp_path / "x" / "y" / "README.md").write_text(
        "---\nconfigs:\n- config_name: big\n  data_files:\n  - split: train\n    path: data/*.jsonl\n---\nA card"
    )
    assert rows_of(f"{folder}:big") == ["data/val.jsonl"]


def test_a_preset_chooses_files_where_they_are_named(tmp_path):
    for split in ("train", "validation", "test"):
        write(tmp_path, "MTEB/scidocs-reranking", [{"query": split}], f"{split}.jsonl")
        write(tmp_path, "AI-MO/NuminaMath-TIR", [{"query": split}], f"{split}.jsonl")
    assert rows_of(str(tmp_path / "MTEB" / "scidocs-reranking")) == ["validation", "test"]
    assert rows_of(str(tmp_path / "AI-MO" / "NuminaMath-TIR")) == ["train"]
    assert rows_of(str(tmp_path / "AI-MO" / "NuminaMath-TIR") + "@test") == ["test"]
    write(tmp_path, "DAMO_NLP/jd", [{"query": "all"}], "rows.jsonl")
    assert rows_of(str(tmp_path / "DAMO_NLP" / "jd")) == ["all"]


@pytest.fixture
def hub(monkeypatch):
    """Put a small hub of Hugging Face and of ModelScope into place; return what is asked for."""
    asked = []

    def table(split: str) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"query": split, "response": str(i), "tag": "en"} for i in range(3)])

    def load_dataset(repository, subset, *, token, streaming):
        asked.append((repository, subset))
        loaded = {split: table(split) for split in ("train", "validation", "test", "train_sft")}
        return {name: part.to_iterable_dataset() for name, part in loaded.items()} if streaming else loaded

    def load(repository, *, subset_name, split, use_streaming):
        asked.append((repository, subset_name, split))
        return table(split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(MsDataset=SimpleNamespace(load=load)))
    return asked


def test_the_hubs_are_asked_for_their_own_ids(hub):
    assert rows_of("hf::swift/self-cognition:empty_think") == ["train"] * 3
    assert rows_of("hf::MTEB/scidocs-reranking") == ["validation"] * 3 + ["test"] * 3
    assert rows_of("hf::open-r1/DAPO-Math-17k-Processed") == ["train"] * 3
    assert rows_of("hf::swift/ultrachat_200k") == ["train_sft"] * 3
    assert rows_of("hf::me/mine:part@test") == ["test"] * 3
    assert hub == [
        ("modelscope/self-cognition", None), ("mteb/scidocs-reranking", None),
        ("open-r1/DAPO-Math-17k-Processed", "all"),
        ("HuggingFaceH4/ultrachat_200k", None), ("me/mine", "part"),
    ]  # fmt: skip
    hub.clear()
    assert rows_of("openai/gsm8k") == ["train"] * 3
    assert rows_of("DAMO_NLP/jd:cls") == ["train"] * 3 + ["validation"] * 3
    assert rows_of("me/mine:a/b") == ["train"] * 6
    assert hub == [
        ("modelscope/gsm8k", "main", "train"), ("DAMO_NLP/jd", "default", "train"),
        ("DAMO_NLP/jd", "default", "validation"), ("me/mine", "a", "train"), ("me/mine", "b", "train"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no split `dev`, only train, validation, test, train_sft"):
        open_source("hf::me/mine@dev")


def test_streams_of_several_splits_are_those_of_the_rows(hub):
    [(source, _)] = open_sources("--dataset", ["hf::MTEB/scidocs-reranking"])
    [(stream, _)] = open_sources("--dataset", ["hf::MTEB/scidocs-reranking"], streaming=True)
    everything = [row for _, _, row in source.rows(np.arange(6))]
    for shards in (1, 2):
        for start in range(4):
            for opened in (source, stream):
                rows = [row for _, _, row in opened.stream(0, shards, start)]
                expected = everything[:3][::shards] + everything[3:][::shards]
                assert rows == expected[start:]


def test_placeholders_are_filled_in_named_rows(hub, make_tokenizer):
    options = TemplateOptions(model_name=["Bob"], model_author=["us"])
    source = open_source("hf::swift/self-cognition:qwen3")
    samples, _ = Encoder(make_tokenizer(), options, "sft", {}).encode(source.rows(np.arange(1)))
    assert "/no_think" in make_tokenizer().decode(samples[0].documents[0][0])


def test_a_recording_comes_before_its_transcript() -> None:
    """As the hub's table has it, and as ms-swift's preprocessor asks."""
    preset = preset_of("speech_asr/speech_asr_aishell1_trainsets")
    assert preset
    view = preset.view("validation")
    assert view
    assert (view.subset, view.splits) == ("default", ("validation",))
    conversation, _ = to_media_conversation(view({"Audio:FILE": "a.wav", "Text:LABEL": "今天 天气 好"}, {}))
    assert conversation.messages == [user(f"{AUDIO}语音转文本"), assistant("今天天气好")]
    assert [medium.source for medium in conversation.media] == ["a.wav"]


def test_an_image_comes_before_its_question() -> None:
    """As the hub's Parquet has it, and as ms-swift's preprocessor asks."""
    preset, image = preset_of("linxy/LaTeX_OCR"), {"bytes": b"...", "path": "1.png"}
    assert preset
    assert preset.subset == "default"
    conversation, _ = to_media_conversation(preset({"image": image, "text": "x ^ 2"}, {}))
    assert conversation.messages == [
        user(f"{IMAGE}Using LaTeX to perform OCR on the image."),
        assistant("x ^ 2"),
    ]
    assert [medium.source for medium in conversation.media] == [image]
