"""The thread that writes: real files, and a disk that is really full."""

import errno
import hashlib
import threading
from pathlib import Path

import torch
from megaswift.bridge.checkpoint import writer
from megaswift.bridge.checkpoint.safetensors_io import TensorSpec
from megaswift.bridge.checkpoint.writer import ShardWriter
from safetensors.torch import load_file

FORM = TensorSpec(torch.float32, (1000, 10))


def test_files_follow_one_another(tmp_path):
    tensors = {f"{file}{number}": torch.randn(1000, 10) for file in "ab" for number in range(3)}
    under_test = ShardWriter(tmp_path)
    for file in "ab":
        names = [name for name in tensors if name[0] == file]
        under_test.begin(file, dict.fromkeys(names, FORM))
        for name in names:
            under_test.put(name, tensors[name])
    under_test.finish()
    assert under_test.error is None
    for file, forms, written in under_test.shards:
        assert forms.keys() == written.checksums.keys()
        assert written.size == (tmp_path / file).stat().st_size
        assert written.sha256 == hashlib.sha256((tmp_path / file).read_bytes()).hexdigest()
        for name, found in load_file(tmp_path / file).items():
            assert torch.equal(found, tensors[name])


def test_copies_are_of_what_was_put(tmp_path):
    """What is put may change at once; what a function gives is asked for when its turn comes."""
    given, whole = torch.randn(1000, 10), torch.randn(1000, 10)
    tensor = given.clone()
    under_test = ShardWriter(tmp_path, copy_to_host=True)
    under_test.begin("file", dict.fromkeys("abc", FORM))
    held_up = threading.Event()
    under_test.put("a", lambda: whole if held_up.wait(10) else None)  # the thread is busy, and then
    under_test.put("b", tensor)
    tensor.zero_()
    held_up.set()
    under_test.put("c", lambda: whole)
    under_test.finish()
    found = load_file(tmp_path / "file")
    assert torch.equal(found["b"], given)
    assert torch.equal(found["a"], whole)
    assert torch.equal(found["c"], whole)


def test_a_full_disk_stops_nobody_else(tmp_path, monkeypatch):
    """What comes after the error is taken and dropped, more of it than may wait, and no other file is begun."""
    monkeypatch.setattr(writer, "MAX_QUEUED", 50_000)
    (tmp_path / "full").symlink_to("/dev/full")
    under_test = ShardWriter(tmp_path)
    for file in ("full", "next"):
        names = [f"{file}{number}" for number in range(20)]
        under_test.begin(file, dict.fromkeys(names, FORM))
        for name in names:
            under_test.put(name, torch.randn(1000, 10))
    under_test.finish()
    assert isinstance(under_test.error, OSError)
    assert under_test.error.errno == errno.ENOSPC
    assert [path.name for path in Path(tmp_path).iterdir()] == ["full"]
    assert not under_test.shards
