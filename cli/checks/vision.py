"""Checks of the flags of the vision tower."""

from collections.abc import Iterator, Mapping

from ...bridge.families import family_of
from ...bridge.option_groups import flag_value
from ...bridge.options import VisionOptions
from ...tasks.options import SftOptions
from ...templates.media.families import FAMILIES
from ..flags import UsageError
from .generation import as_flag, is_set_by_user
from .lora import TRAINABLE_FLAGS
from .model import HfConfig

RATES = {"vit_lr": "freeze_vit", "aligner_lr": "freeze_aligner"}  # learning rate -> flag that freezes what it is for
FREEZING = {"freeze_vit": "vision tower", "freeze_aligner": "mergers"}
DEFAULT_OF = "'s default of "  # in sources of flags that another system's config does not set


def check_vision(options: SftOptions, model: HfConfig | None, sources: Mapping[str, str]) -> Iterator[str]:
    """Raise UsageError for flags of the vision tower that cannot be used. Yield notes for the user.

    model: config.json; None for a hub id, whose tower the run looks for
    """
    vision = options.vision
    if model is not None and not has_tower(model):
        yield from _without_tower(options, "the model has no vision tower that is supported", sources)
        return
    if vision.language_model_only:
        for name in _requests(options):
            raise UsageError(
                f"{as_flag(name, options)} cannot be used with --language_model_only true, which builds no vision "
                "tower. Remove one of them."
            )
    elif vision.freeze_llm and vision.freeze_vit and vision.freeze_aligner:
        _check_trained(options)
    for rate, freezing in RATES.items():
        if flag_value(options, rate) is not None and flag_value(options, freezing):
            yield f"{as_flag(rate, options)} has no effect: --{freezing} true freezes what it is for."
    if model is not None and not vision.language_model_only and trains_tower(vision):
        yield from _check_training(options)
    if is_set_by_user("feature_cache_gib", sources) and not vision.precompute_features:
        yield f"{as_flag('feature_cache_gib', options)} has no effect without --precompute_features true."


def has_tower(model: HfConfig) -> bool:
    """Return whether a family here has the vision or audio tower of a model. model: config.json"""
    has_settings = bool(model.get("vision_config") or model.get("audio_config"))
    return has_settings and model.get("model_type") in FAMILIES and family_of(model).has_tower(model)


def trains_tower(options: VisionOptions) -> bool:
    """Return whether parts of the vision tower are trained, where the data has images."""
    return not (options.freeze_vit and options.freeze_aligner)


def _requests(options: SftOptions) -> Iterator[str]:
    """Yield the flags that need a vision tower, and are set."""
    if options.tuner.tuner_type == "lora_llm":
        yield "tuner_type"
    if options.vision.freeze_llm:
        yield "freeze_llm"
    if options.vision.precompute_features:
        yield "precompute_features"
    if flag_value(options, "turn_images", None):
        yield "turn_images"
    yield from (name for name in RATES if flag_value(options, name) is not None)
    yield from (name for name in FREEZING if not flag_value(options, name))


def _without_tower(options: SftOptions, reason: str, sources: Mapping[str, str]) -> Iterator[str]:
    for name in _requests(options):
        if name in FREEZING:
            if DEFAULT_OF in sources.get(name, ""):  # no user has asked for it
                continue
            yield f"{as_flag(name, options)} has no effect: {reason}."
            continue
        fix = "Set --tuner_type lora." if name == "tuner_type" else "Remove it."
        raise UsageError(f"{as_flag(name, options)}: {reason}. {fix}")
    for name in ("vit_gradient_checkpointing", "language_model_only"):
        if is_set_by_user(name, sources) and flag_value(options, name) != getattr(VisionOptions, name):
            yield f"{as_flag(name, options)} has no effect: {reason}."


def _check_trained(options: SftOptions) -> None:
    """Raise UsageError where the language model, the tower and the mergers are all frozen, and nothing else trained."""
    others = ("modules_to_save",) if options.tuner.has_adapters else TRAINABLE_FLAGS
    if not any(flag_value(options, name) for name in others):
        raise UsageError(
            "--freeze_llm true with --freeze_vit true and --freeze_aligner true: leaves nothing to train. Set "
            "--freeze_vit false or --freeze_aligner false."
        )


def _check_training(options: SftOptions) -> Iterator[str]:
    """Check a trained vision tower beside types and optimizers."""
    trained = "--freeze_vit false" if not options.vision.freeze_vit else "--freeze_aligner false"
    if options.vision.precompute_features:
        raise UsageError(
            f"--precompute_features true cannot be used with {trained}: a tower in training has other features after "
            "each step. Remove one of them."
        )
    if options.torch_dtype == "float16":
        raise UsageError(
            f"--torch_dtype float16 cannot be used with {trained} in this version: the vision tower's gradients have "
            "no common loss scale. Set --torch_dtype bfloat16."
        )
    if options.optimizer.optimizer == "dist_muon":
        raise UsageError(
            f"--optimizer dist_muon cannot be used with {trained} in this version: the vision tower has no owners of "
            "its parameters. Set --optimizer muon."
        )
    if options.build.fp8_format:
        yield f"--fp8_format {options.build.fp8_format}: the vision tower computes in bfloat16."
