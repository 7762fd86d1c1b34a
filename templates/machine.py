"""Lives of processes: whether the one that wrote a file is alive, and workers that end with their parent."""

import multiprocessing
import os
import socket
import threading
from functools import cache
from pathlib import Path

import xxhash


@cache
def process_scope() -> str:
    """Return the host name with a hash of the boot and of the namespace of process ids.

    Containers may share a host name and a disk, but a process id of one means nothing in the other.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}-{xxhash.xxh32_hexdigest((boot + namespace).encode())}"


def is_alive(pid: int) -> bool:
    """Return whether a process of this scope is running."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process is another user's
        return True
    return True


def end_with_parent() -> None:
    """Have this worker process exit when its parent ends. Without this, workers of a killed parent wait forever."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
