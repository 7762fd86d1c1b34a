"""Memory and time of labels' log-probabilities: ours, in chunks of tokens, beside the naive way, all logits in fp32.

    python scripts/bench_log_probs.py                                   # a GPU: 8,192 tokens, vocabulary of 151,936
    python scripts/bench_log_probs.py --vocab 32000 --hidden 256        # a CPU: a minute

Forward and backward, with gradients of the hidden states and of the output matrix, in the dtype of both. Each way runs
in a process of its own; its memory is the peak above what the inputs take. On a GPU there are our fused kernels too.
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
    """`mean`: of the log-probabilities, and `norms` of both gradients, which all ways must agree on."""

    peak: int  # bytes
    seconds: float
    mean: float
    norms: list[float]


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """hidden [tokens, hidden_size], weight [vocabulary, hidden_size], labels [tokens] -> [tokens] fp32."""
    return (hidden @ weight.t()).float().log_softmax(dim=-1).gather(1, labels[:, None]).squeeze(1)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As `naive`."""
    assert dist.group.WORLD is not None
    output = logprobs.OutputMatrix(weight, len(weight), dist.group.WORLD)
    return logprobs.label_log_probs(hidden[:, None], output, labels[None])[0]


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As `naive`, never by the fused kernels."""
    logprobs.usable = lambda *_: False
    return ours(hidden, weight, labels)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"naive": naive, "chunked": chunked, "fused": ours}


def once(way: str, inputs: tuple[Tensor, Tensor, Tensor], slopes: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities, and the gradients of hidden states and matrix."""
    hidden, weight, labels = inputs
    log_probs = WAYS[way](hidden, weight, labels)
    gradients = torch.autograd.grad(log_probs, (hidden, weight), slopes)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return log_probs.detach(), list(gradients)


def measure(way: str, shape: Shape, folder: str) -> Measured:
    """Return one way, in a process that does nothing else."""
    backend = "nccl" if shape.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/{way}", rank=0, world_size=1)
    generator = torch.Generator(shape.device).manual_seed(0)
    settings = {"generator": generator, "device": shape.device}
    hidden = torch.randn(shape.tokens, shape.hidden, **settings).to(shape.dtype).requires_grad_()
    weight = torch.randn(shape.vocab, shape.hidden, **settings).mul(shape.hidden**-0.5).to(shape.dtype).requires_grad_()
    labels = torch.randint(0, shape.vocab, (shape.tokens,), **settings)
    slopes = torch.rand(shape.tokens, **settings)
    few = (hidden[:64].detach().requires_grad_(), weight, labels[:64])
    once(way, few, slopes[:64])  # what kernels and libraries take, once
    begin = _in_use(shape.device)
    found, gradients = once(way, (hidden, weight, labels), slopes)
    peak = _peak(shape.device) - begin
    norms = [gradient.float().norm().item() for gradient in gradients]
    del gradients
    seconds = []
    for _ in range(shape.rounds):
        start = time.perf_counter()
        once(way, (hidden, weight, labels), slopes)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return Measured(peak, statistics.median(seconds), found.mean().item(), norms)


def _in_use(device: str) -> int:
    """Bytes now; the peak is counted from here on."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak(device: str) -> int:
    """Return the process's own, on a CPU: inputs and imports have taken less, where logits are large."""
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
    given = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    shape = Shape(given.tokens, given.hidden, given.vocab, getattr(torch, given.dtype), device, given.rounds)
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    print(f"{shape.tokens:,} tokens, hidden {shape.hidden:,}, vocabulary {shape.vocab:,}, {given.dtype}, {where}\n")
    print("| way | peak memory | forward and backward | mean log p | gradients' norms |\n|---|---|---|---|---|")
    for way in WAYS if on_gpu else ("naive", "chunked"):
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (way, shape, folder))
        print(
            f"| {way} | {row.peak / 2**30:.2f} GiB | {row.seconds * 1e3:,.1f} ms | {row.mean:.5f} "
            f"| {row.norms[0]:.5g}, {row.norms[1]:.5g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
