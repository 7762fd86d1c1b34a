"""Checks of `megatron plan`."""

from ...tasks.options import PlanOptions
from ..flags import UsageError
from .model import supported_config


def check_plan(options: PlanOptions) -> list[str]:
    """Raise UsageError for a model or sizes that cannot be planned. Return notes for the user."""
    supported_config(options.model_options, weights=())
    if options.document_length and options.document_length > options.max_length:
        raise UsageError(
            f"--document_length {options.document_length}: longer than --max_length {options.max_length}. Lower it."
        )
    if options.gpus > options.gpus_per_node and options.gpus % options.gpus_per_node:
        raise UsageError(
            f"--gpus {options.gpus}: not a multiple of --gpus_per_node {options.gpus_per_node}. Set full nodes."
        )
    return []
