"""Layout of vLLM's weights, recorded while its own loaders fill them, so that later updates are plain copies.

vLLM loads a checkpoint's tensors by the loaders of its parameters, which fuse projections, stack experts and cut
shards. Every one ends in `copy_` from a part of the checkpoint's tensor to a part of the parameter. These copies are
recorded at the first update, and verified: the parameters must have the values that were copied, and nothing else.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from ...bridge.checkpoint.strided_copy import StridedCopy, WeightLayout
from .vllm_adapter import VllmObject
from .weight_sync import digest

# Methods that compute with the parameters as they were loaded, and keep no other copy of them.
PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
# Kernels for experts whose weights are those of the loaders. Others reorder them: FlashInfer's, those for CPUs.
PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON"}


class LayoutError(ValueError):
    """Raised where vLLM's weights are not copies of a checkpoint's, so that only its loaders can update them."""


class _Record(NamedTuple):
    """Copy by a loader: to a tensor of a module, in the form that the tensor had meanwhile."""

    target: str  # name of the module's tensor
    form: tuple[torch.Size, tuple[int, ...], torch.dtype]
    copy: StridedCopy
    digest: Tensor  # digest of the copied values, in the target's dtype


class _ModuleTensor(NamedTuple):
    """Place of a parameter or buffer."""

    module: torch.nn.Module
    name: str  # the module's, in the model
    leaf: str

    def tensor(self) -> Tensor | None:
        parameter = self.module._parameters.get(self.leaf)
        return self.module._buffers.get(self.leaf) if parameter is None else parameter


class LoaderTrace(TorchDispatchMode):
    """Record of the copies by which vLLM's loaders fill a model. `watch` gives them the checkpoint's tensors."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._model = model
        self._starts: list[int] = []  # sorted addresses of the checkpoint's tensors
        self._sources: dict[int, tuple[int, str, torch.dtype]] = {}  # address: end, name, dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._records: dict[str, list[_Record]] = {}
        self._problem = unsupported_layer(model)
        # While a layer is loaded its parameters are new tensors, whose values vLLM copies to those of its kernels.
        self._kernel_places = self._list_places()
        self._places = dict(self._kernel_places)

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint, and recognise copies from them from then on."""
        stream = iter(weights)
        while True:
            with _disable_current_modes():  # copies that make the tensors are not loaders'
                item = next(stream, None)
            if item is None:
                return
            if self._problem is None:
                self._add_source(*item)
            yield item

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and self._problem is None:
            self._record(*args[:2])
        return result

    def layout(self) -> WeightLayout:
        """Return the verified layout, after the update. Raises LayoutError."""
        targets: dict[str, Tensor] = {}
        comparisons = []
        if self._problem is None:
            modules = dict(self._model.named_modules())
            for records in self._records.values():
                for record in records:
                    module, _, leaf = record.target.rpartition(".")
                    tensor = _ModuleTensor(modules[module], module, leaf).tensor()
                    if tensor is None or _form(tensor) != record.form:
                        raise LayoutError(f"{record.target} is stored in another form than it was loaded in")
                    targets[record.target] = tensor.detach()
                    comparisons.append((record, digest(record.copy.target_view(targets[record.target]))))
        if self._problem is not None:
            raise LayoutError(self._problem)
        if not comparisons:
            raise LayoutError("no copy was seen")
        expected = torch.stack([record.digest for record, _ in comparisons])
        stored = torch.stack([value for _, value in comparisons])
        for differs, (record, _) in zip((expected != stored).tolist(), comparisons, strict=True):
            if differs:
                raise LayoutError(f"{record.target} has other values than were loaded")
        copies = {
            name: [(record.target, record.copy) for record in self._records.get(name, ())] for name in self._shapes
        }
        layout = WeightLayout(targets, self._shapes, copies)
        layout.padded.update(_padded_targets(layout))
        return layout

    def _add_source(self, name: str, tensor: Tensor) -> None:
        self._shapes[name] = tuple(tensor.shape)
        if not tensor.is_contiguous():
            self._problem = f"{name} came in pieces"
            return
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        # Memory is reused for later tensors once a layer is complete: these replace what was there.
        at = bisect.bisect_left(self._starts, start)
        if at and self._sources[self._starts[at - 1]][0] > start:
            at -= 1
        stop = bisect.bisect_left(self._starts, end)
        for address in self._starts[at:stop]:
            del self._sources[address]
        self._starts[at:stop] = [start]
        self._sources[start] = end, name, tensor.dtype

    def _record(self, target: Tensor, source: Tensor) -> None:
        if target.is_meta or target.numel() == 0 or (place := self._locate(target)) is None:
            return
        if source.data_ptr() == target.data_ptr():  # the end of a layer with a score bias, which vLLM loads in place
            return
        target_name = f"{place.name}.{place.leaf}"
        at = bisect.bisect_right(self._starts, source.data_ptr()) - 1 if not source.is_meta else -1
        end, name, dtype = self._sources[self._starts[at]] if at >= 0 else (0, "", None)
        if source.data_ptr() >= end or source.dtype != dtype or source.shape != target.shape:
            self._problem = f"the loader of {target_name} computes its values"
            return
        parameter = place.tensor()
        assert parameter is not None
        copy = StridedCopy(
            tuple(target.shape),
            (source.data_ptr() - self._starts[at]) // source.itemsize,
            source.stride(),
            int(target.storage_offset() - parameter.storage_offset()),
            target.stride(),
        )
        record = _Record(target_name, _form(parameter), copy, digest(source.to(target.dtype)))
        # vLLM 0.32 loads biases twice: the later copy counts.
        records = self._records.setdefault(name, [])
        records[:] = [earlier for earlier in records if (earlier.target, earlier.copy) != (target_name, copy)]
        records.append(record)

    def _locate(self, target: Tensor) -> _ModuleTensor | None:
        """Return the place that a tensor is a view of; None for other tensors."""
        address = target.untyped_storage().data_ptr()
        for places in (self._kernel_places, self._places):
            if (place := places.get(address)) is not None and _address(place.tensor()) == address:
                return place
        if address in self._kernel_places:  # vLLM's copy to the kernel's tensor, at the end of a layer
            return None
        self._places = self._list_places()
        return self._places.get(address)

    def _list_places(self) -> dict[int, _ModuleTensor]:
        places = {}
        for name, module in self._model.named_modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if address := _address(tensor):
                    places[address] = _ModuleTensor(module, name, leaf)
        return places


def unsupported_layer(model: torch.nn.Module) -> str | None:
    """Return why a layer may compute with other tensors than its loaded parameters, or None if none does."""
    from vllm.model_executor.layers.attention import (  # pyright: ignore[reportMissingImports]
        Attention,
        MMEncoderAttention,
    )

    for name, module in model.named_modules():
        method: VllmObject = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and kind not in PLAIN_METHODS:
            return f"{name} has the method {kind}"
        backend = getattr(method, "unquantized_backend", None)
        if backend is not None and backend.name not in PLAIN_EXPERTS:
            return f"{name} has the kernel for experts {backend.value}"
        # vLLM's functions for CPUs: those with a closure hold weights of their own.
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return f"{name} computes with a repacked copy of its weight"
        is_plain = isinstance(module, Attention | MMEncoderAttention)  # without weights
        is_method = type(module).__name__ in PLAIN_METHODS
        if hasattr(module, "process_weights_after_loading") and not (is_plain or is_method):
            return f"{name} ({type(module).__name__}) derives tensors from its weights"
    return None


def _padded_targets(layout: WeightLayout) -> Iterator[str]:
    """Yield the targets that copies do not fill. Raises LayoutError unless the rest is zeros."""
    by_target: dict[str, list[StridedCopy]] = {}
    for copies in layout.copies.values():
        for name, copy in copies:
            by_target.setdefault(name, []).append(copy)
    filled = Counter({name: sum(copy.numel for copy in copies) for name, copies in by_target.items()})
    for name, tensor in layout.targets.items():
        if filled[name] > tensor.numel():
            raise LayoutError(f"{name} is loaded twice")
        if filled[name] < tensor.numel():
            rest = tensor.clone(memory_format=torch.preserve_format)
            for copy in by_target[name]:
                copy.target_view(rest).zero_()
            if rest.any():
                raise LayoutError(f"{name} has values that are not loaded")
            yield name


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's memory, 0 without memory."""
    return 0 if tensor is None or tensor.is_meta else tensor.untyped_storage().data_ptr()
