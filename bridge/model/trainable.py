"""Trained and frozen parameters, selected by name or by a share of all, and their number.

A weight here is a parameter of the whole model as megatron-core has it, with all experts of a layer in one: what is
frozen is the same in every layout of processes.
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
from ..mapping.local_params import by_key, shard_position
from ..mapping.param_mapping import (
    EMBEDDING,
    OUTPUT,
    Architecture,
    HfConfig,
    ParamKey,
    ParamTable,
    expand_mappings,
)
from ..options import TrainableOptions
from .build import Model, enable_grads_through_frozen


class _Names(NamedTuple):
    """Names of a weight: in megatron-core, and of its parts in Hugging Face files."""

    own: set[str]
    parts: set[str]


def freeze(model: Model, hf_config: HfConfig, options: TrainableOptions, *, names: Container[str] = ()) -> None:
    """Freeze what `options` say of a model without adapters. Every rank calls this.

    `names`: of the tensors of the checkpoint, where a family has several spellings.
    Raises ValueError for a name that no weight has, or that means a part of one, and where nothing is left to train.
    """
    freezing = options.freeze_parameters, options.freeze_parameters_regex
    thawing = options.trainable_parameters, options.trainable_parameters_regex
    if not any((*freezing, *thawing, options.freeze_parameters_ratio)):
        return
    if model.config.fp8_param:
        raise ValueError("--fp8_param_gather true cannot be used with frozen weights. Remove it")
    entries = expand_mappings(family_of(hf_config), hf_config, model.architecture, names)
    sizes = {weight: size for weight, (size, _) in _weights(model, entries).items()}
    named = _names(entries, sizes, model.architecture)
    frozen = _first_ones(sizes, list(named), options.freeze_parameters_ratio)
    frozen |= _meant(named, *freezing, flag="--freeze_parameters")
    frozen -= _meant(named, *thawing, flag="--trainable_parameters")
    if frozen == named.keys():
        raise ValueError(
            "--freeze_parameters (or its regex, or ratio) leaves nothing to train: freeze less, or name what is "
            "trained by --trainable_parameters"
        )
    for chunk in model.chunks:
        for weight, parameter, *_ in _held(chunk, model.architecture):
            parameter.requires_grad_(weight not in frozen)
        enable_grads_through_frozen(chunk)


def freeze_output(model: Model) -> None:
    """Freeze the output layer, where it is no embedding's, of a model that is trained without it: for embeddings.

    Called after `freeze`, before the model is wrapped for data parallelism.
    """
    for chunk in model.chunks:
        if chunk.post_process and not model.architecture.tied:
            chunk.output_layer.requires_grad_(False)


def count_parameters(model: Model, hf_config: HfConfig) -> tuple[int, int]:
    """Count the trained parameters of the model, and all of them, with adapters.

    Each counts once, however many ranks hold it; padding does not count. Every rank calls this.
    """
    entries = expand_mappings(family_of(hf_config), hf_config, model.architecture)
    if model.lora:
        entries |= model.lora.plan.entries
    weights = _weights(model, entries).values()
    return sum(size for size, trained in weights if trained), sum(size for size, _ in weights)


def _weights(model: Model, entries: ParamTable) -> dict[ParamKey, tuple[int, bool]]:
    """Return every weight of the model: its size without padding, and whether it is trained."""
    experts = model.architecture.transformer.get("num_moe_experts") or 1
    here = {}
    for chunk in model.chunks:
        for weight, parameter, key, shard in _held(chunk, model.architecture):
            ranks, _ = shard_position(key, entries[key])
            spans = entries[key].spans(shard.shape, ranks, model.architecture)
            size = sum(map(prod, entries[key].hf_shapes(shard.shape, spans).values()))
            here[weight] = (size * (1 if key.expert is None else experts), parameter.requires_grad)
    group = parallel_state.get_pipeline_model_parallel_group()  # the other ranks of a stage have parts of the same
    stages: list[dict[ParamKey, tuple[int, bool]]] = [{}] * dist.get_world_size(group)  # pyright: ignore[reportArgumentType]
    dist.all_gather_object(stages, here, group=group)  # pyright: ignore[reportArgumentType]
    return {weight: about for stage in stages for weight, about in stage.items()}


def _held(chunk: GPTModel, architecture: Architecture) -> Iterator[tuple[ParamKey, Tensor, ParamKey, Tensor]]:
    """Yield each parameter of a chunk with its weight, a key of the table, and the key's part of the parameter."""
    for name, parameter in chunk.named_parameters():
        key, shard = next(by_key(chunk, name, parameter))
        yield _weight_of(key, architecture), parameter, key, shard


def _weight_of(key: ParamKey, architecture: Architecture) -> ParamKey:
    return EMBEDDING if key == OUTPUT and architecture.tied else key._replace(expert=None)


def _names(entries: ParamTable, weights: Container[ParamKey], architecture: Architecture) -> dict[ParamKey, _Names]:
    """Return the names of all `weights`, ordered from the embedding to the output layer."""
    names: dict[ParamKey, _Names] = {}
    for key, entry in entries.items():
        if (weight := _weight_of(key, architecture)) in weights:
            mcore, parts = names.setdefault(weight, _Names(set(), set()))
            mcore.add(key.name.format(layer=key.layer))
            parts.update(entry.hf)
    return dict(sorted(names.items(), key=lambda item: _depth(item[0])))


def _depth(weight: ParamKey) -> tuple[int, int]:
    if weight.layer is None:
        return (0 if weight == EMBEDDING else 2), 0
    return (3 if weight.name.startswith("mtp.") else 1), weight.layer


def _first_ones(sizes: Mapping[ParamKey, int], ordered: Sequence[ParamKey], ratio: float) -> set[ParamKey]:
    """Select the first weights that lie entirely within the first `ratio` of all parameters."""
    most = ratio * sum(sizes.values())
    ends = accumulate(sizes[weight] for weight in ordered)
    return {weight for weight, end in zip(ordered, ends, strict=True) if end <= most}


def _meant(named: Mapping[ParamKey, _Names], prefixes: Sequence[str], regex: str | None, *, flag: str) -> set[ParamKey]:
    """Return the weights whose own name, or all of whose parts', begin with a prefix or have the expression in them."""
    tests: dict[str, Callable[[str], object]] = {f"{flag} {prefix}": _begins(prefix) for prefix in prefixes}
    if regex:
        tests[f"{flag}_regex {regex}"] = re.compile(regex).search
    every = {name for mcore, parts in named.values() for name in mcore | parts}
    hits = {flag_value: {name for name in every if test(name)} for flag_value, test in tests.items()}
    for flag_value, hit in hits.items():
        if not hit:
            mcore, parts = list(named.values())[1]
            raise ValueError(
                f"{flag_value} is in no parameter's name. Names are such as {min(parts)} or, megatron-core's, "
                f"{min(mcore)}"
            )
    meant, chosen = {name for hit in hits.values() for name in hit}, set()
    for weight, (mcore, parts) in named.items():
        if meant & mcore or meant >= parts:
            chosen.add(weight)
        elif some := meant & parts:
            flag_value = next(flag_value for flag_value, hit in hits.items() if hit & some)
            raise ValueError(
                f"{flag_value} means {min(some)} and not {min(parts - some)}, and both are in {min(mcore)}, which is "
                "frozen or trained as a whole: name all of it"
            )
    return chosen


def _begins(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)
