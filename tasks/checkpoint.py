"""Checkpoints of a run: `checkpoint-N` folders of Hugging Face weights, each whole or absent."""

import re
from pathlib import Path

import torch.distributed as dist

from ..bridge.save import save_weights
from .folders import begin, commit, rotate
from .run import Run, on_first_rank
from .train import Training

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def save_checkpoint(run: Run, training: Training, step: int) -> Path:
    """Write `checkpoint-{step}` beside its place, then put it there. Every rank calls this."""
    path = run.folder / f"checkpoint-{step}"
    temporary = on_first_rank(lambda: begin(path))
    with training.parameters_gathered():
        save_weights(
            training.model.chunks,
            run.hf_config,
            run.model_folder,
            temporary,
            dtype=run.dtype,
            max_shard_bytes=shard_bytes(run.options.max_shard_size),
        )
    dist.barrier()

    def finish() -> None:
        (temporary / "args.json").write_bytes((run.folder / "args.json").read_bytes())
        commit(temporary, path)
        rotate(run.folder, run.options.save_total_limit)

    on_first_rank(finish)
    return path


def shard_bytes(size: str) -> int:
    """'5GB' or '500MB' in bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)I?B?\s*", size.upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"--max_shard_size {size}: give a size such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])
