"""Adapters in PEFT's format: adapter_model.safetensors and adapter_config.json.

Tensors are named base_model.model.<module>.lora_A.weight after the checkpoint's modules, with one adapter per expert.
transformers fuses experts into parameters, and PEFT converts these adapters when it loads them. For this,
adapter_config.json lists the parameters in `target_parameters`. Where the checkpoint itself has all experts of a layer
in one tensor, so do the adapters, in PEFT's form and vLLM's.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from ..families.sequence_classification import SCORE
from ..families.thinker import SPEECH, THINKER_PREFIX
from ..lora.adapter_mapping import FUSED_EXPERTS, PREFIX, adapted_modules
from ..lora.attach import Lora
from ..lora.settings import FUSED, LoraSettings
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import collect_params
from ..mapping.param_mapping import TOWERS, ParamKey, ParamTable
from ..model.chunk_mapping import describe_chunks
from ..parallel import barrier
from .adapter_experts import SeparatedExperts, StackedExperts, fuse_experts, fused_shape
from .hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .load import read_tensors
from .safetensors_io import SafetensorsFolder, sync, write_shard
from .save import complete_folder, write_tensors
from .tensor_names import abridge
from .writer import RankReport, ShardWriter, StagedFolder

# Modules that are parameters in transformers 5's models with experts, and names that PEFT treats as parameters.
PARAMETER_LEAVES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
FUSED_LEAVES = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"} | {
    "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
}  # fmt: skip
# PEFT saves no list of modules, but its members. The projector of Gemma 3 and the tower of Llama 4 have parameters of
# their own.
TOWER_MODULE = re.compile(
    r"\b(?:visual\.\w+(?:\.\d+)?|"
    r"vision_tower\.(?:(?:transformer\.)?(?:encoder\.)?(?:layers?|blocks)\.\d+|(?:transformer|encoder)\.\w+|\w+)|"
    r"visual_embeddings_table|embed_vision|"
    r"vision_model(?=\.)|"
    r"audio_tower\.(?:layers\.\d+|\w+)|"
    r"multi_modal_projector(?=\.mm_)|multi_modal_projector\.\w+|mlp1\.\d+|mm_projector(?:\.proj)?\.\w+)"
)
EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")
IGNORED_WEIGHTS = re.compile(r".+\.base_layer\.weight")  # PEFT saves an embedding's weight with its adapter


def read_settings(folder: Path, config: HfConfig) -> LoraSettings:
    """Return the settings of the adapter in `folder`, given its raw adapter_config.json. Raises ValueError."""
    return LoraSettings.from_adapter_config(config, adapted_modules(folder, SafetensorsFolder(folder).tensors))


def read_num_labels(folder: Path) -> int | None:
    """Return the number of labels of the score head saved with an adapter, None without a head."""
    tensors = SafetensorsFolder(folder).tensors
    return tensors[PREFIX + SCORE.hf].shape[0] if PREFIX + SCORE.hf in tensors else None


def adapter_dtypes(folder: Path) -> tuple[torch.dtype, list[torch.dtype]]:
    """Return the dtype of an adapter's matrices, and the dtypes of the fully trained tensors saved with them.

    Raises ValueError for matrices of several dtypes.
    """
    matrices, others = set[torch.dtype](), set[torch.dtype]()
    for name, stored in SafetensorsFolder(folder).tensors.items():
        if not IGNORED_WEIGHTS.fullmatch(name):
            (matrices if ".lora_" in name else others).add(stored.dtype)
    if len(matrices) != 1:
        raise ValueError(f"{folder} has adapters of {len(matrices)} dtypes. Save it with one by PEFT")
    return matrices.pop(), sorted(others, key=lambda dtype: -dtype.itemsize)


def load_adapter(chunks: Sequence[GPTModel], hf_config: HfConfig, lora: Lora, folder: Path) -> None:
    """Load a PEFT adapter, and the fully trained modules saved with it, into this rank's chunks.

    Raises ValueError for unexpected and missing tensors and for mismatched shapes.
    """
    source = SafetensorsFolder(folder)
    if lora.plan.stacked:
        source = StackedExperts(source, lora.plan)
    elif any(FUSED_EXPERTS.fullmatch(name.partition(".lora_")[0]) for name in source.tensors):
        source = SeparatedExperts(source, lora.plan, lora.settings.rank)
    tensors, entries = trained_tensors(chunks, lora)
    expected = {name for entry in entries.values() for name in entry.hf}
    stored = {name for name in source.tensors if not IGNORED_WEIGHTS.fullmatch(name)} - lora.plan.copies.keys()
    fix = "Is the adapter of this model? Set --model to the one that its adapter_config.json names"
    if missing := expected - stored:
        raise ValueError(f"{folder} lacks {abridge(missing)}. {fix}")
    if extra := stored - expected:
        raise ValueError(f"{folder} has {abridge(extra)}, which this model has no place for. {fix}")
    for name, original in lora.plan.copies.items():
        rows = source.tensors[original].shape[0]
        if name in source.tensors and not torch.equal(source.read(name, 0, 0, rows), source.read(original, 0, 0, rows)):
            raise ValueError(f"{folder}: {name} is not {original}, and this model has one matrix for both. {fix}")
    architecture = describe_chunks(chunks, hf_config)
    read_tensors(tensors, entries, architecture, source)


def save_adapter(chunks: Sequence[GPTModel], hf_config: HfConfig, lora: Lora, destination: Path, *, base: str) -> None:
    """Save the adapter of `chunks` as `stage_adapter` does, and return once the files are on disk.

    Raises OSError on every rank if any rank cannot write.
    """
    complete_folder(stage_adapter(chunks, hf_config, lora, destination, base=base))


def stage_adapter(
    chunks: Sequence[GPTModel],
    hf_config: HfConfig,
    lora: Lora,
    destination: Path,
    *,
    base: str,
    copy_to_host: bool = False,
) -> StagedFolder:
    """Start to save the adapters of `chunks`, and the fully trained modules, into the folder `destination`.

    base: the base model, a folder or a hub id. copy_to_host: training may continue at once (see ShardWriter).
    Every rank calls this.
    """
    architecture = describe_chunks(chunks, hf_config)
    tensors, entries = trained_tensors(chunks, lora, copies=False)
    parts = destination / "parts"
    if dist.get_rank() == 0:
        parts.mkdir()
    barrier()
    writer = ShardWriter(parts, copy_to_host=copy_to_host)
    write_tensors(writer, tensors, entries, architecture, None, 5 * 10**9)

    def complete(_: list[RankReport]) -> dict[str, str]:
        _join_files(parts, destination / ADAPTER_WEIGHTS, lora)
        shutil.rmtree(parts)
        write_adapter_config(destination, lora, architecture, base)
        return {}

    return StagedFolder(writer, complete)


def write_adapter_config(destination: Path, lora: Lora, architecture: Architecture, base: str) -> None:
    """Write adapter_config.json into the folder `destination`."""
    config = adapter_config(lora, architecture, base)
    with (destination / ADAPTER_CONFIG).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        sync(stream)


def adapter_config(lora: Lora, architecture: Architecture, base: str) -> HfConfig:
    """Return the adapter_config.json that PEFT and vLLM read."""
    from peft import LoraConfig

    settings, plan = lora.settings, lora.plan
    modules, parameters, fused = plan.modules, [], {}
    alpha, rslora = settings.alpha, settings.rslora
    if "num_moe_experts" in architecture.transformer:
        modules = [name for name in modules if name not in plan.stacked_parameters]
        fused_modules = {name for name in modules if name.rpartition(".")[2] in PARAMETER_LEAVES}
        modules = [name for name in modules if name not in fused_modules]
        parameters = sorted([*_parameters(fused_modules), *plan.stacked_parameters.values()])
        if plan.has_experts:  # neither PEFT's fusion nor vLLM supports rslora for experts
            alpha, rslora = settings.scaling * settings.rank, False
            fused = {} if plan.stacked else {FUSED: 2}
    saved = {
        _leaf(entry.hf[0].removesuffix(".weight"))
        for key, entry in plan.modules_to_save.items()
        if entry.hf[0].endswith(".weight") and not key.name.startswith(TOWERS)
    }
    saved |= {match[0] for entry in plan.modules_to_save.values() if (match := TOWER_MODULE.search(entry.hf[0]))}
    # Towers, and the models that speak, share module names with the language model.
    is_thinker = any(name.startswith(THINKER_PREFIX) for name in plan.modules)
    excluded = SPEECH if is_thinker else ""
    if is_thinker or any("language_model." in name for name in plan.modules):
        has_tower = any(key.name.startswith(TOWERS) for key in plan.adapted)
        excluded = excluded if has_tower else architecture.passthrough
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
        exclude_modules=rf"({excluded}).*" if excluded else None,
        target_parameters=parameters or None,
        rank_pattern={pattern: times * settings.rank for pattern, times in fused.items()},
        alpha_pattern={pattern: times * alpha for pattern, times in fused.items()},
        modules_to_save=sorted(saved) or None,
        ensure_weight_tying=bool(plan.copies),
    ).to_dict()
    return config | {"target_modules": _shorten_names(modules, plan.leaves)}


def trained_tensors(
    chunks: Sequence[GPTModel], lora: Lora, *, copies: bool = True
) -> tuple[dict[ParamKey, torch.Tensor], ParamTable]:
    """Return this rank's tensors of adapters and fully trained modules, and the table for all ranks.

    copies: as of `collect_params`
    """
    weights = collect_params(chunks, copies=copies)
    saved_modules = {key: tensor for key, tensor in weights.items() if key in lora.plan.modules_to_save}
    return collect_params(chunks, adapters=True, copies=copies) | saved_modules, lora.plan.all_entries


def _join_files(parts: Path, file: Path, lora: Lora) -> None:
    """Join the tensors of all files in the folder `parts` into one file."""
    source, plan = SafetensorsFolder(parts), lora.plan
    names = {name: name for entry in plan.all_entries.values() for name in entry.hf} | plan.copies
    if set(names.values()) != source.tensors.keys():
        raise RuntimeError(f"{len(source.tensors)} tensors were written, which are not those of the adapter")
    specs = {name: source.tensors[original].spec for name, original in names.items()}
    stacked = plan.stacked
    tensors = ((name, source.read_whole(original)) for name, original in names.items())
    tensors = ((name, fuse_experts(name, tensor) if name in stacked else tensor) for name, tensor in tensors)
    specs |= {name: specs[name]._replace(shape=fused_shape(name, specs[name].shape)) for name in stacked}
    write_shard(file, specs, tensors)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parameters(modules: Iterable[str]) -> list[str]:
    """Return the `target_parameters` of PEFT for these modules."""
    names = set()
    for name in modules:
        expert = EXPERT.fullmatch(name)
        names.add(f"{expert[1]}.{FUSED_LEAVES[expert[2]]}" if expert else f"{name}.weight")
    return sorted(name.replace(".block_sparse_moe.", ".mlp.") for name in names)


def _shorten_names(modules: list[str], leaves: dict[str, int]) -> list[str]:
    """Shorten module names to their last word where all of the model's modules with that word are listed.

    Not to a number, which is also a name of blocks.
    """
    by_leaf = defaultdict(list)
    for name in modules:
        by_leaf[_leaf(name)].append(name)
    return sorted(
        entry
        for leaf, names in by_leaf.items()
        for entry in ([leaf] if len(names) == leaves[leaf] and not leaf.isdecimal() else names)
    )
