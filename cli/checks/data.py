"""Checks of the data's options: names, files, lengths, mixtures."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields

from ...tasks.options import InferOptions
from ...templates.chat_template.loss_scale import LossScale
from ...templates.formats.dataset_names import check_dataset, resolve_text
from ...templates.formats.self_cognition import SelfCognition
from ...templates.media.families import FAMILIES
from ...templates.media.limits import requested_values
from ...templates.options import DataOptions, MediaOptions, PrepareOptions
from ..flags import UsageError, show, usage_errors
from .model import HfConfig


def check_data(options: PrepareOptions) -> None:
    """Raise UsageError for data that cannot be used."""
    if not options.dataset and not options.cached_dataset:
        raise UsageError("--dataset: missing. Set files, folders or hub ids.")
    for name in ("dataset", "val_dataset", "cached_dataset", "cached_val_dataset"):
        check_paths(f"--{name}", getattr(options, name))
    check_system(options)
    with usage_errors():
        SelfCognition(options.model_name, options.model_author)
        LossScale.parse(options.loss_scale)
    _check_mixture(options)
    if options.packing and options.max_length is None and options.packing_length is None:
        raise UsageError("--packing true needs the length of a pack. Set --max_length.")
    if options.packing_length and options.max_length and options.packing_length < options.max_length:
        raise UsageError(
            f"--packing_length {options.packing_length}: less than --max_length. Set at least {options.max_length}."
        )


def check_media(options: MediaOptions, model: HfConfig | None) -> Iterator[str]:
    """Raise UsageError for limits of images and videos that cannot be used. Yield notes for the user."""
    with usage_errors():
        requested_values(options)
    defaults = MediaOptions()
    for name in [field.name for field in fields(MediaOptions)]:
        value = getattr(options, name)
        if value != getattr(defaults, name) and model is not None and model.get("model_type") not in FAMILIES:
            yield f"--{name} {show(value)} has no effect: the model takes no images."


def check_paths(flag: str, names: Iterable[str]) -> None:
    """Raise UsageError for a file or folder that does not exist. The run checks hub ids."""
    for name in names:
        try:
            check_dataset(name)
        except ValueError as error:
            raise UsageError(f"{flag} {error}") from None


def check_system(options: PrepareOptions | InferOptions) -> None:
    """Raise UsageError for a file of the system prompt that cannot be read."""
    with usage_errors():
        resolve_text("--system", options.system)


def _check_mixture(options: DataOptions) -> None:
    probabilities, datasets = options.interleave_prob, len(options.dataset) + len(options.cached_dataset)
    if not probabilities:
        if options.stopping_strategy != DataOptions.stopping_strategy:
            raise UsageError(
                f"--stopping_strategy {options.stopping_strategy}: only with --interleave_prob. Set that, or remove it."
            )
        return
    flag = f"--interleave_prob {show(probabilities)}"
    if len(probabilities) != datasets:
        raise UsageError(f"{flag}: has {len(probabilities)} values for {datasets} datasets. Set one for each.")
    if not math.isclose(sum(probabilities), 1, abs_tol=1e-6):
        raise UsageError(f"{flag}: the sum is {sum(probabilities):g}. Set values with the sum 1.")
    if options.stopping_strategy == "all_exhausted" and 0 in probabilities:
        raise UsageError(f"{flag}: a dataset of probability 0 is never used up. Remove it.")
    if options.streaming:
        raise UsageError(f"{flag}: cannot be used with --streaming true. Remove one of them.")
