"""Decision whether documents with a prompt in common share it in a run's micro batches."""

from collections.abc import Iterable
from dataclasses import replace

from ...bridge.checkpoint import hub
from ...bridge.checkpoint.rope_scaling import scale_rope
from ...bridge.families import family_of
from ...bridge.model.shared_prompts import unshared_reason
from ...bridge.option_groups import flag_value
from ...templates.formats.schemas import PROMPTED
from ...templates.json_types import JsonObject
from ...templates.prepare import Prepared
from ..options import SftOptions

ROLES = "ref", "critic", "teacher"  # prefixes of the flags of models that may run on the trained model's micro batches


def role_configs(options: SftOptions) -> list[JsonObject]:
    """Return the config.json of each reference, critic and teacher that a flag names, if the task may share prompts.

    Downloads small files of a hub. Raises as `source_folder` of hub.py.
    """
    configs = []
    for role in ROLES if options.stage in ("preference", *PROMPTED) else ():
        model, mcore_model = (flag_value(options, f"{prefix}{role}_model", None) for prefix in ("", "mcore_"))
        if model or mcore_model:
            folder = hub.source_folder(replace(options, model=model or ""), mcore_model, weights=False)
            configs.append(scale_rope(hub.read_config(folder, mcore=bool(mcore_model)), options))
    return configs


def prompts_unshared_because(options: SftOptions, configs: Iterable[JsonObject]) -> str:
    """Return why prompts are not shared, for messages; "" if they can be. configs: of all models of the run"""
    reasons = (unshared_reason(family_of(config).describe(config), options.build) for config in configs)
    return next(filter(None, reasons), "")


def share_pairs(options: SftOptions, data: Prepared, configs: Iterable[JsonObject]) -> None:
    """Set whether pairs of answers share their prompts, and why they do not. configs: of all models of the run"""
    if options.stage != "preference" or not data.has_shared_beginnings:
        return
    if data.has_media:
        data.unshared_because = "images or videos"
    elif options.tuner.has_adapters and options.lora.lora_dropout != 0:
        data.unshared_because = "dropout of adapters (--lora_dropout 0: none)"
    else:
        data.unshared_because = prompts_unshared_because(options, configs)
    data.shares_prompts = not data.unshared_because
