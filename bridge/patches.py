"""Patches of megatron-core, each limited to the versions that need it.

tests/bridge/test_patches.py fails once a patch is no longer needed.
"""

import contextlib
import fcntl
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from .kernels.weight_gradient import accumulate_product

LONGEST_BUILD = 120  # seconds
_is_applied = False


def apply_patches() -> None:
    """Apply the patches that the installed megatron-core needs. Later calls do nothing."""
    global _is_applied
    if _is_applied:
        return
    _is_applied = True
    if version("megatron-core").startswith("0.19."):
        _fix_recompute_without_fp8()
    _remove_stale_lock_of_recompute()
    _provide_weight_gradients_without_apex()
    _allow_optimizer_without_gpu()


def _fix_recompute_without_fp8() -> None:
    # CheckpointWithoutOutput tests `fp8 is not None` although the default is False, and then needs Transformer Engine.
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _remove_stale_lock_of_recompute() -> None:
    # CheckpointWithoutOutput compiles a function at its first use. Before 2.14 torch's lock for that is a file, which
    # stays where the process is killed, and all later processes wait for its end without a limit. From then on its file
    # always stays, and locks nothing by being there.
    from megatron.core.tensor_parallel import random

    build: Callable[[], Callable] | None = getattr(random, "_get_share_storage", None)
    if build is None:  # older versions compile nothing
        return

    def get_share_storage() -> Callable:
        if random._share_storage_ext is not None:
            return build()
        from torch.utils import cpp_extension

        if not hasattr(cpp_extension, "FileBaton"):
            return build()
        folder = Path(cpp_extension._get_build_directory("share_storage_ext", verbose=False))
        with (folder / "megaswift.lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # ends with the process
            remove_stale_lock(folder / "lock")
            return build()

    random._get_share_storage = get_share_storage


def remove_stale_lock(lock: Path) -> None:
    """Wait until a lock file is gone, or older than a build takes: then remove it."""
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.stat().st_mtime < LONGEST_BUILD:
            time.sleep(0.2)
        lock.unlink()


def _provide_weight_gradients_without_apex() -> None:
    # gradient_accumulation_fusion needs two functions of apex, for main gradients in fp32 and in half precision.
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return

    def add(inputs: Tensor, grad_output: Tensor, total: Tensor) -> None:
        accumulate_product(total, grad_output, inputs)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
    )
    layers._grad_accum_fusion_available = True


def _allow_optimizer_without_gpu() -> None:
    # megatron-core starts with Transformer Engine's or apex's Adam if installed. Neither can be built on a CPU, and
    # tasks/train/optimizer.py replaces it with megaswift's AdamW.
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = True
