"""Offload of what recomputed layers keep: their inputs, and attention's outputs, which are then computed only once.

megatron-core's recomputation of whole layers keeps their inputs on the device, and repeats all of the forward pass.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..kernels.kept_outputs import KeptOutputs, KeptTensor
from ..mapping.local_params import decoder_layers
from . import activation_offload
from .activation_offload import LayerTensors, SavedTensor, Streams, check_layers, unpack

_checkpoint = tensor_parallel.checkpoint
_current: "_ChunkRecompute | None" = None  # chunk whose layers are called


def offload_recomputed(chunks: Sequence[GPTModel], num_layers: int) -> None:
    """Offload what the first layers of this rank keep for their recomputation. Raises ValueError if there are fewer."""
    tensor_parallel.checkpoint = _checkpoint_layers
    remaining = num_layers
    check_layers(num_layers, sum(len(decoder_layers(chunk)) for chunk in chunks))
    for chunk in chunks:
        layers = min(remaining, len(decoder_layers(chunk)))
        remaining -= layers
        recomputed = chunk.config.recompute_num_layers or 1
        if chunk.config.recompute_method == "block" and layers > recomputed:
            raise ValueError(
                f"--cpu_offloading_num_layers {num_layers}: more than --recompute_num_layers {recomputed} of a chunk, "
                "and with --recompute_method block only recomputed layers are offloaded. Set fewer, or recompute more"
            )
        if layers:
            recompute = _ChunkRecompute(layers, recomputed if chunk.config.recompute_method == "uniform" else 1)
            chunk.decoder.register_forward_pre_hook(recompute.begin)
            chunk.decoder.register_forward_hook(recompute.end, always_call=True)


def _checkpoint_layers(function: Callable[..., Any], distributes: bool, *arguments: Any) -> Any:
    """Stand in for megatron-core's `tensor_parallel.checkpoint`."""
    if _current is None:
        return _checkpoint(function, distributes, *arguments)
    return _current.checkpoint(function, distributes, *arguments)


class _Resident(NamedTuple):
    """Tensor that stays on the device."""

    tensor: Tensor

    def get(self) -> Tensor:
        return self.tensor


class _ChunkRecompute:
    """Recomputation of one chunk's layers, the first `limit` with offload. unit: layers that are recomputed together"""

    def __init__(self, limit: int, unit: int):
        self._limit, self._unit, self._streams = limit, unit, Streams()
        self._first = 0  # layer that is called next
        self._last: weakref.ref[LayerTensors] | None = None

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Begin a forward pass of the chunk."""
        global _current
        if torch.is_grad_enabled():
            _current, self._first, self._last = self, 0, None

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End the pass, and free what the last layers have copied."""
        global _current
        _current = None
        self._release_last()

    def checkpoint(self, function: Callable[..., Any], distributes: bool, hidden: Tensor, *arguments: Any) -> Any:
        """Call layers that will be recomputed. hidden: their input [sequence, batch, hidden_size]"""
        is_offloaded = self._first < self._limit
        self._first += self._unit
        if not is_offloaded:
            output = _checkpoint(function, distributes, hidden, *arguments)
            self._release_last()
            return output
        tensors = LayerTensors(self._last)
        address, shape = hidden.data_ptr(), hidden.shape  # autograd keeps `pack`, which must not keep the input

        def save(tensor: Tensor) -> SavedTensor | _Resident:
            is_small = tensor.nbytes < activation_offload.MIN_BYTES
            return _Resident(tensor) if is_small else tensors.save(tensor, self._streams)

        def pack(tensor: Tensor) -> Tensor | KeptTensor:
            return save(tensor) if (tensor.data_ptr(), tensor.shape) == (address, shape) else tensor

        with saved_tensors_hooks(pack, unpack):
            output = _checkpoint(KeptOutputs(save).keep(function), distributes, hidden, *arguments)
        self._release_last()
        self._last = weakref.ref(tensors)
        return output

    def _release_last(self) -> None:
        if self._last is not None and (tensors := self._last()) is not None:
            tensors.release()
