"""Benchmark of label log-probabilities: memory and time, in chunks of tokens and from all logits in fp32.

    python scripts/bench_log_probs.py                                   # a GPU: 8,192 tokens, vocabulary of 151,936
    python scripts/bench_log_probs.py --vocab 32000 --hidden 256        # a CPU: a minute

It measures forward and backward, with gradients of the hidden states and of the output matrix in their dtype. Each
method runs in a separate process. Memory is the peak above that of the inputs. A GPU also has the fused kernels.
"""

# pyright: reportMissingImports=false

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge.layers import logprobs
from torch import Tensor


@dataclass
class Shape:
    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: str
    rounds: int


@dataclass
class Measured:
    """Memory and time of a method, and its results, on which all methods must agree."""

    peak: int  # bytes
    seconds: float
    mean: float  # of the log-probabilities
    norms: list[float]  # of both gradients


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return log-probabilities from all logits.

    hidden [tokens, hidden_size], weight [vocabulary, hidden_size], labels [tokens] -> [tokens] fp32
    """
    return (hidden @ weight.t()).float().log_softmax(dim=-1).gather(1, labels[:, None]).squeeze(1)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the same as `naive`, with the product's own function."""
    assert dist.group.WORLD is not None
    output = logprobs.OutputMatrix(weight, len(weight), dist.group.WORLD)
    return logprobs.label_log_probs(hidden[:, None], output, labels[None])[0]


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the same as `ours`, without the fused kernels."""
    logprobs.usable = lambda *_: False
    return ours(hidden, weight, labels)


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"naive": naive, "chunked": chunked, "fused": ours}


def once(method: str, inputs: tuple[Tensor, Tensor, Tensor], output_gradients: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return log-probabilities, and the gradients of hidden states and output matrix."""
    hidden, weight, labels = inputs
    log_probs = METHODS[method](hidden, weight, labels)
    gradients = torch.autograd.grad(log_probs, (hidden, weight), output_gradients)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return log_probs.detach(), list(gradients)


def measure(method: str, shape: Shape, folder: str) -> Measured:
    """Return the measurements of a method, in a process that does nothing else."""
    backend = "nccl" if shape.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/{method}", rank=0, world_size=1)
    generator = torch.Generator(shape.device).manual_seed(0)
    settings = {"generator": generator, "device": shape.device}
    hidden = torch.randn(shape.tokens, shape.hidden, **settings).to(shape.dtype).requires_grad_()
    weight = torch.randn(shape.vocab, shape.hidden, **settings).mul(shape.hidden**-0.5).to(shape.dtype).requires_grad_()
    labels = torch.randint(0, shape.vocab, (shape.tokens,), **settings)
    output_gradients = torch.rand(shape.tokens, **settings)
    warmup_inputs = (hidden[:64].detach().requires_grad_(), weight, labels[:64])
    once(method, warmup_inputs, output_gradients[:64])  # warm-up: memory that kernels and libraries allocate once
    base = _in_use(shape.device)
    log_probs, gradients = once(method, (hidden, weight, labels), output_gradients)
    peak = _peak(shape.device) - base
    norms = [gradient.float().norm().item() for gradient in gradients]
    del gradients
    seconds = []
    for _ in range(shape.rounds):
        start = time.perf_counter()
        once(method, (hidden, weight, labels), output_gradients)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return Measured(peak, statistics.median(seconds), log_probs.mean().item(), norms)


def _in_use(device: str) -> int:
    """Return the bytes in use, and reset the peak of a GPU."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak(device: str) -> int:
    """Return the peak in bytes; on a CPU that of the process, which large logits determine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=10 if on_gpu else 2)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    shape = Shape(args.tokens, args.hidden, args.vocab, getattr(torch, args.dtype), device, args.rounds)
    hardware = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    print(f"{shape.tokens:,} tokens, hidden {shape.hidden:,}, vocabulary {shape.vocab:,}, {args.dtype}, {hardware}\n")
    print("| way | peak memory | forward and backward | mean log p | gradients' norms |\n|---|---|---|---|---|")
    for method in METHODS if on_gpu else ("naive", "chunked"):
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (method, shape, folder))
        print(
            f"| {method} | {row.peak / 2**30:.2f} GiB | {row.seconds * 1e3:,.1f} ms | {row.mean:.5f} "
            f"| {row.norms[0]:.5g}, {row.norms[1]:.5g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
