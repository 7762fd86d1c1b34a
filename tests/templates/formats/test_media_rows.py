"""Rows with images, videos and audios: tags, columns and blocks."""

import json

import pytest
from megaswift.templates.formats.media_rows import has_media, to_media_conversation, to_media_text
from megaswift.templates.formats.medium import AUDIO, IMAGE, SENTINELS, VIDEO, to_blocks
from megaswift.templates.formats.paired_media_rows import media_of
from megaswift.templates.formats.schemas import ArrowRow, UnusableRow

ANSWER = {"role": "assistant", "content": "a"}


def user(content) -> dict:
    return {"role": "user", "content": content}


def read(row: dict) -> tuple[list[str], list]:
    """Return the contents with I, V and A for images, videos and audios, and the sources in order."""
    conversation, _ = to_media_conversation(row)
    contents = [message["content"] for message in conversation.messages]
    sentinels = [character for content in contents for character in content if character in (IMAGE, VIDEO, AUDIO)]
    assert sentinels == [SENTINELS[medium.kind] for medium in conversation.media]
    contents = [content.replace(IMAGE, "[I]").replace(VIDEO, "[V]").replace(AUDIO, "[A]") for content in contents]
    return contents, [medium.source for medium in conversation.media]


@pytest.mark.parametrize(
    ("row", "contents", "sources"),
    [
        ({"messages": [user("<image>q"), ANSWER], "images": ["1"]}, ["[I]q", "a"], ["1"]),
        ({"messages": [user("<image>q"), ANSWER], "image": "1"}, ["[I]q", "a"], ["1"]),
        ({"messages": [user("q<image>"), ANSWER], "images": '["1"]'}, ["q[I]", "a"], ["1"]),
        ({"messages": [user("q"), ANSWER], "images": ["1", "2"]}, ["[I][I]q", "a"], ["1", "2"]),
        ({"messages": [user("q<image>"), ANSWER], "images": ["1", "2"]}, ["[I]q[I]", "a"], ["1", "2"]),
        (
            {"system": "s", "messages": [user("q"), ANSWER], "images": ["1"], "videos": [["2", "3"]]},
            ["s", "[I][V]q", "a"],
            ["1", ["2", "3"]],
        ),
        (
            {"messages": [user("<image>"), {"role": "assistant", "content": "<image>"}], "images": ["1", "2"]},
            ["[I]", "[I]"],
            ["1", "2"],
        ),
        (
            {"query": "<video><image>", "response": "a", "history": [["<image>b", "c"]], "images": ["1", "2"],
             "videos": ["3"]},
            ["[I]b", "c", "[V][I]", "a"],
            ["1", "3", "2"],
        ),
        ({"instruction": "<image>", "input": "b", "output": "a", "images": ["1"]}, ["[I]\nb", "a"], ["1"]),
        (
            {"conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}], "image": "1"},
            ["[I]\nq", "a"],
            ["1"],
        ),
        ({"messages": [user("<img>a b.png</img>q"), ANSWER]}, ["[I]q", "a"], ["a b.png"]),
        (
            {"messages": [user("<image><img>x.png</img><video>y.mp4</video>"), ANSWER], "images": ["1"]},
            ["[I][I][V]", "a"],
            ["1", "x.png", "y.mp4"],
        ),
        (
            {"messages": [user([
                {"type": "text", "text": "b"},
                {"type": "image_url", "image_url": {"url": "1"}},
                {"type": "image_url", "image_url": "2"},
                {"type": "image", "image": "3"},
                {"type": "image"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                {"type": "image", "source": {"type": "url", "url": "5"}},
                {"type": "image", "url": "6"},
                {"type": "image", "path": "7"},
                {"type": "video", "video": ["8", "9"]},
                {"type": "video_url", "video_url": {"url": "10"}},
                {"type": "image", "image": {"bytes": b"11", "path": None}},
                {"type": "text", "text": "<image>"},
            ]), ANSWER], "images": ["4", "12"]},
            ["b[I][I][I][I][I][I][I][I][V][V][I][I]", "a"],
            ["1", "2", "3", "4", "data:image/png;base64,AA==", "5", "6", "7", ["8", "9"], "10",
             {"bytes": b"11", "path": None}, "12"],
        ),
        ({"messages": json.dumps([user([{"type": "image"}]), ANSWER]), "images": ["1"]}, ["[I]", "a"], ["1"]),
        ({"messages": [user("q"), ANSWER], "images": [], "image": None, "videos": ""}, ["q", "a"], []),
        (
            {"messages": [user("<audio>b<image><audio>3.wav</audio>"), ANSWER], "audios": ["1"], "image": "2"},
            ["[A]b[I][A]", "a"],
            ["1", "2", "3.wav"],
        ),
        (
            {"messages": [user([
                {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
                {"type": "input_audio", "input_audio": {"data": "https://a/b.wav"}},
                {"type": "audio_url", "audio_url": {"url": "1"}},
                {"type": "audio", "audio": "2"},
                {"type": "audio", "audio_url": "3"},
                {"type": "audio"},
                {"type": "text", "text": "q"},
            ]), ANSWER], "audio": "4"},
            ["[A][A][A][A][A][A]q", "a"],
            ["data:;base64,AA==", "https://a/b.wav", "1", "2", "3", "4"],
        ),
    ],
)  # fmt: skip
def test_media_are_in_the_order_of_their_places(row, contents, sources) -> None:
    assert read(row) == (contents, sources)
    assert [medium.source for medium in media_of(row, "sft")] == sources


def test_blocks_of_arrow_have_nulls_for_other_keys() -> None:
    blocks = [
        {"type": "text", "text": "q", "image": None, "image_url": None},
        {"type": "image", "text": None, "image": "1", "image_url": None},
        {"type": "image_url", "text": None, "image": None, "image_url": {"url": "2", "detail": None}},
    ]
    row = ArrowRow(messages=[user(blocks), ANSWER], images=None)
    assert read(row) == (["q[I][I]", "a"], ["1", "2"])


def test_limits_of_a_row() -> None:
    row = {"messages": [user("q"), ANSWER], "images": ["1"], "chat_template_kwargs": {"max_pixels": 100, "x": 1}}
    [medium] = to_media_conversation(row)[0].media
    assert medium.limits == {"max_pixels": 100}
    row["chat_template_kwargs"] = {"fps": -1}
    with pytest.raises(UnusableRow, match="set fps, which is no number above 0"):
        to_media_conversation(row)


def test_plain_texts() -> None:
    for row in ({"text": "b<image>c"}, {"messages": [{"role": "assistant", "content": "b<image>c"}]}):
        text, media = to_media_text(row | {"images": ["1", "2"]})
        assert (text, [medium.source for medium in media]) == (f"{IMAGE}b{IMAGE}c", ["1", "2"])
    with pytest.raises(UnusableRow, match="use megatron sft"):
        to_media_text({"text": "<bbox>", "images": ["1"], "objects": {"bbox": [[1, 2]]}})


MESSAGES = {"messages": [user("<image>q"), ANSWER]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (MESSAGES, "more <image> tags than images"),
        (MESSAGES | {"images": []}, "more <image> tags than images"),
        ({"messages": [user("<video>"), ANSWER], "images": ["1"]}, "more <video> tags than videos"),
        ({"messages": [user([{"type": "image"}]), ANSWER]}, "more <image> tags than images"),
        ({"messages": [user("<audio>"), ANSWER], "images": ["1"]}, "more <audio> tags than audios"),
        (MESSAGES | {"images": ["1"], "audios": ["1", ""]}, "its audios has an empty value"),
        (MESSAGES | {"images": ["1", None]}, "its images has an empty value"),
        (MESSAGES | {"images": "[1"}, "its images is not JSON"),
        (MESSAGES | {"images": ["1"], "rejected_images": ["2"]}, "it has rejected_images, which this task"),
        (MESSAGES | {"images": ["1"], "objects": [1]}, "its objects are not an object of lists"),
        ({"messages": [user(f"{IMAGE}q"), ANSWER], "images": ["1"]}, "a character that Unicode reserves"),
        ({"messages": [user("\ufdd20\ufdd3q"), ANSWER], "images": ["1"]}, "a character that Unicode reserves"),
        ({"messages": [user([{"type": "image", "source": {"type": "file"}}]), ANSWER]},
         "without an image, video or audio"),
        ({"messages": [user([{"type": "image"}, {"type": "tool_use"}]), ANSWER], "images": ["1"]},
         "tool_use content; text and media are expected"),
        ({"messages": [user([{"type": "image"}, {"type": "text", "text": 5}]), ANSWER], "images": ["1"]},
         "its text is a number"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(row, reason) -> None:
    with pytest.raises(UnusableRow, match=reason):
        to_media_conversation(row)


def test_which_rows_have_media() -> None:
    assert has_media({"images": ["1"]})
    assert has_media({"rejected_images": ["1"]})
    assert has_media({"chosen": [user([{"type": "image_url"}])]})
    assert not has_media({"messages": [user("<image>")], "images": []})
    assert not has_media({"messages": [user([{"type": "text", "text": "q"}])]})


def test_blocks() -> None:
    image, video = {"type": "image"}, {"type": "video"}
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    assert to_blocks(f"a{IMAGE}b{VIDEO}{IMAGE}") == [text("a"), image, text("b"), video, image]
    assert to_blocks(f"{IMAGE}a") == [image, text("a")]
