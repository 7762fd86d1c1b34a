"""Several nodes: what they share is found out, what each has of its own is used."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prepared import ON_CPU, ROOT


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Observations of the four ranks of two nodes that share a folder."""
    folder: Path = tmp_path_factory.mktemp("nodes")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "megaswift.cli.torchrun", "--nnodes=2", "--nproc_per_node=2"]
    command += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    nodes = [
        subprocess.Popen(
            [*command, f"--node_rank={node}", "-m", "tests.tasks.distributed.collectives_worker", str(folder)],
            cwd=ROOT,
            env=os.environ | ON_CPU,
        )
        for node in range(2)
    ]
    assert [node.wait(240) for node in nodes] == [0, 0]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
def test_a_cache_is_built_once(seen: list[dict]) -> None:
    caches = [rank["caches"] for rank in seen]
    assert [cache["shared"] for cache in caches] == [["built"], *[["found", "of rank 0"]] * 3]
    apart = [["built"], ["found", "of rank 0"], ["built"], ["found", "of rank 2"]]
    assert [cache["apart"] for cache in caches] == apart
    nothing = [["built"], ["found", ""]]  # a cache that cannot be written is each node's own matter
    assert [cache["none"] for cache in caches] == nothing * 2
    assert caches[0]["left"] == ["tokens"]


@pytest.mark.slow
def test_an_output_folder_that_is_not_shared_is_refused(seen: list[dict]) -> None:
    for rank in seen:  # all hear of it
        said = rank["folders"]
        assert said["shared"] == ""
        assert said["left"] == []
        for name in ("apart", "absent"):
            assert said[name].startswith("ValueError: --output_dir ")
            assert "not shared by all nodes" in said[name]
            assert "Set a path on a disk that all nodes mount" in said[name]
        assert said["read-only"].startswith("ValueError: --output_dir ")
        assert "rank 2 on" in said["read-only"]
        assert "(Read-only file system), but all nodes write checkpoints. Make it writable, or set" in said["read-only"]


@pytest.mark.slow
def test_ranks_share_the_hashing_of_a_checkpoint(seen: list[dict]) -> None:
    verified = [rank["verification"] for rank in seen]
    damaged = ["3 has other bytes than were written", "6 is missing", "manifest.json is missing"]
    for rank in verified:
        assert rank["shared"][0] == rank["one node's"][0] == []
        assert rank["shared, damaged"] == rank["one node's, damaged"] == damaged
        assert rank["error"] == "ZeroDivisionError: integer division or modulo by zero"
    assert [rank["shared"][1] for rank in verified] == [["0", "7"], ["1", "6"], ["2", "5"], ["3", "4"]]
    # Ranks 2 and 3 do not have the folder: rank 0 reads their shares.
    assert [rank["one node's"][1] for rank in verified] == [["0", "2", "3", "4", "5", "7"], ["1", "6"], [], []]


@pytest.mark.slow
def test_ranks_wait_for_each_other_as_long_as_it_takes(seen: list[dict]) -> None:
    assert [rank["waiting"] for rank in seen] == ["done"] * 4


@pytest.mark.slow
def test_an_error_of_any_reaches_all(seen: list[dict]) -> None:
    assert [rank["failing"] for rank in seen] == [["ValueError: rank 2 cannot"] * 2] * 4
