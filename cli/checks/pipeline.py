"""Checks of pipeline parallelism: flags that exclude each other, and how they divide the model's layers."""

from ...bridge.options import BuildOptions
from ...bridge.pipeline_layout import (
    ACCOUNTED,
    LAYOUT,
    UNEVEN,
    check_prediction_layers,
    divide_layers,
    virtual_pipeline_size,
)
from ..flags import UsageError, usage_errors

VIRTUAL = "virtual_pipeline_model_parallel_size"


def check_pipeline(options: BuildOptions) -> None:
    """Raise UsageError for pipeline flags with a single stage, and for those that exclude each other."""
    stages, virtual = options.pipeline_model_parallel_size, options.virtual_pipeline_model_parallel_size
    uneven = [f"--{name} {value}" for name in UNEVEN if (value := getattr(options, name)) is not None]
    layout = options.pipeline_model_parallel_layout
    layouts = [f"--{LAYOUT} {layout}"] * (layout is not None)
    if stages == 1:
        for flag in [*[f"--{VIRTUAL} {virtual}"] * ((virtual or 1) > 1), *uneven, *layouts]:
            raise UsageError(
                f"{flag}: there is one pipeline stage. Set --pipeline_model_parallel_size 2 or more, or remove "
                f"{flag.split()[0]}."
            )
        return
    accounted = [f"--{name} true" for name in ACCOUNTED if getattr(options, name)]
    for flags, others in ((layouts, [*uneven, *accounted]), (uneven, accounted)):
        if flags and others:
            raise UsageError(f"{flags[0]} cannot be used with {others[0]}, which divides layers too. Remove one.")
    with usage_errors():
        size = virtual_pipeline_size(options)
        check_prediction_layers(options, options.mtp_num_layers or 0)
    if virtual is not None and virtual != (size or 1):
        raise UsageError(
            f"--{VIRTUAL} {virtual}: --{LAYOUT} {layout} has {(size or 1) * stages} stages, which are not "
            f"--pipeline_model_parallel_size {stages} x {virtual}. Remove --{VIRTUAL}."
        )


def check_layers(options: BuildOptions, layers: int) -> None:
    """Raise UsageError if the stages do not divide the model's layers."""
    with usage_errors():
        divide_layers(options, layers)
