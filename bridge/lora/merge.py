"""Merge adapters into weights."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..mapping.local_params import ADAPTER, by_key, collect_params
from ..mapping.param_mapping import ParamKey
from .layers import ExpertsAdapter


def merge_functions(chunks: Sequence[GPTModel]) -> dict[ParamKey, Callable[[Tensor], Tensor]]:
    """Return, for each weight with an adapter, a function from this rank's shard to the merged one, a copy in fp32.

    Where DoRA's matrices are split by their inputs, the ranks of a tensor-parallel group call it together.
    """
    functions: dict[ParamKey, Callable[[Tensor], Tensor]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            module, _, leaf = name.rpartition(".")
            adapter = getattr(chunk.get_submodule(module), "adapter", None)
            if leaf != "weight" or ADAPTER in name or adapter is None:
                continue
            for number, (key, _) in enumerate(by_key(chunk, name, parameter)):
                inside = isinstance(adapter, ExpertsAdapter)
                functions[key] = partial(adapter.merged, expert=number) if inside else adapter.merged
    return functions


@torch.no_grad()
def merge_and_unload(chunks: Sequence[GPTModel]) -> None:
    """Merge the adapters of `chunks` into their weights, and remove them: for a model that is saved, never trained.

    Each sum is made in fp32 and rounded once. Every rank calls this.
    """
    tensors = collect_params(chunks)
    for key, merged in merge_functions(chunks).items():
        tensors[key].copy_(merged(tensors[key]))
    for chunk in chunks:
        for module in list(chunk.modules()):
            if adapter := getattr(module, "adapter", None):
                if hook := getattr(adapter, "hook", None):
                    hook.remove()
                del module.adapter
