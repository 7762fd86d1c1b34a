"""Checkpointer of a run: writes `checkpoint-N` folders atomically, in Hugging Face's or megatron-core's format.

A folder holds the model's weights, or only the adapter with LoRA; `--merge_lora` adds `checkpoint-N-merged` beside it.
Its `training_state` holds the state to resume from (train_state.py, tasks/run/resume.py).
"""

import errno
import json
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ...bridge.checkpoint.adapter_files import stage_adapter
from ...bridge.checkpoint.distributed import save_distributed, save_distributed_adapter
from ...bridge.checkpoint.save import stage_weights
from ...bridge.checkpoint.sentence_transformers import sentence_transformers_files
from ...bridge.checkpoint.writer import RankReport, StagedFolder
from ...bridge.mapping.fp8 import masters_as_bf16
from ...bridge.model.model import Model
from ...templates.chat_template.retrieval import REPRESENT
from ...templates.media.processor import VisionProcessor
from ..distributed.collectives import broadcast_from_rank0
from ..distributed.watchdog import Watchdog
from ..options import EmbeddingOptions
from ..run.context import Run
from ..run.planning import shard_bytes
from ..run.resume import update_run_dir
from ..run.run_dir import STATE, last_save, merged_path
from ..system.atomic_dir import FolderError, ManifestEntry, commit_together, os_error_hints, stage
from .eval_command import EvalCommandCallback
from .reference_sync import REFERENCE
from .step import TrainState
from .trained_role import TrainedRole, stage_tensors

POLL = 0.02  # seconds between two polls of the store


class Checkpointer:
    """Checkpoint writer. Every rank calls every method, in the same order.

    Each rank writes its files in a thread, and reports when they are on the disk. After all reports, rank 0 renames
    the folder into place. Training waits for the threads; with --async_save only until the tensors are copied. The
    threads communicate through the process group's store, because collectives could interleave with those of training.
    """

    def __init__(
        self,
        run: Run,
        training: TrainState,
        watchdog: Watchdog,
        note: Callable[[str], None],
        reference: Model | None = None,
        role: TrainedRole | None = None,
        on_written: Callable[[dict[str, Path], float], None] = lambda paths, seconds: None,
        eval_command: EvalCommandCallback | None = None,
    ):
        """
        note: prints a message to the user.
        reference: reference model to save too, if training updates it (TR-DPO).
        role: another trained model to save too.
        on_written: called with the paths and seconds of a checkpoint that was written during training.
        eval_command: is given each complete checkpoint.
        """
        self._run, self._training, self._watchdog, self._reference = run, training, watchdog, reference
        self._role = role
        # A separate connection: a rank that waits for a key blocks the process group's own.
        self._store: Any = PrefixStore("checkpoints", _get_default_store().clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._saves = 0
        self._saves_before = last_save(run.folder)  # only rank 0's value is used
        self.last = {"checkpoint": run.resumed.checkpoint} if run.resumed else {}  # the last complete checkpoint
        self._pending: _PendingSave | None = None
        self._note, self._has_failed = note, False  # whether the previous checkpoint failed
        self._eval_command = eval_command
        self._on_written = on_written if run.options.checkpoint.async_save else lambda paths, seconds: None

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Path]:
        """Save the weights, this rank's `tensors` and rank 0's `state`.

        Returns the folder as "checkpoint", and the folder of merged weights, if any, as "merged_checkpoint". Raises
        what `wait` raises. Reports a failure of the previous checkpoint and continues; raises a second one in a row.
        """
        try:
            self.wait()
        except OSError as error:
            if self._has_failed:
                raise
            self._has_failed = True
            self._note(f"{error} Training goes on, and this checkpoint is tried instead.")
        path = self.folder(step)
        merged = merged_path(path) if self._training.model.lora and self._run.options.merge_lora else None
        paths = [merged, path] if merged else [path]
        self._saves += 1
        with self._watchdog.phase(f"saving {path.name}"):
            subfolders = [f"{STATE}/{REFERENCE}"] if self._reference else []
            subfolders += self._role.subfolders if self._role else []
            temporary = broadcast_from_rank0(lambda: _make_folders(path, paths, [STATE, *subfolders]))
            masters = masters_as_bf16(self._training.optimizer, self._training.modules)
            with (
                self._training.parameters_gathered(),
                masters,
                os_error_hints(path),
                _remove_on_error(temporary),
                self._role.staged(temporary / path.name) if self._role else nullcontext([]) as role_folders,
            ):
                copies = self._run.options.checkpoint.async_save
                state_folder = stage_tensors(tensors, temporary / path.name, STATE, copy_to_host=copies)
                folders = {path: [*self._stage(step, temporary / path.name), state_folder, *role_folders]}
                if self._role:
                    state |= {self._role.name: self._role.numbers()}
                if self._reference:
                    folders[path].append(self._stage_reference(self._reference, temporary / path.name))
                if merged:
                    folders[merged] = [self._stage_weights(temporary / merged.name)]
                state = state | {"saves": self._saves_before + self._saves, "time": time.time(), "step": step}
                self._pending = _PendingSave(
                    self._run,
                    self._store,
                    self._saves,
                    temporary,
                    paths,
                    folders,
                    state,
                    self._on_written,
                    self._eval_command,
                )
                if not self._run.options.checkpoint.async_save:
                    self.wait()
        return _paths_by_name(paths)

    def folder(self, step: int) -> Path:
        return self._run.folder / f"checkpoint-{step}"

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete. Raises any rank's error on every rank."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self._watchdog.phase(f"waiting until {pending.paths[-1].name} is written"):
            while not pending.is_done():
                if pending.waits_for_others:
                    self._watchdog.tick_while_waiting()
                time.sleep(POLL)
        pending.join()
        self.last, self._has_failed = _paths_by_name(pending.paths), False

    def _stage(self, step: int, folder: Path) -> list[StagedFolder]:
        """Stage the weights, or only the adapter, in the requested format."""
        run, chunks, lora = self._run, self._training.model.parts, self._training.model.lora
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
        """Stage the weights as a Hugging Face folder; merge LoRA adapters into copies of them."""
        run = self._run
        staged = stage_weights(
            self._training.model.parts,
            run.hf_config,
            run.model_folder,
            folder,
            dtype=run.dtype,
            max_shard_bytes=shard_bytes(run.options.checkpoint.max_shard_size),
            merge=True,
            copy_to_host=run.options.checkpoint.async_save,
        )
        return (
            _with_sentence_transformers(staged, folder, run.options, run.vision)
            if isinstance(run.options, EmbeddingOptions)
            else staged
        )

    def _stage_reference(self, reference: Model, folder: Path) -> StagedFolder:
        run, subfolder = self._run, f"{STATE}/{REFERENCE}"
        staged = stage_weights(
            reference.parts,
            run.hf_config,
            run.model_folder,
            folder / subfolder,
            dtype=run.dtype,
            max_shard_bytes=shard_bytes(run.options.checkpoint.max_shard_size),
            copy_to_host=run.options.checkpoint.async_save,
        )
        return replace(staged, subfolder=subfolder)


class _PendingSave:
    """Checkpoint that a thread writes to the disk."""

    def __init__(
        self,
        run: Run,
        store: Any,
        number: int,
        temporary: Path,
        paths: list[Path],
        folders: dict[Path, list[StagedFolder]],
        state: dict[str, Any],
        on_written: Callable[[dict[str, Path], float], None],
        eval_command: EvalCommandCallback | None,
    ):
        self._eval_command = eval_command
        self.paths, self._on_written, self._start = paths, on_written, time.perf_counter()
        self.waits_for_others = False  # for the watchdog: this rank has written its files, others have not
        self._run, self._store, self._number = run, store, number
        self._temporary, self._folders, self._state = temporary, folders, state
        self._thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Return whether the checkpoint is complete or has failed."""
        return self._store.check([self._key("outcome")])

    def join(self) -> None:
        """Wait for the thread. Raises the error of a failed checkpoint."""
        self._thread.join()
        _decode_report(self._store.get(self._key("outcome")))

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
                with os_error_hints(self.paths[-1]), _remove_on_error(self._temporary):
                    self._commit(self._gather_reports())
                with suppress(OSError):
                    self._on_written(_paths_by_name(self.paths), time.perf_counter() - self._start)
                outcome = json.dumps(None)
            except Exception as error:
                outcome = _error_as_json(error)
            self._store.set(self._key("outcome"), outcome)

    def _gather_reports(self) -> list[dict[Path, list[RankReport]]]:
        keys = [self._key(rank) for rank in range(dist.get_world_size())]
        for key in keys:
            while not self._store.check([key]):
                time.sleep(POLL)
        self.waits_for_others = False
        messages = [_decode_report(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [
            {
                path: [RankReport.from_json(report) for report in reports]
                for path, reports in zip(self.paths, message, strict=True)
            }
            for message in messages
        ]

    def _commit(self, rank_reports: list[dict[Path, list[RankReport]]]) -> None:
        entries: dict[Path, dict[str, ManifestEntry]] = {}
        for path, folders in self._folders.items():
            entries[path] = {}
            for number, folder in enumerate(folders):
                reports = [reports[path][number] for reports in rank_reports]
                names = folder.complete(reports)
                for shard in (shard for report in reports for shard in report.shards):
                    name = f"{folder.subfolder}{'/' if folder.subfolder else ''}{names.get(shard.name, shard.name)}"
                    entries[path][name] = {"size": shard.written.size, "sha256": shard.written.sha256}
        run, path = self._run, self.paths[-1]
        (self._temporary / path.name / STATE / "state.json").write_text(json.dumps(self._state, indent=2) + "\n")
        for final_path in self.paths:
            (self._temporary / final_path.name / "args.json").write_bytes((run.folder / "args.json").read_bytes())
        commit_together(self._temporary, self.paths, entries)
        update_run_dir(run.options, path, in_use=self._eval_command.pending() if self._eval_command else ())
        if self._eval_command:
            self._eval_command.add(path)


def _with_sentence_transformers(
    staged: StagedFolder, folder: Path, options: EmbeddingOptions, vision: VisionProcessor | None
) -> StagedFolder:
    """Return the staged folder with the files that sentence-transformers reads."""
    instruction = REPRESENT if vision and vision.family.has_retrieval_prompts else None

    def complete(reports: list[RankReport]) -> dict[str, str]:
        names = staged.complete(reports)
        sentence_transformers_files(folder, options.pooling, dims=options.mrl_dims, instruction=instruction)
        return names

    return replace(staged, complete=complete)


def _paths_by_name(paths: list[Path]) -> dict[str, Path]:
    """Return the folders of a checkpoint and of its merged weights, if any, by name."""
    return {"checkpoint": paths[-1]} | ({"merged_checkpoint": paths[0]} if len(paths) > 1 else {})


def _error_as_json(error: Exception) -> str:
    """Return an error as JSON for other ranks: an OSError by its text, others (bugs) by their traceback.

    The store carries no pickles, because anyone who reaches its port could place one.
    """
    if isinstance(error, OSError):
        kind = "explained" if isinstance(error, FolderError) else "os"
        return json.dumps({"kind": kind, "errno": error.errno or errno.EIO, "text": error.strerror or str(error)})
    return json.dumps({"kind": "fault", "errno": 0, "text": "".join(traceback.format_exception(error))})


def _decode_report(message: bytes) -> Any:
    """Return the report that a rank sent. Raises the error that it sent instead."""
    content = json.loads(message)
    if isinstance(content, dict):
        if content["kind"] == "fault":
            raise RuntimeError(content["text"])
        raise (FolderError if content["kind"] == "explained" else OSError)(content["errno"], content["text"])
    return content


def _make_folders(path: Path, paths: list[Path], subfolders: list[str]) -> Path:
    temporary = stage(path)
    with os_error_hints(path):
        for final_path in paths:
            (temporary / final_path.name).mkdir()
        for folder in subfolders:
            (temporary / path.name / folder).mkdir()
    return temporary


@contextmanager
def _remove_on_error(folder: Path) -> Iterator[None]:
    """Remove `folder` on an OSError, which frees the space of a full disk."""
    try:
        yield
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
