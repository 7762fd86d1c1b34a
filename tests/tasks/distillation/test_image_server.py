"""Distillation on images from a teacher behind a server: the numbers of the teacher in the run's processes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.image_bodies import ImageReader
from megaswift.tasks.rollout.in_process import InProcessBackend
from megaswift.tasks.rollout.request_image import RequestImage
from megaswift.tasks.rollout.scoring_client import ScoringClient
from megaswift.tasks.rollout.server import Server
from megaswift.tasks.rollout.transformers_engine import TransformersEngine
from megaswift.tasks.rollout.video_bodies import VideoReader
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions
from PIL import Image

from tests import tiny, tiny_vision
from tests.tasks.distillation.test_images import LAYOUTS, ROWS, distil
from tests.tasks.rollout.served import listening
from tests.tasks.vision_oracle import BATCH, STEPS, Oracle, Place, log

pytestmark = pytest.mark.slow
PLACE, TOP = 5, 9  # placeholder of an image; tokens at a position
NAMES = "loss", "jsd", "nll_loss"


def answered(number: int, *, has_video: bool = False) -> dict:
    """A conversation with images in both of its messages, and a video in the first."""
    row = ROWS[number]
    answer = {"role": "assistant", "content": f"like <image>, {row['messages'][1]['content']}"}
    video = [f"{number % 3}.png"] * (2 + number % 2)
    question = {"role": "user", "content": f"<video>{row['messages'][0]['content']}"}
    media = {"images": [*row["images"], f"{number}.png"]}
    if not has_video:
        return {"messages": [row["messages"][0], answer], **media}
    return {"messages": [question, answer], **media, "videos": [video]}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("served"))
    tiny_vision.qwen3_vl(place.folder / "other", seed=1)
    place.write("rows.jsonl", [answered(number) for number in range(STEPS * BATCH)])
    place.write("videos.jsonl", [answered(number, has_video=number % 3 != 1) for number in range(STEPS * BATCH)])
    return place


@contextmanager
def teaching(folder: Path, *, takes_images: bool = True) -> Iterator[str]:
    """Address of a server of the model in `folder`, by transformers, in a thread."""
    engine = TransformersEngine(folder, dtype=torch.float32)
    settings = {"vocab_size": tiny_vision.VOCABULARY + 2, "positions": 512}
    if takes_images:
        vision = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
        assert vision is not None
        settings |= {"images": ImageReader(vision, None), "videos": VideoReader(vision)}
    with listening(Server(InProcessBackend(engine, "transformers"), "other", **settings).app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url(place: Place) -> Iterator[str]:
    with teaching(place.folder / "other") as url:
        yield url


GENERATED = "--top_k 1 --max_completion_length 9"
ON_POLICY = f"--lmbda 1 --sft_alpha 0 --use_vllm false {GENERATED}"


@pytest.mark.parametrize(
    ("layout", "flags", "names"),
    [
        pytest.param("", "--dataset videos.jsonl", NAMES, id="answers of the data, videos"),
        pytest.param("", "", NAMES, id="answers of the data", marks=pytest.mark.long),
        pytest.param("TP2 SP", "", NAMES, id="TP2 SP", marks=pytest.mark.long),
        pytest.param("PP2", "", NAMES, id="PP2", marks=pytest.mark.long),
        pytest.param("DP2", "--packing true --packing_length 1024", NAMES, id="DP2 packed", marks=pytest.mark.long),
        pytest.param("CP2", "", NAMES, id="CP2", marks=pytest.mark.long),
        pytest.param("", ON_POLICY, NAMES[:2], id="on policy", marks=pytest.mark.long),
        pytest.param("", f"--seq_kd true {GENERATED}", NAMES, id="answers of the teacher", marks=pytest.mark.long),
    ],
)
def test_steps_are_those_of_a_teacher_in_the_process(
    layout: str, flags: str, names: tuple[str, ...], place: Place, url: str
) -> None:
    words = f"{flags} --gkd_logits_topk {TOP}"
    served = distil(place, f"{words} {LAYOUTS.get(layout, '')} --teacher_model_server {url}", 2 if layout else 1)
    inside = distil(place, f"{words} --teacher_model other")
    torch.testing.assert_close(log(served, *names), log(inside, *names), rtol=1e-5, atol=0)


def test_scores_are_those_of_transformers(place: Place, url: str) -> None:
    """Also where an answer has a placeholder that a model has drawn, which transformers takes behind a cache."""
    oracle = Oracle(place.folder / "other", place.folder)
    row = answered(1)
    inputs = oracle.conversation(row["messages"][:1], row["images"][:-1], prompt=True)
    drawn = torch.tensor([[9, PLACE, 17, PLACE + 1, 11]])
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        first = oracle.model(**inputs, use_cache=True)
        rest = oracle.model(
            input_ids=drawn,
            past_key_values=first.past_key_values,
            position_ids=(oracle.model.model.rope_deltas + length + torch.arange(drawn.shape[1])).expand(3, 1, -1),
        )
    expected = torch.cat([first.logits[0], rest.logits[0]])[length - 3 : -1].log_softmax(-1).topk(TOP)
    ids = inputs["input_ids"][0].tolist()
    collapsed = [token for at, token in enumerate(ids) if token != PLACE or ids[at - 1] != PLACE]
    pictures = [Image.open(place.folder / name).convert("RGB") for name in row["images"][:-1]]
    size = oracle.processor.image_processor.size
    least, most = size["shortest_edge"], size["longest_edge"]
    images = [RequestImage(lambda picture=picture: picture, least, most) for picture in pictures]
    document = Request([*collapsed, *drawn[0].tolist()], 0, None, images, length + drawn.shape[1])
    positions = np.arange(length - 3, length + drawn.shape[1] - 1)
    (scores,) = ScoringClient(url).top_log_probs([document], [positions], TOP, tiny_vision.VOCABULARY + 2)
    assert (scores.tokens == expected.indices.numpy()).all()
    np.testing.assert_allclose(scores.log_probs, expected.values.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_length": 30}, "it has 8 tokens with those of its media here, and 30 in training"),
        ({"tokens": [1, 2]}, "it has 1 images, and tokens has 0 places"),
        ({"places": [7]}, "an item of places is 7: it must be a whole number from 0 to 6"),
        ({"images": [{"data": "aGVsbG8="}]}, "image 0: an image is of no known format"),
        ({"images": [{"url": "http://127.0.0.1:9/a.png"}]}, "private"),
    ],
)
def test_bad_documents_have_a_reason(changes: dict, problem: str, url: str) -> None:
    import httpx
    from megaswift.tasks.rollout.request_bodies import scoring_body

    picture = tiny_vision.picture(96, 64)
    document = Request([1, PLACE, 2], 0, None, [RequestImage(lambda: picture, 4096, 65536)], 8)
    body = scoring_body(document) | {"places": [6], "top": 2, "vocab_size": 400}
    answer = httpx.post(f"{url}/top_log_probs", json=json.loads(json.dumps(body | changes)))
    assert (answer.status_code, answer.json()["kind"]) == (422, "request"), answer.text
    assert problem in answer.json()["error"]
    assert httpx.post(f"{url}/top_log_probs", json=body).status_code == 200


def test_refusals(place: Place) -> None:
    words = f"--gkd_logits_topk {TOP}"
    if not (place.folder / "text").is_dir():
        tiny.save_tokenizer(tiny.save(place.folder / "text", "qwen3", 0))
    with teaching(place.folder / "other", takes_images=False) as text_url:
        said = distil(place, f"{words} --teacher_model_server {text_url}", fails=True)
    assert f"--teacher_model_server {text_url}: its model takes no images, and the run's data has some" in said
