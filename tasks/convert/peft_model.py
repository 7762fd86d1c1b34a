"""PEFT adapter attached to, or merged into, a transformers model."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...bridge.checkpoint import internvl_chat
from ...bridge.checkpoint.vision import adapts_tower
from ...bridge.families.internvl import CHAT, CHAT_ARCHITECTURE

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def attach_adapter(model: "PreTrainedModel", adapter: Path, base: Path) -> "PeftModel":
    """Return a transformers model with the adapter attached. Raises ValueError if they do not fit."""
    from peft import PeftModel, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    if model.config.model_type == CHAT and adapts_tower(adapter):
        raise ValueError(
            f"--adapters {adapter}: has adapters of the vision tower, whose layers are others in transformers than in "
            f"{CHAT_ARCHITECTURE}. Merge it by `megatron export --merge_lora true --to_hf true`, and set the result as "
            "--model."
        )
    names = internvl_chat.MODULES if model.config.model_type == CHAT else None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            result = PeftModel.from_pretrained(model, str(adapter), key_mapping=names)
        # A second time, since from_pretrained does not report unused tensors.
        weights = load_peft_weights(str(adapter), device="cpu", key_mapping=names)
        load_result = set_peft_model_state_dict(result, weights)
    except Exception as error:  # PEFT and torch report mismatches by exceptions of many kinds
        reason = " ".join(str(error).split())
        raise ValueError(_mismatch(adapter, base, reason[:500])) from error
    missing = [name for name in load_result.missing_keys if "lora_" in name]
    if missing or load_result.unexpected_keys:
        problem = (
            f"it lacks {missing[0]}" if missing else f"the model has no module for its {load_result.unexpected_keys[0]}"
        )
        raise ValueError(_mismatch(adapter, base, problem))
    return result


def _mismatch(adapter: Path, base: Path, reason: str) -> str:
    return f"--adapters {adapter} does not fit --model {base} ({reason}). Set the model that the adapter was made for."


def merge_adapter(model: "PeftModel") -> "PreTrainedModel":
    """Merge the attached adapter. Each sum is computed in fp32 and rounded once."""
    from peft.tuners.lora import LoraLayer

    output = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            base: Any = layer.get_base_layer()
            if output is not None and base is not output and getattr(base, "weight", None) is output.weight:
                raise ValueError(
                    "--merge_lora true: the adapter changes the embedding, whose weights the output layer shares "
                    "unchanged. Remove the flag."
                )
            dtype = next(base.parameters()).dtype
            base.float()
            layer.merge()  # pyright: ignore[reportCallIssue]
            base.to(dtype)
    return model.unload()
