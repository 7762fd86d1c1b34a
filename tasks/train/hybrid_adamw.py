"""AdamW whose state is on the host or in narrow types, updated on the device bucket by bucket.

The norm for clipping needs all gradients, so no update can begin within the backward pass.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...bridge import runtime
from ...bridge.pinned_memory import PinnedAllocator
from ..system.memory import available_host_memory
from . import device_visits
from .adamw import AdamW, TensorRow
from .optimizer_buckets import Piece, Workspace, divide
from .state_tensor import STATE_DTYPES, StateTensor

DEVICE_BUCKET = 2**25  # elements whose narrow states are in fp32 on the device at a time
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

    def masters(self, *, in_fp8: bool) -> AbstractContextManager[None]:
        """Return a context within which megatron-core builds the masters. in_fp8: it also rounds them to weights."""
        return nullcontext() if self.is_plain or in_fp8 else empty_masters()

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


class HybridAdamW(AdamW):
    """AdamW with the state of a share of the parameters on the host, and states in fp32, fp16, bf16 or FP8.

    The arithmetic is fp32. As in AdamW, gradients are divided by `grad_scale`, and nothing changes if `found_inf` is 1;
    a step with parameters on the host waits for the device.

    copies: the half-precision parameter of each master, which has no storage of its own (`empty_masters`). Masters of
        FP8 weights have none: they stay in fp32 on the device.
    """

    def __init__(
        self, groups: list[dict[str, Any]], copies: dict[Tensor, Tensor], placement: StatePlacement, **defaults: Any
    ):
        self._placement, self._masters = placement, copies
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._on_host = _choose(parameters, placement.host_fraction)
        host_parameters = [parameter for parameter in parameters if parameter in self._on_host]
        self._pinned = PinnedAllocator("--optimizer_cpu_offload true")
        self._states: dict[Tensor, dict[str, StateTensor]] = {}
        super().__init__(groups, copies, **defaults)
        is_narrow = any(dtype != "fp32" for dtype in (placement.exp_avg, placement.exp_avg_sq, placement.main_params))
        narrow = [parameter for parameter in parameters if parameter not in self._on_host] if is_narrow else []
        self._bucketed = {*host_parameters, *narrow}
        self._workspace = Workspace(runtime.device(), DEVICE_BUCKET)
        self._device_buckets = self._divide(narrow, DEVICE_BUCKET)
        self._visits = device_visits.DeviceVisits(self, self._divide(host_parameters, device_visits.BUCKET))

    def _divide(self, parameters: list[Tensor], size: int) -> list[list[Piece]]:
        """Divide parameters into pieces of at most `size` elements, and these into buckets."""
        groups = {parameter: n for n, group in enumerate(self.param_groups) for parameter in group["params"]}
        rows = [(groups[parameter], parameter, self._states[parameter]) for parameter in parameters]
        return divide(rows, size)

    @torch.no_grad()
    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        zeros = self._pinned.zeros if parameter in self._on_host else partial(_zeros, device=parameter.device)
        states = {
            name: StateTensor.zeros(
                parameter.numel(), self._placement.dtype_of(name), zeros, is_root=name == "exp_avg_sq"
            )
            for name in MOMENTS
        }
        if parameter in self._masters:
            if (master := self._master_state(parameter, zeros)) is not None:
                states["param"] = master
            else:
                _fill_storage(parameter)
                parameter.view(-1).copy_(self._masters[parameter].view(-1))
        self._states[parameter] = states
        scales = {f"{name}_exponents": state.exponents for name, state in states.items() if state.exponents is not None}
        return {name: state.values for name, state in states.items()} | scales

    def _master_state(self, parameter: Tensor, zeros: Callable[[int, torch.dtype], Tensor]) -> StateTensor | None:
        """Return a master's values, those of its copy; None if they are to be in the master itself."""
        copy, dtype = self._masters[parameter].detach().view(-1), self._placement.dtype_of("param")
        if dtype == torch.float32 and parameter not in self._on_host:
            return None
        if dtype == torch.float32 and copy.dtype == torch.bfloat16:
            return StateTensor(zeros(len(copy), torch.int16), copy=copy)
        master = StateTensor.zeros(len(copy), dtype, zeros)
        for start in range(0, len(copy), DEVICE_BUCKET):
            stop = min(start + DEVICE_BUCKET, len(copy))
            master.part(start, stop).write(copy[start:stop].to(master.values.device).float())
        return master

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            plain = (p for p in group["params"] if p.grad is not None and p.numel() and p not in self._bucketed)
            self._step_group(number, group, plain)
        for number, bucket in enumerate(self._device_buckets):
            self.step_bucket(f"bucket {number}", bucket, self._workspace)
        self._visits.step()

    def step_bucket(self, name: str, bucket: list[Piece], workspace: Workspace) -> None:
        """Update the states of a bucket's pieces, all on the device, and their parameters or copies.

        name: key of the bucket's address tables
        workspace: memory for the states in fp32
        """
        rows: dict[int, list[TensorRow]] = {}
        narrow_states: list[tuple[StateTensor, Tensor]] = []
        masters: list[tuple[StateTensor, Tensor, Tensor]] = []
        offset = 0
        for piece in bucket:
            values = {} if "param" in piece.states else {"param": piece.of(piece.parameter)}
            for kind, state in piece.states.items():
                values[kind] = state.values
                if state.values.dtype != torch.float32:
                    values[kind] = workspace.take(kind, offset, piece.size)
                    state.read(values[kind])
                    narrow_states.append((state, values[kind]))
            copy = piece.of(self.copies[piece.parameter]) if piece.parameter in self.copies else None
            master = piece.states.get("param")
            if master is not None and copy is not None and master.values.dtype != torch.float32:
                # The copy is of the master that is stored, so that a resumed run has the same.
                if master.copy is None:
                    masters.append((master, values["param"], copy))
                copy = None
            row = (values["param"], piece.gradient, values["exp_avg"], values["exp_avg_sq"], copy)
            rows.setdefault(piece.group, []).append(row)
            offset += piece.size
        for number, group_rows in rows.items():
            group = self.param_groups[number]
            self._step_rows(f"{name}, group {number}", group, group_rows, self.grad_scale, self.found_inf)
        for state, values in narrow_states:
            state.write(values)
        for master, values, copy in masters:
            master.read(values)
            copy.copy_(values)

    def plain_state(self, parameter: Tensor) -> tuple[dict[str, Tensor], list[tuple[StateTensor, Tensor]]]:
        """Return a parameter's state, flat: views, and of encoded states fp32 copies on the host.

        The second value has the copies with the states to which `StateTensor.write` brings them back.
        """
        plain, copies = {}, []
        for name, state in self._states[parameter].items():
            plain[name] = state.values
            if state.is_encoded:
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
            if state.copy is not None:  # written with the master
                continue
            for start in range(0, parameter.numel(), DEVICE_BUCKET):
                stop = min(start + DEVICE_BUCKET, parameter.numel())
                values = torch.empty(stop - start, dtype=torch.float32, device=state.values.device)
                state.part(start, stop).read(values)
                copy.view(-1)[start:stop].copy_(values.to(copy.dtype))


def check_host_memory(placement: StatePlacement, elements: int, weights: torch.dtype) -> None:
    """Raise ValueError if the processes of this machine lack host memory for the states of `elements` parameters."""
    bytes_each = sum(placement.dtype_of(name).itemsize for name in MOMENTS)
    if weights in HALF:
        bytes_each += 2 if weights == torch.bfloat16 else placement.dtype_of("param").itemsize
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    bytes_required = processes * placement.host_fraction * elements * bytes_each
    if bytes_required > (available := available_host_memory()):
        raise ValueError(
            f"--optimizer_cpu_offload true: the optimizer's state needs {bytes_required / 2**30:.1f} GiB of this "
            f"machine's memory, and {available / 2**30:.1f} GiB are free. Lower --optimizer_offload_fraction, or set "
            "--exp_avg_dtype bf16 --exp_avg_sq_dtype bf16"
        )


def _choose(parameters: list[Tensor], fraction: float) -> set[Tensor]:
    """Return the parameters, in order, that fit into this share of all elements."""
    budget = fraction * sum(parameter.numel() for parameter in parameters)
    chosen, size = set(), 0
    for parameter in parameters:
        if size + parameter.numel() <= budget:
            chosen.add(parameter)
            size += parameter.numel()
    return chosen


def _zeros(size: int, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _fill_storage(master: Tensor) -> None:
    master.untyped_storage().resize_(master.numel() * master.element_size())
