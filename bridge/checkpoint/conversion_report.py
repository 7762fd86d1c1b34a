"""conversion.json: what became of every tensor, with a checksum of its bytes, and what the conversion cost.

`python -m megaswift.bridge.checkpoint.conversion_report FOLDER` compares the tensors of a Hugging Face folder with
its conversion.json. Those of two conversions, from a checkpoint and back to one, are equal where nothing was lost.
"""

import json
import resource
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_128

from ..families import family_of
from ..mapping.param_mapping import (
    EMBEDDING,
    OUTPUT,
    Architecture,
    HfConfig,
    ParamTable,
    expand_mappings,
)
from .passthrough import WHAT
from .quantized import open_weights
from .safetensors_io import BLOCK, CHECKSUM, NAMES, SafetensorsFolder, StoredTensor, TensorSpec, sync, tensor_names

FILE = "conversion.json"
SCALES = ("_scale_inv", "_scales", "_blocks")  # of quantised tensors: what follows the name that the table has


def peak_memory() -> dict[str, int]:
    """Bytes that this process has had at most since its start: resident, and of the accelerator's."""
    peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["accelerator"] = torch.cuda.max_memory_allocated()
    return peak


def describe_sources(entries: ParamTable) -> dict[str, dict[str, Any]]:
    """For each Hugging Face tensor of the table the megatron-core tensor that it is (a part of)."""
    found: dict[str, dict[str, Any]] = {}
    for key, entry in entries.items():
        if key == OUTPUT and entry == entries.get(EMBEDDING):
            continue  # tied: see `accounted`
        for part, name in zip(entry.kind.parts, entry.hf, strict=True):
            about: dict[str, Any] = {"mcore": key.name.format(layer=key.layer)}
            about |= {"part": part} if part else {}
            about |= {} if key.layer is None else {"layer": key.layer}
            if entry.expert_index is not None:
                about["experts"] = entry.num_experts
            elif key.expert is not None:
                about["expert"] = key.expert
            found[name] = about
    return found


def unmapped_reasons(extra: Iterable[str], architecture: Architecture) -> dict[str, str]:
    """Those of a checkpoint's tensors without a row that need none, each with the reason."""
    reasons = {}
    for name in extra:
        if name == "lm_head.weight" and architecture.tied:
            reasons[name] = "tied: the output layer is the embedding"
        elif name.endswith("lm_head.weight") and architecture.num_labels is not None:
            reasons[name] = "the model ends in a head of its own, score.weight"
        elif name.endswith(".rotary_emb.inv_freq"):
            reasons[name] = "computed from config.json"
    return reasons


def unused_reasons(source: str | Path, written: Collection[str], architecture: Architecture) -> dict[str, str]:
    """The reasons for those tensors of the checkpoint `source` (if it has any) that are not among what was written.

    Raises RuntimeError where there is none.
    """
    extra = set(tensor_names(source)) - set(written)
    reasons = {name: "quantised: its values were written unquantised" for name in extra if bare(name, written) != name}
    reasons |= unmapped_reasons(extra, architecture)
    if unused := sorted(extra - reasons.keys()):
        raise RuntimeError(f"{source} has {len(unused)} tensors that were not used: {', '.join(unused[:5])}")
    return reasons


def bare(name: str, unquantised: Collection[str]) -> str:
    """The name of the tensor that `name`, if it is one of the parts of a quantised one, is a part of."""
    return next((name.removesuffix(end) for end in SCALES if name.removesuffix(end) in unquantised), name)


def _checksum(stored: StoredTensor) -> str:
    found, left = xxh3_128(), stored.bytes
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.offset)
        while left:
            block = stream.read(min(left, BLOCK))
            if not block:
                raise ValueError(f"{stored.file} is cut short. Download it again")
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def report_conversion(
    source: str | Path, destination: str | Path, hf_config: HfConfig, seconds: float, mtp_depths: int = 0
) -> None:
    """Write the conversion.json of a checkpoint that became something else: its tensors as they were stored.

    To be called by every rank: each computes the checksums of its share. `seconds` are what the conversion took,
    `predicting` how many layers of multi-token prediction the model was built with.
    """
    family = family_of(hf_config)
    architecture = replace(family.describe(hf_config), mtp_depths=mtp_depths)
    folder = SafetensorsFolder(source)
    of_table = describe_sources(
        expand_mappings(family, hf_config, architecture, open_weights(source, hf_config).tensors)
    )
    names = sorted(folder.tensors)
    mine = {name: _checksum(folder.tensors[name]) for name in names[dist.get_rank() :: dist.get_world_size()]}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, peak_memory()))
    if dist.get_rank():
        return
    checksums = {name: checksum for of_rank, _ in everyone for name, checksum in of_rank.items()}
    reasons = unmapped_reasons(folder.tensors.keys() - of_table.keys(), architecture)
    tensors = {}
    for name, stored in folder.tensors.items():
        if name not in reasons:
            about = of_table.get(bare(name, of_table), WHAT)
            tensors[name] = about | describe_tensor(
                TensorSpec(stored.dtype, stored.shape), stored.file.name, checksums[name]
            )
    write_report(
        Path(destination),
        "Hugging Face to megatron-core",
        family.name,
        tensors,
        reasons,
        bytes=sum(folder.tensors[name].bytes for name in tensors),
        seconds=seconds,
        peak_memory=[peak for _, peak in everyone],
    )


def describe_tensor(form: TensorSpec, file: str, checksum: str) -> dict[str, Any]:
    return {"file": file, "dtype": NAMES[form.dtype], "shape": list(form.shape), CHECKSUM: checksum}


def write_report(
    folder: Path, direction: str, family: str, tensors: Mapping[str, Any], reasons: Mapping[str, str], **cost: Any
) -> None:
    """Write conversion.json.

    `tensors` are what `described` and `sources` say of each name, `reasons` those of tensors that were left out; `cost`
    has `bytes`, `seconds` and `peak_memory`, a list with what each process had at most.
    """
    record = {
        "direction": direction,
        "family": family,
        "checksum": f"{CHECKSUM} of a tensor's bytes in its safetensors file",
        "bytes": cost["bytes"],
        "seconds": round(cost["seconds"], 3),
        "gb_per_second": round(cost["bytes"] / cost["seconds"] / 1e9, 3),
        "peak_memory_bytes": cost["peak_memory"],
        "unused": [],  # else load_weights, or left_out, has stopped the conversion
        "missing": [],
        "accounted": dict(reasons),
        "tensors": dict(sorted(tensors.items())),
    }
    with (folder / FILE).open("w", encoding="utf-8") as stream:
        # A line for each tensor: a model has thousands.
        lines = [f"    {json.dumps(name)}: {json.dumps(about)}" for name, about in record.pop("tensors").items()]
        head = json.dumps(record, indent=2, ensure_ascii=False).removesuffix("\n}")
        stream.write(head + ',\n  "tensors": {\n' + ",\n".join(lines) + "\n  }\n}\n")
        sync(stream)


def differences(folder: str | Path) -> list[str]:
    """What of a Hugging Face folder's tensors is not as its conversion.json says, a line a tensor.

    Raises ValueError where the folder has no conversion.json, or its files cannot be read.
    """
    folder = Path(folder)
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}")
    said = json.loads((folder / FILE).read_text(encoding="utf-8"))["tensors"]
    source = SafetensorsFolder(folder)
    found = [f"{name} is missing" for name in sorted(said.keys() - source.tensors.keys())]
    found += [f"{name} is not in {FILE}" for name in sorted(source.tensors.keys() - said.keys())]
    for name in sorted(said.keys() & source.tensors.keys()):
        dtype, shape = source.tensors[name].dtype, source.tensors[name].shape
        if (NAMES[dtype], list(shape)) != (said[name]["dtype"], said[name]["shape"]):
            found.append(f"{name} is {NAMES[dtype]} {list(shape)}, not {said[name]['dtype']} {said[name]['shape']}")
        elif _checksum(source.tensors[name]) != said[name][CHECKSUM]:
            found.append(f"{name} has other bytes than were written")
    return found


if __name__ == "__main__":
    problems = differences(sys.argv[1])
    print("\n".join(problems) or "every tensor is as conversion.json says")
    sys.exit(bool(problems))
