"""Reading and writing safetensors, against the safetensors library, and the messages on damaged folders."""

import json

import pytest
import torch
from megaswift.bridge.checkpoint import safetensors_io
from megaswift.bridge.checkpoint.safetensors_io import (
    INDEX,
    SafetensorsFolder,
    TensorSpec,
    finish_shards,
    unindexed_files,
    write_shard,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TENSORS = {
    "a": torch.randn(6, 5),
    "half": torch.randn(7, 3).bfloat16(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "flat": torch.arange(9),
}


@pytest.fixture
def folder(tmp_path):
    """TENSORS in two shards with an index, and a shard that the index does not name."""
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, inside in shards.items():
        save_file({name: TENSORS[name] for name in inside}, tmp_path / shard)
    placed = {name: shard for shard, inside in shards.items() for name in inside}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    return tmp_path


def test_slices_equal_the_tensors(folder):
    source = SafetensorsFolder(folder)
    assert source.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        stored = source.tensors[name]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
        if tensor.ndim == 0:
            assert torch.equal(source.read(name, 0, 0, 1), tensor)
        for dim, length in enumerate(tensor.shape):
            for start, stop in ((0, length), (length // 3, length // 2), (length // 2, length)):
                assert torch.equal(source.read(name, dim, start, stop), tensor.narrow(dim, start, stop - start))
                for place in range(len(tensor) if dim else 0):
                    assert torch.equal(source.read(name, dim - 1, start, stop, place), tensor[place, start:stop])


def test_slices_of_a_file_whose_data_is_not_aligned(tmp_path):
    """Older writers did not pad the header."""
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    header = json.dumps({"x": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + tensor.numpy().tobytes())
    assert torch.equal(SafetensorsFolder(tmp_path).read("x", 1, 1, 3), tensor[:, 1:3])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_blocks_are_read_into_pinned_memory_beside_a_gpu(on_gpu: bool, folder, monkeypatch) -> None:
    empty, pinned = torch.empty, []

    def record(*sizes, pin_memory: bool = False, **settings) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*sizes, **settings)

    monkeypatch.setattr(torch, "empty", record)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    source = SafetensorsFolder(folder)
    name, stored = max(source.tensors.items(), key=lambda item: item[1].bytes)
    rows = stored.shape[0]
    monkeypatch.setattr(safetensors_io, "BLOCK", stored.bytes - 1)
    whole, part = source.read(name, 0, 0, rows), source.read(name, 0, 1, rows)
    assert pinned == [False, on_gpu]  # the memory of large tensors would stay pinned
    assert torch.equal(whole[1:], part)


def test_what_is_read_is_not_written_back(folder):
    SafetensorsFolder(folder).read("a", 0, 0, 6).zero_()
    assert torch.equal(SafetensorsFolder(folder).read("a", 0, 0, 6), TENSORS["a"])


def test_written_files_are_read_by_the_library(tmp_path):
    """Each tensor in its own dtype, and whole or in runs."""
    shapes = {"w": (3, 5), "b": (7,), "none": (0, 2), "stack": (2, 3, 4), "strided": (0,)}
    forms = {
        name: TensorSpec(torch.float32 if name == "b" else torch.bfloat16, shape) for name, shape in shapes.items()
    }
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    given["strided"] = torch.empty_strided((0,), (0,))
    runs = [(name, run) for name, tensor in given.items() for run in (tensor if name == "stack" else [tensor])]
    write_shard(tmp_path / "part", forms, iter(runs))
    finish_shards(tmp_path, [("part", forms)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert tensor.dtype == forms[name].dtype
        assert torch.equal(tensor, given[name].to(tensor.dtype))
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_an_empty_array_of_numpy_is_written(tmp_path):
    """NumPy 2.5 gives empty arrays a stride of 0."""
    forms = {"none": TensorSpec(torch.int64, (0,)), "one": TensorSpec(torch.int64, (1,))}
    runs = {"none": torch.empty(0, dtype=torch.int64).as_strided((0,), (0,)), "one": torch.tensor([7])}
    write_shard(tmp_path / "part", forms, iter(runs.items()))
    written = load_file(tmp_path / "part")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {"none": [], "one": [7]}


def test_no_such_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has no weights: no model.safetensors.index.json and no file that ends in"):
        SafetensorsFolder(tmp_path)


def test_truncated_shard(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=rf"00001-of-00002.safetensors is cut short: {len(whole) - 10} bytes"):
        SafetensorsFolder(folder)
    shard.write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors is not a whole safetensors file \(40 bytes\)"):
        SafetensorsFolder(folder)


def test_file_that_is_something_else(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors is not a whole safetensors file"):
        SafetensorsFolder(folder)
    (folder / "model-00001-of-00002.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{")
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors is not a safetensors file: its header"):
        SafetensorsFolder(folder)


def test_index_and_shards_that_differ(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({"scalar": TENSORS["scalar"]}, shard)
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors has no tensor (empty|flat), which .*index.json"):
        SafetensorsFolder(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors is missing: .*index.json names it"):
        SafetensorsFolder(folder)
    for text in ("[]", "{}", '{"weight_map": {"a": 3}}', "[" * 100_000):
        (folder / INDEX).write_text(text)
        with pytest.raises(ValueError, match=r"index.json is not an index of safetensors files"):
            SafetensorsFolder(folder)


@pytest.mark.parametrize("name", ["../other/x.safetensors", "/other/x.safetensors", "a/../../x.safetensors", "..\\x"])
def test_an_index_that_leaves_its_folder(name, folder):
    """Else a downloaded index would have another model's weights published with this one."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["a"] = name
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index.json names .*x.*, which is outside the folder. Download"):
        SafetensorsFolder(folder)


def test_an_index_may_name_a_folder_inside(folder):
    (folder / "part").mkdir()
    shard = "model-00002-of-00002.safetensors"
    (folder / shard).rename(folder / "part" / shard)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(shard, f"part/{shard}"))
    assert SafetensorsFolder(folder).tensors.keys() == TENSORS.keys()


def test_weights_of_another_format(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"Its .bin files are not read: convert them, by transformers' from_pretrained"
    ):
        SafetensorsFolder(tmp_path)


def test_a_tensor_in_two_files(folder):
    """The index tells which of them counts; without one, nobody does."""
    save_file({"a": torch.zeros(6, 5)}, folder / "another.safetensors")
    assert torch.equal(SafetensorsFolder(folder).read("a", 0, 0, 6), TENSORS["a"])
    assert unindexed_files(folder) == ["another.safetensors", "consolidated.safetensors"]
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=r"another.safetensors and model-00001-of.* both have a tensor a"):
        SafetensorsFolder(folder)


def test_header_that_contradicts_itself(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 40]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    with pytest.raises(ValueError, match=r"its header cannot be read .*x has 40 bytes, and 48 by its shape"):
        SafetensorsFolder(tmp_path)


def test_a_header_without_end(tmp_path):
    """A sparse file of a few bytes on the disk, whose header would take all memory."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((2**36).to_bytes(8, "little"))
        stream.truncate(2**37)
    with pytest.raises(ValueError, match=rf"{file} is not a safetensors file: .*the format allows 100000000"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [4, 12])}, "b begins at 4, and the tensor before it ends at 8"),
        ({"a": ("F32", [2], [4, 12])}, "a begins at 4, and the tensor before it ends at 0"),
        ({"a": ("F32", [2], [-8, 0])}, "whole numbers of at least 0"),
        ({"a": ("F32", [-2, -1], [0, 8])}, "whole numbers of at least 0"),
        ({"a": ("F32", [2.0], [0, 8])}, "whole numbers of at least 0"),
        ({"a": ("F32", [True], [0, 4])}, "whole numbers of at least 0"),
    ],
)
def test_offsets_and_shapes_that_cannot_be(tensors, said, tmp_path):
    names = ("dtype", "shape", "data_offsets")
    header = json.dumps({name: dict(zip(names, about, strict=True)) for name, about in tensors.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=said):
        SafetensorsFolder(tmp_path)


def test_links_are_followed(folder, tmp_path_factory):
    """A hub's cache is a folder of links to files that are called otherwise."""
    elsewhere = tmp_path_factory.mktemp("cache") / "snapshot"
    elsewhere.mkdir()
    for file in folder.iterdir():
        (elsewhere / file.name).symlink_to(file)
    linked = tmp_path_factory.mktemp("links") / "model"
    linked.symlink_to(elsewhere)
    assert torch.equal(SafetensorsFolder(linked).read("a", 1, 2, 4), TENSORS["a"][:, 2:4])


def test_short_and_long_slices_of_rows(tmp_path):
    """Rows of 10,000 bytes: slices of them are read alone, or with all that lies between them."""
    tensor = torch.arange(7 * 5000, dtype=torch.int16).view(7, 5000)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    for start, stop in ((0, 3000), (2000, 5000), (10, 20), (0, 5000)):
        assert torch.equal(source.read("x", 1, start, stop), tensor[:, start:stop])
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"has become shorter while it was read"):
        source.read("x", 1, 2000, 5000)
