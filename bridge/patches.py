"""Mends of megatron-core, each bound to the versions that need it.

tests/bridge/test_patches.py fails once one is not needed any more.
"""

from importlib.metadata import version
from types import SimpleNamespace

from torch import Tensor

from .kernels.weight_gradient import accumulate_product

_APPLIED = False


def apply_patches() -> None:
    """Apply what the installed megatron-core needs. Safe to call again."""
    global _APPLIED
    if _APPLIED:
        return
    _APPLIED = True
    if version("megatron-core").startswith("0.19."):
        _recompute_without_fp8()
    _weight_gradients_without_apex()
    _optimizer_without_a_gpu()


def _recompute_without_fp8() -> None:
    # CheckpointWithoutOutput asks `fp8 is not None` of a default of False, and then wants Transformer Engine.
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _weight_gradients_without_apex() -> None:
    # For its linears' gradient_accumulation_fusion it wants apex: a function for sums in fp32, one for half precision.
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return

    def add(inputs: Tensor, grad_output: Tensor, total: Tensor) -> None:
        accumulate_product(total, grad_output, inputs)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
    )
    layers._grad_accum_fusion_available = True


def _optimizer_without_a_gpu() -> None:
    # It begins with Transformer Engine's or apex's Adam where one is installed: neither can be made on a CPU, and
    # tasks/train/optimizer.py puts ours in its place.
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = True
