"""Freezing of parameters by name or by fraction, and counts of parameters.

A weight here is a megatron-core parameter of the full model; the experts of a layer are one weight. The selection is
therefore the same in every parallel layout.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..families import family_of
from ..layers.tower_part import TOWER_MODULES
from ..layers.vision_tower import MERGERS
from ..mapping.architecture import Architecture, HfConfig
from ..mapping.local_params import iter_views, shard_position
from ..mapping.param_mapping import EMBEDDING, OUTPUT, TOWERS, ParamKey, ParamTable, expand_mappings
from ..options import TrainableOptions, VisionOptions
from .build import Model, enable_grads_through_frozen


class _Names(NamedTuple):
    """Names of a weight: in megatron-core, and of its parts in Hugging Face checkpoints."""

    mcore: set[str]
    parts: set[str]


def freeze(
    model: Model,
    hf_config: HfConfig,
    options: TrainableOptions,
    vision: VisionOptions | None = None,
    *,
    names: Container[str] = (),
) -> None:
    """Freeze the parameters that `options` select, in a model without adapters. Every rank calls this.

    vision: freezes the language model, the vision tower or its mergers, of a model that has a tower.
    names: the checkpoint's tensors, if the family has several mappings for one. Raises ValueError for a name that
    matches no weight or only a part of one, and if no trained parameter remains.
    """
    freezing = options.freeze_parameters, options.freeze_parameters_regex
    unfreezing = options.trainable_parameters, options.trainable_parameters_regex
    vision = vision if model.vision else None
    if vision is None and not any((*freezing, *unfreezing, options.freeze_parameters_ratio)):
        return
    if model.config.fp8_param:
        raise ValueError("--fp8_param_gather true cannot be used with frozen weights. Remove it")
    entries = expand_mappings(family_of(hf_config), hf_config, model.architecture, names)
    weights = _collect_weights(model, entries)
    sizes = {weight: size for weight, (size, _) in weights.items()}
    untrainable = {weight for weight, (_, is_trained) in weights.items() if not is_trained}
    names_by_weight = _map_names(entries, sizes, model.architecture)
    frozen = _select_first(sizes, list(names_by_weight), options.freeze_parameters_ratio)
    frozen |= _match(names_by_weight, *freezing, flag="--freeze_parameters")
    if vision:
        frozen |= {weight for weight in names_by_weight if is_frozen(weight, vision)}
    named = _match(names_by_weight, *unfreezing, flag="--trainable_parameters")
    if named and named <= untrainable:
        raise ValueError(f"--trainable_parameters: no loss reaches {_example(named)}, which is frozen. Name others")
    frozen = frozen - named | untrainable
    indexers = {weight for weight in names_by_weight if ".indexer." in weight.name}
    if model.config.dsa_indexer_loss_coeff and indexers <= frozen:
        raise ValueError(
            f"--dsa_indexer_loss_coeff {model.config.dsa_indexer_loss_coeff:g}: --freeze_parameters (or its regex, or "
            "ratio) freezes all indexers. Remove it, or name them by --trainable_parameters_regex indexer"
        )
    if frozen == names_by_weight.keys():
        raise ValueError(
            "--freeze_parameters (or its regex, or ratio; --freeze_llm, --freeze_vit, --freeze_aligner) leaves nothing "
            "to train: freeze less, or name what is trained by --trainable_parameters"
        )
    for chunk in model.parts:
        for weight, parameter, *_ in _parameters(chunk, model.architecture):
            parameter.requires_grad_(weight not in frozen)
    for chunk in model.chunks:
        enable_grads_through_frozen(chunk, has_trained_input=model.vision is not None and model.vision.trains)


def _example(weights: set[ParamKey]) -> str:
    weight = min(weights, key=lambda weight: (weight.name, weight.layer or 0))
    return weight.name.format(layer=weight.layer)


def is_frozen(weight: ParamKey, options: VisionOptions) -> bool:
    """Return whether the flags of the vision tower freeze a weight."""
    if not weight.name.startswith(TOWERS):
        return options.freeze_llm
    module = weight.name.split(".")[1]
    return options.freeze_aligner if module in MERGERS else options.freeze_vit


def tower_modules(model: Model, options: VisionOptions) -> list[str]:
    """Return megatron-core's names of the vision tower's modules that are not frozen. The model has a tower."""
    assert model.vision is not None
    modules = [*(() if options.freeze_vit else TOWER_MODULES), *(() if options.freeze_aligner else MERGERS)]
    names = [tower + module for tower in TOWERS for module in modules]
    parameters = [name for name, _ in model.vision.part.named_parameters()]
    return [module for module in names if any(name.startswith(f"{module}.") for name in parameters)]


def freeze_output(model: Model) -> None:
    """Freeze the output layer, if it is not tied, of a model that is trained as an embedding model.

    Call this after `freeze`, before the model is wrapped for data parallelism.
    """
    for chunk in model.chunks:
        if chunk.post_process and not model.architecture.tied:
            chunk.output_layer.requires_grad_(False)


def count_parameters(model: Model, hf_config: HfConfig) -> tuple[int, int]:
    """Return the number of trained parameters and of all parameters, including adapters.

    Replicas and padding do not count. Every rank calls this.
    """
    entries = expand_mappings(family_of(hf_config), hf_config, model.architecture)
    if model.lora:
        entries |= model.lora.plan.entries
    weights = _collect_weights(model, entries).values()
    return sum(size for size, trained in weights if trained), sum(size for size, _ in weights)


def _collect_weights(model: Model, entries: ParamTable) -> dict[ParamKey, tuple[int, bool]]:
    """Return the size without padding of every weight of the model, and whether it is trained."""
    experts = model.architecture.transformer.get("num_moe_experts") or 1
    local_weights = {}
    for chunk in model.parts:
        for weight, parameter, key, shard in _parameters(chunk, model.architecture):
            ranks, _ = shard_position(key, entries[key])
            spans = entries[key].spans(shard.shape, ranks, model.architecture)
            size = sum(map(prod, entries[key].hf_shapes(shard.shape, spans).values()))
            local_weights[weight] = (size * (1 if key.expert is None else experts), parameter.requires_grad)
    group = parallel_state.get_pipeline_model_parallel_group()  # ranks of one stage have the same weights
    stages: list[dict[ParamKey, tuple[int, bool]]] = [{}] * dist.get_world_size(group)  # pyright: ignore[reportArgumentType]
    dist.all_gather_object(stages, local_weights, group=group)  # pyright: ignore[reportArgumentType]
    return {weight: info for stage in stages for weight, info in stage.items()}


def _parameters(chunk: GPTModel, architecture: Architecture) -> Iterator[tuple[ParamKey, Tensor, ParamKey, Tensor]]:
    """Yield each parameter of a chunk as (weight, parameter, a key of the table, view of that key)."""
    for name, parameter in chunk.named_parameters():
        key, shard = next(iter_views(chunk, name, parameter))
        yield _weight_key(key, architecture), parameter, key, shard


def _weight_key(key: ParamKey, architecture: Architecture) -> ParamKey:
    return EMBEDDING if key == OUTPUT and architecture.tied else key._replace(expert=None)


def _map_names(entries: ParamTable, weights: Container[ParamKey], architecture: Architecture) -> dict[ParamKey, _Names]:
    """Return the names of `weights`, ordered from the embedding to the output layer."""
    names: dict[ParamKey, _Names] = {}
    for key, entry in entries.items():
        if (weight := _weight_key(key, architecture)) in weights:
            mcore, parts = names.setdefault(weight, _Names(set(), set()))
            mcore.add(key.name.format(layer=key.layer))
            parts.update(entry.hf)
    return dict(sorted(names.items(), key=lambda item: _layer_order(item[0])))


def _layer_order(weight: ParamKey) -> tuple[int, int]:
    if weight.name.startswith(TOWERS):
        return -1, -1
    if weight.layer is None:
        return (0 if weight.name.startswith("embedding.") else 2), 0
    return (3 if weight.name.startswith("mtp.") else 1), weight.layer


def _select_first(sizes: Mapping[ParamKey, int], ordered: Sequence[ParamKey], ratio: float) -> set[ParamKey]:
    """Select the first weights that together have at most `ratio` of all parameters."""
    limit = ratio * sum(sizes.values())
    ends = accumulate(sizes[weight] for weight in ordered)
    return {weight for weight, end in zip(ordered, ends, strict=True) if end <= limit}


def _match(named: Mapping[ParamKey, _Names], prefixes: Sequence[str], regex: str | None, *, flag: str) -> set[ParamKey]:
    """Select the weights whose megatron-core name, or all of whose Hugging Face names, match a prefix or the regex."""
    tests: dict[str, Callable[[str], object]] = {f"{flag} {prefix}": _has_prefix(prefix) for prefix in prefixes}
    if regex:
        tests[f"{flag}_regex {regex}"] = re.compile(regex).search
    all_names = {name for mcore, parts in named.values() for name in mcore | parts}
    matches = {flag_value: {name for name in all_names if test(name)} for flag_value, test in tests.items()}
    for flag_value, match in matches.items():
        if not match:
            mcore, parts = list(named.values())[1]
            raise ValueError(
                f"{flag_value} is in no parameter's name. Names are such as {min(parts)} or, megatron-core's, "
                f"{min(mcore)}"
            )
    matched, selected = {name for match in matches.values() for name in match}, set()
    for weight, (mcore, parts) in named.items():
        if matched & mcore or matched >= parts:
            selected.add(weight)
        elif part := matched & parts:
            flag_value = next(flag_value for flag_value, match in matches.items() if match & part)
            raise ValueError(
                f"{flag_value} means {min(part)} and not {min(parts - part)}, and both are in {min(mcore)}, which is "
                "frozen or trained as a whole: name all of it"
            )
    return selected


def _has_prefix(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)
