"""Cache of a frozen vision tower's features on disk: `--precompute_features true`.

Data loaders look up the features of each image that their rank encodes (templates/media/feature_cache.py). The tower
computes those that are missing, and a thread writes them, while training goes on.
"""

import errno
import logging
import os
import threading
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from ...bridge import runtime
from ...bridge.model.model import Model
from ...templates.cache import cache_root
from ...templates.media.feature_cache import CacheBound, FeatureFiles
from ..distributed.collectives import broadcast_from_rank0, run_on_all_ranks
from ..run.context import Run

logger = logging.getLogger(__name__)

MOST_WAITING = 2 << 30  # bytes that wait to be written; further features are not cached


def open_feature_cache(run: Run, model: Model) -> "FeatureWriter | None":
    """Have the features of the model's frozen tower read from the cache and written to it. Every rank calls this.

    None without `--precompute_features`, or without a tower. Raises ValueError if the tower is trained, or if the cache
    cannot be written.
    """
    encoder, vision = model.vision, run.vision
    if not run.options.vision.precompute_features or encoder is None or vision is None:
        return None
    if encoder.trains:
        raise ValueError("--precompute_features true: an adapter of the vision tower is trained. Remove the flag.")
    tower = broadcast_from_rank0(encoder.fingerprint)
    device = torch.cuda.get_device_name() if runtime.device().type == "cuda" else "cpu"
    kernels, root = f"{device} {model.kernels} {torch.__version__}", cache_root() / "features"
    files = FeatureFiles(root / f"{tower}-{xxh3_64_hexdigest(kernels.encode())}")
    run_on_all_ranks(lambda: _check_writable(files.folder))
    bound = CacheBound(root, int(run.options.vision.feature_cache_gib * 2**30))
    vision.feature_files, encoder.store = files, (writer := FeatureWriter(files, bound))
    return writer


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"--precompute_features true: {folder} cannot be written ({error.strerror}). Set MODELSCOPE_CACHE (or "
            "HF_HOME) to a folder that can be written."
        ) from error


class _Waiting(NamedTuple):
    """Features to be written."""

    media: list[tuple[str, int]]  # key and number of features of each medium
    features: Tensor  # [levels, features, output_size] on the CPU
    copied: torch.cuda.Event | None  # after the copy from the device


class FeatureWriter:
    """Thread that writes features to the cache. It gives up, with a warning, if the disk or the cache is full."""

    def __init__(self, files: FeatureFiles, bound: CacheBound):
        self._files, self._bound = files, bound
        self._queue: Queue[_Waiting | None] = Queue()
        self._input_bytes = self._output_bytes = 0  # each counted by one thread
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self, media: list[tuple[str, int]], features: Tensor) -> None:
        """Write the features of media later: keys with numbers of features, and the features on the device."""
        waiting_bytes = self._input_bytes - self._output_bytes
        if self._is_stopped or not media or waiting_bytes + features.nbytes > MOST_WAITING:
            return
        self._input_bytes += features.nbytes
        copied = None
        if features.device.type == "cuda":
            features, copied = features.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record()
        self._queue.put(_Waiting(media, features, copied))

    def close(self) -> None:
        """Wait until all features are written."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while waiting := self._queue.get():
            if not self._is_stopped:
                try:
                    self._write(waiting)
                except OSError as error:
                    self._stop(f"cannot be written ({error.strerror or error})")
            self._output_bytes += waiting.features.nbytes

    def _write(self, waiting: _Waiting) -> None:
        if waiting.copied:
            waiting.copied.synchronize()
        counts = [count for _, count in waiting.media]
        for (key, _), features in zip(waiting.media, waiting.features.split(counts, dim=1), strict=True):
            if not key or self._files.has(key):
                continue
            if not self._bound.admits(features.nbytes):
                self._stop("is full: set a larger --feature_cache_gib, or free space on its disk")
                return
            self._files.write(key, features.contiguous().view(torch.uint8).numpy())

    def _stop(self, problem: str) -> None:
        self._is_stopped = True
        logger.warning(
            "--precompute_features: the cache %s %s. Further features are computed anew", self._files.folder, problem
        )
