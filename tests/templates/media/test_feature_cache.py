"""Features on disk: whole or absent, shared between processes, within a bound."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from megaswift.templates.media import feature_cache
from megaswift.templates.media.feature_cache import CacheBound, FeatureFiles

GRID = (1, 4, 4)


def features(number: int = 0) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (2, 4, 96), dtype=np.uint8)


def only_file(folder: Path) -> Path:
    [file] = (path for path in folder.rglob("*") if path.is_file())
    return file


def test_features_are_read_as_written(tmp_path: Path) -> None:
    files = FeatureFiles(tmp_path / "tower")
    patches = np.zeros((16, 12), np.uint8)
    key = files.key(GRID, patches)
    assert files.read(key) is None
    files.write(key, features())
    assert np.array_equal(files.read(key), features())
    assert only_file(tmp_path).name == key


def test_a_key_is_that_of_the_patches_and_their_grid() -> None:
    files, patches = FeatureFiles(Path("tower")), np.arange(192, dtype=np.uint8).reshape(16, 12)
    other = patches.copy()
    other[3, 5] += 1
    keys = [
        files.key(GRID, patches),
        files.key((1, 2, 8), patches),
        files.key((4, 2, 2), patches),
        files.key(GRID, other),
    ]
    assert len({*keys, files.key(GRID, patches.reshape(8, 24))}) == 5
    assert files.key(GRID, patches.copy()) == keys[0]


@pytest.mark.parametrize("damage", ["cut", "header", "changed", "longer", "empty"])
def test_damaged_files_are_removed(damage: str, tmp_path: Path, caplog) -> None:
    files = FeatureFiles(tmp_path)
    files.write("aa", features())
    file = only_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1 if damage == "changed" else 0
    lengths = {"cut": len(data) - 9, "header": 11, "empty": 0}
    data = data[: lengths.get(damage, len(data))] + (b"x" if damage == "longer" else b"")
    file.write_bytes(data)
    assert files.read("aa") is None
    assert "is damaged" in caplog.text
    assert not file.exists()
    files.write("aa", features())
    assert np.array_equal(files.read("aa"), features())


def test_a_full_disk_leaves_no_part(tmp_path: Path, monkeypatch) -> None:
    class Full:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def write(self, data):
            self.stream.write(bytes(data)[:5])
            raise OSError(28, os.strerror(28))

    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, mode="r": Full(opened(path, mode)) if "w" in mode else opened(path, mode)
    )
    files = FeatureFiles(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        files.write("aa", features())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def _write_and_read(folder: Path, begin, wrong) -> None:
    files = FeatureFiles(folder)
    begin.wait()
    for round_number in range(200):
        files.write("aa", features())
        found = files.read("aa")
        wrong.value += found is None or not np.array_equal(found, features())
        if round_number % 3 == 0:
            files.write(f"b{round_number}", features(round_number))


def test_writers_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    begin, wrong = context.Barrier(3), context.Value("i", 0)
    processes = [context.Process(target=_write_and_read, args=(tmp_path, begin, wrong)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert wrong.value == 0
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert all(np.array_equal(FeatureFiles(tmp_path).read(f"b{n}"), features(n)) for n in range(0, 200, 3))


def test_the_bound_removes_what_was_used_longest_ago(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(feature_cache, "RESERVE", 0)
    files, size = FeatureFiles(tmp_path / "tower"), 1000
    for number in range(4):
        files.write(f"a{number}", features(number))
        os.utime(only_file(tmp_path / "tower" / f"a{number}"), (number, number))
    bounds = CacheBound(tmp_path, 3300), CacheBound(tmp_path, 1500)  # four files have 3,216 bytes
    assert np.array_equal(files.read("a0"), features(0))  # used now
    assert bounds[0].admits(size)
    assert [files.has(f"a{number}") for number in range(4)] == [True, False, False, True]
    assert not bounds[1].admits(size)
    assert [files.has(f"a{number}") for number in range(4)] == [True, False, False, False]


def test_the_disk_keeps_free_space(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(feature_cache, "RESERVE", 1 << 60)
    assert not CacheBound(tmp_path, 1 << 40).admits(1000)
