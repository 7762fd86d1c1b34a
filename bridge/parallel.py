"""Process groups: megatron-core's parallel state for the parallel sizes in the options."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from . import runtime
from .options import STORE, ParallelOptions
from .pipeline_layout import virtual_pipeline_size

# Seconds by which collectives time out after the watchdog, which ends a hanging run with more information.
WATCHDOG_MARGIN = 300


def initialize(options: ParallelOptions, *, seed: int) -> None:
    """Join the job that torchrun's environment variables describe, and create the process groups.

    Without these variables the job is this one process. Raises ValueError if the number of processes does not fit the
    layout.
    """
    runtime.enable()
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # megatron-core's barriers raise this warning; the device is set above.
        warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
        timeout = timedelta(seconds=options.ddp_timeout + WATCHDOG_MARGIN)
        store, rank, world_size = _open_store(timeout)
        # After torchrun restarts the processes, its store still has the addresses of the previous attempt.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = options.ddp_backend or ("nccl" if has_gpu else "gloo")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _initialize_groups(options)
    seed_ranks(options, seed)


def current_groups() -> ProcessGroupCollection:
    """Return megatron-core's current process groups: the run's, or those of an entered `ProcessGroups`."""
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy() -> None:
    """Destroy all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _open_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the rendezvous store, this process's rank and the world size.

    On one node the store is a file of this user, or this process's memory if it is the only one: a port would be open
    to other users.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
    if path := os.environ.get(STORE):
        store = dist.FileStore(path, world_size)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        return store, rank, world_size
    return next(iter(rendezvous("env://", timeout=timeout)))


def _initialize_groups(options: ParallelOptions) -> None:
    """Create megatron-core's process groups. Raises ValueError if the number of processes does not fit."""
    tp, pp, cp = (
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
    )
    ep, etp = options.expert_model_parallel_size, options.expert_tensor_parallel_size
    world_size = dist.get_world_size()
    for product, names in ((tp * pp * cp, "TP x PP x CP"), (ep * etp * pp, "EP x ETP x PP")):
        if world_size % product:
            raise ValueError(
                f"{world_size} processes do not divide by {names} = {product}: change NPROC_PER_NODE or a size"
            )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(options),
        distributed_timeout_minutes=(options.ddp_timeout + WATCHDOG_MARGIN) // 60,
        create_gloo_process_groups=False,
    )


class ProcessGroups:
    """Process groups of a second parallel layout of the run's processes.

    megatron-core keeps its groups in module variables. Within `entered` these hold this layout's groups: build and run
    the layout's model there. Every rank must create this object and enter it at the same time as the others. Raises
    ValueError if the number of processes does not fit.
    """

    def __init__(self, options: ParallelOptions):
        outer_state = _read_parallel_state()
        _write_parallel_state({name: {} if isinstance(value, dict) else None for name, value in outer_state.items()})
        try:
            _initialize_groups(options)
            self._state = _read_parallel_state()
        finally:
            _write_parallel_state(outer_state)

    @contextmanager
    def entered(self) -> Iterator[None]:
        outer_state = _read_parallel_state()
        _write_parallel_state(self._state)
        try:
            yield
        finally:
            self._state = _read_parallel_state()
            _write_parallel_state(outer_state)


def _read_parallel_state() -> dict[str, Any]:
    """Return megatron-core's variables of process groups, sizes and ranks."""
    variables = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
    return variables | {"_global_process_group_list": parallel_state._global_process_group_list}


def _write_parallel_state(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(parallel_state, name, value)


def seed_ranks(options: ParallelOptions, seed: int) -> None:
    """Seed the random numbers, which dropout uses. Only the ranks of one tensor-parallel group share a seed."""
    seed += 100 * (dist.get_rank() // options.tensor_model_parallel_size)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def barrier() -> None:
    """Wait for every rank. torch's own barrier would guess this rank's device."""
    dist.all_reduce(torch.zeros(1, device=runtime.device()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
