"""Benchmark of loading and saving weights, against a plain copy of the same safetensors files on the same disk.

    python scripts/bench_weights.py --folder /some/disk/scratch --gigabytes 2 --rounds 3
    torchrun --nproc-per-node 8 scripts/bench_weights.py --folder /some/disk/scratch --layers 36 --hidden 4096 --tp 8

It makes a random checkpoint of Qwen3's shape in the folder (or takes `--model`). Each round copies its files, loads
them and saves the model. A file counts as written when it is synced to disk. Before each reading the files are evicted
from the page cache (`--warm`: kept). It prints each round and the best rates.
"""

# pyright: reportMissingImports=false

import argparse
import json
import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge import parallel, runtime
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.save import save_weights
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from safetensors.torch import save_file


@dataclass
class Shape:
    """Shape of a model, by default of Qwen3-1.7B except for the number of layers."""

    layers: int = 0
    hidden: int = 2048
    intermediate: int = 6144
    heads: int = 16
    groups: int = 8
    vocabulary: int = 151936

    def config(self) -> dict:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": 128,
            "tie_word_embeddings": True,
        }

    def outer_tensors(self) -> dict[str, tuple[int, ...]]:
        return {"model.embed_tokens.weight": (self.vocabulary, self.hidden), "model.norm.weight": (self.hidden,)}

    def layer(self, number: int) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * 128, self.groups * 128
        shapes = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


def make(folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a random checkpoint: a file for embeddings and final norm, and one for every four layers."""
    folder.mkdir(parents=True)
    groups = [shape.outer_tensors()]
    for first in range(0, shape.layers, 4):
        numbers = range(first, min(first + 4, shape.layers))
        groups.append({name: size for number in numbers for name, size in shape.layer(number).items()})
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({name: torch.randn(size).to(dtype) for name, size in group.items()}, folder / file)
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(shape.config()))


def sync(files: list[Path], *, forget: bool) -> None:
    """Sync files to disk; `forget`: also evict them from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        if forget:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy(files: list[Path], destination: Path) -> None:
    for file in files:
        shutil.copyfile(file, destination / file.name)
    sync([destination / file.name for file in files], forget=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to work: is made, and removed at the end")
    parser.add_argument("--model", type=Path, help="a checkpoint to take instead of a random one")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--layers", type=int, help="instead of --gigabytes")
    for name, default in (("hidden", 2048), ("intermediate", 6144), ("heads", 16), ("groups", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--warm", action="store_true", help="read from the page cache")
    arguments = parser.parse_args()

    options = BuildOptions(tensor_model_parallel_size=arguments.tp)
    parallel.initialize(options, seed=1)
    is_first = dist.get_rank() == 0
    source = arguments.model or arguments.folder / "source"
    if is_first and arguments.model is None:
        make(source, shape_of(arguments))
    parallel.barrier()
    files = sorted(source.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    config = read_config(source)
    model = build_model(config, options, torch.bfloat16)
    rates: dict[str, list[float]] = {"copy": [], "load": [], "save": []}
    for _ in range(arguments.rounds):
        for operation in rates:
            destination = arguments.folder / operation
            if is_first:
                shutil.rmtree(destination, ignore_errors=True)
                destination.mkdir(parents=True)
                sync(files, forget=not arguments.warm)
            parallel.barrier()
            start = time.perf_counter()
            if operation == "copy" and is_first:
                copy(files, destination)
            elif operation == "load":
                load_weights(model.chunks, config, source)
            elif operation == "save":
                save_weights(model.chunks, config, source, destination, dtype=torch.bfloat16, max_shard_bytes=5 * 10**8)
            parallel.barrier()
            rates[operation].append(size / (time.perf_counter() - start) / 1e9)
        if is_first:
            print(", ".join(f"{operation} {rounds[-1]:.2f} GB/s" for operation, rounds in rates.items()), flush=True)
    if is_first:
        best = {operation: max(rounds) for operation, rounds in rates.items()}
        ratios = ", ".join(f"{operation} {best[operation] / best['copy']:.2f}" for operation in ("load", "save"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
        print(
            f"{size / 1e9:.2f} GB, {dist.get_world_size()} processes on {runtime.device()}, best: "
            + ", ".join(f"{operation} {rate:.2f} GB/s" for operation, rate in best.items())
            + f"; of the copy: {ratios}; peak memory of the first process {peak:.2f} GiB"
        )
        shutil.rmtree(arguments.folder)
    dist.destroy_process_group()


def shape_of(arguments: argparse.Namespace) -> Shape:
    names = ("hidden", "intermediate", "heads", "groups")
    shape = Shape(**{name: getattr(arguments, name) for name in names})

    def gigabytes(sizes: dict[str, tuple[int, ...]]) -> float:
        return 2 * sum(torch.Size(size).numel() for size in sizes.values()) / 1e9

    rest = arguments.gigabytes - gigabytes(shape.outer_tensors())
    shape.layers = arguments.layers or max(1, round(rest / gigabytes(shape.layer(0))))
    return shape


if __name__ == "__main__":
    main()
