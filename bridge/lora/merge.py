"""Merging of adapters into weights."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from ..mapping.local_params import ADAPTER, collect_params, iter_views
from ..mapping.param_mapping import ParamKey
from .layers import ExpertsAdapter


def merge_functions(chunks: Sequence[GPTModel]) -> dict[ParamKey, Callable[[Tensor], Tensor]]:
    """Return a function for each weight with an adapter: from this rank's shard to the merged shard in fp32.

    For DoRA on weights split by inputs, all ranks of a tensor-parallel group must call it.
    """
    functions: dict[ParamKey, Callable[[Tensor], Tensor]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            module, _, leaf = name.rpartition(".")
            adapter = getattr(chunk.get_submodule(module), "adapter", None)
            if leaf != "weight" or ADAPTER in name or adapter is None:
                continue
            for number, (key, _) in enumerate(iter_views(chunk, name, parameter)):
                is_stacked = isinstance(adapter, ExpertsAdapter)
                functions[key] = partial(adapter.merged, expert=number) if is_stacked else adapter.merged
    return functions


@torch.no_grad()
def merge_and_unload(chunks: Sequence[GPTModel]) -> None:
    """Merge the adapters of `chunks` into their weights, and remove them. The model cannot be trained afterwards.

    Sums are in fp32 and rounded once. Every rank calls this.
    """
    tensors = collect_params(chunks)
    for key, merged in merge_functions(chunks).items():
        tensors[key].copy_(merged(tensors[key]))
    for chunk in chunks:
        for module in list(chunk.modules()):
            if adapter := getattr(module, "adapter", None):
                if hook := getattr(adapter, "hook", None):
                    hook.remove()
                module.__dict__.pop("_forward_impl", None)
                del module.adapter
