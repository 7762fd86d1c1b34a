"""Speed of AdamW's update with the state on the host: `python scripts/bench/host_optimizer.py`.

The update is that of --optimizer_cpu_offload true, of parameters in bf16, for each type of the moments.
"""

# pyright: reportMissingImports=false

import statistics
import time

import torch
from megaswift.bridge import runtime
from megaswift.tasks.train.hybrid_adamw import HybridAdamW, StatePlacement

TENSORS = 8
STEPS = 4  # the first one allocates memory, and does not count
SETTINGS = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def measure(parameters: int, dtype: str) -> float:
    """Return the median of millions of parameters per second. dtype: of both moments"""
    device = runtime.device()
    copies = {}
    for _ in range(TENSORS):
        master = torch.empty(parameters // TENSORS, device=device)
        copies[master] = torch.randn_like(master).bfloat16()
        master.grad = torch.randn_like(master)
        master.untyped_storage().resize_(0)  # the optimizer holds its values
    optimizer = HybridAdamW([{"params": [*copies]}], copies, StatePlacement(1.0, dtype, dtype), **SETTINGS)
    seconds = []
    for _ in range(STEPS):
        runtime.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        runtime.synchronize()
        seconds.append(time.perf_counter() - begin)
    return parameters / statistics.median(seconds[1:]) / 1e6


def main() -> None:
    is_cuda = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if is_cuda else f"no GPU, {torch.get_num_threads()} threads", torch.__version__)
    for dtype in ("fp32", "bf16", "fp16", "fp8"):
        rate = measure(2**30 if is_cuda else 2**26, dtype)
        print(f"moments in {dtype}: {rate:,.0f} million parameters/s", flush=True)


if __name__ == "__main__":
    main()
