"""Messages of tools and schedulers with images."""

import json

import pytest
from megaswift.templates.formats.medium import IMAGE
from megaswift.templates.formats.replies import split_replies, to_replies
from megaswift.templates.formats.schemas import UnusableRow
from PIL import Image


@pytest.mark.parametrize(
    ("message", "text", "sources"),
    [
        ({"content": "see <image>"}, "see <image>", []),  # a text
        ({"content": "see <image>!", "images": ["a.png"]}, f"see {IMAGE}!", ["a.png"]),
        ({"content": "see", "images": ["a.png", "b.png"]}, f"{IMAGE}{IMAGE}see", ["a.png", "b.png"]),
        ({"content": "", "images": "a.png"}, IMAGE, ["a.png"]),
        (
            {"content": [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "http://a/b"}}]},
            f"see {IMAGE}",
            ["http://a/b"],
        ),
        ({"content": [{"type": "image", "image": {"bytes": b"abc"}}]}, IMAGE, [None]),
        ({"content": [{"type": "image", "image": Image.new("RGB", (3, 2))}]}, IMAGE, [None]),
    ],
)
def test_forms_of_images(message: dict, text: str, sources: list[str | None]) -> None:
    """Data becomes a data URI."""
    replies = to_replies([{"role": "tool", "name": "look"} | message])
    assert json.loads(json.dumps(replies)) == replies
    [split], media = split_replies(replies)
    assert split == {"role": "tool", "name": "look", "content": text}
    expected = zip(media, sources, strict=True)
    assert all(medium.source == name if name else medium.source.startswith("data:") for medium, name in expected)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "<image><image>", "images": ["a.png"]}, "more <image> tags than images"),
        ({"content": "<video>", "videos": ["a.mp4"]}, "it has videos, where texts"),
        ({"content": "a", "audios": ["a.wav"]}, "it has audios, where texts"),
        ({"content": [{"type": "image", "image": 7}]}, "an image that is no path"),
        ({"content": [{"type": "image"}]}, "more <image> tags than images"),
        ({"content": f"a{IMAGE}", "images": ["a.png"]}, "Unicode reserves"),
    ],
)
def test_what_is_no_image_is_refused(message: dict, problem: str) -> None:
    with pytest.raises(UnusableRow, match=problem):
        to_replies([{"role": "user"} | message])
