"""Checks of --new_special_tokens."""

from ...tasks.options import SftOptions
from ...templates.formats.schemas import UNGROUPED
from ..flags import UsageError, show
from .model import HfConfig

EMBEDDINGS, OUTPUTS = {"embed_tokens", "word_embeddings"}, {"lm_head", "output_layer"}


def check_new_tokens(options: SftOptions, model: HfConfig | None) -> None:
    """Raise UsageError if new tokens would not be trained, or would be missing from what is saved."""
    tokens = options.tuner.new_special_tokens
    if not tokens:
        return
    flag = f"--new_special_tokens {show(tokens)}"
    if options.stage not in UNGROUPED:
        raise UsageError(f"{flag}: only for megatron pt and sft. Train the tokens with these first.")
    if options.mcore_model:
        raise UsageError(f"{flag}: cannot be used with --mcore_model. Set --model to a Hugging Face folder.")
    if not options.tuner.has_adapters:
        return
    saved = {*options.lora.modules_to_save}
    tied = bool((model or {}).get("tie_word_embeddings"))
    if not saved & EMBEDDINGS or not (tied or saved & OUTPUTS):
        needed = "embed_tokens" if tied else "embed_tokens lm_head"
        raise UsageError(
            f"{flag}: an adapter does not train the rows of new tokens. Set --modules_to_save {needed}, or "
            "--tuner_type full."
        )
    if not options.merge_lora:
        raise UsageError(
            f"{flag} with --merge_lora false: the base model of the adapter lacks the tokens. Set --merge_lora true."
        )
