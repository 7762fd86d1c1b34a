"""Verification of a checkpoint before a resume: all ranks together hash every byte of its files."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ..distributed.collectives import broadcast_from_rank0_with_workers, gloo_group
from ..system.atomic_dir import read_manifest, verify_files
from .run_dir import Verify, verify_checkpoint

Request = tuple[Path, list[list[str]]]  # checkpoint, file names by rank


def broadcast_from_rank0_with_verify[T](operation: Callable[[Verify], T]) -> T:
    """Run `operation(verify)` on rank 0, and return its result on every rank. Every rank calls this and gets its error.

    verify(checkpoint): as run_dir.verify_checkpoint, with the files split among all ranks.
    """
    return broadcast_from_rank0_with_workers(
        lambda call_all: operation(partial(verify_checkpoint, verify=partial(_verify_on_all_ranks, call_all))),
        _verify_own_share,
        gloo_group(),
    )


def _verify_on_all_ranks(call_all: Callable[[Request], list[list[str] | None]], checkpoint: Path) -> list[str]:
    """Return the faults of a checkpoint's files against its manifest, as `verify_files` does."""
    sizes = {name: int(entry["size"]) for name, entry in read_manifest(checkpoint).items()}
    shares = balance_files(sizes, dist.get_world_size())
    lines = []
    for names, reported in zip(shares, call_all((checkpoint, shares)), strict=True):
        # Another node may lack the folder, or its NFS client may see an old state: rank 0 decides.
        lines += [] if reported == [] else verify_files(checkpoint, checksums=True, names=names)
    return sorted(lines)


def _verify_own_share(request: Request) -> list[str] | None:
    """Return the faults in this rank's share of the files, None if its node has no manifest."""
    checkpoint, shares = request
    try:
        if not read_manifest(checkpoint):
            return None
        return verify_files(checkpoint, checksums=True, names=shares[dist.get_rank()])
    except ValueError:
        return None


def balance_files(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split files into `count` shares of about equal size: greedily, the largest file first."""
    shares: list[list[str]] = [[] for _ in range(count)]
    totals = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = totals.index(min(totals))
        shares[smallest].append(name)
        totals[smallest] += sizes[name] + 1  # empty files count a little
    return shares
