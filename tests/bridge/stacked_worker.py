"""Experts stacked in one tensor: Hugging Face -> megatron-core -> Hugging Face in every layout of one launch.

torchrun --nproc-per-node 2 -m tests.bridge.stacked_worker FOLDER

FOLDER/plain is a qwen3_moe checkpoint. Its experts are stacked here in two ways, with a table for each; loaded from
either, the model must be that of the plain checkpoint, and saved again it must give the stacked one's bytes. Rank 0
writes what differs to FOLDER/stacked-2.json.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megaswift.bridge import families, parallel, runtime, save
from megaswift.bridge.families import decoder, qwen3_moe
from megaswift.bridge.rows import EXPERTS, GATE_UP, ROW, Architecture, Kind, Row, Span
from megaswift.bridge.tensors import held
from megatron.core import parallel_state
from safetensors.torch import save_file

from tests.bridge.round_trip_worker import EP, ETP, PP, TP, Options, build, config_of, tensors_of

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {EP: 2}, {TP: 2, ETP: 2}],
    4: [{EP: 4}, {EP: 2, PP: 2}, {TP: 2, EP: 2}, {TP: 2, EP: 2, ETP: 2}, {EP: 2}],
}
HF, MCORE = decoder.HF_LAYER + "mlp.experts.", decoder.LAYER + EXPERTS


def _alternating(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    size = length // (2 * ranks)
    return [Span(0, 2 * size * r + part, 2 * size * (r + 1), 2) for r in range(ranks) for part in (0, 1)]


def _rows(*stacked: Row):
    """The family's rows with `stacked` for those of its experts, and a router in fp32."""

    def rows(config):
        layers = tuple(
            i for i in range(config["num_hidden_layers"]) if i not in config["mlp_only_layers"]
        )  # of the tiny model: each but those has experts
        others = [row for row in qwen3_moe.rows(config) if EXPERTS not in row.mcore]
        others = [replace(row, fp32=row.mcore.endswith("router.weight")) for row in others]
        return others + [replace(row, layers=layers) for row in stacked]

    return rows


TABLES = {
    # As GPT-OSS has them: [experts, in, out], rows of gate and up in turn.
    "fused": _rows(
        Row(HF + "gate_up_proj", MCORE + "1.weight", Kind(0, _alternating), stacked=True, transposed=True),
        Row(HF + "down_proj", MCORE + "2.weight", ROW, stacked=True, transposed=True),
    ),
    "apart": _rows(
        Row(HF + "{part}_proj", MCORE + "1.weight", GATE_UP, stacked=True),
        Row(HF + "down_proj", MCORE + "2.weight", ROW, stacked=True),
    ),
}


def stack(plain: Path, folder: Path, how: str) -> None:
    """Write the checkpoint of `plain` with its experts stacked."""
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(plain).items()}
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        if found := re.fullmatch(r"(.+\.experts\.)\d+\.(\w+)_proj\.weight", name):
            stacked.setdefault(f"{found[1]}{found[2]}_proj", []).append(tensors.pop(name))
        elif name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].float()
    whole = {name: torch.stack(experts) for name, experts in stacked.items()}
    if how == "fused":
        for name in [name for name in whole if name.endswith("gate_proj")]:
            gate, up = whole.pop(name), whole.pop(name.replace("gate", "up"))
            whole[name.replace("gate", "gate_up")] = torch.stack((gate, up), 2).flatten(1, 2)
        whole = {name: tensor.transpose(1, 2).contiguous() for name, tensor in whole.items()}
    folder.mkdir()
    save_file(tensors | whole, folder / "model.safetensors")
    shutil.copy(plain / "config.json", folder)


def differences(plain: Path, folder: Path, how: str, options: Options, out: Path) -> str:
    config = config_of(plain)
    reference = held(build(plain, options, torch.bfloat16).chunks)
    known = families.FAMILIES
    families.FAMILIES = (replace(qwen3_moe.FAMILY, rows=TABLES[how]),)
    chunks = build(folder, options, torch.bfloat16).chunks
    wrong = [str(key) for key, tensor in held(chunks).items() if not torch.equal(tensor, reference[key])]
    if dist.get_rank() == 0:
        out.mkdir()
    dist.barrier()
    save.save_weights(chunks, config, folder, out, dtype=torch.bfloat16, max_shard_bytes=100_000)
    families.FAMILIES = known
    before, after = tensors_of(folder), tensors_of(out)
    # The model held the router in bfloat16: what is written in fp32 are those values.
    before = {name: t.bfloat16().float() if t.dtype == torch.float32 else t for name, t in before.items()}
    names = sorted(before.keys() ^ after.keys())
    bytes_differ = [
        name
        for name in before.keys() & after.keys()
        if before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name])
    ]
    dist.barrier()
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, ", ".join(wrong + names + bytes_differ))
    return "; ".join(one for one in found if one)


def main(folder: Path) -> None:
    runtime.enable()
    world = int(os.environ["WORLD_SIZE"])
    results = {}
    for layout in LAYOUTS[world]:
        options = Options(**layout)  # type: ignore[arg-type]
        parallel.initialize(options, seed=1)
        for how in TABLES:
            stacked = folder / f"{how}-{world}"
            if dist.get_rank() == 0 and not stacked.exists():
                stack(folder / "plain", stacked, how)
            dist.barrier()
            out = folder / f"out-{world}-{len(results)}"
            results[f"{layout}: {how}"] = differences(folder / "plain", stacked, how, options, out)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        (folder / f"stacked-{world}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
