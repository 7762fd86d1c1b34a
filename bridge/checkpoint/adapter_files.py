"""Adapters in PEFT's format: adapter_model.safetensors, and the adapter_config.json beside it.

A tensor is called base_model.model.<module>.lora_A.weight, with the names of the checkpoint's modules, experts one by
one. transformers holds experts fused, and PEFT makes its own form of ours when it reads them: for that
adapter_config.json names what it holds as parameters apart (`target_parameters`).
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from ..families.sequence_classification import SCORE
from ..lora.adapter_mapping import FUSED_EXPERTS, PREFIX, modules_of
from ..lora.attach import Lora
from ..lora.settings import FUSED, LoraSettings
from ..mapping.local_params import collect_params
from ..mapping.param_mapping import OUTPUT, Architecture, HfConfig, ParamKey, ParamTable
from ..model.chunk_mapping import describe_chunks
from ..parallel import barrier
from .adapter_experts import SeparatedExperts
from .hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .load import read_tensors
from .safetensors_io import SafetensorsFolder, TensorSpec, sync, write_shard
from .save import write_tensors, write_together
from .tensor_names import some
from .writer import RankReport, ShardWriter, StagedFolder

# Names that transformers 5 gives to parameters in models with experts, or that PEFT takes for such ones there.
PARAMETERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
TOGETHER = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"} | {
    "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
}  # fmt: skip
EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")
UNREAD = re.compile(r".+\.base_layer\.weight")  # PEFT saves an embedding's own weight beside its adapter


def read_settings(folder: Path, config: HfConfig) -> LoraSettings:
    """What the adapter in `folder` is like; `config`: its raw adapter_config.json. Raises ValueError."""
    return LoraSettings.of_adapter(config, modules_of(folder, SafetensorsFolder(folder).tensors))


def read_num_labels(folder: Path) -> int | None:
    """How many labels the head in an adapter's folder has, for `with_head`; None: there is no head."""
    tensors = SafetensorsFolder(folder).tensors
    return tensors[PREFIX + SCORE.hf].shape[0] if PREFIX + SCORE.hf in tensors else None


def load_adapter(chunks: Sequence[GPTModel], hf_config: HfConfig, lora: Lora, folder: Path) -> None:
    """Set the adapters of `chunks`, this rank's, and what is trained beside them, from an adapter in PEFT's format.

    Raises ValueError where a tensor of the file has no place, one is not there, or a shape differs.
    """
    source = SafetensorsFolder(folder)
    if any(FUSED_EXPERTS.fullmatch(name.partition(".lora_")[0]) for name in source.tensors):
        source = SeparatedExperts(source, lora.plan, lora.settings.rank)
    tensors, entries = trained_tensors(chunks, lora)
    wanted = {name for entry in entries.values() for name in entry.hf}
    found = {name for name in source.tensors if not UNREAD.fullmatch(name)} - lora.plan.copies.keys()
    cure = "Is the adapter of this model? Give the --model that its adapter_config.json names"
    if missing := wanted - found:
        raise ValueError(f"{folder} lacks {some(missing)}. {cure}")
    if extra := found - wanted:
        raise ValueError(f"{folder} has {some(extra)}, for which this model has no place. {cure}")
    for name, of in lora.plan.copies.items():
        rows = source.tensors[of].shape[0]
        if name in source.tensors and not torch.equal(source.read(name, 0, 0, rows), source.read(of, 0, 0, rows)):
            raise ValueError(f"{folder}: {name} is not {of}, and this model has one matrix for both. {cure}")
    architecture = describe_chunks(chunks, hf_config)
    read_tensors(tensors, entries, architecture, source)


def save_adapter(*arguments: Any, **settings: Any) -> None:
    """Write what `stage_adapter` says; the files are on the disk when this returns.

    Raises OSError on every rank where one cannot write.
    """
    write_together(stage_adapter(*arguments, **settings))


def stage_adapter(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    lora: Lora,
    destination: Path,
    *,
    base: str,
    copied: bool = False,
) -> StagedFolder:
    """Begin to write the adapters of `chunks`, and what is trained beside them, into the folder `destination`.

    `base`: the model that they are of, a folder or a hub's id. `copied`: training may go on at once (Writer). Every
    rank calls this.
    """
    architecture = describe_chunks(chunks, hf_config)
    tensors, entries = trained_tensors(chunks, lora)
    if architecture.tied:
        tensors.pop(OUTPUT, None)  # the last stage's copy; the first stage has the embedding itself
    parts = destination / "parts"
    if dist.get_rank() == 0:
        parts.mkdir()
    barrier()
    writer = ShardWriter(parts, copied=copied)
    write_tensors(writer, tensors, entries, architecture, None, 5 * 10**9)

    def complete(_: list[RankReport]) -> dict[str, str]:
        _join(parts, destination / ADAPTER_WEIGHTS, lora)
        shutil.rmtree(parts)
        write_adapter_config(destination, lora, architecture, base)
        return {}

    return StagedFolder(writer, complete)


def write_adapter_config(destination: Path, lora: Lora, architecture: Architecture, base: str) -> None:
    """Write adapter_config.json."""
    config = adapter_config(lora, architecture, base)
    with (destination / ADAPTER_CONFIG).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        sync(stream)


def adapter_config(lora: Lora, architecture: Architecture, base: str) -> HfConfig:
    """What PEFT and vLLM want to know of the adapters."""
    from peft import LoraConfig

    settings, plan = lora.settings, lora.plan
    modules, parameters, fused = plan.modules, [], {}
    alpha, rslora = settings.alpha, settings.rslora
    if "num_moe_experts" in architecture.transformer:
        held_so = {name for name in modules if name.rpartition(".")[2] in PARAMETERS}
        modules = [name for name in modules if name not in held_so]
        parameters = _parameters(held_so)
        if plan.has_experts:  # whose scaling neither PEFT's fusion nor vLLM takes by the root of the rank
            alpha, rslora = settings.scaling * settings.rank, False
            fused = {FUSED: 2}
    saved = [entry.hf[0] for entry in plan.whole.values() if entry.hf[0].endswith(".weight")]
    within = any("language_model." in name for name in plan.modules)  # whose other parts have modules of the same names
    config = LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM" if architecture.num_labels is None else "SEQ_CLS",
        inference_mode=True,
        r=settings.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=plan.dropout,
        bias=settings.bias,  # pyright: ignore[reportArgumentType]
        use_rslora=rslora,
        use_dora=settings.dora,
        target_modules=[],
        exclude_modules=rf"({architecture.passthrough}).*" if within and architecture.passthrough else None,
        target_parameters=parameters or None,
        rank_pattern={pattern: times * settings.rank for pattern, times in fused.items()},
        alpha_pattern={pattern: times * alpha for pattern, times in fused.items()},
        modules_to_save=sorted(_leaf(name.removesuffix(".weight")) for name in saved) or None,
        ensure_weight_tying=bool(plan.copies),
    ).to_dict()
    return config | {"target_modules": _shortened(modules, plan.leaves)}


def trained_tensors(chunks: Sequence[GPTModel], lora: Lora) -> tuple[dict[ParamKey, torch.Tensor], ParamTable]:
    """What this rank has of an adapter's tensors, and the table of all of them."""
    whole = {key: tensor for key, tensor in collect_params(chunks).items() if key in lora.plan.whole}
    return collect_params(chunks, adapters=True) | whole, lora.plan.entries | lora.plan.whole


def _join(parts: Path, file: Path, lora: Lora) -> None:
    """One file of the tensors of all files in `parts`."""
    source, plan = SafetensorsFolder(parts), lora.plan
    names = {name: name for entry in (plan.entries | plan.whole).values() for name in entry.hf} | plan.copies
    if set(names.values()) != source.tensors.keys():
        raise RuntimeError(f"{len(source.tensors)} tensors were written, which are not those of the adapter")
    stored = {name: source.tensors[of] for name, of in names.items()}
    forms = {name: TensorSpec(of.dtype, of.shape) for name, of in stored.items()}
    write_shard(file, forms, ((name, source.read(of, 0, 0, forms[name].shape[0])) for name, of in names.items()))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parameters(modules: Iterable[str]) -> list[str]:
    """The names that PEFT's target_parameters have for them."""
    found = set()
    for name in modules:
        expert = EXPERT.fullmatch(name)
        found.add(f"{expert[1]}.{TOGETHER[expert[2]]}" if expert else f"{name}.weight")
    return sorted(name.replace(".block_sparse_moe.", ".mlp.") for name in found)


def _shortened(modules: list[str], leaves: dict[str, int]) -> list[str]:
    """Names of modules, by their last word where all those of the model that have it are meant."""
    by_leaf = defaultdict(list)
    for name in modules:
        by_leaf[_leaf(name)].append(name)
    return sorted(
        short for leaf, names in by_leaf.items() for short in ([leaf] if len(names) == leaves[leaf] else names)
    )
