"""Weight updates in vLLM's workers through its WeightTransferEngine API, from the buckets of weight_buckets.py.

vLLM imports this module in each worker, as the worker's extension, before it creates the model. The import registers
the engine.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

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

from ...bridge.checkpoint.strided_copy import LayoutWriter, WeightLayout
from ...templates.json_types import Json, JsonObject
from .process_group import WeightGroup, gpu_name
from .vllm_adapter import VllmObject, has_adapters, load_adapter
from .vllm_cpu_kernels import repack_experts, repack_heads
from .vllm_engine import monolithic_moe_kernel, scale_of, set_scale, unsharded_tensors
from .vllm_errors import quiet_vllm
from .vllm_layout import LayoutError, LoaderTrace
from .weight_buckets import MemoryHandle, attach, parse_entry, unpack_tensors
from .weight_sync import checksum

NAME = "megaswift"
log = logging.getLogger(__name__)
EXTENSION = f"{__name__}.WorkerExtension"
SERVER = "MEGASWIFT_ROLLOUT_SERVER"  # environment variable: pid of the server; workers exit when the server ends


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Process group of the trainer's GPU and all workers: address of its store, and its size."""

    host: str
    port: int
    size: int


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Message form of weight_buckets.Bucket for vLLM."""

    entries: list[Json]
    handle: list[int] | None
    start: int
    bytes: int


class BucketTransferEngine(WeightTransferEngine):
    """Transfer engine that reads buckets from shared memory or from a broadcast of the trainer's GPU."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self._group: WeightGroup | None = None
        self._adapter: dict[str, Tensor] = {}  # adapter tensors received in this update
        self._layout: WeightLayout | None = None  # once an update has shown it
        self._is_traceable = True
        self._writer: LayoutWriter | None = None  # this update's
        self._trace: LoaderTrace | None = None  # likewise
        quiet_vllm()
        if server := os.environ.get(SERVER):
            exit_with(int(server))

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = WeightGroup(init_info.host, init_info.port, rank, init_info.size, self.device)

    def start_weight_update(self) -> None:
        self._adapter, self._writer, self._trace = {}, None, None
        if has_adapters(self.model):
            return
        if self._layout is not None:
            self._writer = LayoutWriter(self._layout)
            return
        if self._is_traceable:
            self._trace = LoaderTrace(self.model)
        repack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        if self._writer is None and not has_adapters(self.model):
            with self._trace or nullcontext():
                finalize_layerwise_reload(self.model, self.model_config)
            repack_heads(self.model)
            self._set_layout()

    def load_received_adapter(self) -> None:
        """Replace the adapter by the one that the update has brought."""
        tensors, self._adapter = self._adapter, {}
        load_adapter(self.model, tensors)

    def abort_update(self) -> None:
        """Abort an update. Each layer drops the tensors that it has collected."""
        self._adapter = {}
        if self._writer is None and not has_adapters(self.model):
            finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: JsonObject) -> None:
        """Load a bucket. Returns once it has been read."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        tensors = self._tensors(update_info)
        if has_adapters(self.model):
            self._adapter.update(tensors)
        elif self._writer is not None:
            if missing := self._writer.load(tensors):  # a tower's, which earlier updates did not have
                self.model.load_weights(missing)
        elif self._trace is not None:
            with self._trace:
                self.model.load_weights(self._trace.watch(tensors))
        else:
            self.model.load_weights(tensors)

    def _set_layout(self) -> None:
        """Keep the layout that the update has shown: the next ones are plain copies."""
        if self._trace is None:
            return
        try:
            self._layout = self._trace.layout()
        except LayoutError as error:
            self._is_traceable = False
            if self.device.type != "cpu":  # kernels for CPUs always repack
                log.warning("Weights are updated by vLLM's loaders, which takes several times as long: %s.", error)
        self._trace = None

    def _tensors(self, bucket: BucketInfo) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a bucket as copies that vLLM may keep until a layer is complete."""
        entries = [parse_entry(item) for item in bucket.entries]
        if bucket.handle is None:
            assert self._group is not None
            flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=self.device)
            self._group.broadcast(flat)
            yield from unpack_tensors(flat, entries)
            return
        flat = attach(MemoryHandle(*bucket.handle))[bucket.start :]
        for name, tensor in unpack_tensors(flat, entries):
            yield name, tensor if self._writer is not None else tensor.to(self.device, copy=True)

    def shutdown(self) -> None:
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Raise RuntimeError. vLLM's interface requires this method, but the trainer does not need vLLM."""
        raise RuntimeError("weights for this engine are sent by ServerEngine.update (megaswift.tasks.rollout.client)")


class WorkerExtension:
    """Extension of vLLM's worker with methods for collective_rpc."""

    weight_transfer_engine: BucketTransferEngine
    model_runner: VllmObject
    _weight_update_active: bool

    def abort_weight_update(self) -> None:
        """End an incomplete update."""
        self.weight_transfer_engine.abort_update()
        self._weight_update_active = False

    def load_received_adapter(self) -> None:
        """Load the adapter of an update that is finished: with the end of an update vLLM 0.32 removes adapters."""
        self.weight_transfer_engine.load_received_adapter()

    def gpu(self) -> str:
        """Return the worker's `gpu_name`."""
        return gpu_name(self.weight_transfer_engine.device)

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return checksums of the tensors that this worker holds in full."""
        return {name: checksum(tensor) for name, tensor in unsharded_tensors(self.model_runner.model, names)}

    def monolithic_moe_kernel(self) -> str | None:
        """Return `vllm_engine.monolithic_moe_kernel` of the worker's model."""
        return monolithic_moe_kernel(self.model_runner.model)

    def set_temperature(self, temperature: float) -> None:
        """Divide the logits by a temperature: see VllmEngine._set_temperature."""
        model = self.model_runner.model
        if not hasattr(self, "_logits_scale"):
            self._logits_scale = scale_of(model)
        set_scale(model, self._logits_scale / temperature)


def exit_with(pid: int) -> None:
    """Exit this process once process `pid` has ended.

    Otherwise vLLM's workers would survive a killed server and keep their GPU memory.
    """

    def watch() -> None:
        try:
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(1.0)
        except OSError:
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch of the server", daemon=True).start()


WeightTransferEngineFactory.register_engine(NAME, BucketTransferEngine)
