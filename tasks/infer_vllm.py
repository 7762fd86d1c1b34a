"""Engine of `swift infer --infer_backend vllm`."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bridge.checkpoint.hub import read_config
from ..templates.formats.medium import Medium
from ..templates.media.processor import VisionProcessor
from .infer_engine import AdapterFolder, ChatEngine, Emit
from .infer_media import EncodedPrompt, check_videos, count_videos, to_request
from .options import InferOptions
from .rollout.lora_support import RANKS, UNREAD_EXPERTS, lora_rank_bucket, unsupported_expert_rank
from .rollout.vllm_errors import refusals_as_value_errors

UNSUPPORTED_BY_VLLM = {  # keys of adapter_config.json that vLLM rejects or silently ignores
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "fully trained modules (modules_to_save)",
}


class VllmChat(ChatEngine):
    """Engine that uses vLLM in this process."""

    def __init__(
        self,
        folder: Path,
        adapter: AdapterFolder | None,
        options: InferOptions,
        vision: VisionProcessor | None = None,
        media: Sequence[Sequence[Medium]] = (),
    ):
        """media: of each prompt, where the prompts are known"""
        most_videos = max(map(count_videos, media), default=0)
        self.most_videos = options.vllm_limit_mm_per_prompt.get("video", most_videos)
        check_videos(vision, self.most_videos)
        from .rollout.vllm_images import PromptWriter, check_model, image_arguments, takes_images

        check_model(
            "--infer_backend vllm",
            read_config(folder),
            has_images=any(medium.kind == "image" for each in media for medium in each),
        )
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "--infer_backend vllm: vLLM is not installed. Install it (on NVIDIA GPUs: pip install "
                "'megaswift[vllm]'), or remove the flag to use transformers."
            )
        lora_options = {}
        if adapter:
            check_for_vllm(adapter, options)
            lora_options = {"enable_lora": True, "max_lora_rank": lora_rank_bucket(adapter.config.get("r", 8))}
        from .rollout.vllm_kwargs import engine_kwargs, model_settings, quantization_kwargs, set_cpu_defaults

        quantization = quantization_kwargs(options.vllm_quantization, folder)
        super().__init__(folder, options, vision)
        import torch

        from .rollout.vllm_audios import EXTENSION

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
            worker_extension_cls=EXTENSION if vision and vision.audio else "",
            **lora_options,
            **image_arguments(folder, options, most_videos=most_videos),
            **quantization | engine_kwargs(model_settings(options.vllm_engine_kwargs, folder)),
        )
        self.takes_images = vision is None or takes_images(vision.model_type)
        self.adapter = LoRARequest("adapter", 1, str(adapter.folder.absolute())) if adapter else None
        self.settings = self.llm.get_default_sampling_params()  # from the model's generation config
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if (value := getattr(options, name)) is not None:
                setattr(self.settings, name, value)
        self.settings.max_tokens = options.max_new_tokens
        self._prompt, self._request_count = PromptWriter(folder), 0

    def generate(self, prompts: list[EncodedPrompt], emit: Emit | None = None) -> list[str]:
        if emit:
            return [self._stream(prompts[0], emit)]
        requests = [to_request(prompt, self.vision) for prompt in prompts]
        show_progress = len(prompts) > 1 and sys.stderr.isatty()
        with refusals_as_value_errors():
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
        with refusals_as_value_errors():
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


def check_for_vllm(adapter: AdapterFolder, options: InferOptions) -> None:
    """Raise ValueError for adapter features that vLLM does not support."""
    from ..bridge.checkpoint.safetensors_io import SafetensorsFolder
    from ..bridge.families.vlm_text import is_of_tower
    from ..bridge.lora.adapter_mapping import FUSED_EXPERTS

    config = adapter.config
    problems = [feature for name, feature in UNSUPPORTED_BY_VLLM.items() if config.get(name)]
    for name, feature in (("rank_pattern", "ranks"), ("alpha_pattern", "scales")):
        # Patterns for fused experts are internal to PEFT: vLLM loads experts one by one.
        modules = [module for module in config.get(name) or {} if not module.endswith("gate_up_proj")]
        problems += [f"{feature} per module ({name})"] * bool(modules)
    adapted = {name.partition(".lora_")[0] for name in SafetensorsFolder(adapter.folder).tensors}
    if any(module.endswith(".kv_b_proj") for module in adapted):
        problems.append("adapters of kv_b_proj, which it ignores silently")
    if any(map(is_of_tower, adapted)):
        problems.append("adapters of a vision or audio tower, which it ignores")
    experts = {module for module in adapted if ".experts." in f"{module}."}
    if any(FUSED_EXPERTS.fullmatch(module) and ".mlp.experts" not in module for module in experts):
        problems.append(UNREAD_EXPERTS)
    elif experts and (problem := unsupported_expert_rank(config.get("r", 8))):
        problems.append(problem)
    problems += ["biases (bias)"] * (config.get("bias", "none") != "none")
    problems += [f"a rank of {config['r']}"] * (config.get("r", 8) > RANKS[-1])
    problems += ["merging in memory (--merge_lora true)"] * bool(options.merge_lora)
    if problems:
        raise ValueError(
            f"--adapters {adapter.folder}: vLLM does not support {', '.join(problems)}. Export a merged folder (swift "
            f"export --adapters {adapter.folder} --merge_lora true) and set it as --model, or remove --infer_backend "
            "to use transformers."
        )
