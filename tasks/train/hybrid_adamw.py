"""AdamW whose state is on the host or in narrow types, updated bucket by bucket.

On the host only one bucket's gradients and weights are in pinned memory: while a bucket is computed, the next one's
gradients arrive and the previous one's weights leave. The norm for clipping needs all gradients, so no update can begin
within the backward pass.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...bridge import runtime
from ..system.memory import available_host_memory
from .adamw import AdamW, TensorRow
from .state_tensor import STATE_DTYPES, StateTensor

BUCKET = 2**25  # elements, a multiple of state_tensor.BLOCK
HOST_PIECE = 2**23  # elements of an update on the host: the fastest of 2^18 to 2^24 on 2 and on 32 cores
HALF = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StatePlacement:
    """Share of the parameters whose state is on the host, and the types of all states."""

    host_fraction: float = 0.0
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    main_params: str = "fp32"

    @property
    def is_plain(self) -> bool:
        """Return whether all states are fp32 on the device."""
        return not self.host_fraction and {self.exp_avg, self.exp_avg_sq, self.main_params} == {"fp32"}

    def masters(self) -> AbstractContextManager[None]:
        """Return a context within which megatron-core builds the masters."""
        return nullcontext() if self.is_plain else empty_masters()

    def dtype_of(self, name: str) -> torch.dtype:
        return STATE_DTYPES[{"param": self.main_params}.get(name) or getattr(self, name)]


class _EmptyMasters(TorchFunctionMode):
    """Mode in which `float()` of a half-precision tensor returns a tensor of that shape without storage."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.float or args[0].dtype not in HALF:
            return func(*args, **(kwargs or {}))
        master = torch.empty(args[0].shape, dtype=torch.float32, device=args[0].device)
        master.untyped_storage().resize_(0)
        return master


@contextmanager
def empty_masters() -> Iterator[None]:
    """Have megatron-core build fp32 masters without memory; HybridAdamW has their values.

    They hold the gradients and attributes. All masters at once would not fit on the device beside the gradients.
    """
    with _EmptyMasters():
        yield


class _Piece(NamedTuple):
    """Range of a parameter's elements, and their state."""

    group: int  # number of the parameter group
    parameter: Tensor  # that the optimizer updates: an fp32 master, or the model's fp32 parameter
    start: int
    stop: int
    states: dict[str, StateTensor]  # exp_avg, exp_avg_sq, and param of a master

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.start : self.stop]


class BucketTensors(NamedTuple):
    """Tensors of a bucket's pieces, each [elements]."""

    gradients: list[Tensor]
    parameters: list[Tensor | None]  # fp32 parameters to update; None where a piece has a master among its states
    copies: list[Tensor | None]  # half-precision copies of masters


@dataclass
class _Workspace:
    """Memory for one bucket, allocated when it is first used."""

    device: torch.device
    is_pinned: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, offset: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = f"{name} {dtype}"
        if key not in self.tensors:
            self.tensors[key] = torch.empty(BUCKET, dtype=dtype, device=self.device, pin_memory=self.is_pinned)
        return self.tensors[key][offset : offset + size]


class HybridAdamW(AdamW):
    """AdamW with the state of a share of the parameters on the host, and states in fp32, fp16, bf16 or FP8.

    The arithmetic is fp32. As in AdamW, gradients are divided by `grad_scale`, and nothing changes if `found_inf` is 1;
    a step with parameters on the host waits for the device.

    copies: the half-precision parameter of each master, which has no storage of its own (`empty_masters`).
    """

    def __init__(
        self, groups: list[dict[str, Any]], copies: dict[Tensor, Tensor], placement: StatePlacement, **defaults: Any
    ):
        self._placement, self._masters = placement, copies
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._on_host = _choose_hosted(parameters, placement.host_fraction)
        self._states: dict[Tensor, dict[str, StateTensor]] = {}
        super().__init__(groups, copies, **defaults)
        numbers = {parameter: n for n, group in enumerate(self.param_groups) for parameter in group["params"]}
        host_parameters = [parameter for parameter in parameters if parameter in self._on_host]
        is_narrow = any(dtype != "fp32" for dtype in (placement.exp_avg, placement.exp_avg_sq, placement.main_params))
        narrow = [parameter for parameter in parameters if parameter not in self._on_host] if is_narrow else []
        self._bucketed = {*host_parameters, *narrow}
        self._host_buckets = self._buckets(host_parameters, numbers, min(BUCKET, HOST_PIECE))
        self._device_buckets = self._buckets(narrow, numbers, BUCKET)
        self._workspace = _Workspace(runtime.device())
        self._pipeline = HostPipeline(self, self._host_buckets) if self._host_buckets else None

    @torch.no_grad()
    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        is_hosted = parameter in self._on_host
        device = torch.device("cpu") if is_hosted else parameter.device
        dtypes = {name: self._placement.dtype_of(name) for name in MOMENTS}
        if parameter in self._masters and (is_hosted or self._placement.main_params != "fp32"):
            dtypes["param"] = self._placement.dtype_of("param")
        states = {
            name: StateTensor.zeros(parameter.numel(), dtype, device, is_root=name == "exp_avg_sq")
            for name, dtype in dtypes.items()
        }
        if parameter in self._masters:
            copy = self._masters[parameter].view(-1)
            if "param" not in states:
                _fill_storage(parameter)
                parameter.view(-1).copy_(copy)
            for start in range(0, len(copy) if "param" in states else 0, BUCKET):
                stop = min(start + BUCKET, len(copy))
                states["param"].part(start, stop).write(copy[start:stop].to(device).float())
        self._states[parameter] = states
        scales = {f"{name}_exponents": state.exponents for name, state in states.items() if state.exponents is not None}
        return {name: state.values for name, state in states.items()} | scales

    def _buckets(self, parameters: list[Tensor], numbers: dict[Tensor, int], size: int) -> list[list[_Piece]]:
        """Divide parameters into pieces of at most `size` elements, and these into buckets of at most BUCKET."""
        buckets: list[list[_Piece]] = []
        room = 0
        for parameter in parameters:
            for start in range(0, parameter.numel(), size):
                stop = min(start + size, parameter.numel())
                states = {name: state.part(start, stop) for name, state in self._states[parameter].items()}
                if stop - start > room:
                    buckets.append([])
                    room = BUCKET
                buckets[-1].append(_Piece(numbers[parameter], parameter, start, stop, states))
                room -= stop - start
        return buckets

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            plain = (p for p in group["params"] if p.grad is not None and p.numel() and p not in self._bucketed)
            self._step_group(number, group, plain)
        for number, bucket in enumerate(self._device_buckets):
            gradients = [_gradient(piece) for piece in bucket]
            parameters = [piece.of(piece.parameter) if "param" not in piece.states else None for piece in bucket]
            copies = [self._copy_of(piece) for piece in bucket]
            tensors = BucketTensors(gradients, parameters, copies)
            self.step_bucket(f"bucket {number}", bucket, tensors, self._workspace, self.grad_scale, self.found_inf)
        if self._pipeline is not None:
            self._pipeline.step()

    def _copy_of(self, piece: _Piece) -> Tensor | None:
        copy = self.copies.get(piece.parameter)
        return None if copy is None else piece.of(copy)

    def step_bucket(
        self,
        name: str,
        bucket: list[_Piece],
        tensors: "BucketTensors",
        workspace: _Workspace,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update the states of a bucket's pieces, and their parameters or copies, all on one device."""
        rows: dict[int, list[TensorRow]] = {}
        narrow_states: list[tuple[StateTensor, Tensor]] = []
        masters: list[tuple[StateTensor, Tensor, Tensor | None]] = []
        offset = 0
        for piece, gradient, parameter, copy in zip(bucket, *tensors, strict=True):
            values = {} if parameter is None else {"param": parameter}
            for kind, state in piece.states.items():
                values[kind] = state.values
                if state.values.dtype != torch.float32:
                    values[kind] = workspace.take(kind, offset, piece.size)
                    state.read(values[kind])
                    narrow_states.append((state, values[kind]))
            if (master := piece.states.get("param")) is not None and master.values.dtype != torch.float32:
                # The copy is of the master that is stored, so that a resumed run has the same.
                masters.append((master, values["param"], copy))
                copy = None
            row = (values["param"], gradient, values["exp_avg"], values["exp_avg_sq"], copy)
            rows.setdefault(piece.group, []).append(row)
            offset += piece.size
        for number, group_rows in rows.items():
            self._step_rows(f"{name}, group {number}", self.param_groups[number], group_rows, grad_scale, found_inf)
        for state, values in narrow_states:
            state.write(values)
        for master, values, copy in masters:
            master.read(values)
            if copy is not None:
                copy.copy_(values)

    def plain_state(self, parameter: Tensor) -> tuple[dict[str, Tensor], list[tuple[StateTensor, Tensor]]]:
        """Return a parameter's state, flat: views, and of scaled types fp32 copies on the host.

        The second value has the copies with the states to which `StateTensor.write` brings them back.
        """
        plain, copies = {}, []
        for name, state in self._states[parameter].items():
            plain[name] = state.values
            if state.is_scaled:
                plain[name] = torch.empty(len(state.values), dtype=torch.float32)
                on_device = torch.empty_like(state.values, dtype=torch.float32)
                state.read(on_device)
                plain[name].copy_(on_device)
                copies.append((state, plain[name]))
        if parameter in self._masters and "param" not in plain:
            plain["param"] = parameter.detach().view(-1)
        return plain, copies

    @torch.no_grad()
    def write_copies(self) -> None:
        """Round the masters to the half-precision parameters."""
        for parameter, copy in self.copies.items():
            state = self._states[parameter].get("param")
            if state is None:
                copy.view(-1).copy_(parameter.view(-1))
                continue
            for start in range(0, parameter.numel(), BUCKET):
                stop = min(start + BUCKET, parameter.numel())
                values = torch.empty(stop - start, dtype=torch.float32, device=state.values.device)
                state.part(start, stop).read(values)
                copy.view(-1)[start:stop].copy_(values.to(copy.dtype))


class HostPipeline:
    """Update of buckets on the host, beside the copies of the buckets before and after."""

    def __init__(self, optimizer: HybridAdamW, buckets: list[list[_Piece]]):
        self._optimizer, self._buckets = optimizer, buckets
        self._is_cuda = runtime.device().type == "cuda"
        self._slots = [_Workspace(torch.device("cpu"), is_pinned=self._is_cuda) for _ in range(2)]
        self._narrow = _Workspace(torch.device("cpu"))
        if self._is_cuda:
            self._arrivals, self._departures = torch.cuda.Stream(), torch.cuda.Stream()
            self._arrived = [torch.cuda.Event(), torch.cuda.Event()]
            self._departed = [torch.cuda.Event(), torch.cuda.Event()]

    def step(self) -> None:
        """Update all buckets. Work queued on the current stream afterwards sees the new parameters."""
        optimizer = self._optimizer
        if self._is_cuda:
            self._arrivals.wait_stream(torch.cuda.current_stream())
        self._receive(0)
        # These wait for the device: the end of the backward pass, and the norm over all ranks.
        found_inf = torch.zeros(()) if optimizer.found_inf is None else optimizer.found_inf.cpu()
        grad_scale = torch.ones(()) if optimizer.grad_scale is None else optimizer.grad_scale.cpu()
        if found_inf:
            return
        with _all_cores(is_needed=self._is_cuda):
            for number, bucket in enumerate(self._buckets):
                if number + 1 < len(self._buckets):
                    self._receive(number + 1)
                if self._is_cuda:
                    self._arrived[number % 2].synchronize()
                    self._departed[number % 2].synchronize()  # frees the slot's copies
                for piece, gradient, parameter, copy in zip(bucket, *self._staged(number), strict=True):
                    tensors = BucketTensors([gradient], [parameter], [copy])
                    optimizer.step_bucket("host", [piece], tensors, self._narrow, grad_scale, found_inf)
                self._send(number)
        if self._is_cuda:
            torch.cuda.current_stream().wait_stream(self._departures)

    def _receive(self, number: int) -> None:
        """Queue the copies of a bucket's gradients, and of fp32 parameters, to the host."""
        gradients, parameters, _ = self._staged(number)
        if self._is_cuda:
            self._arrivals.wait_event(self._departed[number % 2])  # parameters leave from where they arrive
        with self._on_stream("arrivals"):
            for piece, gradient, parameter in zip(self._buckets[number], gradients, parameters, strict=True):
                gradient.copy_(_gradient(piece), non_blocking=True)
                if parameter is not None:
                    parameter.copy_(piece.of(piece.parameter), non_blocking=True)
            if self._is_cuda:
                self._arrived[number % 2].record(self._arrivals)

    def _send(self, number: int) -> None:
        """Queue the copies of a bucket's updated parameters to the device."""
        _, parameters, copies = self._staged(number)
        with self._on_stream("departures"):
            for piece, parameter, copy in zip(self._buckets[number], parameters, copies, strict=True):
                if parameter is not None:
                    piece.of(piece.parameter).copy_(parameter, non_blocking=True)
                elif copy is not None:
                    piece.of(self._optimizer.copies[piece.parameter]).copy_(copy, non_blocking=True)
            if self._is_cuda:
                self._departed[number % 2].record(self._departures)

    def _staged(self, number: int) -> BucketTensors:
        """Return a bucket's tensors on the host, in one of the two slots."""
        slot, offset = self._slots[number % 2], 0
        tensors = BucketTensors([], [], [])
        for piece in self._buckets[number]:
            copy = self._optimizer.copies.get(piece.parameter)
            tensors.gradients.append(slot.take("gradient", offset, piece.size))
            tensors.parameters.append(slot.take("parameter", offset, piece.size) if copy is None else None)
            tensors.copies.append(None if copy is None else slot.take("copy", offset, piece.size, copy.dtype))
            offset += piece.size
        return tensors

    @contextmanager
    def _on_stream(self, name: str) -> Iterator[None]:
        if not self._is_cuda:
            yield
            return
        with torch.cuda.stream(self._arrivals if name == "arrivals" else self._departures):
            yield


def check_host_memory(placement: StatePlacement, elements: int, *, has_masters: bool) -> None:
    """Raise ValueError if the processes of this machine lack host memory for the states of `elements` parameters."""
    names = (*MOMENTS, *(("param",) if has_masters else ()))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    bytes_required = processes * placement.host_fraction * elements * sum(placement.dtype_of(n).itemsize for n in names)
    if bytes_required > (available := available_host_memory()):
        raise ValueError(
            f"--optimizer_cpu_offload true: the optimizer's state needs {bytes_required / 2**30:.1f} GiB of this "
            f"machine's memory, and {available / 2**30:.1f} GiB are free. Lower --optimizer_offload_fraction, or set "
            "--exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"
        )


def _choose_hosted(parameters: list[Tensor], fraction: float) -> set[Tensor]:
    """Return the parameters, in order, that fit into this share of all elements."""
    budget = fraction * sum(parameter.numel() for parameter in parameters)
    host_parameters, size = set(), 0
    for parameter in parameters:
        if size + parameter.numel() <= budget:
            host_parameters.add(parameter)
            size += parameter.numel()
    return host_parameters


def _fill_storage(master: Tensor) -> None:
    master.untyped_storage().resize_(master.numel() * master.element_size())


def _gradient(piece: _Piece) -> Tensor:
    gradient = piece.parameter.grad
    assert gradient is not None
    return piece.of(gradient)


@contextmanager
def _all_cores(*, is_needed: bool) -> Iterator[None]:
    """Let this process use its share of the machine's cores, which it leaves to data workers otherwise."""
    if not is_needed:
        yield
        return
    threads = torch.get_num_threads()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
