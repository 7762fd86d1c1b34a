"""How much memory this process holds, and what to do where it is not enough."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
ELSEWHERE = ("Rollout server", "--teacher_model_server")  # what begins errors of machines whose memory is another
_most = 0  # bytes, until `unmapped` was last called
_unmapped = 0  # bytes that torch counts as reserved and that are nobody's


def memory_gib() -> float:
    """The most memory this process has held, GiB: reserved on its GPU, or resident on the host where it has none."""
    if torch.cuda.is_available():
        return max(_most, torch.cuda.max_memory_reserved() - _unmapped) / GIB
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / GIB


def held_gib() -> float:
    """The memory that is held now, GiB: of the GPU, by all processes, or by this one of the host where it has none."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return memory_gib()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB


def unmapped(count: int) -> None:
    """From now on so many bytes are nobody's which torch counts as reserved: those of a vLLM that sleeps."""
    global _most, _unmapped
    _most = max(_most, torch.cuda.max_memory_reserved() - _unmapped)
    _unmapped = count
    torch.cuda.reset_peak_memory_stats()


@contextmanager
def explained(options: Any) -> Iterator[None]:
    """Within, an error for want of the GPU's memory says which flags help: RuntimeError."""
    try:
        yield
    except RuntimeError as error:  # torch's own, and vLLM's
        text = str(error)
        if "out of memory" not in text.lower() or any(name in text for name in ELSEWHERE):
            raise
        raise RuntimeError(f"{text.splitlines()[0]} {_cures(options)}") from error


def _cures(options: Any) -> str:
    """What of the options can take less."""
    found = []
    if hasattr(options, "offload_model"):
        found += [f"--{name} true" for name in ("offload_optimizer", "offload_model") if not getattr(options, name)]
        if options.sleep_level == 0:
            found.append("--sleep_level 1")
        if (share := options.vllm_gpu_memory_utilization) is not None:
            found.append(f"a lower --vllm_gpu_memory_utilization than {share}")
        found.append("a larger --vllm_tensor_parallel_size, or --vllm_mode server")
    if hasattr(options, "offload_ref_model") and not options.offload_ref_model:
        found.append("--offload_ref_model true")
    if options.recompute_granularity != "full":
        found.append("--recompute_granularity full --recompute_method uniform --recompute_num_layers 1")
    if options.micro_batch_size > 1:
        found.append(f"a smaller --micro_batch_size than {options.micro_batch_size}")
    return f"What takes less: {'; '.join(found)}; more processes, with a larger --tensor_model_parallel_size."
