"""Metadata of distributed checkpoints is unpickled without running what it names."""

import collections
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint.distributed import _common
from megaswift.bridge.checkpoint.pickles import ALLOWED, UnsafePickle, read_metadata
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan


class Calls:
    """Unpickled, it calls a function."""

    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of torch's own making, with tensors of several types, a nested value and an object."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dtypes = {name: getattr(torch, name) for name in ALLOWED["torch"] if name != "Size"}
        state: dict = {name: torch.ones(3, dtype=dtype) for name, dtype in dtypes.items()}
        state |= {"inner": {"tensor": torch.zeros(2, 3), "list": [1, "two"]}, "object": collections.OrderedDict(a=1)}
        save(state, storage_writer=FileSystemWriter(tmp_path / "checkpoint"))
    finally:
        torch.distributed.destroy_process_group()
    return tmp_path / "checkpoint"


def test_metadata_is_read_as_torch_reads_it(folder):
    found, expected = read_metadata(folder), FileSystemReader(folder).read_metadata()
    assert found.storage_meta.save_id == expected.storage_meta.save_id
    expected.storage_meta = found.storage_meta  # whose load_id is new at each load
    assert found == expected


def test_the_plans_of_ranks_that_megatron_core_keeps(folder):
    """megatron-core saves them in the metadata for its next checkpoint of the same model."""
    metadata = FileSystemReader(folder).read_metadata()
    state = {"tensor": torch.ones(2, 3), "object": 1}
    plan = create_default_local_save_plan(state, is_coordinator=True)
    metadata.all_local_plans = [plan]  # type: ignore[attr-defined]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_metadata(folder).all_local_plans == [plan]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "payload",
    [
        Calls(os.system, "touch ran"),
        Calls(eval, "__import__('os').system('touch ran')"),
        Calls(getattr, "text", "format"),
        Calls(subprocess.check_call, ["touch", "ran"]),
        {"state_dict_metadata": [Calls(torch.load, "x")]},
    ],
)
def test_nothing_that_a_stranger_names_is_called(payload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(payload))
    with pytest.raises(UnsafePickle, match=r"\.metadata names .*, which the metadata of a checkpoint never has"):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_nested_names_are_not_followed(tmp_path):
    """Protocol 4 takes dotted names: `torch.Size` is allowed, what lies below an allowed name is not."""
    module, name = (b"\x8c" + bytes([len(text)]) + text for text in (b"torch", b"Size.__subclasses__"))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + module + name + b"\x93.")
    with pytest.raises(UnsafePickle):
        read_metadata(tmp_path)


def test_common_state_runs_no_code(folder, monkeypatch, tmp_path):
    """common.pt of a stranger, which Megatron-LM reads by pickle."""
    monkeypatch.chdir(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": Calls(os.system, "touch ran")}, folder / "common.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        _common(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x80\x02K\x01r\xff\xff\xff\xff.", id="place in the memo"),
        pytest.param(b"\x80\x05\x96\xff\xff\xff\xff\x02\x00\x00\x00.", id="bytes of an operation"),
        pytest.param(b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", id="bytearray"),
    ],
)
def test_memory_is_bounded_by_the_size_of_the_file(payload, tmp_path):
    (tmp_path / ".metadata").write_bytes(payload)
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from megaswift.bridge.checkpoint.pickles import read_metadata\n"
        "size = 4096 * int(Path('/proc/self/statm').read_text().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))\n"
        "try: read_metadata(Path(sys.argv[1]))\n"
        "except (ValueError, KeyError): pass"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
