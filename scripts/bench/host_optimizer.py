"""Speed of AdamW's update on the host, by the type of the moments: `python scripts/bench/host_optimizer.py`.

The update is that of --optimizer_cpu_offload true, without the copies from and to a GPU, of 2^26 parameters in bf16.
"""

# pyright: reportMissingImports=false

import statistics
import time

import torch
from megaswift.tasks.train.hybrid_adamw import HybridAdamW, StatePlacement

PARAMETERS = 2**26
STEPS = 4  # the first one allocates memory, and does not count
SETTINGS = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def measure(dtype: str) -> float:
    """Return the median of millions of parameters per second. dtype: of both moments"""
    weights = torch.randn(PARAMETERS).bfloat16()
    master = torch.empty(PARAMETERS)
    master.untyped_storage().resize_(0)  # the optimizer holds its values
    optimizer = HybridAdamW([{"params": [master]}], {master: weights}, StatePlacement(1.0, dtype, dtype), **SETTINGS)
    master.grad = torch.randn(PARAMETERS)
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return PARAMETERS / statistics.median(seconds[1:]) / 1e6


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for dtype in ("fp32", "bf16", "fp16", "fp8"):
        print(f"moments in {dtype}: {measure(dtype):,.0f} million parameters/s", flush=True)


if __name__ == "__main__":
    main()
