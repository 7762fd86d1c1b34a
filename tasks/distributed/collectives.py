"""What one rank does for the others, and what all do together: an error of any of them reaches all."""

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

NEVER = timedelta(days=200)
_of_thread = threading.local()
SHARED_AFTER = 30.0  # seconds until what one node has written must be seen by the others, whose NFS may look late
CACHE_SHARED_AFTER = 3.0  # the same where by not seeing it only work is lost


def on_first_rank[T](do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """`do()` on rank 0 alone; its result, or its error, on every rank (by `group`)."""
    value, error = _broadcast(_guarded(do) if dist.get_rank() == 0 else None, group)
    if error is not None:
        raise error
    return value


def on_first_rank_with_help[T, A, B](
    do: Callable[[Callable[[A], list[B]]], T], share: Callable[[A], B], group: dist.ProcessGroup | None = None
) -> T:
    """Return `do(everywhere)` of rank 0 on every rank, or raise its error there. Every rank calls this.

    everywhere(argument): results of `share(argument)` in the order of ranks, which run it at the same time.
    """

    def everywhere(argument: A) -> list[B]:
        _broadcast((True, argument), group)
        results = _of_all_ranks(_guarded(lambda: share(argument)), group)
        for _, error in results:
            if error is not None:
                raise error
        return [result for result, _ in results]

    if dist.get_rank() == 0:
        value, error = _broadcast((False, _guarded(lambda: do(everywhere))), group)[1]
    else:
        while (message := _broadcast(None, group))[0]:
            _of_all_ranks(_guarded(lambda: share(message[1])), group)
        value, error = message[1]
    if error is not None:
        raise error
    return value


def _broadcast(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the value of rank 0."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def on_every_rank[T](do: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """`do()` on every rank; an error of any reaches all (by `group`), where else the others would wait for it."""
    result = _guarded(do)
    _raise_any(result, group)
    return result[0]


def kept_by_first_rank[T](do: Callable[[], T]) -> T | None:
    """What `do` makes on the first rank, there; elsewhere None. Errors reach every rank."""
    return on_first_rank(lambda: _Kept(do())).value


class _Kept:
    """Does not travel."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self):
        return _Kept, (None,)


def first_of_each_node[T](do: Callable[[], T]) -> T:
    """`do()` on the first rank of each node, then on the others, who wait for it as long as it takes."""
    return _on_some_first(_first_of_node(), do, then=do)


def first_of_each_cache[T](folder: Path, do: Callable[[], T], then: Callable[[], T]) -> T:
    """`do()` on one rank for each disk that has a `folder`, be it one node's or shared by several; then `then()` on the
    others, who wait for it as long as it takes."""
    token = on_first_rank(lambda: secrets.token_hex(8))
    probe = folder / f".probe-{token}-{dist.get_rank()}"
    if _first_of_node():
        with suppress(OSError):  # `do` will say why one cannot write there
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    firsts = [rank for rank, first in enumerate(_of_all_ranks(_first_of_node())) if first]  # all have their probes
    before = [probe.with_name(f".probe-{token}-{rank}") for rank in firsts if rank < dist.get_rank()]
    shared = bool(before) and _soon(CACHE_SHARED_AFTER, lambda: any(path.exists() for path in before))
    _of_all_ranks(None)  # all have looked
    if _first_of_node():
        with suppress(OSError):
            probe.unlink()
    return _on_some_first(_first_of_node() and not shared, do, then)


def patient_group() -> Any:
    """A group of all ranks over gloo in which they wait for each other as long as it takes, and which waits for no
    device; none where there is one rank. Every rank calls this, and in the same order what it uses the group for."""
    return getattr(_of_thread, "group", None) or _patient_group(dist.group.WORLD)


@contextmanager
def grouped_apart(group: Any) -> Iterator[None]:
    """Within, this thread's `patient_group` is a group of its own, which no other thread uses."""
    _of_thread.group = group
    yield
    del _of_thread.group


@cache
def _patient_group(world: Any) -> Any:
    return None if dist.get_world_size() == 1 else new_patient_group()


def new_patient_group() -> Any:
    """Another one. Every rank calls this."""
    group: Any = dist.new_group(
        backend="gloo"
    )  # whose members are to come in gloo's own half an hour: one may have ended
    _set_pg_timeout(NEVER, group)
    return group


def check_shared(folder: Path) -> None:
    """Whether the run's folder, which rank 0 has made, is the same one on every node, and each can write there.

    Every rank calls this. Raises ValueError, on every rank, with the reason and the cure.
    """
    token, host = on_first_rank(lambda: _mark(folder))
    mark, here = folder / f"{SHARED}{token}", f"rank {dist.get_rank()} on {socket.gethostname()}"

    def look() -> None:
        if not _soon(SHARED_AFTER, lambda: mark.read_text() == token):
            raise ValueError(
                f"--output_dir must be a folder that all nodes share: what rank 0 on {host} writes to {folder}, {here} "
                "does not see there. Give a path on a disk that all nodes have (NFS, Lustre, ...), the same on each."
            )
        if _first_of_node() and dist.get_rank():
            own = mark.with_name(f"{mark.name}-{dist.get_rank()}")
            try:
                own.touch()
                own.unlink()
            except OSError as error:
                raise ValueError(
                    f"--output_dir: every node writes its part of a checkpoint, but {here} cannot write to {folder}: "
                    f"{error.strerror}. Give it the right to, or another folder that all nodes share."
                ) from None

    try:
        on_every_rank(look, patient_group())
    finally:
        if dist.get_rank() == 0:
            mark.unlink(missing_ok=True)


def _mark(folder: Path) -> tuple[str, str]:
    """Leave a token in `folder`, where no other run has it. The token, and this host's name."""
    token = secrets.token_hex(8)
    (folder / f"{SHARED}{token}").write_text(token)
    return token, socket.gethostname()


def _soon(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether `holds()` within some seconds; an OSError says that it does not yet."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if holds():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _first_of_node() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def _on_some_first[T](first: bool, do: Callable[[], T], then: Callable[[], T]) -> T:
    group = patient_group()
    value = on_every_rank(do if first else lambda: None, group)
    rest = on_every_rank(lambda: None if first else then(), group)
    return value if first else rest  # pyright: ignore[reportReturnType]


def _guarded(do: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _raise_any(result: tuple[Any, Exception | None], group: dist.ProcessGroup | None = None) -> None:
    """Raise the first error that any rank has, on every rank."""
    errors = _of_all_ranks(result[1], group)
    if result[1] is not None:
        raise result[1]  # with its own traceback
    for error in errors:
        if error is not None:
            raise error


def _of_all_ranks[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    values = [value] * dist.get_world_size()
    if len(values) > 1:  # alone there is nobody to ask, which would wait for the device
        dist.all_gather_object(values, value, group)
    return values
