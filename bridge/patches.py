"""Patches of megatron-core, each limited to the versions that need it.

tests/bridge/test_patches.py fails once a patch is no longer needed.
"""

from importlib.metadata import version
from types import SimpleNamespace

from torch import Tensor

from .kernels.weight_gradient import accumulate_product

_is_applied = False


def apply_patches() -> None:
    """Apply the patches that the installed megatron-core needs. Later calls do nothing."""
    global _is_applied
    if _is_applied:
        return
    _is_applied = True
    if version("megatron-core").startswith("0.19."):
        _fix_recompute_without_fp8()
    _provide_weight_gradients_without_apex()
    _allow_optimizer_without_gpu()


def _fix_recompute_without_fp8() -> None:
    # CheckpointWithoutOutput tests `fp8 is not None` although the default is False, and then needs Transformer Engine.
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


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
