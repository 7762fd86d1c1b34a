"""`check_precision` in several layouts of two processes.

torchrun --nproc-per-node 2 -m tests.tasks.convert.logit_parity_worker FOLDER

FOLDER/{qwen3, qwen3_moe} are checkpoints with tokenizers. Rank 0 writes what happened to FOLDER/precision.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge import parallel
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import Model
from megaswift.bridge.options import BuildOptions
from megaswift.tasks.convert.logit_parity import PrecisionError, as_json, check_precision
from megatron.core import parallel_state

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ("qwen3", {"pipeline_model_parallel_size": 2}),
    ("qwen3_moe", {"expert_model_parallel_size": 2}),
]


def attempt(folder: Path, options: BuildOptions, fault: str | None = None) -> Any:
    """The comparisons, or the error's text. The tensor that `fault` names is wrong by a factor."""
    config = read_config(folder)

    def build(dtype: torch.dtype) -> Model:
        model = build_model(config, options, dtype)
        load_weights(model.chunks, config, folder)
        for key, tensor in collect_params(model.chunks).items():
            if str(key) == fault:
                tensor.mul_(1.2)
        return model

    with torch.no_grad():
        try:
            return as_json(check_precision(folder, config, build, torch.bfloat16))
        except PrecisionError as error:
            return str(error)


def main(folder: Path) -> None:
    results = {}
    for name, layout in LAYOUTS:
        options = BuildOptions(**layout)
        parallel.initialize(options, seed=1)
        results[f"{name} {next(iter(layout))}"] = attempt(folder / name, options)
        if "pipeline_model_parallel_size" in layout:
            results["fault"] = attempt(folder / name, options, "decoder.layers.2.self_attention.q_layernorm.weight")
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / "precision.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
