"""Process groups: from a layout in the options to megatron-core's parallel state."""

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

WATCHDOG_MARGIN = (
    300  # seconds: the watchdog ends a hanging run first, with more information than a collective's timeout
)


def initialize(options: ParallelOptions, *, seed: int) -> None:
    """Join the job that torchrun describes in the environment (or be a job of one), and lay out the process groups.

    Raises ValueError where the number of processes does not fit the layout.
    """
    runtime.enable()
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Of megatron-core's own barriers: the device is the one set above.
        warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
        timeout = timedelta(seconds=options.ddp_timeout + WATCHDOG_MARGIN)
        store, rank, world = _open_store(timeout)
        # Where torchrun has started the processes again, its store still has the addresses of the former ones.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = options.ddp_backend or ("nccl" if on_gpu else "gloo")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    _initialize_groups(options)
    seed_ranks(options, seed)


def current_groups() -> ProcessGroupCollection:
    """Return megatron-core's process groups as they are now: the run's, or those of the layout that is entered."""
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy() -> None:
    """End all process groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _open_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store through which the run's processes find each other, this one's rank, and their number.

    On one node that is a file of this user or, of one process, its memory: a port would be open to other users.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == 1:
        return dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
    if path := os.environ.get(STORE):
        store = dist.FileStore(path, world)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        return store, rank, world
    return next(iter(rendezvous("env://", timeout=timeout)))


def _initialize_groups(options: ParallelOptions) -> None:
    """Make megatron-core's groups. Raises ValueError where the number of processes does not fit."""
    tp, pp, cp = (
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
    )
    ep, etp = options.expert_model_parallel_size, options.expert_tensor_parallel_size
    world = dist.get_world_size()
    for product, names in ((tp * pp * cp, "TP x PP x CP"), (ep * etp * pp, "EP x ETP x PP")):
        if world % product:
            raise ValueError(f"{world} processes do not divide by {names} = {product}: change NPROC_PER_NODE or a size")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=(options.ddp_timeout + WATCHDOG_MARGIN) // 60,
        create_gloo_process_groups=False,
    )


class ProcessGroups:
    """The process groups of another layout of the same processes, beside the run's own.

    megatron-core's are variables of one module, which within `entered` are these: what is built there, or goes through
    its model there, is laid out so. Every rank makes one, and enters at the same time as the others. Raises ValueError
    where the number of processes does not fit.
    """

    def __init__(self, options: ParallelOptions):
        outside = _variables()
        _set({name: {} if isinstance(value, dict) else None for name, value in outside.items()})
        try:
            _initialize_groups(options)
            self._own = _variables()
        finally:
            _set(outside)

    @contextmanager
    def entered(self) -> Iterator[None]:
        outside = _variables()
        _set(self._own)
        try:
            yield
        finally:
            self._own = _variables()
            _set(outside)


def _variables() -> dict[str, Any]:
    """megatron-core's groups, sizes and ranks."""
    variables = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
    return variables | {"_global_process_group_list": parallel_state._global_process_group_list}


def _set(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(parallel_state, name, value)


def seed_ranks(options: ParallelOptions, seed: int) -> None:
    """Begin every rank's random numbers anew: of dropout, which is the same within a tensor-parallel group alone."""
    seed += 100 * (dist.get_rank() // options.tensor_model_parallel_size)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def barrier() -> None:
    """Wait for every rank. (torch's own would guess this rank's device.)"""
    dist.all_reduce(torch.zeros(1, device=runtime.device()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
