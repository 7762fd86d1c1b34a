"""Checkpoints of a run: `checkpoint-N` folders, Hugging Face's or megatron-core's, each whole or absent.

A folder has the model's weights or, with LoRA, the adapter alone; `--merge_lora` puts `checkpoint-N-merged` beside it.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..bridge.distributed import save_distributed, save_distributed_adapter
from ..bridge.fp8 import masters_in_bf16
from ..bridge.lora.files import save_adapter
from ..bridge.parallel import barrier
from ..bridge.save import save_weights
from .folders import begin, commit_together, explained, merged_beside, rotate
from .plan import shard_bytes
from .run import Run, on_first_rank
from .train import Training


def save_checkpoint(run: Run, training: Training, step: int) -> dict[str, Path]:
    """Write `checkpoint-{step}` (and its merged weights) in a hidden folder, then put it in its place.

    Every rank calls this. Returns the folder as "checkpoint", and that of the merged weights, if there is one, as
    "merged_checkpoint".
    """
    path = run.folder / f"checkpoint-{step}"
    merged = merged_beside(path) if training.model.lora and run.options.merge_lora else None
    paths = [merged, path] if merged else [path]
    temporary = on_first_rank(lambda: _begin(path, paths))
    masters = masters_in_bf16(training.optimizer, training.chunks)
    with training.parameters_gathered(), masters, explained(path), _removed_on_error(temporary):
        _save(run, training, step, temporary / path.name)
        if merged:
            _save_weights(run, training, temporary / merged.name)
    barrier()

    def finish() -> None:
        with explained(path), _removed_on_error(temporary):
            for each in paths:
                (temporary / each.name / "args.json").write_bytes((run.folder / "args.json").read_bytes())
            commit_together(temporary, paths)
        rotate(run.folder, run.options.save_total_limit)

    on_first_rank(finish)
    return {"checkpoint": path} | ({"merged_checkpoint": merged} if merged else {})


def _begin(path: Path, paths: list[Path]) -> Path:
    temporary = begin(path)
    with explained(path):
        for each in paths:
            (temporary / each.name).mkdir()
    return temporary


def _save(run: Run, training: Training, step: int, folder: Path) -> None:
    """The weights, or the adapter alone, in the format that is asked for."""
    chunks, lora = training.model.chunks, training.model.lora
    if lora and run.options.save_safetensors:
        save_adapter(chunks, run.hf_config, lora, folder, base=run.base)
    elif lora:
        save_distributed_adapter(chunks, run.hf_config, lora, folder, base=run.base, iteration=step)
    elif run.options.save_safetensors:
        _save_weights(run, training, folder)
    else:
        save_distributed(chunks, run.hf_config, run.model_folder, folder, dtype=run.dtype, iteration=step)


def _save_weights(run: Run, training: Training, folder: Path) -> None:
    """The weights as a Hugging Face folder; with LoRA merged, from copies of them."""
    most = shard_bytes(run.options.max_shard_size)
    chunks = training.model.chunks
    save_weights(chunks, run.hf_config, run.model_folder, folder, dtype=run.dtype, max_shard_bytes=most, merge=True)


@contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    """A disk that this checkpoint has filled is given its space back."""
    try:
        yield
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
