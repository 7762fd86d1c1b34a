"""New weights in vLLM's workers, by vLLM's own API (WeightTransferEngine), from what weight_buckets.py describes.

vLLM imports this file in each worker, where it is named as the worker's extension, before the model is there: that is
when the engine is registered under its name.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from .process_group import gpu_name
from .vllm_adapter import has_adapters, put_adapter
from .vllm_engine import chosen_inside, held_whole, quiet_vllm, scale_of, set_scale
from .weight_buckets import Place, as_entry, attach, tensors_in
from .weight_sync import checksum

NAME = "megaswift"
EXTENSION = f"{__name__}.WorkerExtension"
SERVER = "MEGASWIFT_ROLLOUT_SERVER"  # environment: the process without which workers are to end


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The group of the trainer's GPU and all workers': where its store listens, and its size."""

    host: str
    port: int
    size: int


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """wire.Bucket as vLLM's messages can have it."""

    entries: list[Any]
    place: list[int] | None
    start: int
    bytes: int


class Weights(WeightTransferEngine):
    """Buckets from shared memory, or broadcast by the trainer's GPU."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._group: Any = None  # group.Group
        self._adapter: dict[str, Tensor] = {}  # what has come of it
        quiet_vllm()
        if server := os.environ.get(SERVER):
            end_with(int(server))

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        from .process_group import Group

        self._group = Group(init_info.host, init_info.port, rank, init_info.size, self.device)

    def start_weight_update(self) -> None:
        self._adapter = {}
        if not has_adapters(self.model):
            initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        if has_adapters(self.model):
            tensors, self._adapter = self._adapter, {}
            put_adapter(self.model, tensors)
        else:
            finalize_layerwise_reload(self.model, self.model_config)

    def break_off(self) -> None:
        """Each layer forgets what it has gathered."""
        self._adapter = {}
        if not has_adapters(self.model):
            finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns once the bucket has been read."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        if has_adapters(self.model):
            self._adapter.update(self._tensors(update_info))
        else:
            self.model.load_weights(self._tensors(update_info))

    def _tensors(self, bucket: BucketInfo) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are vLLM's to keep: it gathers all those of a layer before it makes the layer's own of them."""
        entries = [as_entry(item) for item in bucket.entries]
        if bucket.place is None:
            assert self._group is not None
            flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=self.device)
            self._group.broadcast(flat)
            yield from tensors_in(flat, entries)
            return
        flat = attach(Place(*bucket.place))[bucket.start :]
        for name, tensor in tensors_in(flat, entries):
            yield name, tensor.to(self.device, copy=True)

    def shutdown(self) -> None:
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM's interface asks for it; our trainers need no vLLM."""
        raise RuntimeError("weights for this engine are sent by ServerEngine.update (megaswift.tasks.rollout.client)")


class WorkerExtension:
    """What a worker is asked for besides, by collective_rpc."""

    weight_transfer_engine: Weights
    model_runner: Any
    _weight_update_active: bool

    def break_off_weights(self) -> None:
        """End an update whose rest will not come."""
        self.weight_transfer_engine.break_off()
        self._weight_update_active = False

    def gpu(self) -> str:
        """By which no two GPUs are the same."""
        return gpu_name(self.weight_transfer_engine.device)

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Of tensors that this worker holds whole and as they came."""
        return {name: checksum(own) for name, own in held_whole(self.model_runner.model, names)}

    def chosen_inside(self) -> str | None:
        """See vllm_engine.py."""
        return chosen_inside(self.model_runner.model)

    def divide_logits(self, by: float) -> None:
        """By a temperature: see VllmEngine."""
        model = self.model_runner.model
        if not hasattr(self, "_logits_scale"):
            self._logits_scale = scale_of(model)
        set_scale(model, self._logits_scale / by)


def end_with(pid: int) -> None:
    """End this process once process `pid` has: vLLM's are left over where theirs is killed, with the GPUs' memory."""

    def watch() -> None:
        try:
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(1.0)
        except OSError:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch of the server", daemon=True).start()


WeightTransferEngineFactory.register_engine(NAME, Weights)
