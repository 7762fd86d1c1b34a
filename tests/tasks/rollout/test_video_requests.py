"""Videos in requests to a rollout server: the frames and times that were sent, and reasons for bad ones."""

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.tasks.rollout import image_bodies
from megaswift.tasks.rollout.bodies import Limits
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.image_bodies import ImageReader
from megaswift.tasks.rollout.request_bodies import request_bodies
from megaswift.tasks.rollout.request_image import RequestImage
from megaswift.tasks.rollout.request_video import training_video
from megaswift.tasks.rollout.video_bodies import VideoReader
from megaswift.templates.dataset.placed_media import PlacedMedium
from megaswift.templates.formats.medium import Medium
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions

from tests import tiny_vision
from tests.tasks.rollout.served import serving

IMAGE, VIDEO = 5, 6  # placeholders
POSITIONS, VOCABULARY = 200, 500
SIDE = 32  # pixels of a visual token of Qwen3-VL


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    for number in range(5):
        tiny_vision.picture(90, 70, number).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def film(folder: Path) -> Path:
    """A file of 30 frames, ten a second."""
    av = pytest.importorskip("av")
    with av.open(str(folder / "film.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number in range(30):
            frame = av.VideoFrame.from_image(tiny_vision.picture(96, 64, seed=number // 3))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return folder / "film.mp4"


def vision_of(family: str, folder: Path) -> VisionProcessor:
    tiny_vision.FAMILIES[family](folder)
    processor = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
    assert processor is not None
    assert (processor.image_token_id, processor.video_token_id) == (IMAGE, VIDEO)
    return processor


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> VisionProcessor:
    return vision_of("qwen3_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(vision: VisionProcessor):
    settings: dict[str, Any] = {"positions": POSITIONS, "vocab_size": VOCABULARY}
    with serving(images=ImageReader(vision, None), videos=VideoReader(vision), **settings) as (url, _, _):
        yield url


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_sent_frames_arrive(family: str, folder: Path, film: Path, tmp_path: Path) -> None:
    """Sampled frames of a file, and a list of three frames. Images beside them keep their size."""
    vision = vision_of(family, tmp_path)
    sources: list[Any] = [str(film), [str(folder / f"{number}.png") for number in range(3)]]
    media = [Medium("video", source) for source in sources]
    videos = [training_video(PlacedMedium(1, 0, vision.plan(medium), medium), vision) for medium in media]
    picture = tiny_vision.picture(150, 90)
    image = RequestImage(lambda: picture, 4096, 8192)
    height, width = vision.resized(90, 150, vision.limits.of_row({"min_pixels": 4096, "max_pixels": 8192}))
    image_tokens = height * width // vision.factor**2
    lengths = [2 + video.plan.length for video in videos]
    requests = [
        Request([1, VIDEO, 2], 0, 4, (), lengths[0], [videos[0]]),
        Request([1, VIDEO, 2, IMAGE], 1, 4, [image], lengths[1] + image_tokens, [videos[1]]),
        Request([1, VIDEO, 2, VIDEO, 3], 2, 4, (), sum(lengths) - 1, videos),
    ]
    (body,) = [json.loads(json.dumps(one)) for one in request_bodies(requests)]
    assert [len(body[name]) for name in ("images", "videos")] == [1, 2]
    limits = Limits(None, None, ImageReader(vision, None), VideoReader(vision))
    arrived, _ = limits.generation(body | {"sampling": {}})
    assert [(one.tokens, one.prompt_length) for one in arrived] == [(one.tokens, one.prompt_length) for one in requests]
    for found, sent in zip(arrived, requests, strict=True):
        for here, there in zip(found.videos, sent.videos, strict=True):
            assert here.plan.grid == there.plan.grid
            assert here.plan.time_step == there.plan.time_step
            np.testing.assert_array_equal(here.plan.expanded(VIDEO), there.plan.expanded(VIDEO))
            medium = media[videos.index(there)]
            np.testing.assert_array_equal(here.patches, vision.patches(medium, here.plan.grid))
            (frames, facts), (expected, wanted) = here.frames, there.frames
            np.testing.assert_array_equal(frames, expected)
            assert facts == wanted
    (beside,) = arrived[1].images
    assert beside.pixels.size == (width, height)
    grid = 1, height // vision.patch_size, width // vision.patch_size
    (expected,) = vision.resized_image(Medium("image", picture), grid)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(np.array(beside.pixels), expected.permute(1, 2, 0).numpy())


def frame(width: int = 2 * SIDE, height: int = SIDE, seed: int = 0) -> str:
    file = io.BytesIO()
    tiny_vision.picture(width, height, seed).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def body(video: Any, tokens: Any = (1, VIDEO, 2), indices: Any = (0,), **more: Any) -> dict[str, Any]:
    request = {"tokens": list(tokens), "seed": 0, "videos": list(indices), **more}
    return {"requests": [request], "videos": [video], "sampling": {"max_new_tokens": 2}}


FRAMES = {"frames": [frame(), frame(seed=1)], "fps": 2.0, "indices": [0, 7], "total_frames": 8}
broken = partial(body, FRAMES)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (body(FRAMES | {"frames": [frame()[:-60], frame()]}), "video 0: an image is damaged or truncated"),
        (body(FRAMES | {"frames": ["%%", "%%"]}), "video 0: an item of frames is no base64"),
        (body(FRAMES | {"frames": [7, 8]}), "video 0: an item of frames is no base64"),
        (body(FRAMES | {"frames": []}), "video 0: frames is a JSON array: it must be a list of 1 to"),
        (body({"frames": [frame()]}), "video 0: a video has fewer than 2 frames"),
        (body({"frames": [frame(), frame(SIDE, SIDE)]}), "video 0: the frames of a video differ in size"),
        (body({"frames": [frame(50, 40)] * 2}), "frames of 50 x 40 pixels: both must be multiples of 32"),
        (body(FRAMES | {"indices": [0]}), "video 0: indices must have a number for each of 2 frames"),
        (
            body(FRAMES | {"indices": [7, 0]}),
            "video 0: indices must have a number for each of 2 frames, in their order",
        ),
        (body(FRAMES | {"indices": [0, 8]}), "video 0: an item of indices is 8: it must be a whole number from 0 to 7"),
        (body(FRAMES | {"fps": 0}), "video 0: fps is 0: it must be a number from 1e-06"),
        (body(FRAMES | {"path": "0.png"}), "video 0: 'path' is unknown. Fields: frames, indices, total_frames, fps"),
        (body({}), "video 0: frames is missing"),
        (body("abc"), "video 0 is a JSON string: send an object"),
        (broken(tokens=[1, 2]), "request 0: it has 1 videos, and tokens has 0 places for them"),
        (broken(indices=[1]), "request 0: an item of videos is 1: it must be a whole number from 0 to 0"),
        (broken(tokens=[VIDEO] * 30, indices=[0] * 30), "tokens and 1 new one are too many: the model has 200"),
        (broken(prompt_length=9), "tokens with those of its media here, and 9 in training"),
    ],
)
def test_bad_videos_have_a_reason(sent: dict, said: str, server: str) -> None:
    answer = httpx.post(f"{server}/generate", json=sent)
    assert (answer.status_code, answer.json()["kind"]) == (422, "request"), answer.text
    assert said in answer.json()["error"]
    assert httpx.post(f"{server}/generate", json=broken()).json()["completions"][0]["tokens"] == [2, VIDEO]


def test_videos_of_a_body_are_bounded(server: str, monkeypatch) -> None:
    monkeypatch.setattr(image_bodies, "MAX_MEDIA_BYTES", 2 * 2 * SIDE * SIDE * 3)
    assert httpx.post(f"{server}/generate", json=broken()).status_code == 200
    answer = httpx.post(f"{server}/generate", json=body(FRAMES | {"frames": [frame()] * 3, "indices": [0, 1, 2]}))
    assert (answer.status_code, answer.json()["kind"]) == (413, "request"), answer.text


def test_servers_that_take_fewer(vision: VisionProcessor) -> None:
    claimed = {"run": "a", "who": "a test", "videos": 2}
    for readers, taken in (
        ({}, "no"),
        ({"images": ImageReader(vision, None), "videos": VideoReader(vision, 1)}, "1"),
    ):
        with serving(positions=POSITIONS, vocab_size=VOCABULARY, **readers) as (url, _, _):
            answer = httpx.post(f"{url}/claim", json=claimed).json()["error"]
            assert (
                f"it takes {taken} videos in a prompt, and the run's data has 2. Start it with --vllm_limit" in answer
            )
            assert httpx.get(f"{url}/health").json()["videos"] == (1 if readers else 0)
            if not readers:
                assert "videos: this server takes none" in httpx.post(f"{url}/generate", json=broken()).json()["error"]
