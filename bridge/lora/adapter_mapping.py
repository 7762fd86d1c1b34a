"""The modules that get adapters, and the mappings of the adapters' tensors, derived from the model's.

Beside a matrix [outputs, inputs] that is made of several Hugging Face matrices (q, k, v; gate, up) stand

    lora_A [matrices * rank, inputs]: each matrix's own A, one after the other
    lora_B [outputs, rank]: laid out and split as the matrix is; of those that have no adapter: padding
    magnitude [outputs]: DoRA's, laid out like lora_B

Where the matrix is split by its inputs, lora_A is, and lora_B is whole; where it is split by its outputs, the other way
round. Experts have them one by one. An embedding has lora_A [vocabulary, rank] and lora_B [hidden, rank].
"""

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..mapping.param_mapping import (
    EMBEDDING,
    EXPERTS,
    OUTPUT,
    REPLICATED,
    Architecture,
    MappingEntry,
    ParamKey,
    ParamTable,
    ShardingKind,
    Span,
)
from .settings import LoraSettings

# The modules of megatron-core's names that all-linear means; in each layer of the decoder.
LINEAR = frozenset({
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    "in_proj", "out_proj",
})  # fmt: skip
ROUTER, WORDS = "router", "word_embeddings"
PREFIX = "base_model.model."  # before a module's name, in PEFT's files
A_MATRIX = re.compile(r"(.+)\.lora_(?:A\.weight|embedding_A)")
# What PEFT calls the fused matrices of a layer's experts where both have adapters: .base_layer: gates and ups.
FUSED_EXPERTS = re.compile(r".*\blayers\.(\d+)\.[\w.]+?\.experts(\.base_layer)?")
HEADS = ("score", "classifier")
USUAL_DROPOUT = 0.05
GROUPS = {"all-linear": LINEAR, "all-router": {ROUTER}, "all-embedding": {WORDS}}


@dataclass
class AdapterPlan:
    """The adapters of a whole model."""

    adapted: dict[ParamKey, tuple[int, ...]] = field(default_factory=dict)  # matrix -> which of its parts have adapters
    entries: ParamTable = field(default_factory=dict)  # the table of the adapters' tensors
    modules_to_save: ParamTable = field(default_factory=dict)  # the model's parameters trained and saved beside them
    modules: list[str] = field(default_factory=list)  # Hugging Face's names of what has adapters
    dropout: float = 0.0
    # PEFT holds experts and routers, and what else has the same names in a model with experts, as parameters.
    parameters: bool = False
    # Names in the files, each for what another name of `whole` stands for: PEFT has a tied embedding twice.
    copies: dict[str, str] = field(default_factory=dict)
    leaves: Counter[str] = field(default_factory=Counter)  # how many modules have a name's last word
    skipped_modules: list[str] = field(
        default_factory=list
    )  # modules that all-linear does not reach: experts in one tensor

    @property
    def all_entries(self) -> ParamTable:
        """The table of the adapters and of the parameters trained beside them."""
        return self.entries | self.modules_to_save

    @property
    def has_experts(self) -> bool:
        return any(key.expert is not None for key in self.adapted)


class _Matrix(NamedTuple):
    """A matrix of the model that may have an adapter."""

    key: ParamKey
    entry: MappingEntry
    module: str  # megatron-core's, with the layer's number
    names: tuple[str, ...]  # Hugging Face's modules, one for each part

    @property
    def leaf(self) -> str:
        return self.module.rpartition(".")[2]


def plan_adapters(entries: ParamTable, settings: LoraSettings, architecture: Architecture) -> AdapterPlan:
    """Plan the adapters that `settings` request for the model of `entries`. Raises ValueError for an impossible one."""
    if settings.rank < 1:
        raise ValueError(f"--lora_rank {settings.rank} must be at least 1")
    plan, hits = AdapterPlan(), dict.fromkeys(settings.targets, 0)
    for matrix in _matrices(entries):
        plan.leaves.update(name.rpartition(".")[2] for name in matrix.names)
        chosen = []
        for part, name in enumerate(matrix.names):
            targets = _meant(hits, name, matrix)
            for target in targets:
                hits[target] += 1
            if targets or (settings.regex and re.fullmatch(settings.regex, name)):
                chosen.append(part)
        if not chosen:
            continue
        if matrix.entry.expert_index is not None or matrix.entry.transposed:
            _refuse_stacked(matrix, settings)
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
        plan.entries |= _tensors(matrix, chosen, settings)
        plan.modules += [matrix.names[part] for part in chosen]
    _check_targets(plan, hits, settings, entries)
    plan.parameters = "num_moe_experts" in architecture.transformer and any(
        re.search(r"\.(?:linear_fc[12]|router)\.weight", key.name) for key in plan.adapted
    )
    _check_parameters(plan, settings)
    _check_experts(plan, entries)
    plan.modules_to_save = _trained_whole(entries, plan, settings, scored=architecture.num_labels is not None)
    if architecture.tied and EMBEDDING in plan.modules_to_save:
        plan.copies[PREFIX + "lm_head.weight"] = plan.modules_to_save[EMBEDDING].hf[0]
    plan.dropout = _dropout(plan, settings)
    return plan


def modules_of(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the modules that have adapters in `folder`, by the `names` of the tensors in its file.

    Of experts in PEFT's fused form megatron-core's names. Raises ValueError where not both matrices of experts have
    adapters, for one alone might be either.
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


def _matrices(entries: ParamTable) -> Iterator[_Matrix]:
    for key, entry in entries.items():
        module, _, leaf = key.name.format(layer=key.layer).rpartition(".")
        if leaf != "weight" or key.name.startswith("mtp.") or (key == OUTPUT and entry == entries.get(EMBEDDING)):
            continue
        if module.rpartition(".")[2] in LINEAR | {ROUTER, WORDS, "output_layer"}:
            yield _Matrix(key, entry, module, tuple(name.removesuffix(".weight") for name in entry.hf))


def _meant(targets: Container[str], name: str, matrix: _Matrix) -> list[str]:
    """List the targets that include the module `name`, a part of `matrix`: its group, or an end of its name."""
    names = {group for group, leaves in GROUPS.items() if matrix.leaf in leaves}
    for words in (name.split("."), matrix.module.split(".")):
        names |= {".".join(words[first:]) for first in range(len(words))}
    return [each for each in names if each in targets]  # and not the other way round: targets can be thousands


def _refuse_stacked(matrix: _Matrix, settings: LoraSettings) -> None:
    if "all-linear" not in settings.targets:
        raise ValueError(
            f"{matrix.names[0]} holds all experts in one tensor, which takes no adapters in this version: leave it out "
            "of --target_modules"
        )


def _tensors(matrix: _Matrix, chosen: list[int], settings: LoraSettings) -> ParamTable:
    """Return the rows of one adapter."""
    (name, layer, expert), kind = matrix.key, matrix.entry.kind
    base = name.removesuffix("weight") + "adapter."
    modules = [PREFIX + matrix.names[part] for part in chosen]

    def named(leaf: str) -> tuple[str, ...]:
        return tuple(f"{module}.{leaf}" for module in modules)

    if matrix.leaf == WORDS:
        a = MappingEntry(kind, named("lora_embedding_A"), transposed=True)
        b, magnitude = MappingEntry(REPLICATED, named("lora_embedding_B")), None
    elif kind.dim == 1:
        a, b = MappingEntry(kind, named("lora_A.weight")), MappingEntry(REPLICATED, named("lora_B.weight"))
        magnitude = MappingEntry(REPLICATED, named("lora_magnitude_vector"))
    else:
        a = MappingEntry(_one_after_the_other(len(chosen)), named("lora_A.weight"))
        rows = _rows_of(kind, chosen)
        b, magnitude = MappingEntry(rows, named("lora_B.weight")), MappingEntry(rows, named("lora_magnitude_vector"))
    tensors = {ParamKey(base + "lora_A", layer, expert): a, ParamKey(base + "lora_B", layer, expert): b}
    if settings.dora:
        if magnitude is None:
            raise ValueError("--use_dora is not for embeddings: leave all-embedding out of --target_modules")
        tensors[ParamKey(base + "magnitude", layer, expert)] = magnitude
    return tensors


def _one_after_the_other(parts: int) -> ShardingKind:
    """Return the sharding of concatenated parts, of which every rank holds all."""

    def spans(length: int, ranks: int, architecture: Architecture) -> list[Span]:
        return [Span(part, 0, length // parts) for part in range(parts)]

    return ShardingKind(None, spans)


def _rows_of(kind: ShardingKind, chosen: list[int]) -> ShardingKind:
    """`kind`, in which parts that are not among `chosen` are padding."""
    numbers = {part: number for number, part in enumerate(chosen)}

    def spans(length: int, ranks: int, architecture: Architecture) -> list[Span]:
        layout = kind.spans(length, ranks, architecture)
        return [span if span.part is None else span._replace(part=numbers.get(span.part)) for span in layout]

    return ShardingKind(kind.dim, spans)


def _check_targets(plan: AdapterPlan, hits: dict[str, int], settings: LoraSettings, entries: ParamTable) -> None:
    if not plan.adapted or not all(hits.values()):
        missed = [f"--target_modules {target}" for target, number in hits.items() if not number][:3]
        missed = missed or [f"--target_regex {settings.regex}"]
        names = sorted(
            {name.rpartition(".")[2] for matrix in _matrices(entries) for name in matrix.names} - {"lm_head", HEADS[0]}
        )
        raise ValueError(
            f"{', '.join(missed)} matches no module of this model. Its modules: {', '.join(names)}; or give "
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
    """PEFT and vLLM hold a layer's experts together: all of them have adapters on all three matrices, or none has."""
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


def _trained_whole(entries: ParamTable, plan: AdapterPlan, settings: LoraSettings, *, scored: bool) -> ParamTable:
    trained: ParamTable = {}
    named = settings.modules_to_save
    if scored:  # PEFT trains and names heads by itself, by all the names that transformers' models have for one
        named = [*(name for name in named if name not in HEADS), HEADS[0]]
    for name in named:
        keys = [key for key in (EMBEDDING, OUTPUT) if key in entries and _saved_by(name, key, entries[key])]
        if not keys:
            tied = OUTPUT not in entries or entries[OUTPUT] == entries.get(EMBEDDING)
            what = "embed_tokens, which is the output layer as well" if tied else "embed_tokens and lm_head"
            what = "embed_tokens and the head (score)" if scored else what
            raise ValueError(f"--modules_to_save {name}: what is trained whole of this model is {what}")
        for key in keys:
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
            inside = plan.adapted.get(matrix, ())
            names = tuple(
                PREFIX + (hf.removesuffix("bias") + "base_layer.bias" if part in inside else hf)
                for part, hf in enumerate(entry.hf)
            )
            trained[key] = entry._replace(hf=names)
    if not trained:
        raise ValueError(f"--lora_bias {settings.bias}: this model has no biases there")
    return trained


def _saved_by(name: str, key: ParamKey, entry: MappingEntry) -> bool:
    modules = (*(hf.removesuffix(".weight") for hf in entry.hf), key.name.removesuffix(".weight"))
    return any(f".{module}".endswith(f".{name}") for module in modules)


def _dropout(plan: AdapterPlan, settings: LoraSettings) -> float:
    if settings.dropout is not None:
        return settings.dropout
    return 0.0 if plan.parameters or settings.dora else USUAL_DROPOUT
