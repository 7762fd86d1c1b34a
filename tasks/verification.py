"""Verification of a checkpoint before a run goes on from it: every byte is hashed, each rank reading its share."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from .folders import MANIFEST, damage, listed
from .ranks import on_first_rank_with_help, patient_group

Request = tuple[Path, list[list[str]]]  # a checkpoint, and for each rank the names of the files that it reads
Faults = Callable[[Path], list[str]]


def on_first_rank_with_faults[T](do: Callable[[Faults], T]) -> T:
    """Return `do(faults)` of rank 0, on every rank, which calls this. Its error reaches every rank too.

    faults(checkpoint): what is wrong with its files, a line a file; empty where it is whole. All ranks read them.
    """
    return on_first_rank_with_help(
        lambda everywhere: do(lambda checkpoint: _faults(checkpoint, everywhere)), _faults_of_share, patient_group()
    )


def _faults(checkpoint: Path, everywhere: Callable[[Request], list[list[str] | None]]) -> list[str]:
    try:
        files = listed(checkpoint)
    except ValueError as error:
        return [str(error)]
    if not files:
        return [f"{MANIFEST} is missing"]
    shares = balanced({name: int(entry["size"]) for name, entry in files.items()}, dist.get_world_size())
    faults = []
    for names, reported in zip(shares, everywhere((checkpoint, shares)), strict=True):
        # Another node may not have the folder, or its NFS client may look at an old state of it: rank 0 decides.
        faults += [] if reported == [] else damage(checkpoint, checksums=True, names=names)
    return sorted(faults)


def _faults_of_share(request: Request) -> list[str] | None:
    """Return what is wrong with this rank's share of the files, or None where its node does not have the folder."""
    checkpoint, shares = request
    if not (checkpoint / MANIFEST).is_file():
        return None
    return damage(checkpoint, checksums=True, names=shares[dist.get_rank()])


def balanced(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Return `count` shares of files of about as many bytes: each file, the largest first, goes to the least share."""
    shares: list[list[str]] = [[] for _ in range(count)]
    totals = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = totals.index(min(totals))
        shares[least].append(name)
        totals[least] += sizes[name] + 1  # empty files count a little
    return shares
