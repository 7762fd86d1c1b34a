"""Layers of vLLM's models that compute with repacked copies of their weights on CPUs, in updates of the weights."""

from collections.abc import Callable
from functools import partial

from .vllm_adapter import VllmObject


def repack_experts(model: VllmObject) -> None:
    """Have vLLM repack the weights of experts in each reload, on CPUs.

    vLLM 0.32 and 0.33 repack them only where they make the kernel of a layer, thus once.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # pyright: ignore[reportMissingImports]
        UnquantizedFusedMoEMethod,
    )
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, MoERunner):
                method = module.routed_experts.quant_method
                process = method.process_weights_after_loading
                if isinstance(method, UnquantizedFusedMoEMethod) and not isinstance(process, partial):
                    method.process_weights_after_loading = partial(_make_kernel, method, process)


def _make_kernel(method: VllmObject, process: Callable[[VllmObject], None], layer: VllmObject) -> None:
    method.moe_kernel = None
    process(layer)


def repack_heads(model: VllmObject) -> None:
    """Have output layers that share the embedding's parameter compute with its new values on CPUs.

    vLLM's reload repacks only layers of which it loads a tensor, and a checkpoint with a tied output has none.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        ParallelLMHead,
    )
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
