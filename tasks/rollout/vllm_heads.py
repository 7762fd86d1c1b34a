"""Output layers of vLLM's models on CPUs after an update of the weights."""

from .vllm_adapter import VllmObject


def repack_heads(model: VllmObject) -> None:
    """Have output layers that share the embedding's parameter compute with its new values on CPUs.

    They compute with a repacked copy there. vLLM's reload makes it again only for layers of which it loads a tensor,
    and a checkpoint with a tied output has none.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        ParallelLMHead,
    )
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
