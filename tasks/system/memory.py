"""Memory use of this process, and hints for out-of-memory errors."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...bridge.option_groups import group_of
from ..options import ReferenceOptions, SftOptions
from ..options.rollout import EngineOptions

GIB = 2**30
HOST_FILL = 0.6  # share of host memory that plans may fill: processes, page cache and rounding take some too
CGROUP = Path("/sys/fs/cgroup")
REMOTE_ERRORS = ("Rollout server", "--teacher_model_server")  # texts in errors of other machines
_peak = 0  # bytes, measured at the last call of `set_unmapped`
_unmapped = 0  # bytes that torch counts as reserved although vLLM has unmapped them


def memory_gib() -> float:
    """Return this process's peak memory in GiB: reserved on its GPU; without a GPU, resident on the host."""
    if torch.cuda.is_available():
        return max(_peak, torch.cuda.max_memory_reserved() - _unmapped) / GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / GIB


def used_gib() -> float:
    """Return the used memory in GiB: of the GPU by all processes; without a GPU, of the host by this process."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return memory_gib()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB


def available_host_memory() -> float:
    """Return the bytes of host memory that are free or can be freed, also within a container's limit."""
    usage = CGROUP / "memory.current"
    used = int(usage.read_text()) if usage.exists() else 0
    return min(_host_memory("MemAvailable"), _container_limit() - used)


def host_memory_share(processes: int) -> float:
    """Return the bytes of host memory that a plan may fill for each process of this machine.

    They do not depend on what is free: all nodes and ranks plan the same.
    """
    return HOST_FILL * min(_host_memory("MemTotal"), _container_limit()) / processes


def _host_memory(line: str) -> float:
    """Return the bytes in a line of /proc/meminfo; infinity where there is no such file."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return math.inf
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(lines[line].split()[0]) * 1024


def _container_limit() -> float:
    """Return the bytes that this container may use; infinity without a limit."""
    file = CGROUP / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return math.inf if limit == "max" else int(limit)


def set_unmapped(count: int) -> None:
    """Set the number of reserved bytes that a sleeping vLLM has unmapped, which torch still counts."""
    global _peak, _unmapped
    _peak = max(_peak, torch.cuda.max_memory_reserved() - _unmapped)
    _unmapped = count
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def oom_hints(options: SftOptions) -> Iterator[None]:
    """Turn an out-of-memory error of the GPU within the context into a RuntimeError that names helpful flags."""
    try:
        yield
    except RuntimeError as error:  # raised by torch and vLLM
        text = str(error)
        if "out of memory" not in text.lower() or any(name in text for name in REMOTE_ERRORS):
            raise
        raise RuntimeError(f"{text.splitlines()[0]} {_lower_memory_hints(options)}") from error


def _lower_memory_hints(options: SftOptions) -> str:
    """Return a sentence that names the flags that lower the memory use."""
    flags = []
    if engine_options := group_of(options, EngineOptions):
        flags += [
            f"--{name} true" for name in ("offload_optimizer", "offload_model") if not getattr(engine_options, name)
        ]
        if engine_options.sleep_level == 0:
            flags.append("--sleep_level 1")
        if (share := engine_options.vllm_gpu_memory_utilization) is not None:
            flags.append(f"a lower --vllm_gpu_memory_utilization than {share}")
        flags.append("a larger --vllm_tensor_parallel_size, or --vllm_mode server")
    reference_options = group_of(options, ReferenceOptions)
    if reference_options and not reference_options.offload_ref_model:
        flags.append("--offload_ref_model true")
    if options.build.recompute_granularity != "full":
        flags.append("--recompute_granularity full --recompute_method uniform --recompute_num_layers 1")
    if not options.vision.freeze_vit and not options.vision.vit_gradient_checkpointing:
        flags.append("--vit_gradient_checkpointing true, for images")
    if options.training.micro_batch_size > 1:
        flags.append(f"a smaller --micro_batch_size than {options.training.micro_batch_size}")
    return f"To lower it, use {'; '.join(flags)}; more processes, with a larger --tensor_model_parallel_size."
