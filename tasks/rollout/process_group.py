"""Process group in which the trainer's GPU (or CPU) broadcasts weights to the workers of other programs."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=10)


def gpu_name(device: torch.device) -> str:
    """Return the UUID of a GPU. NCCL accepts a GPU only once per group."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_store(host: str, size: int) -> dist.TCPStore:  # pyright: ignore[reportPrivateImportUsage]
    """Return the TCPStore of a group. It listens at `host` only; by default TCPStore listens at all addresses."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.bind((host, 0))
    sock.listen()
    port = sock.getsockname()[1]
    settings = {"is_master": True, "wait_for_workers": False, "master_listen_fd": sock.detach()}
    return dist.TCPStore(host, port, size, **settings)  # pyright: ignore[reportPrivateImportUsage]


class WeightGroup:
    """Group of the trainer (rank 0) and all workers, independent of torch's default group.

    `host`, `port`: address of its store. NCCL connects the group in the first broadcast, which waits for all members.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, device: torch.device):
        store = dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
        store = dist.PrefixStore("weights", store)  # pyright: ignore[reportPrivateImportUsage]
        self._device = device
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()  # pyright: ignore[reportPrivateImportUsage]
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportPrivateImportUsage]
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]

    def broadcast(self, flat: Tensor) -> None:
        """Broadcast from rank 0. Returns once this process's part is done."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._group.broadcast([flat]).wait()
                torch.cuda.synchronize(self._device)
        else:
            self._group.broadcast([flat]).wait()

    def abort(self) -> None:
        """Abort this process's pending broadcast."""
        self._group.abort()
