"""Config files with which sentence-transformers loads a language model as an embedding model.

In the format of its versions 2 to 5, which later versions, vLLM and text-embeddings-inference also read. Models of
texts and images need version 5.4.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..families.internvl import CHAT
from ..families.thinker import THINKER
from ..families.vlm_text import text_config
from .safetensors_io import sync

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
MODE = {"last": "lasttoken", "mean": "mean_tokens"}
STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
MESSAGES = {
    "transformer_task": "feature-extraction",
    "modality_config": {
        **dict.fromkeys(("text", "image", "video"), STATES), "message": {**STATES, "format": "structured"}
    },
    "module_output_name": "token_embeddings",
    "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
}  # fmt: skip


def sentence_transformers_files(
    folder: Path,
    pooling: Literal["last", "mean"],
    normalize: bool = True,
    dims: Sequence[int] = (),
    instruction: str | None = None,
) -> None:
    """Write the files into `folder`, which has config.json and the tokenizer; none for Omni and InternVLChatModel.

    SentenceTransformer(folder) then computes the same embeddings as training. dims: sizes of Matryoshka embeddings,
    also written into config.json for vLLM. instruction: default system prompt of a model whose texts and images go
    through its chat template; None: texts are tokenized as they are
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # transformers' AutoModel, by which sentence-transformers loads a folder, takes none of these.
    if THINKER in config or config.get("model_type") == CHAT:
        return
    if dims:
        _write(folder / "config.json", config | {"is_matryoshka": True, "matryoshka_dimensions": sorted(dims)})
    modules = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    paths = [f"{number}_{name}" if number else "" for number, name in enumerate(modules)]
    _write(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (name, path) in enumerate(zip(modules, paths, strict=True))
        ],
    )
    pooling_config = {"word_embedding_dimension": text_config(config)["hidden_size"]}
    pooling_config |= {f"pooling_mode_{mode}": mode == MODE[pooling] for mode in MODES}
    _write(folder / paths[1] / "config.json", pooling_config | {"include_prompt": True})
    if normalize:
        _write(folder / paths[2] / "config.json", {})
    _write(folder / "sentence_bert_config.json", MESSAGES if instruction else {"do_lower_case": False})
    prompts = {"default": instruction} if instruction else {}
    similarity = {"default_prompt_name": next(iter(prompts), None), "similarity_fn_name": "cosine"}
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts} | similarity)


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        sync(stream)
