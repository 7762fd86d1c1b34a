"""Micro batches with images and videos: places, positions, shares of the ranks, resumption, files that break."""

import json
import logging
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from megaswift.templates.batching.collator import Batch, BatchLayout, StepDivision
from megaswift.templates.batching.dataloader import Batches
from megaswift.templates.batching.media_collation import assign_encoders

from tests.templates.media.test_processor import random_rows
from tests.tiny_vision import picture

ROWS = 24
RANKS = 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows = random_rows(folder, ROWS, seed=5)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def micro_batches(made, rows: Path, layout: BatchLayout, count: int | None = None, **options) -> list[Batch]:
    """Return the micro batches of one epoch."""
    options = {"dataset": [str(rows)], "packing": bool(layout.pack_length)} | options
    store = made.prepare(**options, max_length=layout.pack_length).train
    batches = Batches(store, replace(layout, vision=made.vision()), StepDivision(2, 4))
    return [batch for step in islice(batches.steps(), count or batches.steps_per_epoch) for batch in step]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    "layout",
    [
        BatchLayout(),
        BatchLayout(padding_free=False, length_multiple=4),
        BatchLayout(pack_length=800),
        BatchLayout(pack_length=800, context_parallel_size=2, length_multiple=2),
        BatchLayout(context_parallel_size=4),
        BatchLayout(context_parallel_size=2, padding_free=False),
    ],
    ids=["free", "padded", "packed", "packed, CP2", "free, CP4", "padded, CP2"],
)
def test_each_token_is_in_its_place(checkpoint, rows: Path, layout: BatchLayout, family: str) -> None:
    """The rows put together again from all context-parallel ranks; positions of each document beside transformers."""
    from transformers import AutoModelForImageTextToText

    made, size = checkpoint(family), layout.context_parallel_size
    vision = made.vision()
    model = AutoModelForImageTextToText.from_pretrained(made.folder).model
    shards = [micro_batches(made, rows, replace(layout, context_parallel_rank=rank), 3) for rank in range(size)]
    with_media = 0
    for parts in zip(*shards, strict=True):
        first, placeholders = parts[0], [vision.image_token_id, vision.video_token_id]
        if first.media is None:
            assert not any(np.isin(part.tokens.numpy(), placeholders).any() for part in parts)
            continue
        with_media += 1
        tokens, positions = _together(parts)
        for part in parts:
            assert part.rope_positions.shape == (3, *part.tokens.shape)
            for name in ("grids", "encoders", "context_ranks", "positions", "image_pixels", "video_pixels"):
                assert torch.equal(getattr(part.media, name), getattr(first.media, name))
        # Visual tokens: those of images, then those of videos, each in the order of the whole rows.
        media, expected = first.media, [np.flatnonzero(tokens.numpy().ravel() == token) for token in placeholders]
        local = first.tokens.shape[1]
        index = np.stack([np.arange(local) if part.cp_index is None else part.cp_index.numpy() for part in parts])
        rows_, offsets = np.divmod(media.positions.numpy(), local)
        assert (rows_ * local * size + index[media.context_ranks.numpy(), offsets]).tolist() == [
            *expected[0].tolist(),
            *expected[1].tolist(),
        ]
        ends = np.cumsum(media.grids.prod(1).numpy() // 4)
        assert ends[-1] == sum(map(len, expected))
        images = int(np.searchsorted(ends, len(expected[0]), side="right"))
        remaining = media.grids[:images].tolist(), media.grids[images:].tolist()
        for row, start, length in _documents(first, tokens):
            ids = tokens[row, start : start + length][None]
            types = (ids == vision.image_token_id).int() + 2 * (ids == vision.video_token_id).int()
            grids = [_take(grids, int((types == kind).sum())) for kind, grids in enumerate(remaining, 1)]
            wanted, _ = model.get_rope_index(ids, types, *grids)
            assert torch.equal(positions[:, row, start : start + length], wanted[:, 0])
    assert with_media >= 4


def _together(parts: tuple[Batch, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and rope positions of whole rows from those of all context-parallel ranks."""
    rows, local = parts[0].tokens.shape
    tokens = torch.empty(rows, local * len(parts), dtype=torch.int64)
    positions = torch.empty(3, *tokens.shape, dtype=torch.int64)
    for part in parts:
        index = torch.arange(local) if part.cp_index is None else part.cp_index
        tokens[:, index], positions[..., index] = part.tokens, part.rope_positions
    return tokens, positions


def _documents(batch: Batch, tokens: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return row, start and length of each document."""
    if batch.cu_seqlens is None:
        return [(row, 0, length) for row, length in enumerate(batch.lengths)]
    starts = [start for start, end in pairwise(batch.cu_seqlens.tolist()) if tokens[0, start:end].any()]
    return [(0, start, length) for start, length in zip(starts, batch.lengths, strict=True)]


def _take(grids: list, tokens: int) -> torch.Tensor | None:
    """Take the next grids of a number of visual tokens."""
    taken = []
    while tokens:
        taken.append(grids.pop(0))
        tokens -= int(np.prod(taken[-1])) // 4
    return torch.tensor(taken) if taken else None


def test_each_medium_is_encoded_once(checkpoint, rows: Path) -> None:
    made = checkpoint("qwen3_vl")
    layout = BatchLayout(encoder_ranks=RANKS)
    [alone], ranks = (
        [micro_batches(made, rows, BatchLayout())],
        [micro_batches(made, rows, replace(layout, encoder_rank=rank)) for rank in range(RANKS)],
    )
    seen = set()
    for whole, *parts in zip(alone, *ranks, strict=True):
        if whole.media is None:
            continue
        encoders = parts[0].media.encoders
        seen |= set(encoders.tolist())
        vision = made.vision()
        sizes = whole.media.grids.prod(1).tolist()
        pixels = {kind: [getattr(part.media, f"{kind}_pixels") for part in parts] for kind in ("image", "video")}
        starts = {kind: [0] * RANKS for kind in pixels}
        ended = {"image": 0, "video": 0}
        for number, (size, encoder) in enumerate(zip(sizes, encoders.tolist(), strict=True)):
            kind = "image" if number < _images(whole, vision) else "video"
            mine, start = pixels[kind][encoder], starts[kind][encoder]
            first = ended[kind]
            assert torch.equal(mine[start : start + size], getattr(whole.media, f"{kind}_pixels")[first : first + size])
            starts[kind][encoder] += size
            ended[kind] += size
        for kind, parts_ in pixels.items():
            assert [len(part) for part in parts_] == starts[kind]
        for part in parts:
            assert torch.equal(part.media.encoders, encoders)
            assert torch.equal(part.tokens, whole.tokens)
            assert part.media.broken_media == 0
    assert seen == set(range(RANKS))


def _images(batch: Batch, vision) -> int:
    """Return the number of images of a micro batch in one part."""
    tokens = np.cumsum(batch.media.grids.prod(1).numpy() // 4)
    return int((batch.tokens.flatten()[batch.media.positions[tokens - 1]] == vision.image_token_id).sum())


def test_the_costliest_media_come_first() -> None:
    assert assign_encoders([5, 3, 3, 2, 2, 1], 2).tolist() == [0, 1, 1, 0, 1, 0]
    assert assign_encoders([7, 7, 7], 4).tolist() == [0, 1, 2]
    assert assign_encoders([], 3).tolist() == []
    costs = np.random.default_rng(0).integers(1, 1000, 200).tolist()
    loads = np.bincount(assign_encoders(costs, 8), costs)
    assert loads.max() / loads.mean() < 1.01


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
def test_resuming_continues_with_the_same_pictures(checkpoint, rows: Path, streaming: bool) -> None:
    made = checkpoint("qwen2_5_vl")
    options = {"dataset": [str(rows)], "max_length": 800, "packing": True}
    options |= {"streaming": True, "shuffle_buffer_size": 8} if streaming else {}
    store = made.prepare(**options).train
    assert store.has_media

    def start(workers: int = 0) -> Batches:
        layout = BatchLayout(pack_length=800, vision=made.vision())
        return Batches(store, layout, StepDivision(1, 2), num_workers=workers)

    whole, stopped, resumed = start(), start(1), start(1)
    expected = list(islice(whole.steps(), 6))
    steps = stopped.steps()
    first = [next(steps) for _ in range(2)]
    steps.close()  # ends its worker, which the end of the process would wait for
    resumed.resume(stopped.position(), stopped.cursors())
    rest = list(islice(resumed.steps(), 4))
    for step, other in zip(expected, [*first, *rest], strict=True):
        for batch, same in zip(step, other, strict=True):
            _assert_equal(batch, same)
    assert any(batch.media is not None for step in rest for batch in step)


def _assert_equal(batch: Batch, other: Batch) -> None:
    for name in ("tokens", "labels", "loss_weights", "rope_positions"):
        assert torch.equal(getattr(batch, name), getattr(other, name)) if getattr(batch, name) is not None else True
    assert (batch.media is None) == (other.media is None)
    for name, value in vars(batch.media).items() if batch.media else ():
        assert torch.equal(value, getattr(other.media, name)) if torch.is_tensor(value) else True


def broken_rows(folder: Path) -> Path:
    """Write three rows with a picture each, and a text."""
    rows = []
    for number in range(3):
        picture(100, 80, seed=number).save(folder / f"{number}.png")
        row = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": f"a {number}"}]
        rows.append({"messages": row, "images": [str(folder / f"{number}.png")]})
    rows.append({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    (folder / "broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "broken.jsonl"


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def change(path: Path) -> None:
    picture(200, 80).save(path)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255  # its header and end stay
    path.write_bytes(data)


def collate(made, file: Path, **layout) -> Batch:
    store = made.prepare(dataset=[str(file)], dataset_shuffle=False).train
    batches = Batches(store, BatchLayout(vision=made.vision(), **layout), StepDivision(4, 4), shuffle=False)
    [[batch]] = islice(batches.steps(), 1)
    return batch


@pytest.mark.parametrize("fault", [remove, shorten, change, damage])
def test_a_picture_that_breaks_while_training(checkpoint, tmp_path: Path, caplog, fault) -> None:
    """Its document has no loss, a grey picture takes its place, and the log and a counter say so."""
    made, file = checkpoint("qwen3_vl"), broken_rows(tmp_path)
    whole = collate(made, file)
    fault(tmp_path / "1.png")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        batch = collate(made, file)
    [line] = [record.message for record in caplog.records]
    assert line.startswith(f"{tmp_path / '1.png'}: image cannot be used: ")
    assert (batch.media.broken_media, batch.loss_tokens) == (1, whole.loss_tokens)
    assert torch.equal(batch.tokens, whole.tokens)
    start, end = batch.cu_seqlens[1:3].tolist()
    expected = whole.loss_weights.clone()
    assert expected[0, start:end].any()
    expected[0, start:end] = 0
    assert torch.equal(batch.loss_weights, expected)
    assert not batch.labels[0, start:end].any()
    patches = whole.media.grids.prod(1)
    pixels = whole.media.image_pixels.clone()
    pixels[patches[0] : patches[:2].sum()] = 128
    assert torch.equal(batch.media.image_pixels, pixels)
    with pytest.raises(ValueError, match=r"1.png: image cannot be used: .*--strict true"):
        collate(made, file, strict=True)


@pytest.mark.parametrize("fault", [remove, shorten, change, damage])
def test_the_ranks_of_a_replica_agree_on_what_is_broken(checkpoint, tmp_path: Path, fault) -> None:
    """Only the rank that encodes a picture can see that its pixels are damaged: the document keeps its loss."""
    made, file = checkpoint("qwen3_vl"), broken_rows(tmp_path)
    whole = collate(made, file)
    fault(tmp_path / "1.png")
    ranks = [collate(made, file, encoder_rank=rank, encoder_ranks=3) for rank in range(3)]
    start, end = whole.cu_seqlens[1:3].tolist()
    for batch in ranks:
        assert batch.loss_weights[0, start:end].any() == (fault is damage)
        assert torch.equal(batch.loss_weights, ranks[0].loss_weights)
    assert sorted(batch.media.broken_media for batch in ranks) == [0, 0, 1]


def test_ranks_have_similar_numbers_of_visual_tokens(checkpoint, rows: Path) -> None:
    """A step has the same samples for any number of ranks, and each rank's part of them is the same again."""
    made = checkpoint("qwen3_vl")
    store = made.prepare(dataset=[str(rows)]).train
    size, ranks = 16, 4

    def steps(rank: int, count: int) -> list[list[Batch]]:
        layout = BatchLayout(vision=made.vision())
        batches = Batches(store, layout, StepDivision(1, size, rank, count), seed=3)
        return list(islice(batches.steps(), 3))

    def visual_tokens(batch: Batch) -> int:
        return 0 if batch.media is None else len(batch.media.positions)

    whole, parts = steps(0, 1), [steps(rank, ranks) for rank in range(ranks)]
    for number, step in enumerate(whole):
        found = [batch.tokens for part in parts for batch in part[number]]
        assert sorted(tokens.tolist() for tokens in found) == sorted(batch.tokens.tolist() for batch in step)
        counts = np.array([[visual_tokens(batch) for batch in part[number]] for part in parts])
        given = np.array([visual_tokens(batch) for batch in step]).reshape(-1, ranks)
        assert counts.max(0).sum() < given.max(1).sum()
        assert np.ptp(counts.sum(1)) < np.ptp(given.sum(0))
