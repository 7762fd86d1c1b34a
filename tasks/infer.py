"""`swift infer`: chat with a checkpoint, or complete a dataset, with transformers or vLLM.

    swift infer --model DIR --stream true                          # interactive chat
    swift infer --model DIR --val_dataset test.jsonl --temperature 0 --max_batch_size 32
    swift infer --adapters DIR                                     # an adapter with its base model

Both engines receive the same token ids from the tokenizer's chat template. The prompt omits a row's last response. Each
line of the result file is a JSON object: `messages` (with the generated response last), `response`, and `labels`, the
row's own response or null; rows with media have `images`, `videos` and `audios` too.
"""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..bridge.checkpoint.hub import (
    adapter_folder,
    has_weights,
    model_folder,
    no_weights_message,
    read_adapter_config,
    set_base_model,
)
from ..bridge.checkpoint.pretrained import load_model
from ..bridge.checkpoint.rope_scaling import scaled_folder
from ..templates.formats.dataset_names import resolve_text
from ..templates.formats.medium import Medium, json_source, media_columns
from ..templates.formats.schemas import Conversation, UnusableRow
from ..templates.media.processor import VisionProcessor
from ..templates.plural import plural
from .convert.peft_model import attach_adapter, merge_adapter
from .infer_data import InferPrompt, RunData, read_prompts
from .infer_engine import AdapterFolder, ChatEngine, Emit
from .infer_media import (
    EncodedPrompt,
    count_videos,
    media_inputs,
    open_vision,
    read_query,
    with_tags,
)
from .infer_metrics import METRICS
from .infer_vllm import VllmChat
from .options import InferOptions
from .system.atomic_dir import loading, verify_files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

KERNELS = {  # --attention_backend -> transformers' name
    "flash": "flash_attention_2",
    "flash_2": "flash_attention_2",
    "flash_3": "flash_attention_3",
    "unfused": "eager",
}
VLLM_PROMPTS = 2000  # per call of LLM.generate


def run(options: InferOptions, _sources: dict[str, str] | None = None) -> None:
    """Run `swift infer`. Raises ValueError, FileNotFoundError or ImportError."""
    run_data = RunData.of(options) if options.load_data_args else None
    options = run_data.complete(options) if run_data else options
    is_chat = not options.val_dataset and run_data is None
    adapter = checked_adapter(options)
    options = set_base_model(options, adapter and adapter.folder)
    folder = checked_folder(options)
    vision = open_vision(folder, options)
    rows = [] if is_chat else list(read_prompts(options, run_data, vision))
    media = [row.conversation.media for row in rows]
    path = result_path(adapter.folder if adapter else folder, options) if not is_chat else None
    scaled = scaled_folder(folder, options)
    if options.infer_backend == "vllm":
        engine = VllmChat(scaled, adapter, options, vision, media)
    else:
        engine = TransformersChat(scaled, adapter, options, vision)
    if path is None:
        chat(engine, options)
    else:
        answer(engine, rows, path, options)


def checked_folder(options: InferOptions) -> Path:
    """Return the model's folder after checking that it holds a complete checkpoint."""
    folder = model_folder(options)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"--model {folder}: it has no config.json. Set the folder of a checkpoint-N.")
    _verify("--model", folder)
    if not has_weights(folder):
        raise ValueError(f"--model {folder} {no_weights_message(folder)}. Use a folder that has them.")
    return folder


def checked_adapter(options: InferOptions) -> AdapterFolder | None:
    """Return the adapter of `--adapters` after checking its folder; None if unset."""
    folder = adapter_folder(options, options.adapters)
    if folder is None:
        return None
    adapter = AdapterFolder(folder, read_adapter_config(folder))
    _verify("--adapters", folder)
    return adapter


def _verify(flag: str, folder: Path) -> None:
    if faults := verify_files(folder):
        raise ValueError(
            f"{flag} {folder}: it is damaged ({'; '.join(faults)}). Copy it again, or use another checkpoint."
        )
    from ..bridge.checkpoint.safetensors_io import check_headers

    check_headers(folder)  # finds what a manifest cannot: missing or truncated shards


def result_path(folder: Path, options: InferOptions) -> Path:
    """Return the path of the result file, and create its folder.

    Raises FileExistsError if the file exists, ValueError if it cannot be written.
    """
    if options.result_path is None:
        path = _default_path(folder.resolve(), time.strftime("%Y%m%d-%H%M%S"))
    else:
        path = Path(options.result_path).expanduser()
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ValueError(f"--result_path {path}: {error.strerror}. Set another path.") from error
    else:
        raise FileExistsError(f"--result_path {path} exists. Move it, or set another path.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--result_path {path} cannot be written ({error.strerror}). Set another path.") from error
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--result_path {path} cannot be written (its folder is read-only). Set another path.")
    return path


def _default_path(folder: Path, timestamp: str) -> Path:
    """Return a path in the model's folder, or in the run folder for a checkpoint, which the run may delete."""
    if re.fullmatch(r"checkpoint-\d+(-merged)?", folder.name):
        return folder.parent / "infer_result" / f"{folder.name}-{timestamp}.jsonl"
    return folder / "infer_result" / f"{timestamp}.jsonl"


def answer(engine: ChatEngine, prompts: list[InferPrompt], path: Path, options: InferOptions) -> None:
    """Complete each prompt and write its row to `path`, batch by batch."""
    if options.metric and all(prompt.label is None for prompt in prompts):
        raise ValueError(f"--metric {options.metric}: no row of the dataset has a response to compare with. Remove it.")
    batch_size, responses = _rows_per_write(options, len(prompts)), list[str]()
    start = time.perf_counter()
    with path.open("w", encoding="utf-8") as file, tqdm(total=len(prompts), desc="Generate", disable=None) as bar:
        for batch_start in range(0, len(prompts), batch_size):
            batch = prompts[batch_start : batch_start + batch_size]
            encoded = [engine.encode(prompt.conversation, prompt.name) for prompt in batch]
            step = len(batch) if options.infer_backend == "vllm" else options.max_batch_size  # vLLM batches by itself
            answers = [text for i in range(0, len(batch), step) for text in engine.generate(encoded[i : i + step])]
            for prompt, response in zip(batch, answers, strict=True):
                messages = [*with_tags(prompt.conversation.messages), {"role": "assistant", "content": response}]
                row = {"messages": messages, "response": response, "labels": prompt.label}
                row |= media_columns(prompt.conversation.media, json_source)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            responses += answers
            file.flush()
            bar.update(len(batch))
    seconds = time.perf_counter() - start
    print(f"{plural(len(prompts), 'response')} in {seconds:.1f} s ({len(prompts) / seconds:,.1f}/s): {path}")
    labelled = [
        (text, prompt.label) for text, prompt in zip(responses, prompts, strict=True) if prompt.label is not None
    ]
    if labelled:
        correct = sum(response.strip() == label.strip() for response, label in labelled)
        print(f"equal to the dataset's response: {correct} of {len(labelled)} ({correct / len(labelled):.1%})")
    if options.metric:
        if not labelled:
            raise ValueError(
                f"--metric {options.metric}: no row of the dataset has a response to compare with. Remove it"
            )
        print(json.dumps(METRICS[options.metric](labelled)))


def _rows_per_write(options: InferOptions, rows: int) -> int:
    """Return the rows to answer before they are written; by default those that the engine is given at a time."""
    if options.write_batch_size is None:
        return VLLM_PROMPTS if options.infer_backend == "vllm" else options.max_batch_size
    return options.write_batch_size if options.write_batch_size > 0 else max(rows, 1)


def chat(engine: ChatEngine, options: InferOptions) -> None:
    """Chat on the terminal until `exit`, `quit`, or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (adds line editing and history to input())
    print("Chat. `clear` starts over, `exit` quits; Ctrl-C stops a response.")
    system = resolve_text("--system", options.system)
    initial_messages = [{"role": "system", "content": system}] if system else []
    messages, media = list(initial_messages), list[Medium]()
    while True:
        try:
            text = input("<<< ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text in ("exit", "quit"):
            return
        if text == "clear":
            messages, media = list(initial_messages), []
            continue
        if not text:
            continue
        try:
            text, query_media = _query(text, engine, media)
        except (UnusableRow, ValueError) as error:
            print(f"error: {error}")
            continue
        except (EOFError, KeyboardInterrupt):
            print()
            continue
        media += query_media
        messages.append({"role": "user", "content": text})
        pieces: list[str] = []

        def emit(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            print(piece, end="", flush=True)

        try:
            prompt = engine.encode(Conversation(messages, [None] * len(messages), media=media))
            (response,) = engine.generate([prompt], emit if options.stream else None)
            print("" if options.stream else response)
        except KeyboardInterrupt:
            response = "".join(pieces)
            print(" [stopped]")
        messages.append({"role": "assistant", "content": response})


def _query(text: str, engine: ChatEngine, earlier: list[Medium]) -> tuple[str, list[Medium]]:
    """Return a query with its media, whose paths are asked for. Raises UnusableRow or ValueError.

    earlier: media of the conversation
    """
    if engine.vision is None:
        return text, []
    text, media = read_query(text, engine.vision, lambda kind: input(f"{kind}, path or URL <<< ").strip())
    if not engine.takes_images and any(medium.kind == "image" for medium in media):
        raise ValueError("--infer_backend vllm: takes no images of this model. Use transformers.")
    videos, most = count_videos([*earlier, *media]), engine.most_videos
    if most is not None and videos > most:
        raise ValueError(
            f"--infer_backend vllm: takes {most or 'no'} videos in a conversation. Start it with "
            f"""--vllm_limit_mm_per_prompt '{{"video": {videos}}}'."""
        )
    return text, media


class TransformersChat(ChatEngine):
    """Engine that uses transformers' `model.generate`, on all visible GPUs or the CPU."""

    def __init__(
        self,
        folder: Path,
        adapter: AdapterFolder | None,
        options: InferOptions,
        vision: VisionProcessor | None = None,
    ):
        super().__init__(folder, options, vision)
        import torch
        from transformers import set_seed

        from ..bridge.checkpoint.answering_model import answering_model

        set_seed(options.seed)
        device_map = "auto" if torch.cuda.is_available() else None
        with loading(folder, has_progress_bar=True):
            kernel = (
                {}
                if options.attention_backend == "auto"
                else {"attn_implementation": KERNELS[options.attention_backend]}
            )
            dtype = options.torch_dtype or "auto"
            # The classes of audio are others.
            kind = "ImageTextToText" if vision and vision.family.image and not vision.audio else "CausalLM"
            self.model: Any = load_model(folder, kind, dtype=dtype, device_map=device_map, **kernel).eval()
        if adapter:
            self.model = attach_adapter(self.model, adapter.folder, folder)
            if options.merge_lora:
                self.model = merge_adapter(self.model)
        self.settings = self._settings(self.model.generation_config, options)
        self.model = answering_model(self.model)

    def _settings(self, settings: "GenerationConfig", options: InferOptions) -> "GenerationConfig":
        """Return the model's generation config, overridden by the options."""
        eos_ids = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        settings.eos_token_id = sorted({end for end in (*eos_ids, self.tokenizer.eos_token_id) if end is not None})
        # Padding is masked, so any token works; the tokenizer's pad token may exceed the embedding.
        settings.pad_token_id = (settings.eos_token_id or [0])[0]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"):
            if (value := getattr(options, name)) is not None:
                setattr(settings, name, value)
        if options.temperature == 0:
            settings.do_sample = False
            settings.temperature = settings.top_p = settings.top_k = settings.min_p = None
        elif not (options.temperature is options.top_p is options.top_k is options.min_p is None):
            settings.do_sample = True
        if settings.top_k == -1:
            settings.top_k = 0  # transformers' value for all tokens
        return settings

    def generate(self, prompts: list[EncodedPrompt], emit: Emit | None = None) -> list[str]:
        import copy

        import torch

        from ..templates.dataset.transformers_inputs import to_model
        from .rollout.transformers_engine import left_pad

        tokens, mask = left_pad([prompt.ids for prompt in prompts], self.settings.pad_token_id)
        media = media_inputs(prompts, tokens, self.vision) if self.vision else {}
        prompt_length = tokens.shape[1]
        settings = copy.copy(self.settings)
        if settings.max_new_tokens is None:
            settings.max_new_tokens = max(
                1, self.model.config.get_text_config().max_position_embeddings - prompt_length
            )
        with torch.inference_mode():
            output = self.model.generate(
                tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                **to_model(media, self.model.device, self.model.dtype),
                generation_config=settings,
                streamer=_streamer(self.tokenizer, emit) if emit else None,
            )
        return self.tokenizer.batch_decode(output[:, prompt_length:], skip_special_tokens=True)


def _streamer(tokenizer: "PreTrainedTokenizerBase", emit: Emit) -> "TextStreamer":
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            emit(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
