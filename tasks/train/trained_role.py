"""Role that is trained beside the run's model, with its optimizer and schedule: the critic of PPO.

A checkpoint holds its weights as a Hugging Face folder in the training state, and its optimizer's state beside it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...bridge.checkpoint.safetensors_io import TensorSpec
from ...bridge.checkpoint.save import stage_weights
from ...bridge.checkpoint.writer import ShardWriter, StagedFolder
from ...bridge.mapping.fp8 import masters_as_bf16
from ...bridge.model.model import Model
from ...templates.json_types import JsonObject
from ..options.groups import ScheduleOptions
from ..run.planning import shard_bytes
from ..run.resume import Resumed
from ..run.roles import Role
from ..run.run_dir import STATE
from .offload import TrainerOffload
from .optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism, wrap_tower
from .step import TrainState
from .train_state import load_optimizer, optimizer_numbers, rank_file, rank_tensors


class TrainedRole:
    """Model of a role with its optimizer. Every rank makes the same calls; errors reach every rank.

    name: of its folder in a checkpoint's training state.
    hf_config, source: of its weights, for the saved folder.
    offloads: keep weights and optimizer state in host memory outside of `entered`.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        model: Model,
        hf_config: JsonObject,
        source: Path,
        *,
        schedule: ScheduleOptions,
        max_steps: int,
        offloads: bool,
    ):
        self.name, self._role, self._hf_config, self._source = name, role, hf_config, source
        options = role.run.options
        optimizer_options = replace(options.optimizer, muon_lr=None, muon_min_lr=None, lorap_lr_ratio=None)
        with role.entered():
            chunks = wrap_for_data_parallelism(model, options.build)
            tower = wrap_tower(model, options.build)
            optimizer = build_optimizer(model, chunks, optimizer_options, schedule, tower=tower)
            scheduler = build_schedule(optimizer, schedule, options.optimizer.weight_decay, max_steps)
            self.state = TrainState(
                model, chunks, optimizer, scheduler, options.optimizer.clip_grad, tower=tower and tower.module
            )
            if role.run.resumed:
                self._restore(role.run.resumed)
        self._offload = TrainerOffload(self.state, weights=True, optimizer=True) if offloads else None
        self._move_to_host()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the process groups the role's, with its state on the device, within the context."""
        with self._role.entered(), self._on_device():
            yield

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._offload:
            self._offload.onload()
        yield
        self._move_to_host()

    def _move_to_host(self) -> None:
        if self._offload:
            self._offload.offload_step()
            self._offload.offload_weights()

    @property
    def subfolders(self) -> list[str]:
        """Folders within a checkpoint."""
        return [f"{STATE}/{self.name}", f"{STATE}/{self.name}_optimizer"]

    @contextmanager
    def staged(self, folder: Path) -> Iterator[list[StagedFolder]]:
        """Stage weights and optimizer state for the checkpoint `folder`, whose writers may read them in the context.

        Process groups are the run's in it, where the run's own model is staged.
        """
        options = self._role.run.options.checkpoint
        weights, optimizer = self.subfolders
        with ExitStack() as stack:
            stack.enter_context(self._on_device())
            with self._role.entered():
                stack.enter_context(self.state.parameters_gathered())
                stack.enter_context(masters_as_bf16(self.state.optimizer, self.state.modules))
                staged = stage_weights(
                    self.state.model.parts,
                    self._hf_config,
                    self._source,
                    folder / weights,
                    dtype=self._role.run.dtype,
                    max_shard_bytes=shard_bytes(options.max_shard_size),
                    copy_to_host=options.async_save,
                )
                tensors = rank_tensors(self.state, self._hf_config, optimizer=not options.no_save_optim, rng=False)
            yield [
                replace(staged, subfolder=weights),
                stage_tensors(tensors, folder, optimizer, copy_to_host=options.async_save),
            ]

    def numbers(self) -> dict[str, Any]:
        """Return the state that all ranks share, for JSON."""
        is_saved = not self._role.run.options.checkpoint.no_save_optim
        return {"layout": self._role.run.layout, "optimizer": optimizer_numbers(self.state) if is_saved else None}

    def _restore(self, resumed: Resumed) -> None:
        saved = resumed.state[self.name]
        if self._role.run.options.resume.no_load_optim or saved["optimizer"] is None:
            self.state.schedule.step(resumed.step)
            return
        folder = resumed.checkpoint / self.subfolders[1]
        is_same_layout = saved["layout"] == self._role.run.layout
        load_optimizer(self.state, self._hf_config, folder, saved["optimizer"], same_layout=is_same_layout)


def stage_tensors(tensors: dict[str, Tensor], folder: Path, subfolder: str, *, copy_to_host: bool) -> StagedFolder:
    """Stage this rank's tensors, in a file of its own in `subfolder` of the checkpoint `folder`."""
    writer = ShardWriter(folder / subfolder, copy_to_host=copy_to_host)
    if tensors:
        specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        writer.begin(rank_file(dist.get_rank()), specs)
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    return StagedFolder(writer, lambda _: {}, subfolder=subfolder)
