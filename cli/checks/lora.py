"""What adapters and frozen weights cannot be, and what an adapter says of itself: before anything heavy is imported."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...bridge.checkpoint.hub import ADAPTER_WEIGHTS, base_of, mcore_folder, read_adapter_config, read_config
from ...bridge.families import family_of
from ...bridge.lora.adapter_mapping import AdapterPlan, modules_of, plan_adapters
from ...bridge.lora.settings import LoraSettings
from ...bridge.mapping.param_mapping import expand_mappings
from ...bridge.options import AdapterOptions, LoraOptions, McoreAdapterOptions, ModelOptions
from ...tasks.options import SftOptions
from ..flags import UsageError, show

LORA = (
    *(field.name for kind in (LoraOptions, AdapterOptions, McoreAdapterOptions) for field in fields(kind)),
    "lorap_lr_ratio",
)
FREEZING = ("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio")
THAWING = ("trainable_parameters", "trainable_parameters_regex")
OUTPUT = ("lm_head", "output_layer")
# What an adapter is made with, and cannot be changed: flag -> in LoraSettings. Its scaling is alpha's and rslora's.
MADE_WITH = {"lora_rank": "rank", "use_dora": "dora", "lora_bias": "bias"}
SCALING = {"lora_alpha": "alpha", "use_rslora": "rslora"}
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_local_experts", "n_routed_experts")


def check_tuner(options: SftOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for flags of LoRA and of frozen weights that cannot be together, or are of another tuner."""
    for name in ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex"):
        _compiles(name, getattr(options, name))
    if options.tuner_type == "full":
        for name in LORA:
            if _asks(options, name, sources):
                raise UsageError(
                    f"{_written(options, name)} is for --tuner_type lora, and all weights are to be trained "
                    "(--tuner_type full). Give --tuner_type lora, or leave it out."
                )
        _freezing(options)
        return
    for name in (*FREEZING, *THAWING):
        if getattr(options, name):
            raise UsageError(
                f"{_written(options, name)} cannot be with --tuner_type lora, which trains adapters alone. Choose them "
                "by --target_modules or --target_regex, and what is trained whole by --modules_to_save."
            )
    _lora(options, sources)


def _freezing(options: SftOptions) -> None:
    ratio = options.freeze_parameters_ratio
    if not 0 <= ratio <= 1:
        raise UsageError(f"--freeze_parameters_ratio {ratio}: must be at least 0 and at most 1.")
    trained = next((name for name in THAWING if getattr(options, name)), None)
    if trained and not any(getattr(options, name) for name in FREEZING):
        raise UsageError(
            f"{_written(options, trained)}: nothing is frozen, so all weights are trained. Give "
            "--freeze_parameters_ratio 1 as well, to train these alone."
        )
    if ratio == 1 and not trained:
        raise UsageError(
            "--freeze_parameters_ratio 1.0: nothing would be trained. Name what is, by --trainable_parameters."
        )
    freezes = next((name for name in FREEZING if getattr(options, name)), None)
    if freezes and options.fp8_param_gather:
        raise UsageError(
            f"{_written(options, freezes)} cannot be with --fp8_param_gather true, which is for weights that are all "
            "trained. Leave one out."
        )


def _lora(options: SftOptions, sources: Mapping[str, str]) -> None:
    if options.target_regex and _given("target_modules", sources):
        raise UsageError(f"{_written(options, 'target_regex')} is in place of --target_modules. Leave one out.")
    if not options.target_modules and not options.target_regex:
        raise UsageError("--target_modules is empty: name what has adapters, as in --target_modules all-linear.")
    for target in options.target_modules:
        if target.rpartition(".")[2] in OUTPUT:
            raise UsageError(
                f"--target_modules {target}: the output layer takes no adapter. Give --modules_to_save lm_head, which "
                "trains it whole."
            )
    if options.merge_lora and not options.save_safetensors:
        raise UsageError(
            "--merge_lora true cannot be with --save_safetensors false, which saves the adapter alone. Leave one out."
        )
    for name, why in (
        ("fp8_param_gather", "weights that stay as they are, are not gathered"),
        ("mtp_num_layers", "layers that predict further tokens take no adapters"),
    ):
        if getattr(options, name):
            raise UsageError(
                f"{_written(options, name)} cannot be with --tuner_type lora in this version: {why}. Leave it out."
            )


def _given(name: str, sources: Mapping[str, str]) -> bool:
    return sources.get(name, "default") not in ("default", "derived")


def _asks(options: Any, name: str, sources: Mapping[str, str]) -> bool:
    """Whether a flag was given, with a value that asks for something."""
    return _given(name, sources) and getattr(options, name) not in (None, False, [], "none")


def _written(options: Any, name: str) -> str:
    return f"--{name} {show(getattr(options, name))}"


def _compiles(name: str, pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"--{name} {pattern}: not a regular expression: {error}.") from None


def source_of(options: AdapterOptions) -> str:
    """The flag with the adapter that is to be gone on from, merged or run, as one would type it; "" without one.

    Raises UsageError for several.
    """
    mcore = getattr(options, "mcore_adapter", None)
    given = [_written(options, "adapters")] * bool(options.adapters) + [f"--mcore_adapter {mcore}"] * bool(mcore)
    if len(options.adapters) > 1 or len(given) > 1:
        raise UsageError(
            f"{' '.join(given)}: one adapter at a time. Merge one by `swift export --merge_lora true`, and give what "
            "that makes as --model."
        )
    return "".join(given)


def adapter_config(options: AdapterOptions) -> dict[str, Any] | None:
    """adapter_config.json of the adapter; None without one, and for a hub's, which the task fetches.

    Raises UsageError.
    """
    source = source_of(options)
    if not source:
        return None
    name = source.partition(" ")[2]
    folder, mcore = Path(name).expanduser(), source.startswith("--mcore")
    if not folder.is_dir() and (mcore or folder.is_file() or name.startswith((".", "/", "~")) or name.count("/") != 1):
        hub = "" if mcore else ", or a hub id as OWNER/NAME"
        raise UsageError(f"{source}: no such folder. Give that of an adapter (a run's checkpoint-N){hub}.")
    if not folder.is_dir():
        return None
    if mcore and (folder / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{source}: it is in PEFT's format. Give it as --adapters.")
    try:
        if mcore:
            mcore_folder(folder, "--mcore_adapter")
        return read_adapter_config(folder, mcore=mcore)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"{error}.") from None


def take_base(options: ModelOptions, adapter: AdapterOptions) -> Iterator[str]:
    """Where neither --model nor --mcore_model is given, take as --model what the adapter is of; a note for the user.

    Raises UsageError where that is gone.
    """
    config = adapter_config(adapter)
    if config is None or options.model or getattr(options, "mcore_model", None):
        return
    source = source_of(adapter)
    try:
        options.model = base_of(Path(source.partition(" ")[2]).expanduser(), config)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"{error}.") from None
    yield f"--model {options.model}: the base model that {source} names."


def check_base(options: ModelOptions, adapter: AdapterOptions, model: dict[str, Any] | None) -> Iterator[str]:
    """Raise UsageError where an adapter is of a model with other sizes than `model`, a raw config.json; a note where
    it is of another one that has the same sizes, or is not there to be looked at."""
    config = adapter_config(adapter)
    base = "" if config is None else config.get("base_model_name_or_path")
    if not base or model is None:
        return
    mcore = getattr(options, "mcore_model", None)
    given = f"--mcore_model {mcore}" if mcore else f"--model {options.model}"
    folders = [Path(name).expanduser() for name in (base, mcore or options.model)]
    if folders[0].resolve() == folders[1].resolve() or folders[0].name == folders[1].name != "":
        return
    of = f"{source_of(adapter)} is of another model, {base}"
    if (folders[0] / "config.json").is_file():
        theirs, ours = (each | (each.get("text_config") or {}) for each in (read_config(folders[0]), model))
        for name in SIZES:  # what only one of them says, as head_dim, the other may have all the same
            if None not in (theirs.get(name), ours.get(name)) and theirs[name] != ours[name]:
                raise UsageError(
                    f"{of}: that has {name} {theirs.get(name)}, and {given} has {ours.get(name)}. Give --model {base}, "
                    "or another adapter."
                )
    yield f"{of}. It is put on {given}."


def check_adapters(options: SftOptions, sources: Mapping[str, str], model: dict[str, Any] | None) -> Iterator[str]:
    """Raise UsageError where adapters are not for the model that `model` describes, a raw config.json (None: one that
    is not here yet), or not as the adapter from which the run starts; notes for the user.

    What that adapter says of itself becomes the options'.
    """
    theirs, source = settings_of(options), source_of(options)
    settings = LoraSettings.of_options(options) if theirs is None else _of_adapter(options, theirs, sources)
    plan = None if model is None else check_fits(settings, model, options, source)
    if theirs is None:
        return
    for flag, asked in _other_modules(options, settings, sources):
        given = f"{_written(options, flag)}: the adapter that the run starts from, {source}, has"
        if plan is None or model is None:
            yield f"{given} its own, which stay."
        elif not _same_modules(check_fits(asked, model, options), plan):
            raise UsageError(f"{given} others. Leave it out, or start without an adapter.")
    options.target_modules = sorted({name.rpartition(".")[2] for name in theirs.targets})
    options.target_regex, options.modules_to_save = None, list(theirs.modules_to_save)


def _other_modules(
    options: SftOptions, theirs: LoraSettings, sources: Mapping[str, str]
) -> Iterator[tuple[str, LoraSettings]]:
    """Each flag that was given and names modules, with the adapter's settings if it had those."""
    asked = LoraSettings.of_options(options)
    for flag in ("target_modules", "target_regex"):
        if _given(flag, sources):
            yield flag, replace(theirs, targets=asked.targets, regex=asked.regex)
    if _given("modules_to_save", sources):
        yield "modules_to_save", replace(theirs, modules_to_save=asked.modules_to_save)


def _same_modules(one: AdapterPlan | None, other: AdapterPlan | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.adapted == other.adapted
        and one.modules_to_save.keys() == other.modules_to_save.keys()
    )


def settings_of(adapter: AdapterOptions) -> LoraSettings | None:
    """What the adapter says of itself; None without one, and for a hub's. Raises UsageError for what is not known."""
    config = adapter_config(adapter)
    if config is None:
        return None
    try:
        if not adapter.adapters:  # whose checkpoint has names of modules with experts that only torch can read
            return LoraSettings.of_adapter(config, () if config.get("target_parameters") else None)
        folder = Path(adapter.adapters[0]).expanduser()
        return LoraSettings.of_adapter(config, modules_of(folder, _tensors(folder / ADAPTER_WEIGHTS)))
    except ValueError as error:
        raise UsageError(f"{source_of(adapter)}: {error}.") from None


def _tensors(file: Path) -> list[str]:
    """The names of the tensors of a safetensors file, whose header is JSON behind its length. Raises ValueError."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            return list(json.loads(stream.read(min(length, file.stat().st_size))))
        except ValueError:
            raise ValueError(f"{file} is no safetensors file: copy it again") from None


def _stored(folder: Path) -> list[str]:
    """The names of a checkpoint's tensors, where they are here and can be read."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        return list(json.loads(index.read_text())["weight_map"]) if index.is_file() else _tensors(single)
    except (OSError, ValueError, KeyError, TypeError):
        return []


def check_fits(
    settings: LoraSettings, model: dict[str, Any], options: ModelOptions, source: str = ""
) -> AdapterPlan | None:
    """The adapters, those of `source` if it is named, of --model, which `model` describes, a raw config.json; None
    where they cannot be told from here. Raises UsageError for what is not for it."""
    if not settings.targets and not settings.regex:
        return None
    family = family_of(model)
    try:
        architecture = family.describe(model)
        hidden = architecture.transformer["hidden_size"]
        if settings.rank > hidden:
            raise ValueError(
                f"--lora_rank {settings.rank} is larger than the model's hidden_size {hidden}, so that an adapter "
                "would have more parameters than its matrix: give a lower one"
            )
        entries = expand_mappings(family, model, architecture, _stored(Path(options.model).expanduser()))
        return plan_adapters(entries, settings, architecture)
    except ValueError as error:
        raise UsageError(f"{source}: {error}." if source else f"{error}.") from None


def _of_adapter(options: SftOptions, theirs: LoraSettings, sources: Mapping[str, str]) -> LoraSettings:
    """The settings of the adapter that the run starts from, as the options' own, where these do not say otherwise."""
    source = source_of(options)

    def refuse(flag: str, has: Any) -> UsageError:
        return UsageError(
            f"{_written(options, flag)}: the adapter that the run starts from, {source}, has {show(has)}. "
            "Leave it out, or start without an adapter."
        )

    for flag, name in MADE_WITH.items():
        has = getattr(theirs, name)
        if _given(flag, sources) and getattr(options, flag) != has:
            raise refuse(flag, has)
        setattr(options, flag, has)
    given = {flag: name for flag, name in SCALING.items() if _given(flag, sources)}
    mine = replace(theirs, **{name: getattr(options, flag) for flag, name in given.items()})
    if not math.isclose(mine.scaling, theirs.scaling):
        flag, name = next(iter(given.items()))
        raise refuse(flag, getattr(theirs, name))
    for flag, name in SCALING.items():
        setattr(options, flag, getattr(mine, name))
    if not _given("lora_dropout", sources):
        options.lora_dropout = theirs.dropout
    return replace(mine, dropout=options.lora_dropout, dtype=options.lora_dtype)
