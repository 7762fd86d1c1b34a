"""Two nodes of two ranks, by two torchruns on one machine. Each rank writes what it saw to rank-N.json."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megaswift.tasks.distributed import collectives
from megaswift.tasks.run import verification as verification_module
from megaswift.tasks.system import atomic_dir as folders_module
from torch.distributed.distributed_c10d import _set_pg_timeout


def caches(root: Path, node: str) -> dict[str, list]:
    """Who builds, of a cache that the nodes share or do not, and what each has found in it."""
    collectives.CACHE_TIMEOUT = 0.3
    found = {}
    for name, cache in {"shared": root / "cache", "apart": root / f"cache-{node}", "none": Path("/proc/no")}.items():

        def build(cache: Path = cache) -> list:
            time.sleep(0.3)
            if cache.parent != Path("/proc"):
                (cache / "tokens").write_text(f"of rank {dist.get_rank()}")
            return ["built"]

        def find(cache: Path = cache) -> list:
            return ["found", (cache / "tokens").read_text() if cache.parent != Path("/proc") else ""]

        found[name] = collectives.one_rank_per_cache(cache, build, find)
    found["left"] = sorted(file.name for file in (root / "cache").iterdir())
    return found


def error_of(do: Callable[[], object]) -> str:
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def folders(root: Path, node: str) -> dict[str, object]:
    """Return the errors of `check_shared_folder` for each kind of output folder."""
    collectives.SHARED_TIMEOUT = 1.0
    shared, apart = root / "out", root / f"out-{node}"
    shared.mkdir(exist_ok=True)
    apart.mkdir(exist_ok=True)
    said: dict[str, object] = {"shared": error_of(lambda: collectives.check_shared_folder(shared))}
    said["apart"] = error_of(lambda: collectives.check_shared_folder(apart))
    said["absent"] = error_of(lambda: collectives.check_shared_folder(shared if node == "0" else root / "no such"))
    touch, Path.touch = Path.touch, read_only if node == "1" else Path.touch
    said["read-only"] = error_of(lambda: collectives.check_shared_folder(shared))
    Path.touch = touch
    dist.barrier()
    said["left"] = [file.name for folder in (shared, apart) for file in folder.iterdir()]
    return said


def read_only(path: Path) -> None:
    raise OSError(30, "Read-only file system", str(path))


def verification(root: Path, node: str) -> dict[str, object]:
    """Who hashes which files of a checkpoint, and what is found wrong with it where one node has it and where both."""
    read: list[str] = []
    sha256, folders_module._sha256 = folders_module._sha256, lambda file: (read.append(file.name), sha256(file))[1]
    seen: dict[str, object] = {}
    for name in ("shared", "one node's"):
        path = root / f"checkpoint {name}"
        if name == "one node's" and node == "1":
            verification_module.read_manifest = lambda checkpoint: {}  # as if it had no such folder
        if dist.get_rank() == 0:
            temporary = folders_module.stage(path)
            for number in range(8):
                (temporary / str(number)).write_bytes(b"x" * (number + 1))
            folders_module.commit(temporary, path)
        dist.barrier()
        read.clear()
        faults = verification_module.broadcast_from_rank0_with_verify(lambda faults, path=path: faults(path))
        seen[name] = [faults, sorted(read)]
        if dist.get_rank() == 0:
            (path / "3").write_bytes(b"yyyy")
            (path / "6").unlink()
        dist.barrier()
        seen[f"{name}, damaged"] = verification_module.broadcast_from_rank0_with_verify(
            lambda faults, path=path: [*faults(path), *faults(path / "absent")]
        )
    folders_module._sha256 = sha256
    seen["error"] = error_of(lambda: verification_module.broadcast_from_rank0_with_verify(lambda faults: 1 // 0))
    return seen


def waiting() -> str:
    """Others wait for longer than a collective may take."""
    dist.barrier(collectives.gloo_group())
    _set_pg_timeout(timedelta(seconds=1))
    order: list[str] = []
    said = error_of(lambda: collectives.local_rank0_first(lambda: (time.sleep(1.5), order.append("done"))))
    dist.barrier(collectives.gloo_group())
    _set_pg_timeout(timedelta(seconds=60))
    return said + "".join(order)


def failing() -> list[str]:
    def fail() -> None:
        if dist.get_rank() == 2:
            raise ValueError("rank 2 cannot")

    return [error_of(partial(do, fail)) for do in (collectives.run_on_all_ranks, collectives.local_rank0_first)]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    root, node = Path(sys.argv[1]), os.environ["GROUP_RANK"]
    seen = {"caches": caches(root, node), "folders": folders(root, node), "waiting": waiting(), "failing": failing()}
    seen["verification"] = verification(root, node)
    (root / f"rank-{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
