"""transformers' model with an adapter in PEFT's format: beside its weights, or in them."""

import warnings
from pathlib import Path
from typing import Any


def adapted(model: Any, adapter: Path, base: Path) -> Any:
    """A transformers model with an adapter beside its weights. Raises ValueError where the two do not fit."""
    from peft import PeftModel, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")
            result = PeftModel.from_pretrained(model, str(adapter))
        # Once more, since the first time does not say what found no place.
        found = set_peft_model_state_dict(result, load_peft_weights(str(adapter), device="cpu"))
    except Exception as error:  # of any kind: PEFT and torch tell of names and shapes that do not fit as they like
        reason = " ".join(str(error).split())
        raise ValueError(_misfit(adapter, base, reason[:500])) from error
    lacking = [name for name in found.missing_keys if "lora_" in name]
    if lacking or found.unexpected_keys:
        what = f"it lacks {lacking[0]}" if lacking else f"there is no place for its {found.unexpected_keys[0]}"
        raise ValueError(_misfit(adapter, base, what))
    return result


def _misfit(adapter: Path, base: Path, reason: str) -> str:
    return f"--adapters {adapter} does not fit --model {base} ({reason}). Give the model that the adapter was made for."


def merged(model: Any) -> Any:
    """What `adapted` gives, with the adapter in its weights: each sum is made in fp32 and rounded once."""
    from peft.tuners.lora import LoraLayer

    output = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            base: Any = layer.get_base_layer()
            if output is not None and base is not output and getattr(base, "weight", None) is output.weight:
                raise ValueError(
                    "--merge_lora true: the adapter is of the embedding, and the output layer has the same weights, "
                    "which are to stay. Leave the flag out."
                )
            dtype = next(base.parameters()).dtype
            base.float()
            layer.merge()  # pyright: ignore[reportCallIssue]
            base.to(dtype)
    return model.unload()
