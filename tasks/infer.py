"""`swift infer`: chat with a checkpoint, or complete a dataset, with transformers or vLLM.

    swift infer --model DIR --stream true                          # interactive chat
    swift infer --model DIR --val_dataset test.jsonl --temperature 0 --max_batch_size 32
    swift infer --adapters DIR                                     # an adapter with its base model

Both engines receive the same token ids from the tokenizer's chat template. The prompt omits a row's last response. Each
line of the result file is a JSON object: `messages` (with the generated response last), `response`, and `labels`, the
row's own response or null; rows with images or videos have `images` and `videos` too.
"""

import contextlib
import importlib.util
import json
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..bridge.checkpoint.hub import (
    adapter_folder,
    has_weights,
    model_folder,
    no_weights_message,
    read_adapter_config,
    set_base_model,
)
from ..bridge.checkpoint.pretrained import load_model, load_tokenizer
from ..bridge.checkpoint.rope_scaling import scaled_folder
from ..templates.chat_template.chat import ChatTemplate
from ..templates.chat_template.non_thinking import OFF
from ..templates.dataset.placed_media import expand
from ..templates.dataset.tokenize import place_media
from ..templates.formats.dataset_names import resolve_text
from ..templates.formats.medium import Medium, has_sentinels, json_source, media_columns
from ..templates.formats.schemas import Conversation, UnusableRow
from ..templates.json_types import JsonObject
from ..templates.media.processor import VisionProcessor
from ..templates.plural import plural
from .convert.peft_model import attach_adapter, merge_adapter
from .infer_data import InferPrompt, RunData, read_prompts
from .infer_media import EncodedPrompt, has_videos, media_inputs, open_vision, read_query, to_request, with_tags
from .infer_metrics import METRICS
from .options import InferOptions
from .rollout.lora_support import RANKS, lora_rank_bucket
from .system.atomic_dir import loading, verify_files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

KERNELS = {  # --attention_backend -> transformers' name
    "flash": "flash_attention_2",
    "flash_2": "flash_attention_2",
    "flash_3": "flash_attention_3",
    "unfused": "eager",
}
Emit = Callable[[str], None]  # receives a piece of a response
NO_VIDEOS_IN_VLLM = "--infer_backend vllm: takes no videos in this version. Set --infer_backend transformers."
VLLM_PROMPTS = 2000  # per call of LLM.generate
UNSUPPORTED_BY_VLLM = {  # keys of adapter_config.json that vLLM rejects or silently ignores
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "fully trained modules (modules_to_save)",
}


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
    if options.infer_backend == "vllm" and has_videos(medium for row in rows for medium in row.conversation.media):
        raise ValueError(NO_VIDEOS_IN_VLLM)
    path = result_path(adapter.folder if adapter else folder, options) if not is_chat else None
    engine = (VllmChat if options.infer_backend == "vllm" else TransformersChat)(
        scaled_folder(folder, options), adapter, options, vision
    )
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


@dataclass(frozen=True)
class AdapterFolder:
    folder: Path
    config: JsonObject  # adapter_config.json


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


def answer(engine: "ChatEngine", prompts: list[InferPrompt], path: Path, options: InferOptions) -> None:
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


def chat(engine: "ChatEngine", options: InferOptions) -> None:
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
            text, query_media = _query(text, engine, options)
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


def _query(text: str, engine: "ChatEngine", options: InferOptions) -> tuple[str, list[Medium]]:
    """Return a query with its images and videos, whose paths are asked for. Raises UnusableRow or ValueError."""
    if engine.vision is None:
        return text, []
    text, media = read_query(text, engine.vision, lambda kind: input(f"{kind}, path or URL <<< ").strip())
    if options.infer_backend == "vllm" and has_videos(media):
        raise ValueError(NO_VIDEOS_IN_VLLM)
    return text, media


class ChatEngine(ABC):
    """Engine of `swift infer`: token ids and media in, text out.

    vision: processor of images and videos; None for a model that takes none
    """

    def __init__(self, folder: Path, options: InferOptions, vision: VisionProcessor | None = None):
        self.tokenizer, self.vision = load_tokenizer(folder), vision
        if vision and vision.chat_template:  # it goes before the tokenizer's
            self.tokenizer.chat_template = vision.chat_template
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"--model {folder}: its tokenizer has no chat template. Set a model that was fine-tuned on "
                "conversations, or add a chat_template.jinja to the folder."
            )
        thinking = {} if options.enable_thinking is None else dict.fromkeys(OFF, options.enable_thinking)
        if thinking and not any(name in str(self.tokenizer.chat_template) for name in thinking):
            print("note: --enable_thinking has no effect: the chat template has no such variable.")
        self._template = ChatTemplate(self.tokenizer, **thinking)

    def encode(self, conversation: Conversation, row_name: str = "") -> EncodedPrompt:
        """Return the tokens of a conversation up to the start of its response, and its media."""
        try:
            text = self._template.render(conversation, prompt=True)
            if has_sentinels(text):
                raise UnusableRow("the chat template has no place for an image or video in one of its messages")
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if self.vision is None:
                return EncodedPrompt(ids, name=row_name)
            placed = place_media(np.array(ids), conversation.media, self.vision)
        except UnusableRow as error:
            row = f"{row_name}: " if row_name else ""
            raise ValueError(f"--model {self.tokenizer.name_or_path}: {row}{error}") from error
        (expanded, _), placed = expand(np.array(ids), np.zeros(len(ids)), placed)
        return EncodedPrompt(expanded.tolist(), placed, row_name)

    @abstractmethod
    def generate(self, prompts: list[EncodedPrompt], emit: Emit | None = None) -> list[str]:
        """Return a response to each prompt. `emit` receives the pieces of a single prompt's response."""


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

        set_seed(options.seed)
        device_map = "auto" if torch.cuda.is_available() else None
        with loading(folder, has_progress_bar=True):
            kernel = (
                {}
                if options.attention_backend == "auto"
                else {"attn_implementation": KERNELS[options.attention_backend]}
            )
            dtype = options.torch_dtype or "auto"
            kind = "ImageTextToText" if vision else "CausalLM"
            self.model: Any = load_model(folder, kind, dtype=dtype, device_map=device_map, **kernel).eval()
        if adapter:
            self.model = attach_adapter(self.model, adapter.folder, folder)
            if options.merge_lora:
                self.model = merge_adapter(self.model)
        self.settings = self._settings(options)

    def _settings(self, options: InferOptions) -> "GenerationConfig":
        """Return the model's generation config, overridden by the options."""
        settings = self.model.generation_config
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
                **{name: tensor.to(self.model.device) for name, tensor in media.items()},
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


class VllmChat(ChatEngine):
    """Engine that uses vLLM in this process."""

    def __init__(
        self,
        folder: Path,
        adapter: AdapterFolder | None,
        options: InferOptions,
        vision: VisionProcessor | None = None,
    ):
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "--infer_backend vllm: vLLM is not installed. Install it (on NVIDIA GPUs: pip install "
                "'megaswift[vllm]'), or remove the flag to use transformers."
            )
        lora_options = {}
        if adapter:
            _check_for_vllm(adapter, options)
            lora_options = {"enable_lora": True, "max_lora_rank": lora_rank_bucket(adapter.config.get("r", 8))}
        super().__init__(folder, options, vision)
        import torch

        from .rollout.vllm_images import image_arguments, vllm_prompt
        from .rollout.vllm_kwargs import engine_kwargs, set_cpu_defaults

        if not torch.cuda.is_available():
            set_cpu_defaults()
        from vllm import LLM  # pyright: ignore[reportMissingImports]
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        self.llm = LLM(
            str(folder),
            dtype=options.torch_dtype or "auto",
            seed=options.seed,
            tensor_parallel_size=options.vllm_tensor_parallel_size,
            gpu_memory_utilization=options.vllm_gpu_memory_utilization,
            max_model_len=options.vllm_max_model_len,
            enforce_eager=options.vllm_enforce_eager,
            use_tqdm_on_load=sys.stderr.isatty(),
            **lora_options,
            **image_arguments(folder, options),
            **engine_kwargs(options.vllm_engine_kwargs),
        )
        self.adapter = LoRARequest("adapter", 1, str(adapter.folder.absolute())) if adapter else None
        self.settings = self.llm.get_default_sampling_params()  # from the model's generation config
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if (value := getattr(options, name)) is not None:
                setattr(self.settings, name, value)
        self.settings.max_tokens = options.max_new_tokens
        self._prompt, self._request_count = vllm_prompt, 0

    def generate(self, prompts: list[EncodedPrompt], emit: Emit | None = None) -> list[str]:
        if emit:
            return [self._stream(prompts[0], emit)]
        requests = [to_request(prompt, self.vision) for prompt in prompts]
        show_progress = len(prompts) > 1 and sys.stderr.isatty()
        outputs = self.llm.generate(
            list(map(self._prompt, requests)), self.settings, use_tqdm=show_progress, lora_request=self.adapter
        )
        for request, output in zip(requests, outputs, strict=True):
            request.check_length(len(output.prompt_token_ids))
        return [output.outputs[0].text for output in outputs]

    def _stream(self, prompt: EncodedPrompt, emit: Emit) -> str:
        """Run vLLM's engine loop, token by token."""
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        settings = self.settings.clone()
        settings.output_kind = RequestOutputKind.DELTA
        self._request_count += 1
        request = f"chat-{self._request_count}"
        engine = self.llm.llm_engine
        (rendered,) = engine.renderer.render_cmpl([self._prompt(to_request(prompt, self.vision))])
        engine.add_request(request, rendered, settings, lora_request=self.adapter)
        pieces = []
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    pieces.append(output.outputs[0].text)
                    emit(pieces[-1])
        except KeyboardInterrupt:
            engine.abort_request([request])
            raise
        return "".join(pieces)


def _check_for_vllm(adapter: AdapterFolder, options: InferOptions) -> None:
    """Raise ValueError for adapter features that vLLM does not support."""
    from ..bridge.checkpoint.safetensors_io import SafetensorsFolder

    config = adapter.config
    problems = [feature for name, feature in UNSUPPORTED_BY_VLLM.items() if config.get(name)]
    for name, feature in (("rank_pattern", "ranks"), ("alpha_pattern", "scales")):
        # Patterns for fused experts are internal to PEFT: vLLM loads experts one by one.
        modules = [module for module in config.get(name) or {} if not module.endswith("gate_up_proj")]
        problems += [f"{feature} per module ({name})"] * bool(modules)
    if any(".kv_b_proj." in name for name in SafetensorsFolder(adapter.folder).tensors):
        problems.append("adapters of kv_b_proj, which it ignores silently")
    problems += ["biases (bias)"] * (config.get("bias", "none") != "none")
    problems += [f"a rank of {config['r']}"] * (config.get("r", 8) > RANKS[-1])
    problems += ["merging in memory (--merge_lora true)"] * bool(options.merge_lora)
    if problems:
        raise ValueError(
            f"--adapters {adapter.folder}: vLLM does not support {', '.join(problems)}. Export a merged folder (swift "
            f"export --adapters {adapter.folder} --merge_lora true) and set it as --model, or remove --infer_backend "
            "to use transformers."
        )
