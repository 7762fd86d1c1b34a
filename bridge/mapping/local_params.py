"""Local parameters of this rank: tensors of its model chunks by `ParamKey`, and their position among the shards."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .architecture import Architecture
from .fp8 import as_bf16
from .param_mapping import OUTPUT, TOWERS, MappingEntry, ParamKey, ParamTable

# Transformer Engine fuses a norm into the linear layer that follows it.
FUSED_NORMS = {
    f"{matrix}.layer_norm_{kind}": f"{norm}.{kind}"
    for matrix, norm in (
        ("self_attention.linear_qkv", "input_layernorm"),
        ("self_attention.in_proj", "input_layernorm"),
        ("mlp.linear_fc1", "pre_mlp_layernorm"),
    )
    for kind in ("weight", "bias")
}
LAYER = re.compile(r"(?:decoder|mtp)\.layers\.(\d+)\.((?:mtp_model_layer\.)?)(.+)")
TOWER_LAYER = re.compile(r"((?:vision|audio)\.(?:layers|deep_mergers)\.)(\d+)(\..+)")
# `weight3`: local expert 3 in Transformer Engine; `weight`: all local experts, stacked.
EXPERTS = re.compile(r"(mlp\.experts\.linear_fc[12]\.(?:weight|bias|adapter\.lora_[AB]))(\d*)")
ADAPTER = ".adapter."  # in the names of adapter tensors (lora/)


class LocalParam(NamedTuple):
    """Parameter or persistent buffer of a chunk, with one view per stacked expert."""

    chunk: GPTModel
    tensor: Tensor
    views: dict[ParamKey, Tensor]
    name: str  # in the chunk


def decoder_layers(chunk: GPTModel) -> list[TransformerLayer]:
    """List the decoder layers of a chunk. Their `layer_number` counts over the whole model, from 1."""
    return cast(list[TransformerLayer], list(chunk.decoder.layers))


def collect_params(
    chunks: Sequence[GPTModel], *, adapters: bool = False, copies: bool = True
) -> dict[ParamKey, Tensor]:
    """Return the parameters and persistent buffers of this rank's chunks by key, in the model's order.

    Stacked experts are separate views. adapters: return only the adapters' tensors, else all others. copies: include
    the tensors of which the first pipeline stage has the originals (`is_copy`).
    """
    params = iter_params(chunks, adapters=adapters, copies=copies)
    return {key: view for param in params for key, view in param.views.items()}


def iter_params(chunks: Sequence[GPTModel], *, adapters: bool = False, copies: bool = True) -> Iterator[LocalParam]:
    """Yield the parameters and persistent buffers of `collect_params`, without separating stacked experts."""
    for chunk in chunks:
        for name, tensor in _named_state(chunk):
            if (ADAPTER in name) == adapters:
                views = dict(iter_views(chunk, name, tensor))
                if copies or not is_copy(chunk, next(iter(views))):
                    yield LocalParam(chunk, tensor, views, name)


def is_copy(chunk: GPTModel, key: ParamKey) -> bool:
    """Return whether a chunk's tensor is a copy of the first pipeline stage's embedding, or of its adapter.

    The last stage has one for multi-token prediction, and one as its output layer if that is tied.
    """
    if chunk.pre_process:
        return False
    return key.name.startswith("embedding.") or (key == OUTPUT and chunk.share_embeddings_and_output_weights)


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, as_bf16(parameter)) for name, parameter in model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def iter_views(chunk: GPTModel, name: str, tensor: Tensor) -> Iterator[tuple[ParamKey, Tensor]]:
    """Yield the keys of the parameter `name` of a chunk, each with its view of `tensor`."""
    match = LAYER.fullmatch(name)
    if tower := TOWER_LAYER.fullmatch(name):
        yield ParamKey(f"{tower[1]}{{layer}}{tower[3]}", int(tower[2])), tensor
        return
    if not match:
        yield ParamKey(name), tensor
        return
    number, mtp, suffix = int(match[1]), match[2], match[3]
    suffix = FUSED_NORMS.get(suffix, suffix)
    if name.startswith("mtp."):
        prefix, layer = "mtp.layers.{layer}." + mtp, number
    else:
        prefix, layer = "decoder.layers.{layer}.", decoder_layers(chunk)[number].layer_number - 1
    if not (expert_match := EXPERTS.fullmatch(suffix)):
        yield ParamKey(prefix + suffix, layer), tensor
        return
    experts = local_experts(chunk.config.num_moe_experts or 0)
    key = ParamKey(prefix + expert_match[1], layer)
    if expert_match[2]:
        yield key._replace(expert=experts[int(expert_match[2])]), tensor
    else:
        yield from ((key._replace(expert=e), part) for e, part in zip(experts, tensor.detach(), strict=True))


def local_experts(experts: int) -> range:
    """Return the global indices of this rank's experts, given their total number."""
    count = experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * count
    return range(first, first + count)


def expected_keys(chunks: Sequence[GPTModel], entries: ParamTable, architecture: Architecture) -> set[ParamKey]:
    """Return the keys that this rank's chunks must have: its layers, its experts, embedding and output layer, tower."""
    layers = {layer.layer_number - 1 for chunk in chunks for layer in decoder_layers(chunk)}
    experts = local_experts(architecture.transformer.get("num_moe_experts") or 0)
    first, last = any(chunk.pre_process for chunk in chunks), any(chunk.post_process for chunk in chunks)
    has_embedding = first or (last and architecture.mtp_depths > 0)

    def is_local(key: ParamKey) -> bool:
        if key.name.startswith(TOWERS):
            return True
        if key.layer is not None:
            numbers = range(architecture.mtp_depths * last) if key.name.startswith("mtp.") else layers
            return key.layer in numbers and (key.expert is None or key.expert in experts)
        if key == OUTPUT and architecture.tied:
            return last and not has_embedding  # a last stage without the embedding has a copy
        return has_embedding if key.name.startswith("embedding.") else last

    return {key for key in entries if is_local(key)}


def shard_position(key: ParamKey, entry: MappingEntry) -> tuple[int, int]:
    """Return the number of shards of a tensor, and the index of this rank's shard."""
    if entry.kind.dim is None:
        return 1, 0
    group = shard_group(expert=key.expert is not None)
    return group.size(), group.rank()


def shard_group(*, expert: bool) -> ProcessGroup:
    """Return the process group that shards a tensor."""
    if expert:
        return cast(ProcessGroup, parallel_state.get_expert_tensor_parallel_group())
    return cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())
