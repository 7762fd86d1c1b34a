"""Loading of a model's weights from either format."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from ...bridge.checkpoint.distributed import load_distributed
from ...bridge.checkpoint.hub import has_weights, is_mcore_checkpoint, no_weights_message, read_config
from ...bridge.checkpoint.load import load_weights
from ...bridge.model.model import Model
from ...bridge.model.score_head import add_score_head, count_labels
from ...templates.json_types import JsonObject
from ..system.atomic_dir import loading


def read_weights(model: Model, hf_config: JsonObject, folder: Path, *, seed: int) -> None:
    """Load the weights of a Hugging Face folder, or of a megatron-core checkpoint with `hf_config`.

    Rank 0 prints the loading time. `seed` initialises a score head that the folder lacks. Raises ValueError if the
    folder has no weights.
    """
    prints = dist.is_initialized() and dist.get_rank() == 0
    with loading(folder) if prints else nullcontext(lambda share: None) as on_progress:
        _read_weights(model, hf_config, folder, on_progress, seed=seed)


def _read_weights(
    model: Model, hf_config: JsonObject, folder: Path, on_progress: Callable[[float], None], *, seed: int
) -> None:
    if not has_weights(folder):
        if not is_mcore_checkpoint(folder):
            raise ValueError(f"{folder} {no_weights_message(folder)}")
        load_distributed(model.parts, hf_config, folder, seed=seed)
        return
    config, labels = read_config(folder), count_labels(hf_config)  # the folder's config, for its quantization
    config = config if labels is None else add_score_head(config, labels)
    load_weights(model.parts, config, folder, seed=seed, on_progress=on_progress)
