"""vLLM that quantizes a trainer's weights, in the trainer's process: run under torchrun, on one GPU.

    torchrun --nproc-per-node 1 -m tests.tasks.rollout.quantized_worker job.json results.json

job.json: {"models": two folders, "method": --vllm_quantization}. results.json: {engine: [greedy token and its
log-probability for each prompt]}, and the numbers of compared tensors.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.stream import stream_weights
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from megaswift.bridge.parallel import initialize
from megaswift.tasks.options.rollout import EngineOptions
from megaswift.tasks.rollout.engine import Request, Sampling
from megaswift.tasks.rollout.vllm_engine import VllmEngine
from megaswift.tasks.rollout.weight_sync import sync

from tests import tiny

DTYPE, PROMPTS, MEMORY_SHARE = torch.bfloat16, 64, 0.2


def run(job: dict[str, Any]) -> dict[str, Any]:
    initialize(BuildOptions(), seed=3)
    first, second = (Path(folder) for folder in job["models"])
    updated = engine_of(first, job["method"], load=False)
    results: dict[str, Any] = {"compared": []}
    for name, folder in ("first", first), ("second", second), ("again", first):
        results["compared"].append(send(updated, folder))
        results[name] = answers(updated)
    updated.close()
    for name, method in ("loaded", job["method"]), ("plain", None):
        engine = engine_of(first, method, load=True)
        results[name] = answers(engine)
        engine.close()
    return results


def engine_of(folder: Path, method: Any, *, load: bool) -> VllmEngine:
    options = EngineOptions(vllm_max_model_len=128, vllm_max_num_seqs=PROMPTS, vllm_quantization=method)
    return VllmEngine(folder, options, dtype=DTYPE, load=load, memory_share=MEMORY_SHARE)


def send(engine: VllmEngine, folder: Path) -> int:
    """Send the weights of a folder as training does. Return the number of compared tensors."""
    config = read_config(folder)
    model = build_model(config, BuildOptions(), DTYPE)
    load_weights(model.chunks, config, folder)
    return sync(engine, stream_weights(model.chunks, config, folder, dtype=DTYPE), dtype=DTYPE, compare=1000).compared


def answers(engine: VllmEngine) -> list[tuple[int, float]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, tiny.VOCAB, (4 + number % 9,), generator=generator).tolist() for number in range(PROMPTS)
    ]
    completions = engine.generate(
        [Request(prompt, seed=number) for number, prompt in enumerate(prompts)],
        Sampling(temperature=0, max_new_tokens=1),
    )
    return [(one.tokens[0], one.log_probs[0]) for one in completions]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
