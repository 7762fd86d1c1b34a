"""Name for the set of processes whose ids this process can see, to tell whether the writer of a file is alive."""

import os
import socket
from functools import cache
from pathlib import Path

import xxhash


@cache
def process_scope() -> str:
    """Return the host name with a hash of the boot and of the namespace of process ids.

    Two containers may share a host name and a disk, but not this: a process id means nothing in the other.
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
    except PermissionError:  # it is another user's
        return True
    return True
