"""Audios in requests to a rollout server: the samples that were sent, and reasons for bad ones."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from megaswift.bridge.checkpoint.pretrained import load_tokenizer
from megaswift.tasks.rollout import image_bodies, request_bodies
from megaswift.tasks.rollout.audio_bodies import AudioReader
from megaswift.tasks.rollout.bodies import Limits
from megaswift.tasks.rollout.engine import Request
from megaswift.tasks.rollout.request_audio import RequestAudio
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.processor import VisionProcessor
from megaswift.templates.options import MediaOptions

from tests import tiny_audio
from tests.tasks.rollout.served import serving

PLACE = tiny_audio.SPECIAL.index("<|audio_pad|>")
POSITIONS, VOCABULARY = 64, 500


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> VisionProcessor:
    folder = tiny_audio.qwen3_asr(tmp_path_factory.mktemp("model"))
    processor = VisionProcessor.open(folder, load_tokenizer(folder), MediaOptions())
    assert processor is not None
    assert processor.placeholder_id("audio") == PLACE
    return processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("allowed")
    (folder / "a.wav").write_bytes(GOOD)
    (folder / "text.wav").write_text("no sound")
    (folder / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n")
    (folder / "out.wav").symlink_to("/etc/hosts")
    return folder


@pytest.fixture(scope="module")
def server(vision: VisionProcessor, folder: Path):
    settings: dict[str, Any] = {"positions": POSITIONS, "vocab_size": VOCABULARY}
    with serving(audios=AudioReader(vision, folder, 3), **settings) as (url, _, _):
        yield url


def body(*audios: Any, tokens: Any = (1, PLACE, 2), indices: Any = (0,), **more: Any) -> dict[str, Any]:
    data = [{"data": base64.b64encode(one).decode()} if isinstance(one, bytes) else one for one in audios]
    request = {"tokens": list(tokens), "seed": 0, "audios": indices, **more}
    return {"requests": [request], "audios": data, "sampling": {"max_new_tokens": 2}}


def sent_samples(values: Any) -> dict[str, str]:
    return {"samples": base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()}


GOOD = tiny_audio.wav(tiny_audio.sound(12_000))  # 10 tokens


def test_sent_samples_arrive(vision: VisionProcessor) -> None:
    """Bit by bit; of a file that is gone silence, as training has it. Completions of a prompt share an audio."""
    sounds = [tiny_audio.sound(9_000 + 7_001 * number, number) for number in range(3)]
    assert vision.audio is not None
    plans = [vision.plan_audio(vision.audio.frames_of(len(sound))) for sound in sounds]

    def gone() -> np.ndarray:
        raise UnusableRow("an audio cannot be read")

    loads: list[Any] = [lambda: sounds[0], lambda: sounds[1], gone]
    audios = [RequestAudio(plan, vision, load) for plan, load in zip(plans, loads, strict=True)]
    used = [[0], [0], [1, 0], [], [2]]
    requests = [
        Request(
            [9, *[PLACE] * len(numbers)],
            seed,
            4,
            prompt_length=1 + sum(plans[n].length for n in numbers),
            audios=[audios[n] for n in numbers],
        )
        for seed, numbers in enumerate(used)
    ]
    bodies = [json.loads(json.dumps(one)) for one in request_bodies.request_bodies(requests)]
    assert [len(one["audios"]) for one in bodies] == [3]
    limits = Limits(None, None, audios=AudioReader(vision, None))
    arrived = limits.generation(bodies[0] | {"sampling": {}})[0]
    assert [one.prompt_length for one in arrived] == [one.prompt_length for one in requests]
    for request, numbers in zip(arrived, used, strict=True):
        for audio, number in zip(request.audios, numbers, strict=True):
            np.testing.assert_array_equal(audio.samples, audios[number].samples)
            np.testing.assert_array_equal(audio.spectrogram, audios[number].spectrogram)
    np.testing.assert_array_equal(arrived[4].audios[0].spectrogram, vision.empty_values(plans[2]))


HEADER_BYTES = 44
SLOW = tiny_audio.wav(tiny_audio.sound(100), rate=1)
FAST = tiny_audio.wav(tiny_audio.sound(100), rate=2**31 - 1)
LONG = tiny_audio.wav(np.zeros(3601 * 1000), rate=1000, width=1)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (body(GOOD[:-40]), "audio 0: an audio is damaged or truncated"),
        (body(GOOD[:20]), "audio 0: an audio is no WAV file of whole numbers"),
        (body(GOOD[:HEADER_BYTES]), "audio 0: an audio is damaged or truncated"),
        (body(b"no sound" * 9), "audio 0: an audio is no WAV file of whole numbers"),
        (body(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n"), "audio 0: an audio is no WAV file of whole numbers"),
        (body(tiny_audio.wav(np.zeros(0))), "audio 0: an audio is empty"),
        (body(LONG), "audio 0: an audio is longer than 3600 seconds"),
        (body(SLOW), "audio 0: an audio has 1 samples per second, not 1000 to 384000"),
        (body(FAST), "audio 0: an audio has 2147483647 samples per second"),
        (body({"data": "%%"}), "audio 0: data is no base64"),
        (body({"data": 7}), "audio 0: data is no text"),
        (body({"data": "AAAA", "samples": "AAAA"}), "audio 0: it needs one of samples, data (base64), url and path"),
        (body({}), "audio 0: it needs one of samples, data (base64), url and path"),
        (body("abc"), "audio 0 is a JSON string: send an object"),
        (body({"samples": "AAA="}), "samples is no float32: its bytes are no multiple of 4"),
        (body(sent_samples([0.5, np.nan])), "samples has values that are not between"),
        (body(sent_samples([0.5, -np.inf])), "samples has values that are not between"),
        (body({"url": "http://127.0.0.1:9/a.wav"}), "private"),
        (body({"url": "http://localhost/a.wav"}), "private"),
        (body({"url": "file:///etc/hosts"}), "url begins with neither http:// nor https://"),
        (body({"path": "../a.wav"}), "outside of the server's --allowed_local_media_path"),
        (body({"path": "/etc/hosts"}), "outside of the server's --allowed_local_media_path"),
        (body({"path": "out.wav"}), "outside of the server's --allowed_local_media_path"),
        (body({"path": "text.wav"}), "audio 0: an audio is no WAV file of whole numbers"),
        (body({"path": "list.m3u8"}), "audio 0: an audio is no WAV file of whole numbers"),
        (body({"path": "gone.wav"}), "audio 0: an audio cannot be read"),
        (body(sent_samples(tiny_audio.sound(160_000))), "are too many: the model has 64"),
        (body(GOOD, indices=[1]), "request 0: an item of audios is 1: it must be a whole number from 0 to 0"),
        (body(GOOD, indices=[0, 0]), "request 0: it has 2 audios, and tokens has 1 places for them"),
        (body(GOOD, tokens=[1, 2]), "request 0: it has 1 audios, and tokens has 0 places"),
        (body(GOOD, prompt_length=9), "it has 12 tokens with those of its media here, and 9 in training"),
        ({**body(GOOD), "images": []}, "images: this server's model takes none"),
    ],
)
def test_bad_audios_have_a_reason(sent: dict, said: str, server: str) -> None:
    answer = httpx.post(f"{server}/generate", json=sent, timeout=30)
    assert (answer.status_code, answer.json()["kind"]) == (422, "request"), answer.text
    assert said in answer.json()["error"]
    whole = httpx.post(
        f"{server}/generate", json=body(GOOD, {"path": "a.wav"}, tokens=[1, PLACE, PLACE, 2], indices=[0, 1])
    )
    assert whole.json()["completions"][0]["tokens"] == [2, PLACE]


def test_audios_of_a_body_are_bounded(server: str, monkeypatch) -> None:
    monkeypatch.setattr(image_bodies, "MAX_MEDIA_BYTES", 12_000 * 4)
    assert httpx.post(f"{server}/generate", json=body(GOOD)).status_code == 200
    answer = httpx.post(f"{server}/generate", json=body(GOOD, GOOD))
    assert (answer.status_code, answer.json()["kind"]) == (413, "request")


def test_a_server_without_a_tower(vision: VisionProcessor) -> None:
    with serving(positions=POSITIONS, vocab_size=VOCABULARY) as (url, _, _):
        answer = httpx.post(f"{url}/generate", json=body(GOOD))
        assert answer.status_code == 422
        assert "audios: this server's model takes none" in answer.json()["error"]
        claim = httpx.post(f"{url}/claim", json={"run": "a", "who": "a test", "audios": 1})
        assert "its model takes no audios, and the run's data has some" in claim.json()["error"]
    with serving(audios=AudioReader(vision, None, 1)) as (url, _, _):
        answer = httpx.post(f"{url}/generate", json=body({"path": "a.wav"}))
        assert "this server reads no files. Start it with --allowed_local_media_path" in answer.json()["error"]
        claim = httpx.post(f"{url}/claim", json={"run": "a", "who": "a test", "audios": 2})
        assert "it takes 1 audios in a prompt, and the run's data has 2" in claim.json()["error"]
        assert httpx.post(f"{url}/claim", json={"run": "a", "who": "a test", "audios": 1}).status_code == 200
