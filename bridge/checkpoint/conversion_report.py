"""Per-tensor report of a conversion, conversion.json: names, checksums, time and memory.

`python -m megaswift.bridge.checkpoint.conversion_report FOLDER` compares the tensors of a Hugging Face folder with its
conversion.json. A lossless conversion and its reverse report equal tensors.
"""

import json
import resource
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from xxhash import xxh3_128

from ..families import family_of
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.param_mapping import EMBEDDING, OUTPUT, ParamTable, expand_mappings
from .passthrough import RECORD, TensorRecord
from .quantized import open_weights
from .safetensors_io import BLOCK, CHECKSUM, NAMES, SafetensorsFolder, StoredTensor, TensorSpec, sync, tensor_names

FILE = "conversion.json"
SCALES = ("_scale_inv", "_scales", "_blocks", "_packed", "_scale", "_shape")  # suffixes of quantized tensors


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process in bytes: resident, and on the accelerator."""
    peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peak["accelerator"] = torch.cuda.max_memory_allocated()
    return peak


def describe_sources(entries: ParamTable) -> dict[str, TensorRecord]:
    """Return a record of the megatron-core tensor of each Hugging Face tensor of the table."""
    records: dict[str, TensorRecord] = {}
    for key, entry in entries.items():
        if key == OUTPUT and entry == entries.get(EMBEDDING):
            continue  # tied: see `unmapped_reasons`
        for part, name in zip(entry.kind.parts, entry.hf, strict=True):
            record: TensorRecord = {"mcore": key.name.format(layer=key.layer)}
            record |= {"part": part} if part else {}
            record |= {} if key.layer is None else {"layer": key.layer}
            if entry.expert_index is not None:
                record["experts"] = entry.num_experts
            elif key.expert is not None:
                record["expert"] = key.expert
            records[name] = record
    return records


def unmapped_reasons(extra: Iterable[str], architecture: Architecture) -> dict[str, str]:
    """Return the reason for each tensor of a checkpoint that needs no mapping."""
    reasons = {}
    for name in extra:
        if name == "lm_head.weight" and architecture.tied:
            reasons[name] = "tied: the output layer is the embedding"
        elif name.endswith("lm_head.weight") and architecture.num_labels is not None:
            reasons[name] = "the model ends in a score head, score.weight"
        elif name.endswith(".rotary_emb.inv_freq"):
            reasons[name] = "computed from config.json"
    return reasons


def unused_reasons(source: str | Path, written: Collection[str], architecture: Architecture) -> dict[str, str]:
    """Return the reason for each tensor of the checkpoint `source` that was not written.

    Raises RuntimeError for a tensor without a reason.
    """
    extra = set(tensor_names(source)) - set(written)
    reasons = {
        name: "quantized: its values were written dequantized" for name in extra if base_name(name, written) != name
    }
    reasons |= unmapped_reasons(extra, architecture)
    if unused := sorted(extra - reasons.keys()):
        raise RuntimeError(f"{source} has {len(unused)} tensors that were not used: {', '.join(unused[:5])}")
    return reasons


def base_name(name: str, dequantized: Collection[str]) -> str:
    """Return the name of the quantized tensor that `name` belongs to, or `name` itself."""
    return next((name.removesuffix(end) for end in SCALES if name.removesuffix(end) in dequantized), name)


def _checksum(stored: StoredTensor) -> str:
    checksum, remaining = xxh3_128(), stored.bytes
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.offset)
        while remaining:
            block = stream.read(min(remaining, BLOCK))
            if not block:
                raise ValueError(f"{stored.file} is cut short. Download it again")
            checksum.update(block)
            remaining -= len(block)
    return checksum.hexdigest()


def report_conversion(
    source: str | Path, destination: str | Path, hf_config: HfConfig, seconds: float, architecture: Architecture
) -> None:
    """Write the conversion.json of a converted checkpoint, with its tensors as stored in `source`.

    seconds: duration of the conversion. architecture: of the built model. Every rank calls this and computes the
    checksums of its share.
    """
    family = family_of(hf_config)
    folder = SafetensorsFolder(source)
    mapped = describe_sources(expand_mappings(family, hf_config, architecture, open_weights(source, hf_config).tensors))
    names = sorted(folder.tensors)
    checksums = {name: _checksum(folder.tensors[name]) for name in names[dist.get_rank() :: dist.get_world_size()]}
    ranks: list[tuple[dict[str, str], dict[str, int]]] = [({}, {})] * dist.get_world_size()
    dist.all_gather_object(ranks, (checksums, peak_memory()))
    if dist.get_rank():
        return
    all_checksums = {name: checksum for rank, _ in ranks for name, checksum in rank.items()}
    reasons = unmapped_reasons(folder.tensors.keys() - mapped.keys(), architecture)
    tensors = {}
    for name, stored in folder.tensors.items():
        if name not in reasons:
            record = mapped.get(base_name(name, mapped), RECORD)
            tensors[name] = record | describe_tensor(
                TensorSpec(stored.dtype, stored.shape), stored.file.name, all_checksums[name]
            )
    write_report(
        Path(destination),
        "Hugging Face to megatron-core",
        family.name,
        tensors,
        reasons,
        bytes=sum(folder.tensors[name].bytes for name in tensors),
        seconds=seconds,
        peak_memory=[peak for _, peak in ranks],
    )


def describe_tensor(spec: TensorSpec, file: str, checksum: str) -> TensorRecord:
    return {"file": file, "dtype": NAMES[spec.dtype], "shape": list(spec.shape), CHECKSUM: checksum}


def write_report(
    folder: Path,
    direction: str,
    family: str,
    tensors: Mapping[str, TensorRecord],
    reasons: Mapping[str, str],
    *,
    bytes: int,
    seconds: float,
    peak_memory: list[dict[str, int]],
) -> None:
    """Write conversion.json.

    tensors: records of `describe_sources` and `describe_tensor`. reasons: why other tensors were not written.
    peak_memory: of each process.
    """
    record = {
        "direction": direction,
        "family": family,
        "checksum": f"{CHECKSUM} of a tensor's bytes in its safetensors file",
        "bytes": bytes,
        "seconds": round(seconds, 3),
        "gb_per_second": round(bytes / seconds / 1e9, 3),
        "peak_memory_bytes": peak_memory,
        "unused": [],  # always: load_weights and unused_reasons raise for such tensors
        "missing": [],
        "accounted": dict(reasons),
    }
    with (folder / FILE).open("w", encoding="utf-8") as stream:
        # One line per tensor: a model has thousands.
        lines = [f"    {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in sorted(tensors.items())]
        head = json.dumps(record, indent=2, ensure_ascii=False).removesuffix("\n}")
        stream.write(head + ',\n  "tensors": {\n' + ",\n".join(lines) + "\n  }\n}\n")
        sync(stream)


def differences(folder: str | Path) -> list[str]:
    """Return one line per tensor of a Hugging Face folder that differs from its conversion.json.

    Raises ValueError if the folder has no conversion.json, or its files cannot be read.
    """
    folder = Path(folder)
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}")
    records = json.loads((folder / FILE).read_text(encoding="utf-8"))["tensors"]
    source = SafetensorsFolder(folder)
    lines = [f"{name} is missing" for name in sorted(records.keys() - source.tensors.keys())]
    lines += [f"{name} is not in {FILE}" for name in sorted(source.tensors.keys() - records.keys())]
    for name in sorted(records.keys() & source.tensors.keys()):
        stored, record = source.tensors[name], records[name]
        dtype, shape = NAMES[stored.dtype], list(stored.shape)
        if (dtype, shape) != (record["dtype"], record["shape"]):
            lines.append(f"{name} is {dtype} {shape}, not {record['dtype']} {record['shape']}")
        elif _checksum(stored) != record[CHECKSUM]:
            lines.append(f"{name} has other bytes than were written")
    return lines


if __name__ == "__main__":
    problems = differences(sys.argv[1])
    print("\n".join(problems) or "every tensor is as conversion.json says")
    sys.exit(bool(problems))
