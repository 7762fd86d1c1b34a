"""Random and damaged input from strangers: one error of a kind that is shown as one line, in a bounded time.

FUZZ_CASES=20000 pytest tests/test_fuzz.py     as many cases of each kind; else 200
"""

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megaswift.bridge.checkpoint.hub import read_adapter_config, read_config
from megaswift.bridge.checkpoint.pickles import read_metadata
from megaswift.bridge.checkpoint.safetensors_io import INDEX, SafetensorsFolder
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.rollout.in_process import InProcessBackend
from megaswift.tasks.rollout.server import Server
from megaswift.tasks.system.atomic_dir import MANIFEST, verify_files
from megaswift.templates.dataset.sources import open_source
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tests.tasks.rollout.served import KnownEngine
from tests.tasks.rollout.test_server_input import generate

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_CASES", "200")),
    deadline=10_000,  # ms, of one case
    derandomize="FUZZ_CASES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

numbers = st.integers() | st.integers(-2, 40) | st.floats() | st.sampled_from([2**31, 2**63, 10**30, True])
words = st.sampled_from(["F32", "../x", "/etc/passwd", "NaN"])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=8) | words
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def outcome[T](do: Callable[[], T], kind: type[Exception] = ValueError) -> tuple[T | None, Exception | None]:
    """What `do` returns, and the error of the expected kind that it raises. Any other goes on."""
    try:
        return do(), None
    except kind as error:
        return None, error


def mutated(draw: Callable, data: bytes) -> bytes:
    """`data` with some bytes changed, cut, or doubled."""
    found = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0:
                found[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del found[at : at + draw(st.integers(1, 9))]
            case 2:
                found[at:at] = draw(st.binary(max_size=9))
            case 3:
                found[at:at] = found[at : at + draw(st.integers(1, 40))]
    return bytes(found)


@st.composite
def replaced(draw: Callable, tree: Any) -> Any:
    """A JSON value with one of its parts replaced by any other value, taken out, or renamed."""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 4)) == 0:
        return draw(values)
    if isinstance(tree, list):
        at = draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], *([draw(replaced(tree[at]))] if draw(st.booleans()) else []), *tree[at + 1 :]]
    name = draw(st.sampled_from(sorted(tree)))
    rest = {other: value for other, value in tree.items() if other != name}
    match draw(st.integers(0, 3)):
        case 0:
            return rest
        case 1:
            return rest | {draw(st.text(max_size=6)): tree[name]}
    return rest | {name: draw(replaced(tree[name]))}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "__metadata__": {"format": "pt"},
}


@fuzz
@given(st.data())
def test_headers_of_safetensors(place: Path, data: st.DataObject) -> None:
    """What is read is read by the safetensors library too, with the same values; the rest is refused with the file."""
    file = place / "model.safetensors"
    if data.draw(st.booleans()):
        header = json.dumps(data.draw(replaced(HEADER))).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(32)))
    else:
        file.write_bytes(mutated(data.draw, save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})))

    def read() -> dict[str, torch.Tensor]:
        folder = SafetensorsFolder(place)
        sizes = {name: stored.shape[0] if stored.shape else 0 for name, stored in folder.tensors.items()}
        return {name: folder.read(name, 0, 0, size) for name, size in sizes.items()}

    def by_library() -> dict[str, torch.Tensor]:
        with safe_open(file, framework="pt") as library:
            return {name: library.get_tensor(name) for name in library.keys()}  # noqa: SIM118

    tensors, error = outcome(read)
    if tensors is None:
        assert str(place) in str(error)
        return
    expected, error = outcome(by_library, SafetensorError)
    if expected is None:  # it is stricter: bytes after the last tensor, keys that come twice, ...
        return
    assert {*expected} == {*tensors}
    for name, tensor in tensors.items():
        assert torch.equal(expected[name].view(torch.uint8), tensor.view(torch.uint8))


@fuzz
@given(st.data())
def test_indexes(place: Path, data: st.DataObject) -> None:
    folder = place / "index"
    folder.mkdir(exist_ok=True)
    (folder / "one.safetensors").write_bytes(save({"a": torch.ones(2), "b": torch.ones(3)}))
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (folder / INDEX).write_bytes(mutated(data.draw, json.dumps(data.draw(st.just(index) | replaced(index))).encode()))
    found, error = outcome(lambda: SafetensorsFolder(folder))
    if found is None:
        assert str(folder) in str(error)
    else:
        assert all(stored.file.parent == folder for stored in found.tensors.values())


@pytest.mark.parametrize(
    ("name", "read", "content"),
    [
        (MANIFEST, verify_files, {"files": {"a": {"size": 1, "sha256": "00"}, "b": {"size": 2, "sha256": "11"}}}),
        ("config.json", read_config, {"model_type": "qwen2", "hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}}),
        ("adapter_config.json", partial(read_adapter_config, mcore=True), {"r": 8, "lora_alpha": 16, "bias": "none"}),
    ],
)  # fmt: skip
@fuzz
@given(data=st.data())
def test_json_files(name: str, read: Callable, content: dict, place: Path, data: st.DataObject) -> None:
    folder = place / name.replace(".", "-")
    folder.mkdir(exist_ok=True)
    text = json.dumps(data.draw(st.just(content) | replaced(content)))
    (folder / name).write_bytes(mutated(data.draw, text.encode()))
    _, error = outcome(lambda: read(folder))
    assert error is None or name in str(error)


@fuzz
@given(st.data())
def test_metadata_pickles(place: Path, data: st.DataObject) -> None:
    """Nothing but the allowed classes is called; a damaged pickle may raise anything else."""
    folder = place / "pickles"
    folder.mkdir(exist_ok=True)
    calls = [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("posix", "system"), ("torch", "Size")]
    module, name = data.draw(st.sampled_from(calls))
    call = f"c{module}\n{name}\n(X\x05\x00\x00\x00touchtr\x01\x00\x00\x00R.".encode()
    (folder / ".metadata").write_bytes(mutated(data.draw, b"\x80\x02" + call))
    outcome(lambda: read_metadata(folder), Exception)


@fuzz
@given(st.data())
def test_config_files(place: Path, data: st.DataObject) -> None:
    file = place / data.draw(st.sampled_from(["config.yaml", "config.json"]))
    config = {"model": "m", "dataset": ["a.jsonl"], "lr": 1e-5, "columns": {"a": "b"}, "ENV": {"A": 1}}
    tree = data.draw(st.just(config) | replaced(config))
    text = json.dumps(tree) if file.suffix == ".json" else yaml.safe_dump(tree, allow_unicode=True)
    file.write_bytes(mutated(data.draw, text.encode("utf-8", "surrogatepass")))
    before = dict(os.environ)
    try:
        _, error = outcome(lambda: read_options("megatron", ["sft", "--config", str(file)]), UsageError)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert error is None or str(error)


@fuzz
@given(st.data())
def test_rows(place: Path, data: st.DataObject) -> None:
    file = place / "rows.jsonl"
    rows = data.draw(st.lists(st.dictionaries(st.text(max_size=6), values, max_size=3), min_size=1, max_size=4))
    file.write_bytes(mutated(data.draw, b"".join(json.dumps(row).encode() + b"\n" for row in rows)))

    def read() -> int:
        source = open_source(str(file))
        found = list(source.rows(np.arange(len(source))))
        assert len(found) == len(source)
        return len(found)

    _, error = outcome(read)
    assert error is None or str(file) in str(error)


BODIES: dict[str, Any] = {
    "/generate": generate(request_max_new_tokens=2, sampling_temperature=1.0, sampling_top_k=3),
    "/top_log_probs": {"requests": [{"tokens": [1, 2], "places": [0]}], "top": 2},
    "/claim": {"run": "a", "who": "b", "probe": {"pid": 1, "fd": 3, "bytes": 16, "secret": "00" * 16}},
    "/weights/bucket": {"entries": [["a", "F32", [2], 0]], "place": [1, 2, 8], "bytes": 8},
    "/weights/finish": {"version": "1"},
    "/checksums": {"names": ["a"]},
    "/sleep": {"level": 0},
}


@pytest.mark.parametrize("path", [*BODIES, "/vocabulary", "/release", "/weights/begin", "/cache/reset", "/wake"])
def test_routes(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every answer is one of the server's own: no traceback, no 500, within a second."""
    server = Server(InProcessBackend(KnownEngine(), "known"), "known", vocab_size=100, positions=16)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test")
    loop = asyncio.new_event_loop()

    async def post(content: bytes) -> httpx.Response:
        if path not in ("/generate", "/claim"):
            await client.post("/claim", json={"run": "a", "who": "b"})
            if path in ("/weights/bucket", "/weights/finish"):
                await client.post("/weights/begin", headers={"x-run": "a"})
        headers = {"content-type": "application/json", "x-run": "a"}
        return await asyncio.wait_for(client.post(path, content=content, headers=headers), 10)

    @fuzz
    @given(st.data())
    def try_bodies(data: st.DataObject) -> None:
        body = BODIES.get(path, {})
        text = json.dumps(data.draw(st.just(body) | replaced(body)))
        answer = loop.run_until_complete(post(mutated(data.draw, text.encode())))
        assert answer.status_code < 500, answer.text
        assert isinstance(answer.json(), dict)

    try_bodies()
    loop.run_until_complete(client.post("/release", headers={"x-run": "a"}))  # an update in progress holds a thread
    loop.run_until_complete(client.aclose())
    loop.close()
    assert "Traceback" not in caplog.text
