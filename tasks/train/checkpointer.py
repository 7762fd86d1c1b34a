"""Checkpoints of a run: `checkpoint-N` folders, Hugging Face's or megatron-core's, each whole or absent.

A folder has the model's weights or, with LoRA, the adapter alone; `--merge_lora` puts `checkpoint-N-merged` beside it.
In `training_state` it has what the run needs to go on from there (train_state.py, tasks/run/resume.py).
"""

import errno
import json
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ...bridge.checkpoint.adapter_files import stage_adapter
from ...bridge.checkpoint.distributed import save_distributed, save_distributed_adapter
from ...bridge.checkpoint.safetensors_io import TensorSpec
from ...bridge.checkpoint.save import stage_weights
from ...bridge.checkpoint.sentence_transformers import sentence_transformers_files
from ...bridge.checkpoint.writer import RankReport, ShardWriter, StagedFolder
from ...bridge.mapping.fp8 import masters_as_bf16
from ...bridge.model.model import Model
from ..distributed.collectives import broadcast_from_rank0
from ..distributed.watchdog import Watchdog
from ..options import EmbeddingOptions
from ..run.context import Run
from ..run.planning import shard_bytes
from ..run.resume import update_run_dir
from ..run.run_dir import STATE, last_save, merged_path
from ..system.atomic_dir import FolderError, ManifestEntry, commit_together, os_error_hints, stage
from .reference_sync import REFERENCE
from .step import TrainState
from .train_state import rank_file

POLL = 0.02  # seconds between two looks at the others' reports


class Checkpoints:
    """Saves a run. Every rank calls every method, in the same order.

    A rank writes its files and reports that they are on the disk; when all have, rank 0 puts the checkpoint in its
    place. Threads do this: training waits for them, or with --async_save for copies of what is written alone. They
    tell each other by the process group's store, so that no collective is in the way of training's own.
    """

    def __init__(
        self,
        run: Run,
        training: TrainState,
        watchdog: Watchdog,
        note: Callable[[str], None],
        following: Model | None = None,
        written: Callable[[dict[str, Path], float], None] = lambda paths, seconds: None,
    ):
        """
        note: tells the user.
        following: a reference that changes while training does, and is saved too.
        written: tells the user that a checkpoint which was written while training went on is on the disk.
        """
        self._run, self._training, self._watchdog, self._following = run, training, watchdog, following
        # A connection of its own: on the process group's nothing else is sent while a rank waits for a key.
        self._store: Any = PrefixStore("checkpoints", _get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._saved = 0
        self._before = last_save(run.folder)  # rank 0's counts
        self.last = {"checkpoint": run.resumed.checkpoint} if run.resumed else {}  # whole, and in its place
        self._saving: _Saving | None = None
        self._note, self._failed = note, False  # the last one was
        self._written = written if run.options.checkpoint.async_save else lambda paths, seconds: None

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Path]:
        """Save the weights, and beside them this rank's `tensors` and (rank 0's) `state`.

        Returns the folder as "checkpoint", and that of the merged weights, if there is one, as "merged_checkpoint".
        Raises what `settle` raises. If the checkpoint before has failed, and only that, this one is to do instead.
        """
        try:
            self.settle()
        except OSError as error:
            if self._failed:
                raise
            self._failed = True
            self._note(f"{error} Training goes on, and this checkpoint is tried instead.")
        path = self._run.folder / f"checkpoint-{step}"
        merged = merged_path(path) if self._training.model.lora and self._run.options.merge_lora else None
        paths = [merged, path] if merged else [path]
        self._saved += 1
        with self._watchdog.phase(f"saving {path.name}"):
            more = [f"{STATE}/{REFERENCE}"] if self._following else []
            temporary = broadcast_from_rank0(lambda: _begin(path, paths, [STATE, *more]))
            masters = masters_as_bf16(self._training.optimizer, self._training.chunks)
            with self._training.parameters_gathered(), masters, os_error_hints(path), _removed_on_error(temporary):
                folders = {
                    path: [*self._stage(step, temporary / path.name), self._stage_state(temporary, path, tensors)]
                }
                if self._following:
                    folders[path].append(self._stage_reference(self._following, temporary / path.name))
                if merged:
                    folders[merged] = [self._stage_weights(temporary / merged.name)]
                state = state | {"saves": self._before + self._saved, "time": time.time(), "step": step}
                self._saving = _Saving(
                    self._run, self._store, self._saved, temporary, paths, folders, state, self._written
                )
                if not self._run.options.checkpoint.async_save:
                    self.settle()
        return _named(paths)

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is in its place. Raises, on every rank, what a rank met."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        with self._watchdog.phase(f"waiting until {saving.paths[-1].name} is written"):
            while not saving.ended():
                if saving.waits_for_others:
                    self._watchdog.tick_while_waiting()
                time.sleep(POLL)
        saving.result()
        self.last, self._failed = _named(saving.paths), False

    def _stage(self, step: int, folder: Path) -> list[StagedFolder]:
        """Return the weights, or the adapter alone, in the format that is asked for."""
        run, chunks, lora = self._run, self._training.model.chunks, self._training.model.lora
        if lora and run.options.checkpoint.save_safetensors:
            return [
                stage_adapter(
                    chunks, run.hf_config, lora, folder, base=run.base, copy_to_host=run.options.checkpoint.async_save
                )
            ]
        if lora:
            save_distributed_adapter(chunks, run.hf_config, lora, folder, base=run.base, iteration=step)
        elif run.options.checkpoint.save_safetensors:
            return [self._stage_weights(folder)]
        else:
            save_distributed(chunks, run.hf_config, run.model_folder, folder, dtype=run.dtype, iteration=step)
        return []

    def _stage_weights(self, folder: Path) -> StagedFolder:
        """Return the weights as a Hugging Face folder; with LoRA merged, from copies of them."""
        run = self._run
        staged = stage_weights(
            self._training.model.chunks,
            run.hf_config,
            run.model_folder,
            folder,
            dtype=run.dtype,
            max_shard_bytes=shard_bytes(run.options.checkpoint.max_shard_size),
            merge=True,
            copy_to_host=run.options.checkpoint.async_save,
        )
        return _embedding(staged, folder, run.options) if isinstance(run.options, EmbeddingOptions) else staged

    def _stage_reference(self, reference: Model, folder: Path) -> StagedFolder:
        run, subfolder = self._run, f"{STATE}/{REFERENCE}"
        staged = stage_weights(
            reference.chunks,
            run.hf_config,
            run.model_folder,
            folder / subfolder,
            dtype=run.dtype,
            max_shard_bytes=shard_bytes(run.options.checkpoint.max_shard_size),
            copy_to_host=run.options.checkpoint.async_save,
        )
        return replace(staged, subfolder=subfolder)

    def _stage_state(self, temporary: Path, path: Path, tensors: dict[str, Tensor]) -> StagedFolder:
        writer = ShardWriter(temporary / path.name / STATE, copy_to_host=self._run.options.checkpoint.async_save)
        if tensors:
            writer.begin(
                rank_file(dist.get_rank()),
                {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
            )
        for name, tensor in tensors.items():
            writer.put(name, tensor)
        return StagedFolder(writer, lambda _: {}, subfolder=STATE)


class _Saving:
    """A checkpoint on its way to the disk."""

    def __init__(
        self,
        run: Run,
        store: Any,
        number: int,
        temporary: Path,
        paths: list[Path],
        folders: dict[Path, list[StagedFolder]],
        state: dict[str, Any],
        written: Callable[[dict[str, Path], float], None],
    ):
        self.paths, self._written, self._began = paths, written, time.perf_counter()
        self.waits_for_others = False  # what they do, they watch themselves
        self._run, self._store, self._number = run, store, number
        self._temporary, self._folders, self._state = temporary, folders, state
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Return whether the checkpoint is in its place, or has failed."""
        return self._store.check([self._key("outcome")])

    def result(self) -> None:
        """Raise what stood against it."""
        self._thread.join()
        _answer(self._store.get(self._key("outcome")))

    def _key(self, name: object) -> str:
        return f"{self._number}/{name}"

    def _work(self) -> None:
        try:
            reports = {path: [folder.report() for folder in folders] for path, folders in self._folders.items()}
            message = json.dumps([[report.as_json() for report in reports[path]] for path in self.paths])
        except Exception as error:
            message = _error_as_json(error)
        self._store.set(self._key(dist.get_rank()), message)
        self.waits_for_others = True
        if dist.get_rank() == 0:
            try:
                with os_error_hints(self.paths[-1]), _removed_on_error(self._temporary):
                    self._finish(self._reports())
                with suppress(OSError):
                    self._written(_named(self.paths), time.perf_counter() - self._began)
                outcome = json.dumps(None)
            except Exception as error:
                outcome = _error_as_json(error)
            self._store.set(self._key("outcome"), outcome)

    def _reports(self) -> list[dict[Path, list[RankReport]]]:
        keys = [self._key(rank) for rank in range(dist.get_world_size())]
        for key in keys:
            while not self._store.check([key]):
                time.sleep(POLL)
        self.waits_for_others = False
        answers = [_answer(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [
            {
                path: [RankReport.from_json(report) for report in reports]
                for path, reports in zip(self.paths, answer, strict=True)
            }
            for answer in answers
        ]

    def _finish(self, ranks: list[dict[Path, list[RankReport]]]) -> None:
        entries: dict[Path, dict[str, ManifestEntry]] = {}
        for path, folders in self._folders.items():
            entries[path] = {}
            for number, folder in enumerate(folders):
                reports = [reports[path][number] for reports in ranks]
                names = folder.complete(reports)
                for shard in (shard for report in reports for shard in report.shards):
                    name = f"{folder.subfolder}{'/' if folder.subfolder else ''}{names.get(shard.name, shard.name)}"
                    entries[path][name] = {"size": shard.written.size, "sha256": shard.written.sha256}
        run, path = self._run, self.paths[-1]
        (self._temporary / path.name / STATE / "state.json").write_text(json.dumps(self._state, indent=2) + "\n")
        for each in self.paths:
            (self._temporary / each.name / "args.json").write_bytes((run.folder / "args.json").read_bytes())
        commit_together(self._temporary, self.paths, entries)
        update_run_dir(run.options, path)


def _embedding(staged: StagedFolder, folder: Path, options: EmbeddingOptions) -> StagedFolder:
    """Add the files that sentence-transformers reads."""

    def complete(ranks: list[RankReport]) -> dict[str, str]:
        names = staged.complete(ranks)
        sentence_transformers_files(folder, options.pooling, dims=options.mrl_dims)
        return names

    return replace(staged, complete=complete)


def _named(paths: list[Path]) -> dict[str, Path]:
    """Return a checkpoint, and its merged weights where it has some."""
    return {"checkpoint": paths[-1]} | ({"merged_checkpoint": paths[0]} if len(paths) > 1 else {})


def _error_as_json(error: Exception) -> str:
    """Return an error as JSON for other ranks: an OSError by its text, any other, a fault of the program, by its stack.

    The store carries no pickles: whoever reaches its port could put one there.
    """
    if isinstance(error, OSError):
        kind = "explained" if isinstance(error, FolderError) else "os"
        return json.dumps({"kind": kind, "errno": error.errno or errno.EIO, "text": error.strerror or str(error)})
    return json.dumps({"kind": "fault", "errno": 0, "text": "".join(traceback.format_exception(error))})


def _answer(message: bytes) -> Any:
    """Return the report that a rank has sent. Raises its error."""
    answer = json.loads(message)
    if isinstance(answer, dict):
        if answer["kind"] == "fault":
            raise RuntimeError(answer["text"])
        raise (FolderError if answer["kind"] == "explained" else OSError)(answer["errno"], answer["text"])
    return answer


def _begin(path: Path, paths: list[Path], subfolders: list[str]) -> Path:
    temporary = stage(path)
    with os_error_hints(path):
        for each in paths:
            (temporary / each.name).mkdir()
        for folder in subfolders:
            (temporary / path.name / folder).mkdir()
    return temporary


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """A disk that this checkpoint has filled is given its space back."""
    try:
        yield
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
