"""Python overhead of a training step: `train_step` on a tiny model, where Python dominates, relative to a bare loop.

    python scripts/bench/overhead.py [--rounds 15]

The bare loop is transformers' model of the same config with torch's AdamW: forward, backward, clip, step. Both run in
this process on a CPU with one thread, in alternate rounds, so that a busy machine slows both. The printed ratio, which
tests/bench/test_overhead.py bounds, is of the fastest rounds. `operations` counts what a step asks of the device, which
tests/bench/test_operations.py bounds.
"""

# pyright: reportMissingImports=false

import argparse
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from configs import QWEN3
from make import shapes
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.model.build import build_model
from megaswift.bridge.option_groups import compose
from megaswift.bridge.parallel import initialize
from megaswift.tasks.options import SftOptions
from megaswift.tasks.train.optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from megaswift.tasks.train.step import TrainState, sft_loss, train_step
from megaswift.templates.batching.collator import Batch, BatchLayout
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG: dict[str, Any] = (
    QWEN3 | SIZES | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 256, "dtype": "float32"}
)
LENGTH, MICRO_BATCHES, STEPS = 32, 2, 10  # tokens of a document, micro batches of a step, steps of a round
READS = "_local_scalar_dense", "nonzero", "masked_select", "_unique2"  # for which a host waits for a GPU
Step = Callable[[int], object]


def ours(config: dict[str, Any] = CONFIG, **flags: object) -> Step:
    """Return megaswift's training step, which takes the step's number. Needs a world size of 1 (bridge/parallel.py)."""
    options = compose(SftOptions, lr_decay_style="constant", **flags)
    initialize(options.build, seed=1)
    model = build_model(config, options.build, torch.float32, adapters=options.tuner.has_adapters)
    with torch.no_grad():
        for parameter in (parameter for chunk in model.chunks for parameter in chunk.parameters()):
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.02)
    assert sum(p.numel() for c in model.chunks for p in c.parameters()) == sum(map(_size, shapes(config).values()))
    if options.tuner.has_adapters:
        attach_adapters(model, config, LoraSettings.from_options(options.lora), seed=1)
    chunks = wrap_for_data_parallelism(model, options.build)
    optimizer = build_optimizer(model, chunks, options.optimizer, options.schedule)
    schedule = build_schedule(optimizer, options.schedule, options.optimizer.weight_decay, 1000)
    training = TrainState(model, chunks, optimizer, schedule, options.optimizer.clip_grad)
    micro_batches = batches()
    return lambda step: train_step(training, micro_batches, sft_loss, step)


def bare() -> Step:
    """Return the same step in plain PyTorch."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    micro_batches = [(batch.tokens, batch.labels) for batch in batches()]

    def step(_: int) -> None:
        for tokens, labels in micro_batches:
            logits = model(tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[0]) / MICRO_BATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def batches() -> list[Batch]:
    rng = np.random.default_rng(0)
    documents = [(rng.integers(3, 256, LENGTH), np.ones(LENGTH, np.float32)) for _ in range(MICRO_BATCHES)]
    tokens = float(MICRO_BATCHES * (LENGTH - 1))
    return [BatchLayout(pack_length=LENGTH).batch([[document]], tokens, None) for document in documents]


def seconds(step: Step, start: int) -> float:
    """Return the CPU seconds per step, averaged over STEPS. CPU time excludes waiting for a busy machine."""
    start_time = time.process_time()
    for number in range(start, start + STEPS):
        step(number)
    return (time.process_time() - start_time) / STEPS


def compare(step: Step, reference: Step, rounds: int) -> tuple[float, float, float]:
    """Return the fewest seconds of both steps over the rounds, and their ratio, after a warm-up round.

    The minimum is robust: other processes share the CPU caches, which only ever slows a round down.
    """
    gc.collect()
    times = [(seconds(step, STEPS * n), seconds(reference, STEPS * n)) for n in range(rounds + 1)][1:]
    step_seconds, reference_seconds = (min(column) for column in zip(*times, strict=True))
    return step_seconds, reference_seconds, step_seconds / reference_seconds


def operations(step: Step) -> Counter[str]:
    """Return how often a step, after a first one, calls each operation of PyTorch that is more than a view."""
    step(0)
    with _OperationCount() as mode:
        step(1)
    return mode.counts


class _OperationCount(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func._schema.returns
        is_view = bool(results) and all(r.alias_info is not None and not r.alias_info.is_write for r in results)
        name = func._schema.name.removeprefix("aten::")
        if not is_view and name != "_unsafe_view":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    step_seconds, reference_seconds, ratio = compare(ours(), bare(), arguments.rounds)
    print(
        f"a step of ours {1e3 * step_seconds:.2f} ms, of the bare loop {1e3 * reference_seconds:.2f} ms: {ratio:.2f} x"
    )


if __name__ == "__main__":
    main()
