"""Plan of a model's adapters: their modules, and the mappings of their tensors.

A weight [outputs, inputs] may fuse several Hugging Face matrices (q, k, v; gate, up). Its adapter has

    lora_A [matrices * rank, inputs]: the A of each matrix, concatenated
    lora_B [outputs, rank]: laid out and split like the weight; padding for matrices without an adapter
    magnitude [outputs]: of DoRA, laid out like lora_B

A weight split by inputs has a split lora_A and a replicated lora_B; a weight split by outputs the reverse. Each expert
has its own tensors. An embedding has lora_A [vocabulary, rank] and lora_B [hidden, rank].
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..mapping.architecture import Architecture
from ..mapping.param_mapping import (
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    OUTPUT_BIAS,
    REPLICATED,
    TOWERS,
    VISION_TOWER,
    MappingEntry,
    ParamKey,
    ParamTable,
    ShardingKind,
    Span,
)
from .settings import LoraSettings

# megatron-core's modules that all-linear includes, in each decoder layer.
LINEAR_MODULES = frozenset({
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    "decay_down", "decay_up", "gate_down", "gate_up",
    "in_proj", "out_proj", "linear_merge", "fc1_latent_proj", "fc2_latent_proj",
    "input_gate", "input_proj", "layer_projection",
})  # fmt: skip
ROUTER, EMBEDDING_MODULE = "router", "word_embeddings"
PREFIX = "base_model.model."  # prefix of module names in PEFT's files
A_MATRIX = re.compile(r"(.+)\.lora_(?:A\.weight|embedding_A)")
# PEFT's names of a layer's fused expert matrices with adapters; with .base_layer: gate and up, or up alone.
FUSED_EXPERTS = re.compile(r".*\blayers\.(\d+)\.(?:[\w.]+?\.)?experts(\.base_layer)?")
# transformers' class of Llama 4 does not say that its matrices are transposed, so PEFT's A is of their outputs.
SWAPPED_EXPERTS = "feed_forward.experts."
HEADS = ("score", "classifier")
DEFAULT_DROPOUT = 0.05
GROUPS = {"all-linear": LINEAR_MODULES, "all-router": {ROUTER}, "all-embedding": {EMBEDDING_MODULE}}


@dataclass
class AdapterPlan:
    """Adapters of a model, over all its layers."""

    adapted: dict[ParamKey, tuple[int, ...]] = field(default_factory=dict)  # weight -> its parts that have adapters
    entries: ParamTable = field(default_factory=dict)  # table of the adapters' tensors
    modules_to_save: ParamTable = field(default_factory=dict)  # table of the fully trained parameters
    modules: list[str] = field(default_factory=list)  # Hugging Face names of the modules with adapters
    dropout: float = 0.0
    stacked_parameters: dict[str, str] = field(default_factory=dict)  # those of `modules` that hold all experts
    # Whether PEFT treats some of them as parameters: experts, routers, and modules of the same names in MoE models.
    parameters: bool = False
    # Further names of saved tensors in the file, each with the original name: PEFT saves a tied embedding twice.
    copies: dict[str, str] = field(default_factory=dict)
    leaves: Counter[str] = field(default_factory=Counter)  # number of modules by the last word of their names
    skipped_modules: list[str] = field(default_factory=list)  # modules that all-linear skips: see `_unadapted_reason`

    @property
    def all_entries(self) -> ParamTable:
        """Table of the adapters and of the fully trained parameters."""
        return self.entries | self.modules_to_save

    @property
    def stacked(self) -> set[str]:
        """Names of the adapters' tensors in the file that hold those of all experts of a layer."""
        return {name for entry in self.entries.values() if entry.expert_index is not None for name in entry.hf}

    @property
    def has_experts(self) -> bool:
        return any(key.expert is not None for key in self.adapted)


class _Matrix(NamedTuple):
    """Weight that may have an adapter."""

    key: ParamKey
    entry: MappingEntry
    module: str  # megatron-core's name, with the layer number
    names: tuple[str, ...]  # Hugging Face modules, one per part

    @property
    def leaf(self) -> str:
        return self.module.rpartition(".")[2]


def plan_adapters(
    entries: ParamTable,
    settings: LoraSettings,
    architecture: Architecture,
    *,
    is_frozen: Callable[[ParamKey], bool] = lambda key: False,
) -> AdapterPlan:
    """Plan the adapters that `settings` request for the model of `entries`. Raises ValueError for invalid settings.

    is_frozen: whether a weight gets no adapter.
    """
    if settings.rank < 1:
        raise ValueError(f"--lora_rank {settings.rank} must be at least 1")
    # PEFT's model has no layers of multi-token prediction.
    entries = _by_module({k: entry for k, entry in entries.items() if not k.name.startswith("mtp.")}, architecture)
    plan, hits = AdapterPlan(), dict.fromkeys(settings.targets, 0)
    for key, entry in entries.items():  # modules of the tower without adapters: their names are not to be targets
        if key.name.startswith(TOWERS) and _module_of(key).rpartition(".")[2] not in LINEAR_MODULES:
            plan.leaves.update(name.removesuffix(".weight").rpartition(".")[2] for name in entry.hf)
    plan.leaves.update(_leaf_names_of_wrappers(entries))
    saved_modules = {key for name in settings.modules_to_save for key in _tower_keys(name, entries)}
    for matrix in _matrices(entries):
        plan.leaves.update(name.rpartition(".")[2] for name in matrix.names)
        chosen = []
        if is_frozen(matrix.key) or matrix.key in saved_modules:
            continue
        for part, name in enumerate(matrix.names):
            targets = _matching_targets(hits, name, matrix)
            for target in targets:
                hits[target] += 1
            if targets or (settings.regex and re.fullmatch(settings.regex, name)):
                chosen.append(part)
        if not chosen:
            continue
        if reason := _unadapted_reason(matrix, architecture):
            if "all-linear" not in settings.targets:
                raise ValueError(f"{matrix.names[0]} {reason}: leave it out of --target_modules")
            plan.skipped_modules += [name for name in matrix.names if name not in plan.skipped_modules]
            continue
        if matrix.key == OUTPUT and architecture.num_labels is not None:
            raise ValueError("the head (score) is fully trained beside adapters. Remove it from --target_modules")
        if matrix.key == OUTPUT:
            raise ValueError(
                "the output layer (lm_head) takes no adapter: train it whole by --modules_to_save lm_head, or leave it "
                "out of --target_modules"
            )
        if matrix.key == EMBEDDING and architecture.tied:
            raise ValueError(
                "the embedding is the output layer as well, which takes no adapter: train both whole by "
                "--modules_to_save embed_tokens, and leave all-embedding out"
            )
        plan.adapted[matrix.key] = tuple(chosen)
        plan.entries |= _adapter_entries(matrix, chosen, settings)
        if matrix.entry.expert_index in (None, 0):  # once for stacked experts
            plan.modules += [matrix.names[part] for part in chosen]
        if matrix.entry.expert_index == 0:
            plan.stacked_parameters |= dict(zip(matrix.names, matrix.entry.hf, strict=True))
    _check_targets(plan, hits, settings, entries)
    plan.parameters = "num_moe_experts" in architecture.transformer and any(
        re.search(r"\.(?:linear_fc[12]|router)\.weight", key.name) for key in plan.adapted
    )
    _check_parameters(plan, settings)
    _check_experts(plan, entries)
    plan.modules_to_save = _modules_to_save(entries, plan, settings, has_head=architecture.num_labels is not None)
    if architecture.tied and EMBEDDING in plan.modules_to_save:
        plan.copies[PREFIX + "lm_head.weight"] = plan.modules_to_save[EMBEDDING].hf[0]
    plan.dropout = _resolve_dropout(plan, settings)
    return plan


def adapted_modules(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the modules with adapters in `folder`, given the tensor names in its file.

    PEFT's fused experts get megatron-core's names. Raises ValueError if only one matrix of experts has an adapter: its
    name is ambiguous.
    """
    modules = [match[1].removeprefix(PREFIX) for name in names if (match := A_MATRIX.fullmatch(name))]
    fused = {name: match for name in modules if (match := FUSED_EXPERTS.fullmatch(name))}
    for name in fused:
        if name.endswith(".experts") and f"{name}.base_layer" not in fused:
            raise ValueError(
                f"{folder}: of {name} one of the two fused matrices has an adapter, which is not read: merge it by "
                "PEFT's merge_and_unload, and give the result as --model"
            )
    return [
        f"decoder.layers.{fused[name][1]}.mlp.experts.linear_fc{1 if fused[name][2] else 2}" if name in fused else name
        for name in modules
    ]


def _by_module(entries: ParamTable, architecture: Architecture) -> ParamTable:
    """Return the table with transformers' names of modules and stacked experts, which PEFT's files have.

    PEFT reads adapters of single experts only where experts have a gate.
    """

    def rename(name: str) -> str:
        for pattern, replacement in architecture.module_names:
            name = re.sub(pattern, replacement, name)
        return name

    if architecture.module_names:
        entries = {key: entry._replace(hf=tuple(map(rename, entry.hf))) for key, entry in entries.items()}
    if architecture.transformer["gated_linear_unit"]:
        return entries
    return {key: _stack(key, entry, architecture) for key, entry in entries.items()}


def _stack(key: ParamKey, entry: MappingEntry, architecture: Architecture) -> MappingEntry:
    """Return an entry of an expert's own matrix as one of a stack's."""
    if key.expert is None or entry.expert_index is not None:
        return entry
    names = tuple(re.sub(r"\.\d+\.(\w+)\.weight$", r".\1", name) for name in entry.hf)
    return entry._replace(hf=names, num_experts=architecture.transformer["num_moe_experts"], expert_index=key.expert)


def _module_of(key: ParamKey) -> str:
    return key.name.format(layer=key.layer).rpartition(".")[0]


def _matrices(entries: ParamTable) -> Iterator[_Matrix]:
    for key, entry in entries.items():
        module, leaf = _module_of(key), key.name.rpartition(".")[2]
        if leaf != "weight" or (key == OUTPUT and entry == entries.get(EMBEDDING)):
            continue
        if module.rpartition(".")[2] in LINEAR_MODULES | {ROUTER, EMBEDDING_MODULE, "output_layer"}:
            yield _Matrix(key, entry, module, tuple(name.removesuffix(".weight") for name in entry.hf))


def _leaf_names_of_wrappers(entries: ParamTable) -> list[str]:
    """Return the last names of the tower's modules that hold a matrix, as `q_proj` of Gemma 4's `q_proj.linear`."""
    towers = (matrix for matrix in _matrices(entries) if matrix.key.name.startswith(TOWERS))
    return [path.rpartition(".")[2] for path in {name.rpartition(".")[0] for matrix in towers for name in matrix.names}]


def _matching_targets(targets: Container[str], name: str, matrix: _Matrix) -> list[str]:
    """List the targets that match the module `name`, a part of `matrix`: its group, or a suffix of its name."""
    candidates = {group for group, leaves in GROUPS.items() if matrix.leaf in leaves}
    for path in (name.split("."), matrix.module.split(".")):
        candidates |= {".".join(path[first:]) for first in range(len(path))}
    return [target for target in candidates if target in targets]  # in this order: there can be thousands of targets


def _unadapted_reason(matrix: _Matrix, architecture: Architecture) -> str:
    """Return why a matrix takes no adapters, for messages; "" if it takes them."""
    if architecture.vision and architecture.vision.clips and matrix.key.name.startswith(VISION_TOWER + "layers."):
        return "is of a tower that clips, which takes no adapters in this version"
    if architecture.mamba and matrix.leaf == "out_proj":
        return "is the last matrix of a Mamba-2 layer, which transformers' kernels compute without adapters"
    return ""


def _adapter_entries(matrix: _Matrix, chosen: list[int], settings: LoraSettings) -> ParamTable:
    """Return the table entries of one adapter."""
    (name, layer, expert), kind = matrix.key, matrix.entry.kind
    base = name.removesuffix("weight") + "adapter."
    modules = [PREFIX + matrix.names[part] for part in chosen]
    stack = {"num_experts": matrix.entry.num_experts, "expert_index": matrix.entry.expert_index}
    if matrix.entry.expert_index is not None and not matrix.entry.hf[0].endswith(".weight"):
        # Parameters of one module, which PEFT wraps once for each, last for the second matrix.
        modules = [module.rpartition(".")[0] + ".base_layer" * (matrix.leaf == "linear_fc1") for module in modules]

    def names(leaf: str) -> tuple[str, ...]:
        return tuple(f"{module}.{leaf}" for module in modules)

    if matrix.leaf == EMBEDDING_MODULE:
        a = MappingEntry(kind, names("lora_embedding_A"), transposed=True)
        b, magnitude = MappingEntry(REPLICATED, names("lora_embedding_B")), None
    elif kind.dim == 1:
        a, b = MappingEntry(kind, names("lora_A.weight")), MappingEntry(REPLICATED, names("lora_B.weight"))
        magnitude = MappingEntry(REPLICATED, names("lora_magnitude_vector"))
    else:
        a = MappingEntry(_concatenated(len(chosen)), names("lora_A.weight"))
        rows = _select_parts(kind, chosen)
        b, magnitude = MappingEntry(rows, names("lora_B.weight")), MappingEntry(rows, names("lora_magnitude_vector"))
    a, b = a._replace(**stack), b._replace(**stack)
    if SWAPPED_EXPERTS in matrix.names[0]:
        a, b = a._replace(hf=b.hf, transposed=True), b._replace(hf=a.hf, transposed=True)
    tensors = {ParamKey(base + "lora_A", layer, expert): a, ParamKey(base + "lora_B", layer, expert): b}
    if settings.dora:
        if magnitude is None:
            raise ValueError("--use_dora is not for embeddings: leave all-embedding out of --target_modules")
        tensors[ParamKey(base + "magnitude", layer, expert)] = magnitude
    return tensors


def _concatenated(parts: int) -> ShardingKind:
    """Return the sharding of `parts` that are concatenated and replicated on every rank."""

    def spans(length: int, ranks: int, architecture: Architecture) -> list[Span]:
        return [Span(part, 0, length // parts) for part in range(parts)]

    return ShardingKind(None, spans)


def _select_parts(kind: ShardingKind, chosen: list[int]) -> ShardingKind:
    """Return `kind` with padding in place of the parts that are not `chosen`."""
    index_by_part = {part: index for index, part in enumerate(chosen)}

    def spans(length: int, ranks: int, architecture: Architecture) -> list[Span]:
        layout = kind.spans(length, ranks, architecture)
        return [span if span.part is None else span._replace(part=index_by_part.get(span.part)) for span in layout]

    return ShardingKind(kind.dim, spans)


def _check_targets(plan: AdapterPlan, hits: dict[str, int], settings: LoraSettings, entries: ParamTable) -> None:
    if not plan.adapted or not all(hits.values()):
        unmatched = [f"--target_modules {target}" for target, count in hits.items() if not count][:3]
        unmatched = unmatched or [f"--target_regex {settings.regex}"]
        names = sorted(
            {name.rpartition(".")[2] for matrix in _matrices(entries) for name in matrix.names} - {"lm_head", HEADS[0]}
        )
        raise ValueError(
            f"{', '.join(unmatched)} matches no module of this model. Its modules: {', '.join(names)}; or give "
            "all-linear, all-router, all-embedding"
        )


def _check_parameters(plan: AdapterPlan, settings: LoraSettings) -> None:
    if plan.parameters and (settings.dora or settings.dropout or (plan.has_experts and settings.bias != "none")):
        flag = f"--lora_bias {settings.bias}"
        flag = f"--lora_dropout {settings.dropout}" if settings.dropout else flag
        flag = "--use_dora true" if settings.dora else flag
        raise ValueError(
            f"{flag} is not for the MLPs and routers of a model with experts, which PEFT holds as parameters, without "
            "it: leave it out, or name other modules by --target_modules (as linear_qkv linear_proj)"
        )


def _check_experts(plan: AdapterPlan, entries: ParamTable) -> None:
    """Raise ValueError if only some matrices of a layer's experts have adapters: PEFT and vLLM fuse the experts."""
    if not plan.has_experts:
        return
    expected, adapted = defaultdict(set), defaultdict(set)
    for key, entry in entries.items():
        if EXPERTS in key.name and key.name.endswith(".weight"):
            expected[key.layer] |= set(entry.hf)
            adapted[key.layer] |= {entry.hf[part] for part in plan.adapted.get(key, ())}
    for layer, names in adapted.items():
        if names and names != expected[layer]:
            raise ValueError(
                f"of layer {layer}, {len(names)} of {len(expected[layer])} matrices of experts have adapters. PEFT and "
                "vLLM hold them fused: target all of them (all-linear, or gate, up and down projections of all "
                "experts), or none"
            )


def _modules_to_save(entries: ParamTable, plan: AdapterPlan, settings: LoraSettings, *, has_head: bool) -> ParamTable:
    trained: ParamTable = {}
    requested = settings.modules_to_save
    if has_head:  # PEFT adds the head itself, by all names that transformers' models have for it
        requested = [*(name for name in requested if name not in HEADS), HEADS[0]]
    for name in requested:
        keys = [key for key in (EMBEDDING, OUTPUT) if key in entries and _matches_module(name, key, entries[key])]
        keys += [OUTPUT_BIAS] * (OUTPUT in keys and OUTPUT_BIAS in entries)
        keys += _tower_keys(name, entries)
        if not keys:
            tied = OUTPUT not in entries or entries[OUTPUT] == entries.get(EMBEDDING)
            supported = "embed_tokens, which is the output layer as well" if tied else "embed_tokens and lm_head"
            supported = "embed_tokens and the head (score)" if has_head else supported
            raise ValueError(f"--modules_to_save {name}: what is trained whole of this model is {supported}")
        for key in keys:
            if "." not in entries[key].hf[0].removeprefix("model."):
                raise ValueError(
                    f"{entries[key].hf[0]} is a parameter of no module, and PEFT saves whole modules: set "
                    "--freeze_aligner true, --tuner_type lora or --tuner_type full"
                )
            if key in plan.adapted:
                raise ValueError(f"--modules_to_save {name} has an adapter as well: leave all-embedding out")
            trained[key] = entries[key]._replace(hf=tuple(PREFIX + hf for hf in entries[key].hf))
    if settings.bias == "none":
        return trained
    adapted = {key.name.removesuffix("weight") + "bias" for key in plan.adapted}
    for key, entry in entries.items():
        if key.name.endswith(".bias") and (settings.bias == "all" or key.name in adapted):
            if entry.expert_index is not None or EXPERTS in key.name:
                raise ValueError(f"--lora_bias {settings.bias} is not for biases of experts ({entry.hf[0]})")
            matrix = key._replace(name=key.name.removesuffix("bias") + "weight")
            if key.name.startswith(TOWERS) and matrix not in plan.adapted:
                continue
            adapted_parts = plan.adapted.get(matrix, ())
            names = tuple(
                PREFIX + (hf.removesuffix("bias") + "base_layer.bias" if part in adapted_parts else hf)
                for part, hf in enumerate(entry.hf)
            )
            trained[key] = entry._replace(hf=names)
    if not trained:
        raise ValueError(f"--lora_bias {settings.bias}: this model has no biases there")
    return trained


def _tower_keys(module: str, entries: ParamTable) -> list[ParamKey]:
    """Return the tensors of the vision tower in `module`, a name of Hugging Face or megatron-core."""
    return [
        key
        for key, entry in entries.items()
        if key.name.startswith(TOWERS) and any(f".{module}." in f".{name}" for name in (*entry.hf, key.name))
    ]


def _matches_module(name: str, key: ParamKey, entry: MappingEntry) -> bool:
    modules = (*(hf.removesuffix(".weight") for hf in entry.hf), key.name.removesuffix(".weight"))
    return any(f".{module}".endswith(f".{name}") for module in modules)


def _resolve_dropout(plan: AdapterPlan, settings: LoraSettings) -> float:
    if settings.dropout is not None:
        return settings.dropout
    return 0.0 if plan.parameters or settings.dora else DEFAULT_DROPOUT
