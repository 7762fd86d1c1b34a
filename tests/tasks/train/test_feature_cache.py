"""Runs with a frozen tower's features on disk: each computed once, and the same numbers bit by bit."""

import json
from pathlib import Path

import pytest
import torch

from tests.tasks.vision_oracle import BATCH, COUNTED, PICTURES, STEPS, Place, encoded_patches, log

pytestmark = pytest.mark.slow
NAMES = "loss", "grad_norm"
CACHE = "--precompute_features true"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("features"))
    rows = []
    for number in range(STEPS * BATCH):
        count = number * 7 % 4
        question = {"role": "user", "content": "what <image>" * count + "colour?"}
        answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
        names = [f"{(number + i) % PICTURES}.png" for i in range(count)]
        rows.append({"messages": [question, answer], "images": names})
    place.write("rows.jsonl", rows)
    return place


def train(place: Place, flags: str = "", processes: int = 1, *, task: str = "sft", **more) -> Path:
    micro = "" if "micro_batch_size" in flags else "--micro_batch_size 2"
    return place.run(f"{task} --model qwen3 --dataset rows.jsonl {micro} {flags}", processes, **more)


def cached_images(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    return [row.get("cached_images", 0.0) for row in rows if "loss" in row]


def files_of(place: Path) -> list[Path]:
    return [path for path in (place / "cache").rglob("features/*/*/*") if path.is_file()]


def test_a_second_run_encodes_nothing(place: Place) -> None:
    plain = train(place, program=COUNTED)
    first, second = (train(place, f"{CACHE} --seed {seed}", program=COUNTED) for seed in (42, 43))
    steps = log(plain, *NAMES)
    assert log(first, *NAMES) == log(second, *NAMES) == steps
    images = [number for (number,) in log(plain, "images")]
    assert 0 < encoded_patches(first) <= encoded_patches(plain)
    assert encoded_patches(second) == 0
    assert cached_images(plain) == [0.0] * STEPS
    assert cached_images(second) == images


def test_a_truncated_file_is_computed_again(place: Place) -> None:
    before = log(train(place, CACHE), *NAMES)
    damaged = files_of(place.folder)[0]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    run = train(place, f"{CACHE} --seed 44", program=COUNTED)
    assert encoded_patches(run) > 0
    assert log(run, *NAMES) == before
    assert damaged.read_bytes() == whole


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--tensor_model_parallel_size 2 --sequence_parallel true", id="TP2 SP"),
        pytest.param("--pipeline_model_parallel_size 2", id="PP2", marks=pytest.mark.long),
        pytest.param("--context_parallel_size 2", id="CP2", marks=pytest.mark.long),
    ],
)
def test_a_layout_reads_what_another_has_written(layout: str, place: Place) -> None:
    train(place, CACHE)
    plain, cached = (train(place, f"{layout} {flags}", 2, program=COUNTED) for flags in ("", CACHE))
    assert encoded_patches(plain) > 0 == encoded_patches(cached)
    torch.testing.assert_close(log(cached, *NAMES), log(plain, *NAMES), rtol=1e-5, atol=0)
    assert cached_images(cached) == [number for (number,) in log(plain, "images")]
    assert all(1 < imbalance <= 2 for (imbalance,) in log(plain, "vision_imbalance"))
    assert len(list(plain.parent.glob(f"{plain.name}-encoded-*.txt"))) == 2  # every rank encodes some


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_epoch_reads_the_first(workers: int, place: Place, monkeypatch) -> None:
    """Workers look some batches ahead: here the second epoch's before the first's are written."""
    monkeypatch.setenv("MODELSCOPE_CACHE", str(place.folder / f"of-{workers}-workers"))
    flags = f"--train_iters {3 * STEPS} --dataloader_num_workers {workers}"
    plain, cached = (train(place, f"{flags} {more}", program=COUNTED) for more in ("", CACHE))
    assert log(cached, *NAMES) == log(plain, *NAMES)
    epoch = encoded_patches(plain) / 3
    assert 0 < encoded_patches(cached) <= epoch * (2 if workers else 1)


def test_a_full_cache_stops_writing(place: Place, monkeypatch) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(place.folder / "small"))
    run = train(place, f"{CACHE} --feature_cache_gib 0.00001")
    assert log(run, *NAMES) == log(train(place), *NAMES)
    written = [path.stat().st_size for path in (place.folder / "small").rglob("features/*/*/*")]
    assert sum(written) <= 0.00001 * 2**30


def test_a_cache_that_cannot_be_written_is_refused(place: Place, monkeypatch) -> None:
    blocked = place.folder / "blocked" / "megaswift" / "features"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(place.folder / "blocked"))
    printed = train(place, f"{CACHE} --seed 45", fails=True)
    assert f"--precompute_features true: {blocked}" in printed
    assert "cannot be written" in printed


@pytest.mark.parametrize("flag", ["--freeze_vit false", "--freeze_aligner false"])
def test_a_trained_tower_has_no_cache(flag: str, place: Place) -> None:
    assert f"--precompute_features true cannot be used with {flag}" in train(place, f"{CACHE} {flag}", fails=True)
