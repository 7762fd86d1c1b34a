"""Verification of a checkpoint before a run goes on from it: every byte is hashed, each rank reading its share."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ..distributed.collectives import on_first_rank_with_help, patient_group
from ..system.atomic_dir import damage, listed
from .run_dir import Faults, faults

Request = tuple[Path, list[list[str]]]  # a checkpoint, and for each rank the names of the files that it reads


def on_first_rank_with_faults[T](do: Callable[[Faults], T]) -> T:
    """Return `do(faults)` of rank 0, on every rank, which calls this. Its error reaches every rank too.

    faults(checkpoint): as run_folder.faults, but all ranks read the files.
    """
    return on_first_rank_with_help(
        lambda everywhere: do(partial(faults, verify=partial(_damage, everywhere))), _damage_in_share, patient_group()
    )


def _damage(everywhere: Callable[[Request], list[list[str] | None]], checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint that differ from its manifest, as `damage` does."""
    sizes = {name: int(entry["size"]) for name, entry in listed(checkpoint).items()}
    shares = balanced(sizes, dist.get_world_size())
    lines = []
    for names, reported in zip(shares, everywhere((checkpoint, shares)), strict=True):
        # Another node may not have the folder, or its NFS client may look at an old state of it: rank 0 decides.
        lines += [] if reported == [] else damage(checkpoint, checksums=True, names=names)
    return sorted(lines)


def _damage_in_share(request: Request) -> list[str] | None:
    """Return the damage in this rank's share of the files, or None where its node does not have the manifest."""
    checkpoint, shares = request
    try:
        if not listed(checkpoint):
            return None
        return damage(checkpoint, checksums=True, names=shares[dist.get_rank()])
    except ValueError:
        return None


def balanced(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Return `count` shares of files of about as many bytes: each file, the largest first, goes to the least share."""
    shares: list[list[str]] = [[] for _ in range(count)]
    totals = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = totals.index(min(totals))
        shares[least].append(name)
        totals[least] += sizes[name] + 1  # empty files count a little
    return shares
