"""Identity of the process id namespace, to tell whether the process that wrote a file is alive."""

import os
import socket
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
