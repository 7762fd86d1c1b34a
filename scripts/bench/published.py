"""Published configurations beside the plan: whether each fits, and how fast it is.

    python scripts/bench/published.py [--into docs/plan.md]

Each is planned as the command of the same layout here. Exits with 1 if one does not fit by the plan and has no note
that says why, or has one and fits.
"""

# pyright: reportMissingImports=false

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megaswift.cli.main import read_options
from megaswift.tasks.plan.gpus import GPUS
from megaswift.tasks.plan.memory import OUTSIDE
from megaswift.tasks.plan.run_plan import RunPlan, plan_run
from megaswift.tasks.plan.speed import Machine, seconds_per_step
from megaswift.tasks.plan.table import aligned
from published_configs import MODELS
from report import insert

GIB = 2**30
MARKERS = "<!-- published -->", "<!-- /published -->"
HEADINGS = (
    "model", "from", "GPUs", "layout", "packs", "GiB planned", "published", "fits", "tokens/s/GPU planned", "published"
)  # fmt: skip
RECOMPUTE = "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"
BF16_GRADIENTS = "--accumulate_allreduce_grads_in_fp32 false"
BF16_STATES = f"{BF16_GRADIENTS} --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"
FP8 = "--fp8_format hybrid --fp8_recipe tensorwise --fp8_param_gather true"
LORA = "--tuner_type lora"


@dataclass(frozen=True)
class Recipe:
    """Published configuration, which fits as its source says."""

    model: str
    source: str
    gpus: int
    length: int  # tokens of a pack
    batches: tuple[int, int]  # micro and global batch, in packs
    flags: str  # flags of the layout
    gpu: str = "h100"
    speed: float | None = None  # tokens per second of a GPU
    memory: float | None = None  # GiB of a GPU
    note: str = ""  # why it does not fit by the plan

    def plan(self, folder: Path) -> RunPlan:
        """Return the plan of the configuration. folder: for the config.json"""
        (folder / "config.json").write_text(json.dumps(MODELS[self.model][0]))
        micro, batch = self.batches
        words = (
            f"--model {folder} --dataset x.jsonl --train_iters 1 --packing true --max_length {self.length} "
            f"--micro_batch_size {micro} --global_batch_size {batch} {self.flags}"
        )
        options = read_options("megatron", ["sft", *words.split()])[0]
        return plan_run(options, self.gpus, gpu_bytes=GPUS[self.gpu].memory * GIB)

    def result(self, folder: Path) -> "Result":
        """Plan the configuration. folder: for the config.json"""
        plan, kind = self.plan(folder), GPUS[self.gpu]
        machine = Machine.of(kind.name)
        assert machine is not None
        seconds = seconds_per_step(plan.work, plan.layout, machine)
        tokens = self.batches[1] * self.length / seconds / self.gpus
        return Result(self, plan, plan.memory.total / GIB, plan.memory.total + OUTSIDE <= kind.memory * GIB, tokens)


@dataclass(frozen=True)
class Result:
    """Plan of a published configuration: GiB of the GPU with most, and tokens per second of a GPU."""

    recipe: Recipe
    plan: RunPlan
    memory: float
    fits: bool
    speed: float

    @property
    def is_explained(self) -> bool:
        """Return whether a note is where the plan disagrees, and only there."""
        return self.fits == (not self.recipe.note)

    @property
    def cells(self) -> tuple[str, ...]:
        recipe, layout = self.recipe, self.plan.layout
        kinds = {"LoRA": self.plan.work.lora_rank, "FP8": self.plan.work.fp8, "recomputed": layout.recompute == "full"}
        choices = [str(layout), *(name for name, is_set in kinds.items() if is_set)]
        choices += ["AdamW on the host"] * layout.offloads
        return (
            recipe.model,
            recipe.source,
            f"{recipe.gpus} {recipe.gpu.upper()}",
            ", ".join(choices),
            f"{recipe.batches[0]} x {recipe.length:,}",
            f"{self.memory:.1f}",
            f"{recipe.memory:g}" if recipe.memory else "",
            "yes" if self.fits else f"no: {recipe.note}",
            f"{self.speed:,.0f}",
            f"{recipe.speed:,.0f}" if recipe.speed else "",
        )


def parallel(**sizes: int) -> str:
    """Return the flags of parallel sizes by their short names."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "first": "decoder_first_pipeline_num_layers",
        "last": "decoder_last_pipeline_num_layers",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    flags = " ".join(f"--{names[name]} {size}" for name, size in sizes.items())
    return f"{flags} --sequence_parallel true" if sizes.get("tp", 1) > 1 else flags


SWIFT, OUMI, BRIDGE = "ms-swift", "Oumi", "Megatron-Bridge"
SPEEDS = "Megatron-Bridge, performance summary"
RECIPES = [
    Recipe("Qwen2.5-7B", SWIFT, 2, 2048, (16, 16), f"{LORA} {RECOMPUTE} {parallel(tp=2)}", "a100"),
    Recipe("Qwen2.5-7B", SWIFT, 8, 4096, (4, 32), parallel(tp=2), "a100"),
    Recipe(
        "Qwen3-30B-A3B",
        SWIFT,
        8,
        8192,
        (1, 4),
        f"{RECOMPUTE} {parallel(tp=4, pp=2, first=25, ep=4)}",
        "a100",
        memory=76,
    ),
    Recipe("Qwen3-30B-A3B", SWIFT, 2, 2048, (8, 16), f"{LORA} {RECOMPUTE} {parallel(ep=2)}", "a100", memory=50),
    Recipe("Qwen3-VL-8B", SWIFT, 2, 2048, (1, 4), f"{RECOMPUTE} {parallel(tp=2)}", "a100", memory=76),
    Recipe(
        "Llama-3.1-70B",
        OUMI,
        16,
        4096,
        (1, 8),
        parallel(tp=8, pp=2),
        "a100",
        note="weights, gradients in fp32 and AdamW take 74 GiB without activations",
    ),
    Recipe(
        "Llama-3.1-405B",
        OUMI,
        256,
        4096,
        (1, 64),
        f"{RECOMPUTE} --optimizer_cpu_offload true {parallel(tp=8, pp=16, first=7, last=7, cp=2)}",
    ),
    Recipe("Llama-3.2-1B", BRIDGE, 1, 8192, (1, 512), ""),
    Recipe(
        "Llama-3.1-8B",
        BRIDGE,
        2,
        8192,
        (1, 512),
        parallel(cp=2),
        note="the recipe has the GPUs of one replica; AdamW is divided over more when it runs",
    ),
    Recipe("Llama-3.1-8B", BRIDGE, 16, 16_384, (1, 512), parallel(tp=4, pp=2, cp=2)),
    Recipe("Llama-3.1-8B", BRIDGE, 32, 65_536, (1, 512), parallel(tp=4, pp=2, cp=4)),
    Recipe("Llama-3.1-8B", BRIDGE, 64, 131_072, (1, 512), parallel(tp=4, pp=2, cp=8)),
    Recipe("Llama-3.1-8B", BRIDGE, 2, 4096, (1, 8), f"{BF16_GRADIENTS} {parallel(tp=2)}"),
    Recipe("Llama-3.1-8B", BRIDGE, 1, 4096, (1, 8), LORA),
    Recipe("Llama-3.1-70B", BRIDGE, 32, 8192, (1, 512), parallel(tp=4, pp=4, vpp=5, cp=2)),
    Recipe("Llama-3.1-70B", BRIDGE, 32, 4096, (1, 8), f"{BF16_GRADIENTS} {parallel(tp=8, pp=4)}"),
    Recipe("Llama-3.1-70B", BRIDGE, 8, 4096, (1, 8), f"{LORA} {parallel(tp=8)}"),
    Recipe("Llama-3.1-70B", SPEEDS, 64, 8192, (1, 256), f"{FP8} {parallel(tp=4, pp=8, vpp=5)}", speed=1664),
    Recipe("Llama-3.1-70B", SPEEDS, 32, 4096, (1, 32), f"{FP8} {parallel(tp=4, pp=4, vpp=5)}", speed=1638),
    Recipe("Llama-3.1-70B", SPEEDS, 8, 4096, (1, 32), f"{LORA} {FP8} {parallel(tp=2, pp=4, vpp=20)}", speed=2643),
    Recipe(
        "Llama-3.1-405B",
        SPEEDS,
        1024,
        8192,
        (1, 1536),
        f"{FP8} {parallel(tp=8, pp=8, first=15, last=15, cp=2)}",
        speed=326,
    ),
    Recipe("Qwen2.5-7B", BRIDGE, 2, 2048, (1, 128), f"{BF16_GRADIENTS} {parallel(tp=2)}"),
    Recipe("Qwen2.5-14B", BRIDGE, 4, 4096, (2, 32), f"{BF16_GRADIENTS} {parallel(tp=4)}"),
    Recipe("Qwen2.5-72B", BRIDGE, 32, 4096, (2, 32), f"{BF16_GRADIENTS} {parallel(tp=8, pp=4)}"),
    Recipe("Qwen3-4B", BRIDGE, 2, 2048, (1, 8), f"{BF16_GRADIENTS} {parallel(tp=2)}"),
    Recipe("Qwen3-8B", BRIDGE, 4, 2048, (1, 32), parallel(tp=4)),
    Recipe("Qwen3-8B", BRIDGE, 8, 32_768, (1, 8), parallel(tp=4, cp=2)),
    Recipe("Qwen3-14B", BRIDGE, 8, 4096, (2, 32), parallel(tp=8)),
    Recipe("Qwen3-32B", BRIDGE, 16, 4096, (2, 32), f"{RECOMPUTE} {parallel(tp=8, pp=2)}"),
    Recipe("Qwen3-32B", BRIDGE, 1, 2048, (1, 8), f"{LORA} {RECOMPUTE}"),
    Recipe("Qwen3-30B-A3B", BRIDGE, 8, 4096, (2, 32), f"{RECOMPUTE} {parallel(tp=4, pp=2, ep=4)}"),
    Recipe("Qwen3-30B-A3B", BRIDGE, 16, 4096, (1, 1024), f"{BF16_GRADIENTS} {parallel(ep=16)}"),
    Recipe("Qwen3-30B-A3B", BRIDGE, 4, 2048, (1, 32), f"{LORA} {parallel(tp=4, ep=4)}"),
    Recipe("Qwen3-30B-A3B", SPEEDS, 16, 4096, (1, 1024), parallel(ep=16), speed=8960),
    Recipe("Qwen3-235B-A22B", BRIDGE, 256, 4096, (1, 32), parallel(tp=4, pp=16, first=5, last=5, cp=2, ep=8)),
    Recipe("Qwen3-235B-A22B", SPEEDS, 256, 4096, (1, 8192), parallel(tp=2, pp=8, first=11, last=11, ep=32), speed=1712),
    Recipe("gpt-oss-20b", BRIDGE, 8, 2048, (1, 128), f"{BF16_GRADIENTS} {parallel(ep=8)}"),
    Recipe("gpt-oss-20b", BRIDGE, 1, 2048, (1, 128), LORA),
    Recipe("gpt-oss-120b", BRIDGE, 32, 2048, (1, 128), f"{BF16_GRADIENTS} {parallel(pp=4, ep=8)}"),
    Recipe("gpt-oss-120b", SPEEDS, 64, 4096, (1, 1280), parallel(pp=4, ep=8), speed=5824),
    Recipe("Moonlight-16B-A3B", BRIDGE, 8, 4096, (1, 2048), f"{BF16_STATES} {parallel(tp=2, ep=8)}"),
    Recipe("DeepSeek-V2-Lite", BRIDGE, 8, 4096, (1, 512), f"{RECOMPUTE} {parallel(ep=8)}"),
    Recipe(
        "DeepSeek-V3",
        BRIDGE,
        1024,
        4096,
        (1, 4096),
        f"{BF16_STATES} {parallel(tp=2, pp=16, last=1, ep=64)}",
        note="16 micro batches in flight without recomputation; the measured recipe of this model recomputes modules",
    ),
    Recipe(
        "DeepSeek-V3", BRIDGE, 256, 4096, (1, 4096), f"{RECOMPUTE} {BF16_STATES} {parallel(tp=2, pp=8, last=5, ep=32)}"
    ),
    Recipe(
        "GLM-4.5-Air",
        BRIDGE,
        32,
        2048,
        (1, 128),
        f"{BF16_GRADIENTS} {parallel(pp=4, last=10, ep=8)}",
        note="planned are full packs; its data (SQuAD) is not packed, and its samples are shorter",
    ),
]


def results() -> list[Result]:
    """Return the results of all configurations."""
    with tempfile.TemporaryDirectory() as folder:
        return [recipe.result(Path(folder)) for recipe in RECIPES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="a page with markers")
    arguments = parser.parse_args()
    planned = results()
    rows = [HEADINGS, *(result.cells for result in planned)]
    print(aligned(rows))
    if arguments.into:
        lines = [f"| {' | '.join(row)} |" for row in (HEADINGS, ["---"] * len(HEADINGS), *rows[1:])]
        insert(arguments.into, "\n".join(lines), MARKERS)
    print(f"\n{sum(result.fits for result in planned)} of {len(planned)} fit")
    sys.exit(int(not all(result.is_explained for result in planned)))


if __name__ == "__main__":
    main()
