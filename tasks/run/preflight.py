"""`--preflight true`: a table of GPUs, links, clocks, disks and host memory of all nodes before a model is loaded."""

import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ...bridge import runtime
from ..distributed.collectives import all_gather_objects
from ..system.memory import GIB

MIN_SPEED_RATIO = 0.85  # of the ranks' median speed: a slower GPU slows the others down
MAX_SKEW = 1.0  # seconds between the clocks of two nodes
MAX_TEMPERATURE = 85  # degrees Celsius
MIN_DISK = 50 * GIB  # bytes that should be free for checkpoints
HEADER = (
    "node", "ranks", "TFLOP/s", "GPU GiB free", "deg C", "GB/s within", "across", "host GiB free", "disk GiB free",
    "clock s",
)  # fmt: skip
SECONDS = 0.5  # for each measurement
QUERY = "temperature.gpu,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.hw_slowdown"


@dataclass(frozen=True)
class Health:
    """State of a rank's GPU and node."""

    host: str
    tflops: float  # matrix product in bf16; in fp32 on a CPU
    gpu_free: float  # GiB; 0 without a GPU
    temperature: int | None  # degrees Celsius; None, like the next two, if nvidia-smi does not report it
    ecc_errors: int | None  # uncorrected errors since the driver was loaded
    slowed: bool | None  # whether the hardware throttles it: heat or power
    host_free: float  # GiB
    disk_free: float  # GiB, in the run's folder
    clock: float  # seconds since 1970, right after a barrier of all ranks
    within: float  # GB/s of an all-reduce over the node's ranks (busbw of nccl-tests); 0 for one rank
    across: float  # the same over all ranks; 0 for one node


def preflight(folder: Path) -> list[str]:
    """Return the measured table and its warnings, after about ten seconds. Every rank calls this.

    folder: the run's output folder.
    """
    hosts = all_gather_objects(socket.gethostname())
    node: dist.ProcessGroup | None = None
    nodes = sorted(set(hosts), key=hosts.index)
    for host in nodes:  # every rank must call new_group for every group
        group = dist.new_group([rank for rank, rank_host in enumerate(hosts) if rank_host == host])
        if host == hosts[dist.get_rank()]:
            assert isinstance(group, dist.ProcessGroup)
            node = group
    tflops = _tflops()
    within = _bandwidth(node) if hosts.count(hosts[dist.get_rank()]) > 1 else 0.0
    across = _bandwidth(dist.group.WORLD) if len(nodes) > 1 else 0.0
    dist.destroy_process_group(node)
    dist.barrier()
    clock = time.time()
    health = Health(
        hosts[dist.get_rank()],
        tflops,
        torch.cuda.mem_get_info()[0] / GIB if torch.cuda.is_available() else 0.0,
        *_nvidia_smi(),
        _available_bytes() / GIB,
        shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / GIB,
        clock,
        within,
        across,
    )
    ranks = [Health(*values) for values in all_gather_objects(astuple(health))]
    return [*table(ranks), *(f"warning: {text}" for text in warnings(ranks))]


def table(ranks: Sequence[Health]) -> list[str]:
    """Return a line per node, with the ranges over its ranks."""
    first = min(rank.clock for rank in ranks)
    rows: list[tuple[str, ...]] = [HEADER]
    for host in dict.fromkeys(rank.host for rank in ranks):
        numbers = [number for number, rank in enumerate(ranks) if rank.host == host]
        local_ranks = [ranks[number] for number in numbers]
        rows.append((
            host,
            f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
            _range(rank.tflops for rank in local_ranks),
            _range(rank.gpu_free for rank in local_ranks) if any(rank.gpu_free for rank in local_ranks) else "-",
            _range(rank.temperature for rank in local_ranks if rank.temperature is not None),
            _range(rank.within for rank in local_ranks if rank.within),
            _range(rank.across for rank in local_ranks if rank.across),
            _range(rank.host_free for rank in local_ranks),
            _range(rank.disk_free for rank in local_ranks),
            f"+{max(rank.clock for rank in local_ranks) - first:.3f}",
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def warnings(ranks: Sequence[Health]) -> list[str]:
    """Return the problems to fix before a long run, a line each."""
    texts = []
    median = statistics.median(rank.tflops for rank in ranks)
    for number, rank in enumerate(ranks):
        rank_name = f"rank {number} on {rank.host}"
        if rank.tflops < MIN_SPEED_RATIO * median:
            texts.append(f"{rank_name}: {rank.tflops:.4g} TFLOP/s, where the median is {median:.4g}")
        if rank.ecc_errors:
            texts.append(f"{rank_name}: {rank.ecc_errors} uncorrected memory errors of its GPU. Reset or replace it")
        if rank.slowed:
            texts.append(f"{rank_name}: the hardware slows its GPU down (heat or power)")
        elif rank.temperature is not None and rank.temperature >= MAX_TEMPERATURE:
            texts.append(f"{rank_name}: its GPU has {rank.temperature} degrees Celsius")
    rank_of_host = {rank.host: rank for rank in ranks}
    skew = max(rank.clock for rank in ranks) - min(rank.clock for rank in ranks)
    if skew > MAX_SKEW:
        texts.append(f"the clocks of the nodes are {skew:.1f} s apart. Synchronize them (chrony, ntpd)")
    for host, rank in rank_of_host.items():
        if rank.disk_free * GIB < MIN_DISK:
            texts.append(f"{host}: {rank.disk_free:.3g} GiB are free in the output folder")
    slowest = {host: min(rank.within for rank in ranks if rank.host == host) for host in rank_of_host}
    fastest = max(slowest.values())
    texts += [
        f"{host}: {speed:.3g} GB/s between its GPUs, where another node has {fastest:.3g}"
        for host, speed in slowest.items()
        if 0 < speed < MIN_SPEED_RATIO * fastest
    ]
    return texts


def _tflops() -> float:
    """Return the speed of matrix products of this rank's device, the best of several."""
    on_gpu = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if on_gpu else (512, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=runtime.device())
    best, end = 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        runtime.synchronize()
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        runtime.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def _bandwidth(group: dist.ProcessGroup | None) -> float:
    """Return the bus bandwidth of an all-reduce of large messages in GB/s, the best of several."""
    size = dist.get_world_size(group)
    tensor = torch.ones(2**27 if torch.cuda.is_available() else 2**20, dtype=torch.float32, device=runtime.device())
    best = 0.0
    for _ in range(6):  # equal on every rank; the first one also connects
        runtime.synchronize()
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        runtime.synchronize()
        best = max(best, tensor.nbytes * 2 * (size - 1) / size / (time.perf_counter() - start) / 1e9)
    return best


def _nvidia_smi() -> tuple[int | None, int | None, bool | None]:
    """Return temperature, uncorrected ECC errors and whether the hardware throttles this rank's GPU."""
    if not torch.cuda.is_available():
        return None, None, None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        line = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        result = subprocess.run(line, capture_output=True, text=True, timeout=20, check=True)
        temperature, errors, slowed = (value.strip() for value in result.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None, None
    return (
        int(temperature) if temperature.isdigit() else None,
        int(errors) if errors.isdigit() else None,
        {"Active": True, "Not Active": False}.get(slowed),
    )


def _available_bytes() -> int:
    """Return the bytes of host memory still available to programs."""
    rows = Path("/proc/meminfo").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))


def _range(values: Iterable[float]) -> str:
    """Return the smallest and largest value as text, or one number if equal."""
    texts = [f"{value:.4g}" for value in sorted(values)]
    return "-" if not texts else texts[0] if texts[0] == texts[-1] else f"{texts[0]}-{texts[-1]}"
