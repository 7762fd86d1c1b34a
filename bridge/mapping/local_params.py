"""What this rank holds: the tensors of its model chunks under the table's keys, and its place in each split."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .fp8 import in_bf16
from .param_mapping import OUTPUT, Architecture, Entry, Family, Key

# Transformer Engine puts a norm inside the module of the matrix that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
LAYER = re.compile(r"(?:decoder|mtp)\.layers\.(\d+)\.((?:mtp_model_layer\.)?)(.+)")
# `weight3`: expert 3 of this rank, by Transformer Engine; `weight`: all of them, stacked.
EXPERTS = re.compile(r"(mlp\.experts\.linear_fc[12]\.(?:weight|bias|adapter\.lora_[AB]))(\d*)")
ADAPTER = ".adapter."  # in the names of the tensors of lora/


def architecture_of(chunks: Sequence[Any], family: Family, hf_config: dict[str, Any]) -> Architecture:
    """What `family` makes of a raw config.json, with the layers of multi-token prediction that `chunks` have."""
    depths = max((len(chunk.mtp.layers) for chunk in chunks if getattr(chunk, "mtp", None)), default=0)
    return replace(family.describe(hf_config), predicting=depths)


def held(chunks: Sequence[Any], *, adapters: bool = False) -> dict[Key, Tensor]:
    """Every parameter and persistent buffer of this rank's GPTModel chunks, experts one by one (views where stacked).

    In the order of the model. Without adapters, or those of the adapters alone.
    """
    return {key: tensor for _, _, views in held_whole(chunks, adapters=adapters) for key, tensor in views.items()}


def held_whole(chunks: Sequence[Any], *, adapters: bool = False) -> Iterator[tuple[Any, Tensor, dict[Key, Tensor]]]:
    """The same as its modules have it: each chunk with each parameter or buffer, and what of it stands for which key.

    A parameter in which experts are stacked has several keys.
    """
    for chunk in chunks:
        for name, tensor in _state(chunk):
            if (ADAPTER in name) == adapters:
                yield chunk, tensor, dict(keyed(chunk, name, tensor))


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, in_bf16(parameter)) for name, parameter in model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def keyed(chunk: Any, name: str, tensor: Tensor) -> Iterator[tuple[Key, Tensor]]:
    """The keys for which the parameter `name` of a chunk stands, each with what of `tensor` it means."""
    found = LAYER.fullmatch(name)
    if not found:
        yield Key(name), tensor
        return
    number, inside, rest = int(found[1]), found[2], found[3]
    rest = FUSED_NORMS.get(rest, rest)
    if name.startswith("mtp."):
        prefix, layer = "mtp.layers.{layer}." + inside, number
    else:
        prefix, layer = "decoder.layers.{layer}.", chunk.decoder.layers[number].layer_number - 1
    if not (expert := EXPERTS.fullmatch(rest)):
        yield Key(prefix + rest, layer), tensor
        return
    here = local_experts(chunk.config.num_moe_experts)
    named = Key(prefix + expert[1], layer)
    if expert[2]:
        yield named._replace(expert=here[int(expert[2])]), tensor
    else:
        yield from ((named._replace(expert=e), part) for e, part in zip(here, tensor.detach(), strict=True))


def local_experts(experts: int) -> range:
    """The model's experts that this rank holds."""
    each = experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * each
    return range(first, first + each)


def expected(chunks: Sequence[Any], entries: dict[Key, Entry], architecture: Architecture) -> set[Key]:
    """The keys of the table that this rank's chunks have to hold: its layers, its experts, the model's ends."""
    layers = {layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers}
    experts = local_experts(architecture.transformer.get("num_moe_experts") or 0)
    first, last = any(chunk.pre_process for chunk in chunks), any(chunk.post_process for chunk in chunks)

    def here(key: Key) -> bool:
        if key.layer is not None:
            of = range(architecture.predicting) if key.name.startswith("mtp.") else layers
            return key.layer in of and (key.expert is None or key.expert in experts)
        if key == OUTPUT and architecture.tied:
            return last and not first  # a stage without the embedding holds a copy
        return first if key.name.startswith("embedding.") else last

    return {key for key in entries if here(key)}


def split_of(key: Key, entry: Entry) -> tuple[int, int]:
    """Into how many shards the tensor is split, and which of them this rank holds."""
    if entry.kind.dim is None:
        return 1, 0
    group = split_group(expert=key.expert is not None)
    return group.size(), group.rank()


def split_group(*, expert: bool) -> ProcessGroup:
    """The ranks that hold the shards of one tensor."""
    of = parallel_state.get_expert_tensor_parallel_group if expert else parallel_state.get_tensor_model_parallel_group
    return cast(ProcessGroup, of())
