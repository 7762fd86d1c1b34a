"""Images in requests to a rollout server: the pixels that were sent, and reasons for bad ones."""

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.tasks.rollout import image_bodies, request_bodies
from megaswift.tasks.rollout.bodies import Limits
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.image_bodies import ImageReader
from megaswift.tasks.rollout.request_image import RequestImage
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions
from PIL import Image

from tests import tiny_vision
from tests.tasks.rollout.served import serving

PLACE = 5  # placeholder of an image
POSITIONS, VOCABULARY = 64, 500
SIDE = 32  # pixels of an image token


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> VisionProcessor:
    folder = tiny_vision.qwen3_vl(tmp_path_factory.mktemp("model"))
    processor = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
    assert processor is not None
    assert processor.image_token_id == PLACE
    return processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("allowed")
    tiny_vision.picture(70, 100).save(folder / "a.png")
    (folder / "text.png").write_text("no picture")
    (folder / "out.png").symlink_to("/etc/hosts")
    return folder


@pytest.fixture(scope="module")
def server(vision: VisionProcessor, folder: Path):
    settings: dict[str, Any] = {"positions": POSITIONS, "vocab_size": VOCABULARY}
    with serving(images=ImageReader(vision, folder), most_images=3, **settings) as (url, _, _):
        yield url


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG whose header says 20,000 x 20,000."""
    head = b"IHDR" + (20000).to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + head + zlib.crc32(head).to_bytes(4) + b"\0\0\0\0IEND\xaeB`\x82"


def body(*images: Any, tokens: Any = (1, PLACE, 2), indices: Any = (0,), **more: Any) -> dict[str, Any]:
    data = [{"data": base64.b64encode(one).decode()} if isinstance(one, bytes) else one for one in images]
    request = {"tokens": list(tokens), "seed": 0, "images": indices, **more}
    return {"requests": [request], "images": data, "sampling": {"max_new_tokens": 2}}


GOOD = encoded(tiny_vision.picture(SIDE * 3, SIDE * 2))


def test_sent_pixels_arrive(vision: VisionProcessor) -> None:
    """Completions of a prompt share their image. Bodies are divided by bytes, and keep the order of requests."""
    pictures = [tiny_vision.picture(40 + 30 * number, 90, number) for number in range(3)]
    images = [RequestImage.within(lambda picture=picture: picture, 4096, 65536, vision) for picture in pictures]
    used = [[0], [0], [1, 0], [], [2]]
    lengths = [
        vision.tokens((1, *(side // 16 for side in vision.resized(*p.size[::-1], vision.limits)))) for p in pictures
    ]
    requests = [
        Request(
            [3, *[PLACE] * len(numbers)], seed, 4, [images[n] for n in numbers], 1 + sum(lengths[n] for n in numbers)
        )
        for seed, numbers in enumerate(used)
    ]
    for limit, sizes in ((2**26, [3]), (1, [1, 2, 1])):
        request_bodies.MEDIA_BYTES, before = limit, request_bodies.MEDIA_BYTES
        bodies = [json.loads(json.dumps(one)) for one in request_bodies.request_bodies(requests)]
        request_bodies.MEDIA_BYTES = before
        assert [len(one["images"]) for one in bodies if "images" in one] == sizes
        limits = Limits(None, None, ImageReader(vision, None))
        arrived = [request for one in bodies for request in limits.generation(one | {"sampling": {}})[0]]
        assert [(one.tokens, one.seed, one.prompt_length) for one in arrived] == [
            (one.tokens, one.seed, one.prompt_length) for one in requests
        ]
        for request, numbers in zip(arrived, used, strict=True):
            for image, number in zip(request.images, numbers, strict=True):
                np.testing.assert_array_equal(np.array(image.pixels), np.array(pictures[number]))
                assert (image.min_pixels, image.max_pixels) == (4096, 65536)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (body(GOOD[:-40]), 422, "image 0: an image is damaged or truncated"),
        (body(b"no picture" * 9), 422, "image 0: an image is of no known format"),
        (body(bomb()), 422, "image 0: an image has more than 178,956,970 pixels"),
        (body(encoded(Image.new("RGB", (3, 900)))), 422, "image 0: an image or video is more than 200 times as long"),
        (body({"data": "%%"}), 422, "image 0: data is no base64"),
        (body({"data": 7}), 422, "image 0: data is no text"),
        (body({}), 422, "image 0: it needs one of data (base64), url and path"),
        (body("abc"), 422, "image 0 is a JSON string: send an object"),
        (body({"url": "http://127.0.0.1:9/a.png"}), 422, "private"),
        (body({"url": "http://localhost/a.png"}), 422, "private"),
        (body({"url": "file:///etc/hosts"}), 422, "url begins with neither http:// nor https://"),
        (body({"path": "../a.png"}), 422, "outside of the server's --allowed_local_media_path"),
        (body({"path": "/etc/hosts"}), 422, "outside of the server's --allowed_local_media_path"),
        (body({"path": "out.png"}), 422, "outside of the server's --allowed_local_media_path"),
        (body({"path": "text.png"}), 422, "image 0: an image is of no known format"),
        (body({"path": "gone.png"}), 422, "image 0: an image cannot be read"),
        (body({"path": "a\0"}), 422, "image 0: path"),
        (body({"path": "a.png", "max_pixels": 0}), 422, "max_pixels is 0"),
        (body({"path": "a.png", "max_pixels": 1024, "min_pixels": 4096}), 422, "min_pixels 4096 is above max_pixels"),
        (body({"path": "a.png", "max_pixels": 2**30, "min_pixels": 2**29}), 422, "are too many: the model has 64"),
        (body(GOOD, indices=[1]), 422, "request 0: an item of images is 1: it must be a whole number from 0 to 0"),
        (body(GOOD, indices=[0, 0]), 422, "request 0: it has 2 images, and tokens has 1 places for them"),
        (body(GOOD, tokens=[1, 2]), 422, "request 0: it has 1 images, and tokens has 0 places"),
        (body(GOOD, tokens=[PLACE] * 11, indices=[0] * 11), 422, "66 tokens and 1 new one are too many"),
        (
            body(GOOD, prompt_length=9),
            422,
            "it has 8 tokens with those of its media here, and 9 in training",
        ),
    ],
)
def test_bad_images_have_a_reason(sent: dict, status: int, said: str, server: str) -> None:
    answer = httpx.post(f"{server}/generate", json=sent)
    assert (answer.status_code, answer.json()["kind"]) == (status, "request"), answer.text
    assert said in answer.json()["error"]
    whole = httpx.post(
        f"{server}/generate", json=body(GOOD, {"path": "a.png"}, tokens=[1, PLACE, PLACE, 2], indices=[0, 1])
    )
    assert whole.json()["completions"][0]["tokens"] == [2, PLACE]


def test_images_of_a_body_are_bounded(server: str, monkeypatch) -> None:
    monkeypatch.setattr(image_bodies, "MAX_MEDIA_BYTES", 3 * SIDE * 3 * SIDE * 2)
    assert httpx.post(f"{server}/generate", json=body(GOOD)).status_code == 200
    answer = httpx.post(f"{server}/generate", json=body(GOOD, GOOD))
    assert (answer.status_code, answer.json()["kind"]) == (413, "request")


def test_a_server_without_a_tower(vision: VisionProcessor) -> None:
    with serving(positions=POSITIONS, vocab_size=VOCABULARY) as (url, _, _):
        answer = httpx.post(f"{url}/generate", json=body(GOOD))
        assert answer.status_code == 422
        assert "this server's model takes none" in answer.json()["error"]
        claim = httpx.post(f"{url}/claim", json={"run": "a", "who": "a test", "images": 2})
        assert "its model takes no images, and the run's data has some" in claim.json()["error"]
    with serving(images=ImageReader(vision, None), most_images=3) as (url, _, _):
        answer = httpx.post(f"{url}/generate", json=body({"path": "a.png"}))
        assert "this server reads no files. Start it with --allowed_local_media_path" in answer.json()["error"]
        claim = httpx.post(f"{url}/claim", json={"run": "a", "who": "a test", "images": 4})
        assert "it takes 3 images in a prompt, and the run's data has 4" in claim.json()["error"]
        assert httpx.post(f"{url}/claim", json={"run": "a", "who": "a test", "images": 3}).status_code == 200
