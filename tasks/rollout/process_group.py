"""A group of GPUs of several programs (of CPUs, where there is none), in which the trainer's sends to all others."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(minutes=10)


def gpu_name(device: torch.device) -> str:
    """By which no two GPUs are the same, whatever a process calls them. NCCL takes each once in a group."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_store(host: str, size: int) -> Any:
    """The store of a group, which listens at this address of this machine, and (as TCPStore by itself would) at no
    other."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.bind((host, 0))
    sock.listen()
    port = sock.getsockname()[1]
    own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": sock.detach()}
    return dist.TCPStore(host, port, size, **own)  # pyright: ignore[reportPrivateImportUsage]


class Group:
    """This process's place in the group, beside whatever other groups it is in; `host` and `port` are of its store.

    NCCL makes the group in its first broadcast, which waits for all.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, device: torch.device):
        store = dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=PATIENCE)  # pyright: ignore[reportPrivateImportUsage]
        store = dist.PrefixStore("weights", store)  # pyright: ignore[reportPrivateImportUsage]
        self._device = device
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportPrivateImportUsage]
            options._timeout = PATIENCE
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, PATIENCE)  # pyright: ignore[reportPrivateImportUsage]

    def broadcast(self, flat: Tensor) -> None:
        """From rank 0; returns once this process's part is done."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._group.broadcast([flat]).wait()
                torch.cuda.synchronize(self._device)
        else:
            self._group.broadcast([flat]).wait()

    def abort(self) -> None:
        """Give up what is under way, here."""
        self._group.abort()
