"""Rows of several documents with images: their documents, shared media, batches, and refused rows."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megaswift.templates.batching.collator import Batch, BatchLayout, StepDivision
from megaswift.templates.batching.dataloader import Batches

from tests.templates.media.test_prepare import ANSWER, user, write

QUESTION = user("<image>q")
IMAGE_TOKEN = 5


def first_batch(made: Any, store: Any, stage: Any, samples: int) -> Batch:
    layout = BatchLayout(stage=stage, vision=made.vision())
    [batch] = next(Batches(store, layout, StepDivision(samples, samples), shuffle=False).steps())
    return batch


def check(made: Any, batch: Batch, sources: list[list[str]], images: list[str]) -> None:
    """Compare a batch with the images of its documents: each once a sample, with its tokens in every document."""
    media, vision = batch.media, made.vision()
    assert media is not None
    assert batch.cu_seqlens is not None
    plans = {source: (1, *size) for source, size in zip(images, [(4, 4), (4, 6), (6, 10)], strict=True)}
    uses = [source for document in sources for source in document]
    assert [tuple(media.grids[use].tolist()) for use in media.uses] == [plans[source] for source in uses]
    patches = np.split(media.image_pixels.numpy(), np.cumsum(media.grids.prod(1).numpy())[:-1])
    for use, source in zip(media.uses.tolist(), uses, strict=True):
        assert (patches[use] == vision.patches(_medium(source), plans[source])).all()
    tokens = np.flatnonzero(batch.tokens.numpy()[0] == IMAGE_TOKEN)
    assert np.array_equal(media.positions.numpy(), tokens)
    starts, ends = batch.cu_seqlens[:-1].numpy(), batch.cu_seqlens[1:].numpy()
    counts = [int(((tokens >= start) & (tokens < end)).sum()) for start, end in zip(starts, ends, strict=True)]
    sizes = {source: time * height * width // 4 for source, (time, height, width) in plans.items()}
    assert counts[: len(sources)] == [sum(sizes[source] for source in document) for document in sources]
    assert batch.rope_positions is not None
    assert (batch.rope_positions[:, 0, starts[:-1]] == 0).all()


def _medium(source: str) -> Any:
    from megaswift.templates.formats.medium import Medium

    return Medium("image", source)


@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_share_their_images(made, images, tmp_path: Path, streaming: bool) -> None:
    first, second, third = images
    rejected = {"role": "assistant", "content": "<image>no"}
    rows = write(
        tmp_path,
        {"messages": [QUESTION, ANSWER], "images": [first], "rejected_response": "b"},
        {"messages": [QUESTION, ANSWER], "images": [first], "rejected_images": [second]},
        {"messages": [user("q"), ANSWER], "images": [third, first], "rejected_response": [rejected]},
        {"messages": [QUESTION, ANSWER], "images": [second], "rejected_messages": [user("<image>and <image>"), ANSWER],
         "rejected_images": [second, third]},
        {"prompt": [user([{"type": "image", "image": third}])], "chosen": [ANSWER],
         "rejected": [ANSWER | {"content": "b"}]},
    )  # fmt: skip
    options = {"streaming": True} if streaming else {"dataset_shuffle": False}
    store = made.prepare("preference", dataset=[rows], dataset_num_proc=1, **options).train
    layout = BatchLayout(stage="preference", vision=made.vision())
    [batch] = next(Batches(store, layout, StepDivision(5, 5), shuffle=False).steps())
    documents = [[first], [first], [first], [second], [third, first], [third, first], [second], [second, third]]
    check(made, batch, [*documents, [third], [third]], images)
    assert batch.media is not None
    assert batch.media.uses.tolist() == [0, 0, 1, 2, 3, 4, 3, 4, 5, 5, 6, 7, 7]
    if not streaming:
        assert store.media_counts() == {"image": 8, "video": 0, "audio": 0}
        assert [medium.medium.source for medium in store.media(2)] == [third, first, third, first]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_documents_are_those_of_conversations(checkpoint, images, tmp_path: Path, family: str) -> None:
    """Each side of a pair has the tokens, media and positions of the same conversation by itself, videos too."""
    made = checkpoint(family)
    first, second, third = images
    medias = {"images": [third, first], "videos": [[third, third, third, third]]}
    question, other = user("<image>q<video>and<image>"), {"role": "assistant", "content": "no <image>"}
    pair = {"messages": [question, ANSWER], **medias, "rejected_messages": [question, ANSWER, user("so"), other],
            "rejected_images": [first, second, first]}  # fmt: skip
    alone = [
        {"messages": pair["messages"], **medias},
        {"messages": pair["rejected_messages"], **medias, "images": pair["rejected_images"]},
    ]
    paired = made.prepare("preference", dataset=[write(tmp_path, pair)]).train
    (tmp_path / "alone").mkdir()
    single = made.prepare(dataset=[write(tmp_path / "alone", *alone)], dataset_shuffle=False).train
    documents = paired.row(0)
    for number, (ids, _) in enumerate(documents):
        assert np.array_equal(ids, single.row(number)[0][0])
    starts = [0, len(documents[0][0])]
    placed = [(m.place + start, m.plan[:4], m.medium) for n, start in enumerate(starts) for m in single.media(n)]
    assert [(m.place, m.plan[:4], m.medium) for m in paired.media(0)] == placed
    layout = BatchLayout(stage="preference", vision=made.vision())
    [batch] = next(Batches(paired, layout, StepDivision(1, 1)).steps())
    assert batch.media is not None
    assert batch.rope_positions is not None
    assert len(batch.media.grids) == 4  # three pictures and a video
    [lone] = next(Batches(single, BatchLayout(vision=made.vision()), StepDivision(2, 2), shuffle=False).steps())
    assert np.array_equal(batch.rope_positions, lone.rope_positions)
    assert np.array_equal(batch.media.positions, lone.media.positions)


def test_mismatched_answers_keep_the_images_of_prompts(made, images, tmp_path: Path) -> None:
    rows = [
        {"messages": [QUESTION, {"role": "assistant", "content": text}], "images": [image], "label": label}
        for text, image, label in zip(("a", "blue", "a red circle"), images, (True, False, True), strict=True)
    ]
    store = made.prepare("kto", dataset=[write(tmp_path, *rows)], dataset_shuffle=False).train
    batch = first_batch(made, store, "kto", 3)
    for part in (batch, batch.mismatched):
        assert part is not None
        check(made, part, [[image] for image in images], images)
        assert (part.loss_weights.numpy() * (part.tokens.numpy() == IMAGE_TOKEN)).sum() == 0
    limited = made.prepare("kto", dataset=[write(tmp_path, *rows)], dataset_shuffle=False, max_length=36).train
    assert max(len(ids) for number in range(len(limited)) for ids, _ in limited.row(number)) <= 36


@pytest.mark.parametrize("stage", ["embedding", "reranker"])
def test_texts_have_images_of_their_own(made, images, tmp_path: Path, stage: str) -> None:
    first, second, third = images
    rows = write(
        tmp_path,
        {"query": "<image>q", "images": [first], "positive": ["a", "<image>b"], "positive_images": [[second], [third]],
         "negative": ["c", "d<image>"], "negative_images": [[], [first]]},
        {"messages": [user("q")], "positive_messages": [user("p")], "positive_images": [third, first],
         "negative_messages": [[user([{"type": "image", "image": second}])]]},
    )  # fmt: skip
    store = made.prepare(stage, dataset=[rows], dataset_shuffle=False).train
    assert len(store) == 3
    batch = first_batch(made, store, stage, 3)
    if stage == "embedding":
        documents = [[first], [second], [], [first], [first], [third], [], [first], [], [third, first], [second]]
    else:
        documents = [[first, second], [first], [first, first], [first, third], [first], [first, first]]
        documents += [[third, first], [second]]
    check(made, batch, documents, images)
    assert batch.media is not None
    assert len(batch.media.grids) == 7  # one in several documents of a sample once


def texts_of(made: Any, store: Any) -> list[str]:
    texts = [made.tokenizer.decode(ids.tolist()) for number in range(len(store)) for ids, _ in store.row(number)]
    return [re.sub(r"(<\|image_pad\|>)+", "I", text) for text in texts]


def test_published_prompts(checkpoint, images, tmp_path: Path) -> None:
    """Prompts of Qwen3-VL-Embedding and Qwen3-VL-Reranker; Qwen2.5-VL has those of texts."""
    shape = "<|vision_start|>I<|vision_end|>"
    row = {"query": "<image>q", "system": "Find it", "images": images[:1], "positive": "p", "negative": "<image>",
           "negative_images": [images[1:2]]}  # fmt: skip
    options = {"dataset": [write(tmp_path, row)]}

    def prompt(system: str, user: str) -> str:
        return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"

    made, represent = checkpoint("qwen3_vl"), "Represent the user's input."
    assert texts_of(made, made.prepare("embedding", **options).train) == [
        prompt("Find it.", f"{shape}q"), prompt(represent, "p"), prompt(represent, shape)
    ]  # fmt: skip
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
        'the answer can only be "yes" or "no".'
    )
    assert texts_of(made, made.prepare("reranker", **options).train) == [
        prompt(judge, f"<Instruct>: Find it<Query>:{shape}q\n<Document>:{document}") for document in ("p", shape)
    ]
    earlier = checkpoint("qwen2_5_vl")
    plain = texts_of(earlier, earlier.prepare("embedding", **options).train)
    assert plain == [f"Find it{shape}q", "p", shape]


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_embedding_keeps_its_prompt_and_special_tokens(made, tmp_path: Path, side: Any) -> None:
    """As the tokenizer of Qwen3-VL-Embedding, which ends texts with a token of its own."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    end = ("<|endoftext|>", tokenizer.pad_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <|endoftext|>", special_tokens=[end])
    made = made._replace(tokenizer=tokenizer)
    anchor = "a red circle, " * 9 + "the sky"
    dataset = [write(tmp_path, {"anchor": anchor, "positive": "a blue square"})]
    whole = made.prepare("embedding", dataset=dataset).train.row(0)[0][0].tolist()
    assert whole == tokenizer(tokenizer.decode(whole[:-1])).input_ids
    assert whole[-1] == tokenizer.pad_token_id
    cut = made.prepare("embedding", dataset=dataset, max_length=len(whole) - 5, truncation_strategy=side).train
    ids = cut.row(0)[0][0].tolist()
    words = tokenizer(anchor, add_special_tokens=False).input_ids
    kept = words[5:] if side == "left" else words[:-5]
    start = next(n for n in range(len(whole)) if whole[n : n + len(words)] == words)
    assert ids == [*whole[:start], *kept, *whole[start + len(words) :]]


def test_classified_conversations_and_texts(made, images, tmp_path: Path) -> None:
    first, second, third = images
    rows = write(
        tmp_path,
        {"messages": [user("<image>q<image>"), ANSWER], "images": [third, second], "label": 1},
        {"text": "before <image>after", "images": [first], "label": 0},
    )
    store = made.prepare("seq_cls", dataset=[rows], dataset_shuffle=False).train
    check(made, first_batch(made, store, "seq_cls", 2), [[third, second], [first]], images)
    assert "<|vision_start|><|image_pad|>" in made.tokenizer.decode(store.row(1)[0][0].tolist())


PAIR = {"messages": [QUESTION, ANSWER], "rejected_response": "b"}
CONTRASTED = {"query": "q", "positive": ["a", "b"], "negative": "c"}


@pytest.mark.parametrize(
    ("stage", "row", "reason"),
    [
        ("preference", PAIR, "it has more <image> tags than images"),
        ("preference", PAIR | {"images": ["0.png"], "rejected_images": ["gone.png"]}, "an image cannot be read"),
        ("preference", {"messages": [user("<image><image>"), ANSWER], "images": ["0.png", "1.png"],
                        "rejected_images": ["2.png"]}, "it has more <image> tags than images"),
        ("preference", PAIR | {"images": ["0.png"], "rejected_images": [""]}, "its rejected_images has an empty value"),
        ("preference", {"messages": [QUESTION, ANSWER], "images": ["0.png"], "rejected_images": ["0.png"]},
         "its chosen and rejected answers are the same"),
        ("preference", {"messages": [QUESTION, ANSWER], "images": ["0.png"]}, "it has no rejected answer"),
        ("preference", PAIR | {"images": ["0.png"], "positive_images": ["1.png"]}, "it has positive_images, which"),
        ("preference", PAIR | {"images": ["0.png"], "rejected_audios": ["1.wav"]},
         "it has audios, which are not supported with qwen3_vl"),
        ("kto", {"messages": [user("q"), {"role": "assistant", "content": "<image>"}], "images": ["0.png"], "label": 1},
         "its answer has an image or video, and KTO pairs"),
        ("embedding", CONTRASTED | {"positive_images": ["0.png"]}, "its positive_images are not one list for each"),
        ("reranker", CONTRASTED | {"negative_images": [["0.png"], ["1.png"]]}, "it has 1 of these, and 2 of those"),
        ("embedding", CONTRASTED | {"rejected_images": ["0.png"]}, "it has rejected_images, which this task"),
        ("seq_cls", {"messages": [QUESTION], "images": ["0.png", "9.png"], "label": 1}, "an image cannot be read"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_with_their_place(
    made, images, tmp_path: Path, monkeypatch, stage: str, row: dict, reason: str
) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    rows = write(tmp_path, {"query": "none"}, row)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        made.prepare(stage, dataset=[rows])
    assert "rows.jsonl line 2" in str(error.value)


def test_a_broken_file_leaves_its_pair_without_loss(made, images, tmp_path: Path) -> None:
    rows = write(tmp_path, *(PAIR | {"images": [image]} for image in images[:2]))
    store = made.prepare("preference", dataset=[rows], dataset_shuffle=False).train
    whole = first_batch(made, store, "preference", 2)
    Path(images[0]).unlink()
    batch = first_batch(made, store, "preference", 2)
    assert batch.media is not None
    assert batch.grouping is not None
    assert whole.grouping is not None
    assert batch.media.broken_media == 1
    assert batch.grouping.tokens.tolist() == [0, 0, *whole.grouping.tokens.tolist()[2:]]
    assert batch.loss_tokens == whole.loss_tokens
