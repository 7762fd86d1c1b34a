"""Preparation of rows with images: refusals, truncation, objects, caches, the report, formats of files."""

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megaswift.templates.batching.collator import BatchLayout, StepDivision
from megaswift.templates.batching.dataloader import Batches
from megaswift.templates.batching.prompt_dataloader import Prompts
from megaswift.templates.dataset.placed_media import collapse, media_from_json, media_to_json
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare

from tests.tiny_vision import picture

ANSWER = {"role": "assistant", "content": "a circle"}


def user(content) -> dict:
    return {"role": "user", "content": content}


def write(folder: Path, *rows: dict) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text(made, ids: np.ndarray) -> str:
    """Return the text of tokens, with one placeholder for each run of these."""
    kept = [i for i in range(len(ids)) if i == 0 or ids[i] not in (5, 6) or ids[i - 1] != ids[i]]
    return made.tokenizer.decode(ids[kept].tolist())


def test_placeholders_in_every_turn(made, images, tmp_path: Path) -> None:
    rows = write(
        tmp_path, {"messages": [user("<image>what?"), ANSWER, user("and <image>"), ANSWER], "images": images[:2]}
    )
    store = made.prepare(dataset=[rows]).train
    [(ids, weights)] = store.row(0)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text(made, ids) == (
        f"<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\na circle<|im_end|>\n"
        f"<|im_start|>user\nand {image}<|im_end|>\n<|im_start|>assistant\na circle<|im_end|>\n"
    )
    assert text(made, ids[weights > 0]) == "a circle<|im_end|>a circle<|im_end|>"
    assert [medium.plan.tokens for medium in store.media(0)] == [4, 6]
    assert [medium.medium.source for medium in store.media(0)] == images[:2]
    assert store.lengths.tolist() == [len(ids)]
    assert store.visual_tokens.tolist() == [10]


def test_pre_training_takes_tags(made, images, tmp_path: Path) -> None:
    rows = write(
        tmp_path,
        {"text": "a <image> b", "images": images[:1]},
        {"messages": [{"role": "assistant", "content": "c"}], "images": images[1:2]},
    )
    store = made.prepare("pt", dataset=[rows], dataset_shuffle=False).train
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    for number, expected in enumerate((f"a {image} b<|im_end|>", f"{image}c<|im_end|>")):
        [(ids, weights)] = store.row(number)
        assert text(made, ids) == expected
        # Neither the placeholders nor the tokens around them are learned.
        assert text(made, ids[weights > 0]) == expected.replace(image, "")
        assert [medium.medium.source for medium in store.media(number)] == [images[number]]


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_truncation_never_cuts_an_image(made, images, tmp_path: Path, strategy: str) -> None:
    """Text is truncated as far as the next image; a row that would lose one is dropped."""
    words, image = "what colour is the shape a red circle " * 4, "<image>"
    question, answer = user(words + image), {"role": "assistant", "content": words}
    rows = write(tmp_path, {"messages": [question, answer], "images": images[2:]})
    [whole] = made.prepare(dataset=[rows]).train.lengths.tolist()
    lengths = []
    for limit in range(whole, 20, -3):
        options = {"dataset": [rows], "max_length": limit, "truncation_strategy": strategy}
        try:
            store = made.prepare(**options).train
        except ValueError as error:
            if re.search("would cut an image or video|none of its tokens is trained on", str(error)):
                continue
            raise
        [(ids, weights)], [medium] = store.row(0), store.media(0)
        assert len(ids) == len(weights) == limit
        assert ids[medium.place - 1 : medium.place + 16].tolist() == [3, *[5] * 15, 4]
        assert (ids == 5).sum() == 15
        lengths.append(limit)
    assert len(lengths) > 10
    assert lengths == list(range(whole, lengths[-1] - 1, -3))
    assert lengths[-1] > 40
    with pytest.raises(ValueError, match="1 row longer than --max_length 60"):
        made.prepare(dataset=[rows], max_length=60)


def test_pieces_of_a_text_never_cut_an_image(made, images, tmp_path: Path) -> None:
    rows = write(tmp_path, {"text": "ab<image>" * 7 + "c" * 40, "images": [images[2], images[0]] * 3 + images[:1]})
    whole = made.prepare("pt", dataset=[rows]).train
    [(expected, _)] = whole.row(0)
    for limit in (19, 23, 40):
        options = {"max_length": limit, "truncation_strategy": "split"}
        store = made.prepare("pt", dataset=[rows], dataset_shuffle=False, **options).train
        pieces = [store.row(number)[0][0] for number in range(len(store))]
        assert np.concatenate(pieces).tolist() == expected.tolist()
        assert max(map(len, pieces)) <= limit
        media = [store.media(number) for number in range(len(store))]
        assert [m.plan.tokens for piece in media for m in piece] == [15, 4] * 3 + [4]
        assert [m.number for piece in media for m in piece] == list(range(7))
        for ids, piece in zip(pieces, media, strict=True):
            for medium in piece:
                block = ids[medium.place - 1 : medium.place + medium.plan.tokens + 1]
                assert block.tolist() == [3, *[5] * medium.plan.tokens, 4]
    with pytest.raises(ValueError, match="an image or video has more tokens than --max_length 10"):
        made.prepare("pt", dataset=[rows], max_length=10, truncation_strategy="split")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"images": ["/no/such.png"]}, r"an image cannot be read \(no such file"),
        ({"images": [5]}, "an image is a number"),
        ({"images": ["data:image/png;base64,AAAA"]}, "of no known format"),
        ({"videos": [[]]}, "a video has no frame"),
        ({"messages": [user("<image><image>"), ANSWER], "images": ["0.png"]}, "more <image> tags than images"),
        ({"messages": [user("<|image_pad|>"), ANSWER], "images": ["0.png"]}, "its text has other placeholders"),
        ({"messages": [user("<|video_pad|>"), ANSWER]}, "its text has other placeholders"),
        ({"input_ids": [1, 5, 2], "messages": None}, "its text has other placeholders"),
        ({"audios": ["a.wav"]}, "it has audios, which are not supported with qwen3_vl"),
        ({"rejected_images": ["a.png"]}, "it has rejected_images, which this task does not read"),
    ],
)
def test_rows_that_are_dropped(made, images, tmp_path: Path, monkeypatch, row: dict, reason: str) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    rows = write(tmp_path, {"messages": [user("q"), ANSWER]} | row, {"messages": [user("q"), ANSWER]})
    prepared = made.prepare(dataset=[rows])
    assert len(prepared.train) == 1
    assert any(re.search(reason, line) for line in prepared.report.splitlines())
    assert "rows.jsonl line 1" in prepared.report
    is_file = reason.startswith(("an image", "a video", "of no known"))
    assert is_file == ("set --load_from_cache_file false" in prepared.report)
    with pytest.raises(ValueError, match="strict"):
        made.prepare(dataset=[rows], strict=True)


def test_a_template_that_omits_images(made, images, tmp_path: Path, monkeypatch) -> None:
    template = made.tokenizer.chat_template.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    monkeypatch.setattr(made.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="the chat template omits one of these"):
        made.prepare(dataset=[write(tmp_path, {"messages": [user("q"), ANSWER], "images": images[:1]})])


def test_a_model_without_a_tower(make_tokenizer, images, tmp_path: Path) -> None:
    options = PrepareOptions(dataset=[write(tmp_path, {"messages": [user("<image>q"), ANSWER], "images": images[:1]})])
    for stage in ("sft", "kto"):
        with pytest.raises(ValueError, match="it has images, and this model has no vision tower"):
            prepare(options, make_tokenizer(), stage=stage)
    blocks = PrepareOptions(dataset=[write(tmp_path, {"messages": [user([{"type": "image"}]), ANSWER]})])
    with pytest.raises(ValueError, match="a message has image content, and this model has no vision tower"):
        prepare(blocks, make_tokenizer(), stage="sft")
    text_only = PrepareOptions(dataset=[write(tmp_path, {"text": "q", "images": images[:1]})])
    with pytest.raises(ValueError, match="this model has no vision tower"):
        prepare(text_only, make_tokenizer(), stage="pt")


def test_prompts_with_images(made, images, tmp_path: Path) -> None:
    """Rewards get tags and names of images. Images of the answer are not in the prompt."""
    messages = [user("<image>what?"), ANSWER, user("and <image>"), {"role": "assistant", "content": "<image> a"}]
    rows = [
        {"messages": messages, "images": images[:3], "solution": 7},
        {"messages": [user("<image>b")], "image": base64.b64encode(Path(images[0]).read_bytes()).decode()},
        {"messages": [user("no")]},
    ]
    store = made.prepare("prompts", dataset=[write(tmp_path, *rows)], dataset_shuffle=False).train
    prompts = Prompts(store, completions_per_prompt=2, shuffle=False, seed=0)
    first, second, third = prompts.next_batch(3)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text(made, np.array(first.tokens)) == (
        f"<|im_start|>user\n{image}what?<|im_end|>\n<|im_start|>assistant\na circle<|im_end|>\n"
        f"<|im_start|>user\nand {image}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [medium.medium.source for medium in first.media] == images[:2]
    assert collapse(first.tokens, first.media, made.vision().placeholders).count(5) == 2 < first.tokens.count(5)
    assert first.columns == {"messages": messages[:3], "images": images[:2], "solution": 7}
    assert second.columns["images"] == [None]
    assert third.media == []
    restored = media_from_json(json.loads(json.dumps(media_to_json(first.media))))
    assert restored == list(first.media)
    [frame] = images[:1]
    rows = [{"messages": [user("<video>a")], "videos": [[frame] * 3]}]
    store = made.prepare("prompts", dataset=[write(tmp_path, *rows)], dataset_shuffle=False).train
    [prompt] = Prompts(store, completions_per_prompt=1, shuffle=False, seed=0).next_batch(1)
    assert prompt.columns["videos"] == [[frame] * 3]
    assert repr(media_from_json(json.loads(json.dumps(media_to_json(prompt.media))))) == repr(list(prompt.media))


def test_prompts_keep_the_rows_of_images(checkpoint, images, tmp_path: Path) -> None:
    """Tokens between the rows of an image, in episodes that a checkpoint holds."""
    made = checkpoint("mistral3")
    rows = [{"messages": [user("a<image>b")], "images": images[2:]}]
    store = made.prepare("prompts", dataset=[write(tmp_path, *rows)], dataset_shuffle=False).train
    [prompt] = Prompts(store, completions_per_prompt=1, shuffle=False, seed=0).next_batch(1)
    assert text(made, np.array(prompt.tokens)) == (
        "<s>[INST]a" + ("[IMG]" * 6 + "[IMG_BREAK]") * 3 + "[IMG]" * 6 + "[IMG_END]b[/INST]"
    )
    vision = made.vision()
    assert collapse(prompt.tokens, prompt.media, vision.placeholders).count(vision.image_token_id) == 1
    assert repr(media_from_json(json.loads(json.dumps(media_to_json(prompt.media))))) == repr(list(prompt.media))


@pytest.mark.parametrize("stage", ["answered", "asked"])
def test_answers_to_distil_have_images(made, images, tmp_path: Path, stage: str) -> None:
    """An image of the answer is none of the prompt."""
    answer = {"role": "assistant", "content": "<image>a"}
    rows = [
        {"messages": [user("<image>q"), ANSWER, user("and <image>?"), answer], "images": images},
        {"messages": [user("<image>q"), ANSWER], "images": images[:1]},
        {"messages": [user("<image>q")], "images": images[:1]},
    ]
    rows = rows[:2] if stage == "answered" else rows
    options = {"dataset": [write(tmp_path, *rows)], "dataset_shuffle": False, "loss_scale": "last_round"}
    store, conversations = made.prepare(stage, **options).train, made.prepare("sft", **options).train
    prompts = Prompts(store, completions_per_prompt=1, shuffle=False, seed=0)
    for number, prompt in enumerate(prompts.next_batch(len(rows))):
        if number == 2:
            assert prompt.reference_document is None
            continue
        (ids, weights), *_ = conversations.row(number)
        assert prompt.reference_document is not None
        assert np.array_equal(prompt.reference_document[0], ids)
        assert np.array_equal(prompt.reference_document[1], weights)
        assert list(prompt.reference_media) == conversations.media(number)
        assert np.array_equal(prompt.tokens, ids[: len(prompt.tokens)])
        places = [medium.place for medium in prompt.reference_media]
        assert sum(place < len(prompt.tokens) for place in places) == len(places) - (number == 0)


OBJECTS = {"ref": ["dog", "cat"], "bbox": [[32, 24, 64, 48], [8, 16]]}


@pytest.mark.parametrize(
    ("variables", "options", "extra", "expected"),
    [
        ({}, {}, {}, "<|object_ref_start|>dog<|object_ref_end|> <|box_start|>(250,375),(500,750)<|box_end|>"),
        ({}, {"norm_bbox": "none"}, {}, "<|box_start|>(32,24),(64,48)<|box_end|>"),
        ({"QWENVL_BBOX_FORMAT": "new"}, {}, {}, "dog [250, 375, 500, 750] cat [62, 250]"),
        (
            {"QWENVL_BBOX_FORMAT": "new"},
            {},
            {"bbox": [[0.25, 0.5, 0.5, 1.0], [0, 1]], "bbox_type": "norm1"},
            "dog [250, 500, 500, 1000] cat [0, 1000]",
        ),
        ({"QWENVL_BBOX_FORMAT": "new"}, {}, {"image_id": [1]}, "dog [333, 375, 667, 750] cat [62, 250]"),
    ],
)
def test_objects(made, tmp_path: Path, monkeypatch, variables, options, extra, expected) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    paths = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    picture(128, 64).save(paths[0])
    picture(96, 64).save(paths[1])
    answer = {"role": "assistant", "content": "<ref-object> <bbox> <ref-object> <bbox>"}
    row = {"messages": [user("<image><image>where?"), answer], "images": paths, "objects": OBJECTS | extra}
    [(ids, _)] = made.prepare(dataset=[write(tmp_path, row)], **options).train.row(0)
    assert expected in text(made, ids)


def test_boxes_in_pixels_of_the_resized_image(checkpoint, tmp_path: Path) -> None:
    """The form of Qwen2.5-VL without a flag."""
    made = checkpoint("qwen2_5_vl")
    picture(1000, 500).save(tmp_path / "a.png")
    row = {
        "messages": [user("<image>"), {"role": "assistant", "content": "<bbox>"}],
        "images": [str(tmp_path / "a.png")],
    }
    row["objects"] = {"bbox": [[100, 50, 500, 250]]}
    store = made.prepare(dataset=[write(tmp_path, row)]).train
    _, height, width = store.media(0)[0].plan.grid
    box = [round(v) for v in (width * 1.4, height * 1.4, width * 7, height * 7)]
    assert f"({box[0]},{box[1]}),({box[2]},{box[3]})" in text(made, store.row(0)[0][0])


@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        ({"bbox": [[1, 2]]}, "more or fewer <bbox> tags"),
        ({"ref": ["a"], "bbox": []}, "more or fewer <bbox> tags|more or fewer <ref-object> tags"),
        ({"bbox": [[1, 2, 3], [1, 2]]}, "neither 4 numbers nor 2"),
        ({"bbox": [[1, 2], [3, 4]], "image_id": [0, 1]}, "an image_id that the row does not have"),
        ({"bbox": [[1, 2], [3, 4]], "bbox_type": "norm"}, "the bbox_type norm; known: real, norm1"),
    ],
)
def test_objects_that_do_not_fit(made, images, tmp_path: Path, objects: dict, reason: str) -> None:
    row = {"messages": [user("<image><bbox><bbox>"), ANSWER], "images": images[:1], "objects": objects}
    with pytest.raises(ValueError, match=reason):
        made.prepare(dataset=[write(tmp_path, row)])


def test_the_report_counts_images(made, images, tmp_path: Path) -> None:
    rows = write(
        tmp_path,
        {"messages": [user("<image>q"), ANSWER], "images": images[:1]},
        {"messages": [user("q"), ANSWER], "images": images[1:], "videos": [images[:1] * 2]},
        {"messages": [user("q"), ANSWER]},
    )
    report = made.prepare(dataset=[rows], dataset_shuffle=False).report
    assert "3 images and 1 video of 29 tokens" in report
    assert "<|vision_start|><|image_pad|>x4<|vision_end|>q" in report


def test_texts_alone_have_the_same_cache_entry_as_before(make_tokenizer, made, tmp_path: Path, cache: Path) -> None:
    """Only a vision processor changes the key, and adds columns."""
    rows = write(tmp_path, {"messages": [user("q"), ANSWER]})
    prepare(PrepareOptions(dataset=[rows]), make_tokenizer(), stage="sft")
    store = made.prepare(dataset=[rows]).train
    entries = [pa.ipc.open_file(file).schema.names for file in (cache / "megaswift" / "tokens").rglob("*.arrow")]
    assert sorted(map(len, entries)) == [11, 19]
    assert not store.has_media
    made.prepare(dataset=[rows], max_pixels=50_000)
    assert len(list((cache / "megaswift" / "tokens").iterdir())) == 3


def image_features():
    from datasets import Features, Image, List, Value

    return Features(query=Value("string"), response=Value("string"), images=List(Image()))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "saved"])
def test_images_in_every_kind_of_file(made, images, tmp_path: Path, cache: Path, kind: str) -> None:
    """Rows are read again by number; what cannot be is copied once."""
    rows = [{"query": f"<image>{n}", "response": "a", "images": [images[n % 3]]} for n in range(200)]
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "jsonl" | "jsonl.gz":
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
        case "json":
            path.write_text(json.dumps(rows))
        case "csv":
            lines = [f"<image>{n},a,{images[n % 3]}" for n in range(200)]
            path.write_text("\n".join(["query,response,images", *lines]))
        case "parquet":
            binary = [row | {"images": [{"bytes": Path(row["images"][0]).read_bytes(), "path": None}]} for row in rows]
            pq.write_table(pa.Table.from_pylist(binary), path, row_group_size=150)
        case "saved":
            import datasets

            features = datasets.Features(
                query=datasets.Value("string"),
                response=datasets.Value("string"),
                images=datasets.List(datasets.Image()),
            )
            datasets.Dataset.from_list(rows, features=features).save_to_disk(str(path))
    store = made.prepare(dataset=[str(path)]).train
    batches = Batches(store, BatchLayout(vision=made.vision()), StepDivision(8, 8), num_workers=1)
    seen = 0
    for step in batches.one_pass():
        for batch in step:
            assert batch.media.broken_media == 0
            seen += len(batch.media.grids)
    assert seen == 200
    copies = list((cache / "megaswift" / "rows").glob("*")) if kind in ("jsonl.gz", "json", "csv", "parquet") else []
    assert len(copies) == (kind in ("jsonl.gz", "json", "csv", "parquet"))


@pytest.mark.parametrize("saved", [False, True])
def test_streams_carry_their_images(made, images, tmp_path: Path, saved: bool) -> None:
    text_ = base64.b64encode(Path(images[0]).read_bytes()).decode()
    rows = [{"query": f"<image>{n}", "response": "a", "images": [text_]} for n in range(20)]
    path = write(tmp_path, *rows)
    if saved:
        import datasets

        features = image_features()
        rows = [row | {"images": images[:1]} for row in rows]
        datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
        path = str(tmp_path / "saved")
    prepared = made.prepare(dataset=[path], streaming=True)
    assert prepared.train.has_media
    assert "<|image_pad|>x4" in prepared.report
    batches = Batches(prepared.train, BatchLayout(vision=made.vision()), StepDivision(4, 4))
    [batch] = next(batches.steps())
    assert batch.media.grids.tolist() == [[1, 4, 4]] * 4
    expected = made.vision().patches(
        prepared.train.encoder.media_of({"query": "q", "response": "a", "images": [text_]})[0], (1, 4, 4)
    )
    assert (batch.media.image_pixels[:16].numpy() == expected).all()


def test_templates_of_earlier_processors(made, images, tmp_path: Path) -> None:
    """chat_template.json goes before the tokenizer's template, as in transformers."""
    folder = tmp_path / "earlier"
    shutil.copytree(made.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "chat_template.jinja"))
    template = made.tokenizer.chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for name in ("image_processor", "video_processor"):
        config = json.loads((folder / "processor_config.json").read_text())[name]
        file = "preprocessor_config.json" if name == "image_processor" else "video_preprocessor_config.json"
        (folder / file).write_text(json.dumps(config))
    (folder / "processor_config.json").unlink()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ raise_exception('the one of the tokenizer') }}"
    earlier = made._replace(folder=folder, tokenizer=tokenizer)
    rows = write(tmp_path, {"messages": [user("q"), ANSWER], "images": images[:1]})
    assert (
        earlier.prepare(dataset=[rows]).train.row(0)[0][0].tolist()
        == made.prepare(dataset=[rows]).train.row(0)[0][0].tolist()
    )


def test_a_checkpoint_without_its_processor(made, tmp_path: Path) -> None:
    """It trains on text; a damaged processor is an error."""
    folder = tmp_path / "bare"
    shutil.copytree(made.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "processor_config.json"))
    assert VisionProcessor.open(folder, made.tokenizer, PrepareOptions()) is None
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"its processor of images cannot be read .*Copy preprocessor_config.json"):
        made._replace(folder=folder).vision()
