"""Checkpoints of a run: `checkpoint-N` folders of weights, Hugging Face's or megatron-core's, each whole or absent."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..bridge.distributed import save_distributed
from ..bridge.fp8 import masters_in_bf16
from ..bridge.parallel import barrier
from ..bridge.save import save_weights
from .folders import begin, commit, explained, rotate
from .plan import shard_bytes
from .run import Run, on_first_rank
from .train import Training


def save_checkpoint(run: Run, training: Training, step: int) -> Path:
    """Write `checkpoint-{step}` beside its place, then put it there. Every rank calls this."""
    path = run.folder / f"checkpoint-{step}"
    temporary = on_first_rank(lambda: begin(path))
    masters = masters_in_bf16(training.optimizer, training.chunks)
    with training.parameters_gathered(), masters, explained(path), _removed_on_error(temporary):
        chunks = training.model.chunks
        if run.options.save_safetensors:
            most = shard_bytes(run.options.max_shard_size)
            save_weights(chunks, run.hf_config, run.model_folder, temporary, dtype=run.dtype, max_shard_bytes=most)
        else:
            save_distributed(chunks, run.hf_config, run.model_folder, temporary, dtype=run.dtype, iteration=step)
    barrier()

    def finish() -> None:
        with explained(path), _removed_on_error(temporary):
            (temporary / "args.json").write_bytes((run.folder / "args.json").read_bytes())
            commit(temporary, path)
        rotate(run.folder, run.options.save_total_limit)

    on_first_rank(finish)
    return path


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """A disk that this checkpoint has filled is given its space back."""
    try:
        yield
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
