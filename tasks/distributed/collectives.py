"""Collectives on Python objects, with errors propagated to every rank."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ..system.atomic_dir import SHARED

NO_TIMEOUT = timedelta(days=200)
_thread_local = threading.local()
SHARED_TIMEOUT = 30.0  # seconds until other nodes must see a new file: NFS clients see it late
CACHE_TIMEOUT = 3.0  # shorter, since a late file only costs duplicate work


def broadcast_from_rank0[T](do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return the result of `do()` on rank 0, or raise its error, on every rank of `group`."""
    value, error = _broadcast(_try(do) if dist.get_rank() == 0 else None, group)
    if error is not None:
        raise error
    return value


def broadcast_from_rank0_with_workers[T, A, B](
    do: Callable[[Callable[[A], list[B]]], T], work: Callable[[A], B], group: dist.ProcessGroup | None = None
) -> T:
    """Return the result of rank 0's `do(call_workers)`, or raise its error, on every rank. Every rank calls this.

    call_workers(argument): runs `work(argument)` on all ranks concurrently and returns their results in rank order.
    """

    def call_workers(argument: A) -> list[B]:
        _broadcast((True, argument), group)
        results = all_gather_objects(_try(lambda: work(argument)), group)
        for _, error in results:
            if error is not None:
                raise error
        return [result for result, _ in results]

    if dist.get_rank() == 0:
        value, error = _broadcast((False, _try(lambda: do(call_workers))), group)[1]
    else:
        while (message := _broadcast(None, group))[0]:
            all_gather_objects(_try(lambda: work(message[1])), group)
        value, error = message[1]
    if error is not None:
        raise error
    return value


def _broadcast(value: object, group: dist.ProcessGroup | None) -> Any:
    """Return the value of rank 0."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def run_on_all_ranks[T](do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return this rank's `do()`. Raise any rank's error on every rank, so that no rank waits for a failed one."""
    result = _try(do)
    _raise_first_error(result, group)
    return result[0]


def rank0_only[T](do: Callable[[], T]) -> T | None:
    """Return `do()` on rank 0, None on the other ranks. Raise its error on every rank."""
    return broadcast_from_rank0(lambda: _Rank0Only(do())).value


class _Rank0Only[T]:
    """Value that pickles as None, so that it stays on its rank."""

    def __init__(self, value: T | None):
        self.value = value

    def __reduce__(self) -> tuple[type["_Rank0Only"], tuple[None]]:
        return _Rank0Only, (None,)


def local_rank0_first[T](do: Callable[[], T]) -> T:
    """Run `do()` on the first rank of each node, then on the other ranks, which wait without a timeout."""
    return _run_in_two_phases(_is_first_of_node(), do, then=do)


def one_rank_per_cache[T](folder: Path, do: Callable[[], T], then: Callable[[], T]) -> T:
    """Run `do()` on one rank per disk that holds `folder`, local or shared; then `then()` on the other ranks.

    The other ranks wait without a timeout.
    """
    token = broadcast_from_rank0(lambda: secrets.token_hex(8))
    probe = folder / f".probe-{token}-{dist.get_rank()}"
    if _is_first_of_node():
        with suppress(OSError):  # `do` reports why the folder is not writable
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    is_first = all_gather_objects(_is_first_of_node())  # also a barrier: every probe now exists
    first_ranks = [rank for rank, is_first_rank in enumerate(is_first) if is_first_rank]
    earlier_probes = [probe.with_name(f".probe-{token}-{rank}") for rank in first_ranks if rank < dist.get_rank()]
    is_shared = bool(earlier_probes) and _poll(CACHE_TIMEOUT, lambda: any(path.exists() for path in earlier_probes))
    all_gather_objects(None)  # barrier: every rank has checked
    if _is_first_of_node():
        with suppress(OSError):
            probe.unlink()
    return _run_in_two_phases(_is_first_of_node() and not is_shared, do, then)


def gloo_group() -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks, None for a single rank. It has no timeout and does not synchronise devices.

    Every rank calls this, and uses the group in the same order.
    """
    return getattr(_thread_local, "group", None) or _cached_gloo_group(dist.group.WORLD)


@contextmanager
def use_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Make `gloo_group` return `group` in this thread within the context. No other thread may use it."""
    _thread_local.group = group
    yield
    del _thread_local.group


@cache
def _cached_gloo_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if dist.get_world_size() == 1 else new_gloo_group()


def new_gloo_group() -> dist.ProcessGroup:
    """Create another gloo group without a timeout. Every rank calls this."""
    # Its creation keeps gloo's default timeout of half an hour, since a rank may have exited.
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    _set_pg_timeout(NO_TIMEOUT, group)
    return group


def check_shared_folder(folder: Path) -> None:
    """Check that the run's folder, which rank 0 has created, is shared and writable on every node.

    Every rank calls this. Raises ValueError on every rank.
    """
    token, host = broadcast_from_rank0(lambda: _write_token(folder))
    mark, rank_name = folder / f"{SHARED}{token}", f"rank {dist.get_rank()} on {socket.gethostname()}"

    def check() -> None:
        if not _poll(SHARED_TIMEOUT, lambda: mark.read_text() == token):
            raise ValueError(
                f"--output_dir {folder}: not shared by all nodes: {rank_name} sees no files of rank 0 on {host}. "
                "Set a path on a disk that all nodes mount (NFS, Lustre, ...), the same on each."
            )
        if _is_first_of_node() and dist.get_rank():
            probe = mark.with_name(f"{mark.name}-{dist.get_rank()}")
            try:
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise ValueError(
                    f"--output_dir {folder}: {rank_name} cannot write there ({error.strerror}), but all nodes write "
                    "checkpoints. Make it writable, or set another folder that all nodes share."
                ) from None

    try:
        run_on_all_ranks(check, gloo_group())
    finally:
        if dist.get_rank() == 0:
            mark.unlink(missing_ok=True)


def _write_token(folder: Path) -> tuple[str, str]:
    """Write a file with a random token to `folder`; return the token and this host's name."""
    token = secrets.token_hex(8)
    (folder / f"{SHARED}{token}").write_text(token)
    return token, socket.gethostname()


def _poll(seconds: float, condition: Callable[[], bool]) -> bool:
    """Return whether `condition()` becomes true within `seconds`. An OSError counts as false."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _is_first_of_node() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _run_in_two_phases[T](is_first: bool, do: Callable[[], T], then: Callable[[], T]) -> T:
    group = gloo_group()
    value = run_on_all_ranks(do if is_first else lambda: None, group)
    other_value = run_on_all_ranks(lambda: None if is_first else then(), group)
    return value if is_first else other_value  # pyright: ignore[reportReturnType]


def _try[T](do: Callable[[], T]) -> tuple[T, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error  # pyright: ignore[reportReturnType]


def _raise_first_error(result: tuple[object, Exception | None], group: dist.ProcessGroup | None = None) -> None:
    """Raise the first error of any rank on every rank."""
    errors = all_gather_objects(result[1], group)
    if result[1] is not None:
        raise result[1]  # keeps its traceback
    for error in errors:
        if error is not None:
            raise error


def all_gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return `value` of every rank, in rank order."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:  # a single rank need not synchronise its device
        dist.all_gather_object(values, value, group)
    return values
