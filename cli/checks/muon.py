"""Checks of `--optimizer muon` and `dist_muon`."""

import importlib.util
from collections.abc import Mapping

from ...bridge.option_groups import flag_value
from ...tasks.options import SftOptions
from ...tasks.options.groups import OptimizerOptions
from ..flags import UsageError
from .generation import as_flag, is_set_by_user
from .model import HfConfig

FLAGS = [name for name in OptimizerOptions.__dataclass_fields__ if name.startswith("muon_")]


def is_muon(options: OptimizerOptions) -> bool:
    """Return whether Muon is the optimizer."""
    return options.optimizer in ("muon", "dist_muon")


def check_muon(options: SftOptions, model: HfConfig | None, sources: Mapping[str, str]) -> None:
    """Raise UsageError for options that Muon cannot be used with, or that only it reads."""
    if not is_muon(options.optimizer):
        for name in FLAGS:
            if is_set_by_user(name, sources):
                raise UsageError(
                    f"{as_flag(name, options)}: only for --optimizer muon or dist_muon. Set one of them, or remove it."
                )
        return
    flag = f"--optimizer {options.optimizer.optimizer}"
    if importlib.util.find_spec("emerging_optimizers") is None:
        raise UsageError(f"{flag}: emerging-optimizers is not installed. Run `pip install 'megaswift[muon]'`.")
    if options.tuner.has_adapters:
        raise UsageError(
            f"{flag} cannot be used with --tuner_type lora: Muon orthogonalizes whole matrices, and an adapter has "
            "factors of one. Set --optimizer adam."
        )
    if options.build.fp8_param_gather:
        raise UsageError(f"{flag} cannot be used with --fp8_param_gather true. Remove one of them.")
    if options.build.overlap_param_gather:
        raise UsageError(
            f"--overlap_param_gather true cannot be used with {flag}, which sends parameters after its step. Remove it."
        )
    schedule = options.schedule
    peak = schedule.lr if options.optimizer.muon_lr is None else options.optimizer.muon_lr
    if options.optimizer.muon_min_lr is not None and options.optimizer.muon_min_lr > peak:
        name = "--lr" if options.optimizer.muon_lr is None else "--muon_lr"
        raise UsageError(f"{as_flag('muon_min_lr', options)}: above {name} {peak}. Set a lower one.")
    _check_query_groups(options, model)


def _check_query_groups(options: SftOptions, model: HfConfig | None) -> None:
    """Raise UsageError where tensor parallelism splits a key-value head that Muon needs whole."""
    text = (model or {}).get("text_config") or model or {}
    groups, ranks = text.get("num_key_value_heads"), options.build.tensor_model_parallel_size
    is_latent = bool(text.get("kv_lora_rank"))
    if flag_value(options, "muon_split_qkv") and isinstance(groups, int) and groups < ranks and not is_latent:
        raise UsageError(
            f"--muon_split_qkv true: --tensor_model_parallel_size {ranks} splits the model's {groups} key-value heads. "
            f"Set at most {groups}, or --muon_split_qkv false."
        )
