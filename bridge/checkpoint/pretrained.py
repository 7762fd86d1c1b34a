"""Loaders of transformers' tokenizers, configs and models from checkpoint folders.

All such calls of the project are here, but those for processors of images (`templates.media.processor`). Python code
in a folder (`auto_map`) is never run. A model is returned only if all its weights come from the folder's files.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..families import family_of
from ..families.config_file import lift_config
from ..mapping.architecture import Architecture, HfConfig
from . import internvl_chat
from .hub import has_weights, no_weights_message, read_config

_TOKENIZERS = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tokenization*.py"]
_NO_CODE = {"trust_remote_code": False, "local_files_only": True}


def load_tokenizer(folder: Path) -> Any:
    """Load transformers' tokenizer from a checkpoint folder. Raises FileNotFoundError or ValueError with the fix."""
    # Without these files transformers creates an empty tokenizer.
    if not any(file for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        raise FileNotFoundError(f"{folder}: no tokenizer there: copy {_TOKENIZERS[0]} from the original checkpoint")
    from transformers import AutoTokenizer

    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(folder, **_NO_CODE)
    except Exception as error:  # broken JSON, classes unknown to this transformers, ...
        if _needs_code(error):
            raise ValueError(
                f"{folder}: its tokenizer is only available as Python code in the folder (auto_map in "
                f"tokenizer_config.json), which is never run. Use a checkpoint with a {_TOKENIZERS[0]}"
            ) from error
        raise ValueError(
            f"{folder}: its tokenizer cannot be read ({_reason(error)}): copy its files again from the original "
            "checkpoint"
        ) from error


def load_config(folder: Path, *, flag: str = "--model") -> Any:
    """Load transformers' config from a checkpoint folder. Raises ValueError naming `flag` and the fix."""
    from transformers import AutoConfig

    hf_config = read_config(folder)
    is_chat = hf_config.get("model_type") == internvl_chat.CHAT
    try:
        kind = internvl_chat.register_in_transformers() if is_chat else AutoConfig
        config = kind.from_pretrained(folder, **_NO_CODE)
    except Exception as error:  # transformers' validators raise many types
        raise _unusable(folder, flag, error) from error
    if is_chat:
        internvl_chat.set_image_token(config, load_tokenizer(folder))
    architecture, text_config = _describe(hf_config), config.get_text_config()
    if text_config is not config and architecture is not None:
        # AutoModelForCausalLM may build the text model's class, which ignores the outer value.
        text_config.tie_word_embeddings = architecture.tied
    return config


def load_model(folder: Path, kind: str = "CausalLM", *, flag: str = "--model", **settings: Any) -> Any:
    """Load transformers' `AutoModelFor<kind>` from a checkpoint folder, with `settings` for `from_pretrained`.

    kind "": AutoModel, which has no output layer; of an Omni model the whole, with its input as the logits.
    A causal model is loaded with the vision tower, where a family here has that, or where no other class exists. What
    speaks of an Omni model is not loaded.
    Raises ValueError, naming `flag`, if the folder has no safetensors, if the model needs Python code of the folder, or
    for unexpected and missing tensors and mismatched shapes.
    """
    import torch
    import transformers

    from .safetensors_io import check_headers
    from .tensor_names import abridge, check_folder_names, shape_mismatch

    if not has_weights(folder):
        raise ValueError(f"{flag} {folder} {no_weights_message(folder)}")
    check_headers(folder)
    check_folder_names(folder, read_config(folder))
    config = load_config(folder, flag=flag)
    name = f"AutoModelFor{kind}" if kind else "AutoModel"
    is_omni = _leave_out_speech(config)
    auto = _causal_class(config) if kind == "CausalLM" or is_omni else getattr(transformers, name)
    load = auto.from_pretrained
    if is_omni:  # Qwen2.5-Omni's own method expects no report
        load = partial(transformers.PreTrainedModel.from_pretrained.__func__, auto._model_mapping[type(config)])
    try:
        with _quiet():
            model, report = load(
                folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **settings, **_NO_CODE
            )
    except Exception as error:  # transformers and its quantizers raise many types
        raise _unusable(folder, flag, error) from error
    if mismatched := sorted(report["mismatched_keys"]):
        raise ValueError(f"{flag} {shape_mismatch(folder, *mismatched[0])}")
    architecture = _describe(read_config(folder))
    # Passthrough tensors are not needed to generate text.
    optional = re.compile(architecture.passthrough if architecture and architecture.passthrough else "(?!)")
    if is_omni and not kind:  # AutoModel takes none
        model.thinker.lm_head = torch.nn.Identity()
        optional = re.compile(rf"thinker\.lm_head\.|{optional.pattern}")
    if missing := [name for name in report["missing_keys"] if not optional.match(name)]:
        owner = f"{type(model).__name__} of this config.json has"
        raise ValueError(f"{flag} {folder} lacks {abridge(missing)}, which a {owner}. Use a checkpoint that has them")
    return model


def check_weights(folder: Path, *, flag: str = "--model") -> None:
    """Check the headers of a model folder's files against its config.json.

    Raises ValueError for missing and truncated files, for names that the model does not have, and for shapes that
    differ from transformers' model. Shapes are compared only for tensors with the same name in transformers.
    """
    import torch

    from .quantized import quantization_of
    from .safetensors_io import SafetensorsFolder
    from .tensor_names import check_folder_names, shape_mismatch

    if not has_weights(folder):
        return
    tensors, hf_config = SafetensorsFolder(folder).tensors, read_config(folder)
    check_folder_names(folder, hf_config)
    if quantization_of(hf_config) or _describe(hf_config) is None:
        return
    with torch.device("meta"):
        model = empty_model(load_config(folder, flag=flag))
    for name, tensor in model.state_dict().items():
        if name in tensors and not _is_loadable(tensors[name].shape, tuple(tensor.shape)):
            raise ValueError(f"{flag} {shape_mismatch(tensors[name].file, name, tensors[name].shape, tensor.shape)}")


def _is_loadable(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of a file fits one of transformers, which transposes Qwen3-VL-MoE's stacked experts."""
    return stored == shape or (len(shape) == 3 and stored == (shape[0], shape[2], shape[1]))


def empty_model(config: Any, **settings: Any) -> Any:
    """Build transformers' causal language model of `config` without loading weights, and without what speaks."""
    _leave_out_speech(config)
    return _causal_class(config).from_config(config, trust_remote_code=False, **settings)


def empty_classifier(config: Any) -> Any:
    """Build transformers' classifier of sequences without loading weights. Raises ValueError where it has none."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)


def _leave_out_speech(config: Any) -> bool:
    """Have an Omni model of transformers' `config` made without talker and vocoder; return whether it is one."""
    is_omni = hasattr(config, "thinker_config")
    if is_omni:
        config.enable_audio_output = False
    return is_omni


def _causal_class(config: Any) -> Any:
    """Return AutoModelForCausalLM, or another of transformers' classes for a config that only it knows.

    Likewise for a model whose tower a family here has: AutoModelForCausalLM may build the text model alone (Qwen3.5).
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    kind = type(config)
    is_vision_language = kind not in MODEL_FOR_CAUSAL_LM_MAPPING or _has_tower(config.to_dict())
    is_known = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if is_vision_language and not is_known and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForImageTextToText if is_vision_language and is_known else AutoModelForCausalLM


def _has_tower(hf_config: HfConfig) -> bool:
    """Return whether a family here has the vision tower of a model."""
    try:
        hf_config = lift_config(hf_config)
        return family_of(hf_config).has_tower(hf_config)
    except ValueError:
        return False


def _describe(hf_config: HfConfig) -> Architecture | None:
    """Return the architecture of a model, None if the bridge does not support its family."""
    try:
        return family_of(hf_config).describe(hf_config)
    except ValueError:
        return None


def _unusable(folder: Path, flag: str, error: Exception) -> ValueError:
    if _needs_code(error):
        return ValueError(
            f"{flag} {folder}: its architecture is only available as Python code in the folder (auto_map in "
            "config.json), which is never run. Use a checkpoint of an architecture that transformers has"
        )
    return ValueError(f"{flag} {folder}: transformers cannot load it ({_reason(error)})")


def _needs_code(error: Exception) -> bool:
    return "trust_remote_code=True" in str(error)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warnings, which the checks above replace, and its progress bars outside of a terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
