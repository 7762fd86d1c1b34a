"""Offload of activations: tensors that layers save for their backward pass wait in host memory.

A layer's tensors leave while the next layer computes, and arrive while the backward pass of the next layer computes.
megatron-core's --cpu-offloading needs Transformer Engine; this works with any layer, through autograd's hooks.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..kernels.kept_outputs import KeptTensor
from ..mapping.local_params import decoder_layers
from .host_pool import HostPool

MIN_BYTES = 2**18  # smallest tensor to offload: copies of smaller ones would cost more time than the memory is worth


def offload_activations(chunks: Sequence[GPTModel], num_layers: int) -> None:
    """Offload the activations of the first layers of this rank. Raises ValueError if there are fewer."""
    layers = [(chunk, layer) for chunk in chunks for layer in decoder_layers(chunk)]
    check_layers(num_layers, len(layers))
    streams = Streams()
    offloads = {chunk: _ChunkOffload(chunk, streams) for chunk in chunks if decoder_layers(chunk)}
    for number, (chunk, layer) in enumerate(layers):
        if number < num_layers:
            layer.register_forward_pre_hook(offloads[chunk].begin_layer)
            layer.register_forward_hook(offloads[chunk].end_layer, always_call=True)
        else:
            layer.register_forward_hook(offloads[chunk].release_last)


def check_layers(num_layers: int, layers: int) -> None:
    """Raise ValueError if there are fewer layers than should be offloaded."""
    if num_layers > layers:
        raise ValueError(
            f"--cpu_offloading_num_layers {num_layers}: a pipeline stage has {layers} layers. Set at most these"
        )


class Streams:
    """Host memory, and streams of the copies in both directions, made when they are first used; without a GPU none."""

    def __init__(self) -> None:
        self.host = HostPool()
        self._streams: dict[str, torch.cuda.Stream] = {}

    def get(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream()
        return self._streams[name]


class _ChunkOffload:
    """Offload of one chunk's layers, by hooks of its modules."""

    def __init__(self, chunk: GPTModel, streams: Streams):
        self._chunk, self._first, self._streams = chunk, decoder_layers(chunk)[0], streams
        self._parameter_storages: set[int] = set()
        self._hooks: saved_tensors_hooks | None = None
        self._layer: LayerTensors | None = None
        self._last: weakref.ref[LayerTensors] | None = None

    def begin_layer(self, module: nn.Module, inputs: Any) -> None:
        """Begin to pack what autograd saves."""
        if not torch.is_grad_enabled():
            return
        if self._last is None or module is self._first:
            # Read in each pass: wrapping the model for data parallelism moves parameters into buffers.
            self._parameter_storages = {p.untyped_storage()._cdata for p in self._chunk.parameters()}
        self._layer = LayerTensors(self._last)
        self._hooks = saved_tensors_hooks(self._pack, unpack)
        self._hooks.__enter__()

    def end_layer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """End packing, and free what the layer before has copied."""
        if self._hooks is None or self._layer is None:
            return
        self._hooks.__exit__(None, None, None)
        self.release_last()
        self._last, self._hooks, self._layer = weakref.ref(self._layer), None, None

    def release_last(self, *_: Any) -> None:
        """Free the last layer's tensors on the device, after their copies."""
        if self._last is not None and (layer := self._last()) is not None:
            layer.release()

    def _pack(self, tensor: Tensor) -> "Tensor | SavedTensor":
        is_expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.nbytes < MIN_BYTES or tensor.untyped_storage()._cdata in self._parameter_storages or is_expanded:
            return tensor
        assert self._layer is not None
        return self._layer.save(tensor, self._streams)


class LayerTensors:
    """Tensors that one forward pass of a layer saved. They live as long as the graph refers to them."""

    def __init__(self, previous: "weakref.ref[LayerTensors] | None"):
        self.previous = previous  # layer before, whose backward pass comes next
        self._saved: weakref.WeakValueDictionary[tuple[Any, ...], SavedTensor] = weakref.WeakValueDictionary()
        self.is_fetched = False

    def save(self, tensor: Tensor, streams: Streams) -> "SavedTensor":
        """Return the saved tensor; operations that save the same one share it."""
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        saved = self._saved.get((*key, tensor._version))
        if saved is None:
            saved = self._saved[(*key, tensor._version)] = SavedTensor(tensor, self, streams)
        return saved

    def release(self) -> None:
        for saved in list(self._saved.values()):
            saved.release()

    def fetch(self) -> None:
        """Begin the copies back to the device."""
        self.is_fetched = True
        for saved in list(self._saved.values()):
            saved.fetch()


class SavedTensor:
    """Tensor on its way to the host and back."""

    def __init__(self, tensor: Tensor, layer: LayerTensors, streams: Streams):
        self.layer, self._streams = layer, streams
        # Held until `release`, so that its memory is not reused within the copy.
        self._source: Tensor | None = tensor
        self._is_cuda = tensor.is_cuda
        self._form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self._fetched: Tensor | None = None
        self._block = streams.host.take(tensor.nbytes)
        weakref.finalize(self, streams.host.give_back, self._block).atexit = False
        self._host = self._block.as_tensor(tensor)
        if not self._is_cuda:
            self._host.copy_(tensor)
            return
        stream = streams.get("to host")
        stream.wait_stream(torch.cuda.current_stream())
        if self._block.last_use is not None:
            stream.wait_event(self._block.last_use)
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
            self._event = self._block.last_use = stream.record_event()

    def release(self) -> None:
        if self._is_cuda and self._source is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._source = None

    def fetch(self) -> None:
        if self._source is not None or self._fetched is not None:
            return
        shape, stride, dtype, device = self._form
        self._fetched = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if not self._is_cuda:
            self._fetched.copy_(self._host)
            return
        copies = self._streams.get("to device")
        copies.wait_stream(torch.cuda.current_stream())  # earlier users of the memory
        copies.wait_event(self._event)
        with torch.cuda.stream(copies):
            self._fetched.copy_(self._host, non_blocking=True)
            self._event = self._block.last_use = copies.record_event()

    def get(self) -> Tensor:
        """Return the tensor on the device, and begin to fetch those of the layer before."""
        if self._source is not None:
            return self._source
        if not self.layer.is_fetched:
            self.layer.fetch()
            previous = self.layer.previous and self.layer.previous()
            if previous is not None and not previous.is_fetched:
                previous.fetch()
        self.fetch()
        assert self._fetched is not None
        if self._is_cuda:
            torch.cuda.current_stream().wait_event(self._event)
        return self._fetched


def unpack(saved: Tensor | KeptTensor) -> Tensor:
    """Return the tensor on the device: a hook of autograd."""
    return saved if isinstance(saved, Tensor) else saved.get()
