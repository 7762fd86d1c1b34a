"""LoRA adapter of the run in vLLM's model; each update replaces it in memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

VllmObject = Any  # any object of vLLM, which is optional and absent during type checks
ID = 1  # vLLM's id of the adapter


def has_adapters(model: VllmObject) -> bool:
    """Return whether vLLM's model was built for adapters."""
    return hasattr(model, "lora_manager")


def lora_request() -> VllmObject:
    """Return the LoRARequest that selects the adapter by its id."""
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    return LoRARequest("adapter of the run", ID, "in memory")


def load_adapter(model: VllmObject, tensors: Mapping[str, Tensor]) -> None:
    """Replace the model's adapter.

    `tensors`: named as in PEFT, with the scaling folded into the B matrices; vLLM keeps references to them. Raises
    ValueError where vLLM does not support a module.
    """
    from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
    from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

    manager = model.lora_manager
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    if rank > (max_rank := manager.lora_config.max_lora_rank):
        raise ValueError(f"--vllm_max_lora_rank {max_rank}: an adapter of rank {rank} has arrived. Set {rank} or more")
    adapter = LoRAModel.from_lora_tensors(
        ID,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # a scaling of 1
        device="cpu",  # vLLM copies the tensors from there to its layers
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=names_mapper(model),
    )
    supported = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    if unsupported := sorted(adapter.loras.keys() - supported):
        raise ValueError(
            f"vLLM's {type(model).__name__} does not support adapters of {', '.join(unsupported[:5])}. Set other "
            "--target_modules, or remove --vllm_enable_lora"
        )
    manager.remove_adapter(ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ID)


def unsharded_adapter_tensors(model: VllmObject, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the loaded adapter's tensors that this rank holds unsharded."""
    from vllm.lora.utils import parse_fine_tuned_lora_name  # pyright: ignore[reportMissingImports]

    manager = model.lora_manager
    if ID not in manager.lora_index_to_id:
        return
    slot, adapter = manager.lora_index_to_id.index(ID), manager.get_adapter(ID)
    fused_part = {part: (fused, i) for fused, parts in manager.packed_modules.items() for i, part in enumerate(parts)}
    for name in names:
        module_name, is_a = parse_fine_tuned_lora_name(name, names_mapper(model))
        fused, i = fused_part.get(module_name, (module_name, 0))
        if fused not in adapter.loras:
            continue
        module, weights = manager.modules[fused], adapter.loras[fused]
        stacked, loaded = (module.lora_a_stacked, weights.lora_a) if is_a else (module.lora_b_stacked, weights.lora_b)
        tensor = stacked[i]
        if tensor.dim() == 4:  # [adapters, 1, rank or outputs, inputs or rank]
            tensor, loaded = tensor[slot, 0], loaded[i] if isinstance(loaded, list) else loaded
        else:  # `stacked` has gate, down and up of each expert; `loaded` has [experts, ...] for gate, down and up
            loaded = loaded[i % 3][i // 3]
        tensor = tensor[: loaded.shape[0], : loaded.shape[1]]
        if tensor.shape == loaded.shape:  # else it is sharded over the engine's ranks
            yield name, tensor


def names_mapper(model: VllmObject) -> VllmObject:
    """Return vLLM's mapper from Hugging Face names to its own, without fusing of projections."""
    mapper: VllmObject = getattr(model, "hf_to_vllm_mapper", None)
    # The method's name is the second one in vLLM 0.26, the first one in 0.32. Before it was there nothing was fused.
    unfused = getattr(mapper, "get_rename_mapper", None) or getattr(mapper, "get_unstacked_mapper", None)
    return unfused() if unfused is not None else mapper
