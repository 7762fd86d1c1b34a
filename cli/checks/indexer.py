"""Checks of the loss of lightning indexers."""

from ...bridge.families import family_of
from ...tasks.options import SftOptions
from ..flags import UsageError
from .generation import as_flag
from .model import HfConfig


def check_indexer(options: SftOptions, model: HfConfig | None) -> None:
    """Raise UsageError for a loss of indexers that the model has not, or that is not computed."""
    build = options.build
    if build.dsa_indexer_use_sparse_loss and not build.dsa_indexer_loss_coeff:
        raise UsageError(
            "--dsa_indexer_use_sparse_loss true needs a weight of the loss. Set --dsa_indexer_loss_coeff, as in 0.001."
        )
    if build.dsa_indexer_loss_coeff and model is not None and family_of(model).describe(model).sparse is None:
        raise UsageError(
            f"{as_flag('dsa_indexer_loss_coeff', options)}: {model['architectures'][0]} has no lightning indexer. "
            "Remove it."
        )
