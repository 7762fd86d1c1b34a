"""Checks of adapters and frozen weights, and settings of an adapter's config."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

from ...bridge.checkpoint.hub import ADAPTER_WEIGHTS, base_model_name, mcore_folder, read_adapter_config, read_config
from ...bridge.families import family_of
from ...bridge.families.vlm_text import is_of_tower
from ...bridge.lora.adapter_mapping import AdapterPlan, adapted_modules, plan_adapters
from ...bridge.lora.settings import LoraSettings
from ...bridge.mapping.param_mapping import expand_mappings
from ...bridge.option_groups import flag_value
from ...bridge.options import AdapterOptions, LoraOptions, McoreAdapterOptions, ModelOptions
from ...tasks.options import SftOptions
from ...templates.json_types import JsonObject
from ..flags import UsageError, show
from .generation import as_flag, is_set_by_user
from .model import HfConfig

LORA_FLAGS = (
    *(field.name for kind in (LoraOptions, AdapterOptions, McoreAdapterOptions) for field in fields(kind)),
    "lorap_lr_ratio",
)
FREEZE_FLAGS = ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio")
TRAINABLE_FLAGS = ("trainable_parameters", "trainable_parameters_regex")
OUTPUT_LAYERS = ("lm_head", "output_layer")
# Settings that an adapter fixes: flag -> attribute of LoraSettings. Alpha and rslora together determine its scaling.
FIXED_SETTINGS = {"lora_rank": "rank", "use_dora": "dora", "lora_bias": "bias"}
SCALING_SETTINGS = {"lora_alpha": "alpha", "use_rslora": "rslora"}
SIZE_KEYS = ("hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size", "num_attention_heads")
SIZE_KEYS += ("num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_local_experts", "n_routed_experts")


def check_tuner(options: SftOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for flags of LoRA and freezing that cannot be used together or with --tuner_type."""
    for name in ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex"):
        _check_regex(name, flag_value(options, name))
    if options.tuner.tuner_type == "full":
        for name in LORA_FLAGS:
            if _is_set(options, name, sources):
                raise UsageError(
                    f"{as_flag(name, options)}: only for --tuner_type lora, and --tuner_type full "
                    "trains all weights. Set --tuner_type lora, or remove it."
                )
        _check_freezing(options)
        return
    for name in (*FREEZE_FLAGS, *TRAINABLE_FLAGS):
        if flag_value(options, name):
            raise UsageError(
                f"{as_flag(name, options)} cannot be used with --tuner_type lora, which trains adapters. Select them "
                "with --target_modules or --target_regex, and fully trained modules with --modules_to_save."
            )
    if options.optimizer.apply_wd_to_qk_layernorm:
        raise UsageError(
            "--apply_wd_to_qk_layernorm true cannot be used with --tuner_type lora, which freezes norms. Remove it."
        )
    _check_lora(options, sources)


def _check_freezing(options: SftOptions) -> None:
    ratio = options.tuner.freeze_parameters_ratio
    trainable_flag = next((name for name in TRAINABLE_FLAGS if flag_value(options, name)), None)
    if trainable_flag and not any(flag_value(options, name) for name in FREEZE_FLAGS):
        raise UsageError(
            f"{as_flag(trainable_flag, options)}: nothing is frozen, so all weights are trained. Set "
            "--freeze_parameters_ratio 1 as well, to train these alone."
        )
    if ratio == 1 and not trainable_flag:
        raise UsageError("--freeze_parameters_ratio 1.0: freezes all weights. Set --trainable_parameters.")
    freeze_flag = next((name for name in FREEZE_FLAGS if flag_value(options, name)), None)
    if freeze_flag and options.build.fp8_param_gather:
        raise UsageError(
            f"{as_flag(freeze_flag, options)} cannot be used with --fp8_param_gather true, which needs all weights "
            "trained. Remove one of them."
        )


def _check_lora(options: SftOptions, sources: Mapping[str, str]) -> None:
    if options.lora.target_regex and is_set_by_user("target_modules", sources):
        raise UsageError(
            f"{as_flag('target_regex', options)} cannot be used with --target_modules. Remove one of them."
        )
    if not options.lora.target_modules and not options.lora.target_regex:
        raise UsageError("--target_modules: is empty. Set modules, as in --target_modules all-linear.")
    for target in options.lora.target_modules:
        if target.rpartition(".")[2] in OUTPUT_LAYERS:
            raise UsageError(
                f"--target_modules {target}: the output layer supports no adapter. Set --modules_to_save lm_head to "
                "train all of it."
            )
    if options.merge_lora and not options.checkpoint.save_safetensors:
        raise UsageError(
            "--merge_lora true cannot be used with --save_safetensors false, which saves the adapter only. Remove one "
            "of them."
        )
    for name, reason in (
        ("fp8_param_gather", "frozen weights are not gathered"),
        ("dsa_indexer_loss_coeff", "indexers support no adapters"),
    ):
        if flag_value(options, name):
            raise UsageError(
                f"{as_flag(name, options)} cannot be used with --tuner_type lora in this version: {reason}. Remove it."
            )


def _is_set(options: SftOptions, name: str, sources: Mapping[str, str]) -> bool:
    """Return whether the user set an option to a value that has an effect."""
    return is_set_by_user(name, sources) and flag_value(options, name) not in (None, False, [], "none")


def _check_regex(name: str, pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"--{name} {pattern}: not a regular expression ({error}). Fix it.") from None


def adapter_flag(options: AdapterOptions) -> str:
    """Return the flag of the adapter to continue, merge or run, with its value; "" without an adapter.

    Raises UsageError for several adapters.
    """
    mcore = flag_value(options, "mcore_adapter", None)
    flags = [as_flag("adapters", options)] * bool(options.adapters) + [f"--mcore_adapter {mcore}"] * bool(mcore)
    if len(options.adapters) > 1 or len(flags) > 1:
        raise UsageError(
            f"{' '.join(flags)}: only one adapter is supported. Merge one with `swift export --merge_lora true`, and "
            "set the result as --model."
        )
    return "".join(flags)


def adapter_config(options: AdapterOptions) -> JsonObject | None:
    """Return adapter_config.json; None without an adapter or for one not downloaded yet. Raises UsageError."""
    source = adapter_flag(options)
    if not source:
        return None
    name = source.partition(" ")[2]
    if not name.strip():
        raise UsageError(f"{source.strip()}: is empty. Set the folder of an adapter, or remove it.")
    folder, mcore = Path(name).expanduser(), source.startswith("--mcore")
    if not folder.is_dir() and (mcore or folder.is_file() or name.startswith((".", "/", "~")) or name.count("/") != 1):
        hub = "" if mcore else ", or a hub id as OWNER/NAME"
        raise UsageError(f"{source}: no such folder. Set the folder of an adapter (a run's checkpoint-N){hub}.")
    if not folder.is_dir():
        return None
    if mcore and (folder / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{source}: is in PEFT's format. Set it as --adapters.")
    try:
        if mcore:
            mcore_folder(folder, "--mcore_adapter")
        return read_adapter_config(folder, mcore=mcore)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"{error}.") from None


def set_base_model(options: ModelOptions, adapter: AdapterOptions) -> Iterator[str]:
    """Set --model to the adapter's base model if no model is set, and yield a note.

    Raises UsageError if the base model is missing.
    """
    config = adapter_config(adapter)
    if config is None or options.model or flag_value(options, "mcore_model", None):
        return
    source = adapter_flag(adapter)
    try:
        options.model = base_model_name(Path(source.partition(" ")[2]).expanduser(), config)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"{error}.") from None
    yield f"--model {options.model}: the base model that {source} names."


def check_base(options: ModelOptions, adapter: AdapterOptions, model: HfConfig | None) -> Iterator[str]:
    """Raise UsageError if the adapter's base model and `model` differ in size. Yield a note for another model."""
    config = adapter_config(adapter)
    base = "" if config is None else config.get("base_model_name_or_path")
    if not base or model is None:
        return
    mcore = flag_value(options, "mcore_model", None)
    flag = f"--mcore_model {mcore}" if mcore else f"--model {options.model}"
    folders = [Path(name).expanduser() for name in (base, mcore or options.model)]
    if folders[0].resolve() == folders[1].resolve() or folders[0].name == folders[1].name != "":
        return
    problem = f"{adapter_flag(adapter)}: made for another model, {base}"
    if (folders[0] / "config.json").is_file():
        expected, actual = (config | (config.get("text_config") or {}) for config in (read_config(folders[0]), model))
        for name in SIZE_KEYS:  # a size that one config omits, such as head_dim, may be equal by default
            if None not in (expected.get(name), actual.get(name)) and expected[name] != actual[name]:
                raise UsageError(
                    f"{problem}, with {name} {expected[name]}, and {flag} has {actual[name]}. Set --model {base}, or "
                    "another adapter."
                )
    yield f"{problem}. It is applied to {flag}."


def check_adapters(options: SftOptions, sources: Mapping[str, str], model: HfConfig | None) -> Iterator[str]:
    """Raise UsageError if the options do not fit the model or the adapter to continue. Yield notes for the user.

    Copies the adapter's settings to the options.
    model: config.json, None if not downloaded yet
    """
    adapter, source = adapter_settings(options), adapter_flag(options)
    settings = (
        LoraSettings.from_options(options.lora) if adapter is None else _continued_settings(options, adapter, sources)
    )
    plan = None if model is None else check_fits(settings, model, options, source)
    if adapter is None:
        return
    for flag, changed in _changed_modules(options, settings, sources):
        prefix = f"{as_flag(flag, options)}: the adapter to continue, {source}, has"
        if plan is None or model is None:
            yield f"{prefix} its own, which stay."
        elif not _same_modules(check_fits(changed, model, options, beside=settings.targets), plan):
            raise UsageError(f"{prefix} others. Remove it, or start without an adapter.")
    options.lora.target_modules = sorted({name.rpartition(".")[2] for name in adapter.targets})
    options.lora.target_regex, options.lora.modules_to_save = None, list(adapter.modules_to_save)


def _changed_modules(
    options: SftOptions, adapter: LoraSettings, sources: Mapping[str, str]
) -> Iterator[tuple[str, LoraSettings]]:
    """Yield each flag with which the user selects modules, and the adapter's settings with its value."""
    requested = LoraSettings.from_options(options.lora)
    for flag in ("target_modules", "target_regex"):
        if is_set_by_user(flag, sources):
            yield flag, replace(adapter, targets=requested.targets, regex=requested.regex)
    if is_set_by_user("modules_to_save", sources):
        yield "modules_to_save", replace(adapter, modules_to_save=requested.modules_to_save)


def _same_modules(plan: AdapterPlan | None, other_plan: AdapterPlan | None) -> bool:
    return (
        plan is not None
        and other_plan is not None
        and plan.adapted == other_plan.adapted
        and plan.modules_to_save.keys() == other_plan.modules_to_save.keys()
    )


def adapter_settings(adapter: AdapterOptions) -> LoraSettings | None:
    """Return the settings in the adapter's config; None if `adapter_config` is. Raises UsageError."""
    config = adapter_config(adapter)
    if config is None:
        return None
    try:
        if not adapter.adapters:  # with experts, only torch can read the module names of --mcore_adapter
            return LoraSettings.from_adapter_config(config, () if config.get("target_parameters") else None)
        folder = Path(adapter.adapters[0]).expanduser()
        return LoraSettings.from_adapter_config(
            config, adapted_modules(folder, _safetensors_names(folder / ADAPTER_WEIGHTS))
        )
    except ValueError as error:
        raise UsageError(f"{adapter_flag(adapter)}: {error}.") from None


def _safetensors_names(file: Path) -> list[str]:
    """Return the tensor names in a safetensors file's header (its length, then JSON). Raises ValueError."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            return list(json.loads(stream.read(min(length, file.stat().st_size))))
        except ValueError:
            raise ValueError(f"{file}: not a safetensors file. Copy it again") from None


def _checkpoint_tensors(folder: Path) -> list[str]:
    """Return the tensor names of a checkpoint; [] if its files cannot be read."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        return list(json.loads(index.read_text())["weight_map"]) if index.is_file() else _safetensors_names(single)
    except (OSError, ValueError, KeyError, TypeError):
        return []


def check_fits(
    settings: LoraSettings, model: HfConfig, options: ModelOptions, source: str = "", *, beside: Collection[str] = ()
) -> AdapterPlan | None:
    """Return the plan of adapters for a model; None if their targets are in an adapter not downloaded yet.

    Modules of a tower count where the targets have some. source: flag of the adapter, for messages. beside: targets of
    an adapter that the plan is compared with
    Raises UsageError if they do not fit the model.
    """
    if not settings.targets and not settings.regex:
        return None
    family = family_of(model)
    try:
        adapts_tower = any(map(is_of_tower, [*settings.targets, *beside]))
        architecture = family.describe(model, vision=adapts_tower and family.has_tower(model))
        hidden = architecture.transformer["hidden_size"]
        if settings.rank > hidden:
            raise ValueError(
                f"--lora_rank {settings.rank}: larger than the model's hidden_size {hidden}. Set a lower one"
            )
        entries = expand_mappings(family, model, architecture, _checkpoint_tensors(Path(options.model).expanduser()))
        return plan_adapters(entries, settings, architecture)
    except ValueError as error:
        raise UsageError(f"{source}: {error}." if source else f"{error}.") from None


def _continued_settings(options: SftOptions, adapter: LoraSettings, sources: Mapping[str, str]) -> LoraSettings:
    """Return the settings to continue an adapter with, and copy them to the options.

    Raises UsageError if the user set different ones.
    """
    source = adapter_flag(options)

    def difference_error(flag: str, value: object) -> UsageError:
        return UsageError(
            f"{as_flag(flag, options)}: the adapter to continue, {source}, has {show(value)}. Remove it, or start "
            "without an adapter."
        )

    for flag, name in FIXED_SETTINGS.items():
        value = getattr(adapter, name)
        if is_set_by_user(flag, sources) and flag_value(options, flag) != value:
            raise difference_error(flag, value)
        setattr(options.lora, flag, value)
    user_settings = {flag: name for flag, name in SCALING_SETTINGS.items() if is_set_by_user(flag, sources)}
    settings = replace(adapter, **{name: flag_value(options, flag) for flag, name in user_settings.items()})
    if not math.isclose(settings.scaling, adapter.scaling):
        flag, name = next(iter(user_settings.items()))
        raise difference_error(flag, getattr(adapter, name))
    for flag, name in SCALING_SETTINGS.items():
        setattr(options.lora, flag, getattr(settings, name))
    if not is_set_by_user("lora_dropout", sources):
        options.lora.lora_dropout = adapter.dropout
    return replace(settings, dropout=options.lora.lora_dropout, dtype=options.lora.lora_dtype)
