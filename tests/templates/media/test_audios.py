"""Audios: forms of files and of sources, refusals, tokens and spectrograms beside transformers' processors."""

import base64
import io
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from megaswift.templates.batching.collator import BatchLayout, StepDivision
from megaswift.templates.batching.dataloader import Batches
from megaswift.templates.formats.medium import Medium
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media.audios import audio_info, read_audio

from tests.templates.media.test_prepare import ANSWER, user, write
from tests.tiny_audio import RATE, sound, wav

FAMILIES = ("qwen3_asr",)
ROWS = 60


@pytest.fixture
def heard(checkpoint):
    return checkpoint("qwen3_asr")


def encoded(samples: np.ndarray, rate: int, kind: str, codec: str) -> bytes:
    """Return a file that PyAV has written."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            np.round(samples * 32767).astype(np.int16)[None], format="s16", layout="mono"
        )
        frame.sample_rate = rate
        for part in av.AudioResampler(format=stream.format, rate=rate).resample(frame):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_wav_files(width: int, channels: int) -> None:
    samples = np.stack([sound(3001, seed) for seed in range(channels)], axis=1)
    data = wav(samples, channels=channels, width=width)
    assert audio_info(data) == (3001, RATE)
    read = read_audio(data, RATE)
    assert read.dtype == np.float32
    assert np.abs(read - samples.mean(axis=1)).max() < 1.01 / 2 ** (8 * width - 1) + 1e-6


@pytest.mark.parametrize(("rate", "samples"), [(8000, 4001), (44100, 30000), (48000, 24001), (22050, 9999)])
def test_another_rate_keeps_tones(rate: int, samples: int) -> None:
    """A tone of 440 Hz that begins and ends softly, computed at both rates."""

    def tone(at: int, count: int) -> np.ndarray:
        time = np.arange(count) / at
        return (np.sin(2 * np.pi * 440 * time) * np.sin(np.pi * time / (samples / rate)) ** 2 * 0.5).astype(np.float32)

    data = wav(tone(rate, samples), rate)
    count = audio_info(data).resampled(RATE)
    read = read_audio(data, RATE)
    assert len(read) == count
    assert np.abs(read - tone(RATE, count)).max() < 2e-3


@pytest.mark.parametrize(
    ("kind", "codec", "bound"), [("flac", "flac", 1e-4), ("ogg", "libopus", 0.3), ("mp3", "libmp3lame", 0.3)]
)
def test_other_formats(kind: str, codec: str, bound: float) -> None:
    rate = 48000 if codec == "libopus" else RATE
    time = np.arange(rate) / rate
    samples = (0.4 * np.sin(2 * np.pi * 300 * time)).astype(np.float32)
    data = encoded(samples, rate, kind, codec)
    info, read = audio_info(data), read_audio(data, rate)
    assert info.rate == rate
    assert len(read) == info.samples
    assert abs(info.samples - rate) < 0.1 * rate
    assert np.abs(read[1000 : rate - 1000]).max() < 0.4 + bound
    if kind == "flac":
        assert np.abs(read - samples).max() < bound


def test_forms_of_sources(tmp_path: Path, monkeypatch) -> None:
    data, file = wav(sound(900)), tmp_path / "a.wav"
    file.write_bytes(data)
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    text = base64.b64encode(data).decode()
    sources = [data, str(file), "a.wav", file.as_uri(), f"data:audio/wav;base64,{text}", f"data:;base64,{text}", text]
    for source in [*sources, {"bytes": data, "path": None}, {"bytes": None, "path": str(file)}]:
        assert audio_info(source) == (900, RATE)
        assert (read_audio(source, RATE) == read_audio(data, RATE)).all()


def test_libraries_that_are_missing_are_named(monkeypatch) -> None:
    flac = encoded(sound(4000), RATE, "flac", "flac")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"needs PyAV. Run pip install 'megaswift\[audio\]'"):
        audio_info(flac)
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    with pytest.raises(ValueError, match=r"needs SciPy. Run pip install 'megaswift\[audio\]'"):
        read_audio(wav(sound(900), 8000), RATE)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_spectrograms_are_those_of_the_processor(family: str, checkpoint, tmp_path: Path) -> None:
    """The processor gets the samples that are read here, of each row by itself."""
    made, random_ = checkpoint(family), random.Random(5)
    rows = []
    for number in range(ROWS):
        rate, width = random_.choice([(RATE, 2), (RATE, 2), (8000, 1), (44100, 3)])
        samples = random_.choice([random_.randint(300, 9000), random_.randint(9000, 80000)])
        file = tmp_path / f"{number}.wav"
        file.write_bytes(wav(sound(samples, number), rate, width=width))
        parts = ["what", "<audio>", " is it?"]
        random_.shuffle(parts)
        messages = [user("".join(parts)), ANSWER]
        rows.append({"messages": messages, "audios": [str(file)]})
    store = made.prepare(dataset=[write(tmp_path, *rows)], dataset_shuffle=False, strict=True).train
    layout = BatchLayout(vision=made.vision())
    batches = Batches(store, layout, StepDivision(1, 1), shuffle=False).steps()
    token = made.vision().placeholders["audio"]
    for row, [batch] in zip(rows, batches, strict=False):
        samples = read_audio(row["audios"][0], RATE)
        contents = re.split("<(audio)>", row["messages"][0]["content"])
        blocks = [{"type": "audio"} if part == "audio" else {"type": "text", "text": part} for part in contents if part]
        messages = [user(blocks), {"role": "assistant", "content": [{"type": "text", "text": ANSWER["content"]}]}]
        text = made.processor.apply_chat_template(messages, tokenize=False)
        expected = made.processor(text=[text], audio=[samples])
        assert batch.tokens[0].tolist() == expected["input_ids"][0].tolist()
        frames = int(expected["input_features_mask"].sum())
        assert batch.media.frames.tolist() == [frames]
        assert batch.media.spectrograms.equal(expected["input_features"][0, :, :frames].t())
        assert batch.media.positions.equal((batch.tokens[0] == token).nonzero().squeeze(1))
        assert batch.media.counts.tolist() == [len(batch.media.positions)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"audios": ["missing.wav"]}, "an audio cannot be read (no such file or directory)"),
        ({"audios": ["cut.wav"]}, "an audio is damaged or truncated"),
        ({"audios": ["cut.flac"]}, "damaged or truncated"),
        ({"audios": ["text.wav"]}, "an audio is of no known format, or is damaged or truncated"),
        ({"audios": ["empty.wav"]}, "an audio is empty"),
        ({"audios": ["long.wav"]}, "an audio is longer than 3600 seconds"),
        ({"audios": [7]}, "an audio is a number"),
        ({"audios": [{"path": None}]}, "an audio has neither bytes nor a path"),
        ({"audios": ["http://127.0.0.1/a.wav"]}, "a URL of its media leads to a private network"),
        ({"messages": [user("<audio><audio>"), ANSWER], "audios": ["good.wav"]}, "more <audio> tags than audios"),
        ({"messages": [user("<|audio_pad|>"), ANSWER], "audios": ["good.wav"]}, "its text has other placeholders"),
        ({"images": ["good.png"]}, "it has images, which are not supported with qwen3_asr"),
        ({"videos": ["good.mp4"]}, "it has videos, which are not supported with qwen3_asr"),
    ],
)
def test_rows_that_are_dropped(heard, tmp_path: Path, monkeypatch, row: dict, reason: str) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path))
    data = wav(sound(9000))
    flac = encoded(sound(90000), RATE, "flac", "flac")
    files = {"good.wav": data, "cut.wav": data[:-900], "text.wav": b"text", "empty.wav": wav(sound(0)),
             "cut.flac": flac[: len(flac) // 3], "long.wav": wav(np.zeros(3601 * 1000), 1000)}  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if "cut.flac" in row.get("audios", ()):  # only what is decoded shows it
        with pytest.raises(UnusableRow, match=reason):
            read_audio("cut.flac", RATE)
        return
    rows = write(tmp_path, {"messages": [user("q"), ANSWER]} | row, {"messages": [user("q"), ANSWER]})
    prepared = heard.prepare(dataset=[rows])
    assert len(prepared.train) == 1
    assert any(reason in line for line in prepared.report.splitlines()), prepared.report
    assert "rows.jsonl line 1" in prepared.report
    assert reason.startswith(("an audio", "a URL")) == ("set --load_from_cache_file false" in prepared.report)


@pytest.mark.parametrize("when", ["changed", "truncated", "flac truncated"])
def test_an_audio_that_breaks_after_preparation_has_no_loss(heard, tmp_path: Path, when: str, caplog) -> None:
    good, bad = tmp_path / "good.wav", tmp_path / "bad"
    good.write_bytes(wav(sound(9000)))
    flac = encoded(sound(90000), RATE, "flac", "flac")
    bad.write_bytes(flac if when == "flac truncated" else wav(sound(20000)))
    rows = [{"messages": [user("q"), ANSWER], "audios": [str(file)]} for file in (good, bad)]
    store = heard.prepare(dataset=[write(tmp_path, *rows)], dataset_shuffle=False).train
    broken = {"changed": wav(sound(40000)), "truncated": bad.read_bytes()[:-700], "flac truncated": flac[:9000]}
    bad.write_bytes(broken[when])
    layout = BatchLayout(vision=heard.vision(), padding_free=True)
    [batch] = next(Batches(store, layout, StepDivision(2, 2), shuffle=False).steps())
    assert batch.media.broken_media == 1
    first = batch.lengths[0]
    assert batch.loss_weights[0, :first].any()
    assert not batch.loss_weights[0, first:].any()
    frames = batch.media.frames.tolist()
    assert batch.media.spectrograms[frames[0] :].eq(-1.5).all()
    assert torch.isfinite(batch.media.spectrograms).all()
    assert "audio cannot be used" in caplog.text
    strict = BatchLayout(vision=heard.vision(), padding_free=True, strict=True)
    with pytest.raises(ValueError, match="--strict true"):
        next(Batches(store, strict, StepDivision(2, 2), shuffle=False).steps())


def test_each_audio_of_a_pair_is_one_medium(heard, tmp_path: Path) -> None:
    """Both answers to an audio share it, and a rejected one may have another."""
    files = [str(tmp_path / f"{number}.wav") for number in range(2)]
    for number, file in enumerate(files):
        Path(file).write_bytes(wav(sound(9000 + 9000 * number, number)))
    rows = write(
        tmp_path,
        {"messages": [user("<audio>q"), ANSWER], "audios": [files[0]], "rejected_response": "b"},
        {"messages": [user("<audio>q"), ANSWER], "audios": [files[0]], "rejected_audios": [files[1]]},
    )
    store = heard.prepare("preference", dataset=[rows], dataset_shuffle=False).train
    layout = BatchLayout(stage="preference", vision=heard.vision(), padding_free=True)
    [batch] = next(Batches(store, layout, StepDivision(2, 2), shuffle=False).steps())
    assert batch.media.uses.tolist() == [0, 0, 1, 2]
    assert len(batch.media.frames) == 3


def test_a_row_in_a_text_model_is_refused(make_tokenizer, tmp_path: Path) -> None:
    from megaswift.templates.options import PrepareOptions
    from megaswift.templates.prepare import prepare

    options = PrepareOptions(dataset=[write(tmp_path, {"messages": [user("q"), ANSWER], "audios": ["a.wav"]})])
    with pytest.raises(ValueError, match="it has audios, and this model has no audio tower"):
        prepare(options, make_tokenizer(), stage="sft")


def test_headers_alone_are_read_in_preparation(heard, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(wav(sound(50000)))
    monkeypatch.setattr("megaswift.templates.media.audio_processor.read_audio", None)
    plan = heard.vision().plan(Medium("audio", str(file)))
    assert (plan.kind, plan.grid, plan.tokens) == ("audio", (312, 1, 1), 13 * 3 + 2)


def test_an_audio_in_broken_base64_is_called_one():
    with pytest.raises(UnusableRow, match="an audio is in broken base64"):
        audio_info("data:audio/wav;base64,A")
