"""Kinds of GPUs, as their data sheets have them. None needs to be present."""

from typing import NamedTuple


class GpuKind(NamedTuple):
    """GPU of a kind."""

    name: str  # as torch has it, or its beginning
    memory: float  # GiB that a process sees
    bandwidth: float  # bytes a second of its memory
    link: float  # bytes a second to other GPUs of its node, both directions together


GPUS = {
    "h100": GpuKind("NVIDIA H100", 79.1, 3.35e12, 900e9),
    "h200": GpuKind("NVIDIA H200", 139.8, 4.8e12, 900e9),
    "h20": GpuKind("NVIDIA H20", 95.1, 4.0e12, 900e9),
    "a100": GpuKind("NVIDIA A100", 79.1, 2.04e12, 600e9),
    "b200": GpuKind("NVIDIA B200", 178.3, 8.0e12, 1800e9),
    "l40s": GpuKind("NVIDIA L40S", 44.4, 0.864e12, 64e9),  # without NVLink
}


def gpu_kind(name: str) -> GpuKind:
    """Return the kind of a GPU by torch's name: the H100 if its memory and links are not listed."""
    kinds = [kind for kind in GPUS.values() if name.startswith(kind.name)]
    return max(kinds, key=lambda kind: len(kind.name), default=GPUS["h100"])
