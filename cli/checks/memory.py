"""Checks of options that keep the optimizer's state or activations in host memory, or states in narrow types."""

from collections.abc import Mapping

from ...tasks.options import SftOptions
from ..flags import UsageError
from .generation import is_set_by_user

DTYPE_FLAGS = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
# megatron-core discards these modules' outputs after they are saved for the backward pass.
DISCARDED = ("layernorm", "moe_act", "mla_up_proj")


def check_memory(options: SftOptions, sources: Mapping[str, str]) -> None:
    """Raise UsageError for unusable options of host memory and of the optimizer's types."""
    _check_optimizer(options, sources)
    _check_activations(options, sources)


def _check_optimizer(options: SftOptions, sources: Mapping[str, str]) -> None:
    optimizer = options.optimizer
    flags = ["--optimizer_cpu_offload true"] * optimizer.optimizer_cpu_offload
    flags += [f"--{name} {getattr(optimizer, name)}" for name in DTYPE_FLAGS if getattr(optimizer, name) != "fp32"]
    is_unread = is_set_by_user("optimizer_offload_fraction", sources) and not optimizer.optimizer_cpu_offload
    if is_unread and optimizer.optimizer_offload_fraction not in (0, 1):
        raise UsageError(
            f"--optimizer_offload_fraction {optimizer.optimizer_offload_fraction}: only for --optimizer_cpu_offload "
            "true. Set it, or remove this flag."
        )
    if not flags:
        return
    if optimizer.optimizer != "adam":
        raise UsageError(
            f"{flags[0]} cannot be used with --optimizer {optimizer.optimizer}: only AdamW has such states. Set "
            "--optimizer adam, or remove it."
        )
    moved = [flag for flag in flags if not flag.startswith("--exp_avg")]
    if options.build.fp8_param_gather and moved:  # its masters are in fp32 on the device
        raise UsageError(f"{moved[0]} cannot be used with --fp8_param_gather true. Remove one of them.")


def _check_activations(options: SftOptions, sources: Mapping[str, str]) -> None:
    build = options.build
    if not build.cpu_offloading:
        if build.cpu_offloading_num_layers and is_set_by_user("cpu_offloading_num_layers", sources):
            raise UsageError(
                f"--cpu_offloading_num_layers {build.cpu_offloading_num_layers}: only for --cpu_offloading true. Set "
                "it, or remove this flag."
            )
        return
    if not build.cpu_offloading_num_layers:
        raise UsageError(
            "--cpu_offloading true needs the number of layers. Set --cpu_offloading_num_layers, such as 8."
        )
    for module in DISCARDED:
        if build.recompute_granularity == "selective" and module in build.recompute_modules:
            raise UsageError(
                f"--cpu_offloading true cannot be used with --recompute_modules {module}, whose output is discarded. "
                "Remove one of them."
            )
    if build.fp8_format is not None:
        raise UsageError(
            f"--cpu_offloading true cannot be used with --fp8_format {build.fp8_format}, whose layers save weights in "
            "FP8 too. Remove one of them."
        )
