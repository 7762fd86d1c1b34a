"""vLLM in the trainer's processes: each `vllm_tensor_parallel_size` consecutive ranks form one engine.

vLLM uses the trainer's process groups and adds its own. While it sleeps, the trainer can use its memory.
"""

import contextlib
import gc
import importlib.util
import os
import random
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge import runtime
from ...bridge.checkpoint.hub import read_config
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.checkpoint.strided_copy import WeightLayout
from ...bridge.families import family_of
from ...bridge.lora.adapter_mapping import PREFIX as ADAPTER_PREFIX  # prefix of adapter tensor names
from ...templates.json_types import JsonObject
from ..options.rollout import EngineOptions
from ..system.memory import set_unmapped
from .engine import Completion, Request, Sampling
from .eos import eos_token_ids
from .lora_support import lora_rank_bucket
from .vllm_adapter import (
    VllmObject,
    has_adapters,
    load_adapter,
    lora_request,
    names_mapper,
    unsharded_adapter_tensors,
)
from .vllm_cpu_kernels import repack_experts, repack_heads
from .vllm_errors import quiet_vllm, refusals_as_value_errors
from .vllm_images import PromptWriter, image_arguments
from .vllm_kwargs import (
    engine_kwargs,
    is_vllm_before,
    model_settings,
    quantization_kwargs,
    set_cpu_defaults,
    with_normalizing_processor,
)
from .vllm_requests import sampling_params, to_completion
from .weight_sync import checksum

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's tags for memory that sleeps
BASE_LAYER = ".base_layer."  # part of vLLM's names of layers with an adapter
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # environment variables of torch's allocator
EXPANDABLE, NOT_EXPANDABLE = "expandable_segments:True", "expandable_segments:False"
TRANSFORMERS_INSTEAD = "generate with transformers (--use_vllm false, or --infer_backend transformers)"
_CLOSED_ASLEEP: list[VllmObject] = []  # engines closed while asleep: see `close`


class VllmEngine:
    """Engine whose methods all ranks call together. The ranks of one engine pass the same requests.

    `load`: load the weights of `folder`; otherwise weights are random until the first `update`.
    `experts`: support Sampling.experts.
    `adapter_rank`: keep the weights of `folder`; `update` sends adapters of at most this rank.
    `sleep_level`: 0: never sleep. 1: move weights to the host and free the cache. 2: free the weights too, so that an
        `update` must follow. On a CPU the engine does not sleep.
    `memory_share`: vLLM's share of the GPU's memory.
    `most_images`, `most_videos`: of a prompt of the data.

    Raises ImportError without vLLM. Raises ValueError where the tensor parallel size does not divide the number of
    ranks, or `check_experts` fails.
    """

    def __init__(
        self,
        folder: str | Path,
        options: EngineOptions,
        *,
        dtype: torch.dtype,
        load: bool = False,
        experts: bool = False,
        adapter_rank: int | None = None,
        sleep_level: int = 0,
        memory_share: float = 0.9,
        most_images: int = 0,
        most_videos: int = 0,
        most_audios: int = 0,
    ):
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "--use_vllm true: vLLM is not installed. Install it (on NVIDIA GPUs: pip install 'megaswift[vllm]'), "
                "or remove the flag to generate with transformers."
            )
        load_format = "auto" if load or adapter_rank else "dummy"
        size, world = options.vllm_tensor_parallel_size, dist.get_world_size()
        if world % size:
            raise ValueError(
                f"--vllm_tensor_parallel_size {size}: does not divide the {world} processes. Set a size that does"
            )
        lora = lora_arguments(Path(folder), adapter_rank)
        on_gpu = torch.cuda.is_available()
        quantization = quantization_kwargs(options.vllm_quantization, Path(folder))
        _prepare_environment(on_gpu)
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        quiet_vllm()
        if experts:
            check_expert_recording("--router_replay_mode R3", "Set R2")
        settings = engine_kwargs(model_settings(options.vllm_engine_kwargs, Path(folder)))
        if load_format == "dummy":
            settings = with_normalizing_processor(settings)
        self._level = sleep_level if on_gpu else 0
        if not on_gpu and size > 1:
            _rename_shared_memory()
        with _preserve_state(), _plain_segments():
            self.llm: VllmObject = LLM(
                str(folder),
                dtype=str(dtype).removeprefix("torch."),
                tensor_parallel_size=size,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=memory_share,
                max_model_len=options.vllm_max_model_len,
                max_num_seqs=options.vllm_max_num_seqs,
                enforce_eager=options.vllm_enforce_eager or not on_gpu,  # compiling costs minutes on a CPU
                enable_prefix_caching=options.vllm_enable_prefix_caching,
                enable_sleep_mode=self._level > 0,
                load_format=load_format,
                enable_return_routed_experts=experts,
                use_tqdm_on_load=sys.stderr.isatty(),
                **lora,
                **image_arguments(Path(folder), options, most_images, most_videos, most_audios),
                generation_config="vllm",  # no defaults other than Sampling's
                logprobs_mode="raw_logprobs",  # see _set_temperature
                **quantization,
                **scheduler_kwargs(settings, experts=experts),
                **settings,
            )
        _keep_process_groups(self.llm)
        if experts:
            check_experts(*self.llm.apply_model(monolithic_moe_kernel))
        (self._scale,) = self.llm.apply_model(scale_of)
        self._temperature = 1.0
        self._asleep: set[str] = set()
        self.layout: WeightLayout | None = None
        self.layout_problem: str | None = None
        self._has_adapter, self._to_prompt = bool(adapter_rank), PromptWriter(Path(folder))
        self.eos_ids = eos_token_ids(folder, load_tokenizer(Path(folder)))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if not requests:
            return []
        self.wake()
        self._set_temperature(sampling.temperature)
        with refusals_as_value_errors():
            outputs = self.llm.generate(
                [self._to_prompt(request) for request in requests],
                [sampling_params(request, sampling, self.eos_ids) for request in requests],
                use_tqdm=False,
                lora_request=lora_request() if self._has_adapter else None,
            )
        for request, output in zip(requests, outputs, strict=True):
            request.check_length(len(output.prompt_token_ids))
        return [to_completion(output, sampling) for output in outputs]

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights. If asleep, wake the weights only."""
        if WEIGHTS in self._asleep:
            self._wake(WEIGHTS)
        if self._has_adapter:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in weights}
            self.llm.apply_model(lambda model: load_adapter(model, tensors))
        else:
            self.llm.apply_model(repack_experts)
            if self.layout is None and self.layout_problem is None:
                self._trace(weights)
            else:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.apply_model(repack_heads)
        self._reset_caches()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let the tensors of `layout` be written within the context. If asleep, wake the weights only."""
        if WEIGHTS in self._asleep:
            self._wake(WEIGHTS)
        yield
        self._reset_caches()

    def _trace(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights, and set `layout` or `layout_problem`."""
        from .vllm_layout import LayoutError, LoaderTrace

        with LoaderTrace(self.llm.apply_model(lambda model: model)[0]) as trace:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": trace.watch(weights)})
        try:
            self.layout = trace.layout()
        except LayoutError as error:
            self.layout_problem = str(error)

    def _reset_caches(self) -> None:
        self.llm.llm_engine.reset_encoder_cache()  # features of images by an earlier tower
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        if self._level and not self._asleep:
            self.llm.sleep(level=self._level)
            self._asleep = {WEIGHTS, CACHE}
            set_unmapped(_bytes_asleep())

    def wake(self) -> None:
        for tag in sorted(self._asleep, reverse=True):  # weights first
            self._wake(tag)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return checksums of the tensors that this rank holds in full, neither sharded nor repacked."""
        (checksums,) = self.llm.apply_model(
            lambda model: {name: checksum(tensor) for name, tensor in unsharded_tensors(model, names)}
        )
        return checksums

    def close(self) -> None:
        """Free the engine but not the process groups: vLLM's shutdown would destroy those of the trainer."""
        self.layout = None  # has the weights
        if self._asleep:  # freeing would unmap its memory twice ("CUDA Error: invalid argument")
            _CLOSED_ASLEEP.append(self.llm)
            return
        self.llm.llm_engine.model_executor.shutdown()
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake(self, tag: str) -> None:
        torch.cuda.empty_cache()  # vLLM cannot use memory cached by the trainer's allocator
        self.llm.wake_up(tags=[tag])
        self._asleep.discard(tag)
        set_unmapped(_bytes_asleep())

    def _set_temperature(self, temperature: float) -> None:
        """Scale the logits by the temperature.

        vLLM returns log-probabilities either at temperature 1, or after top_p and other filters. It therefore samples
        at temperature 1 from logits that are already divided by the temperature.
        """
        temperature = temperature or 1.0
        if temperature != self._temperature:
            self.llm.apply_model(lambda model: set_scale(model, self._scale / temperature))
            self._temperature = temperature


def _keep_process_groups(llm: VllmObject) -> None:
    """Keep vLLM from shutting down by itself, since that destroys the trainer's process groups too.

    vLLM 0.32 and later do so once their object is collected, and at the end of the process.
    """
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def _bytes_asleep() -> int:
    """Return the number of bytes that vLLM has unmapped although torch counts them as reserved."""
    from vllm.device_allocator.cumem import CuMemAllocator  # pyright: ignore[reportMissingImports]

    return sum(data.handle[1] for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.is_asleep)


def scheduler_kwargs(settings: JsonObject, *, experts: bool) -> dict[str, VllmObject]:
    """Return the scheduler of an engine as keyword arguments: `CompletionScheduler`, or none for vLLM's own.

    settings: --vllm_engine_kwargs, which may name a scheduler
    experts: outputs have the chosen experts of each token, which only vLLM's own scheduler hands over
    """
    if experts or "scheduler_cls" in settings:
        return {}
    from .vllm_scheduler import CompletionScheduler

    return {"scheduler_cls": CompletionScheduler}


def monolithic_moe_kernel(model: VllmObject) -> str | None:
    """Return the name of the model's expert kernel if it chooses experts internally, else None."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner  # pyright: ignore[reportMissingImports]

    methods = [module.routed_experts.quant_method for module in model.modules() if isinstance(module, MoERunner)]
    return next((type(method).__name__ for method in methods if method.is_monolithic), None)


def check_experts(kernel: str | None) -> None:
    """Raise ValueError where vLLM cannot record the chosen experts. `kernel`: from `monolithic_moe_kernel`."""
    if kernel is not None:
        raise ValueError(
            f"--router_replay_mode R3: vLLM's expert kernel on this machine ({kernel}) does not return the chosen "
            f"experts. Set R2, or {TRANSFORMERS_INSTEAD}"
        )


def check_expert_recording(flag: str, fix: str) -> None:
    """Raise ValueError, with the flag and a fix, where vLLM cannot record experts: since 0.32 that needs Triton."""
    if is_vllm_before("0.32"):
        return
    from vllm.triton_utils import HAS_TRITON  # pyright: ignore[reportMissingImports]

    if not HAS_TRITON:
        raise ValueError(
            f"{flag}: vLLM records the chosen experts with Triton alone since 0.32, which its build for CPUs lacks. "
            f"{fix}, or {TRANSFORMERS_INSTEAD}"
        )


def scale_of(model: VllmObject) -> float:
    """Return the factor by which vLLM's model multiplies its logits."""
    return _logits_processor(model).scale


def set_scale(model: VllmObject, scale: float) -> None:
    _logits_processor(model).scale = scale


def _logits_processor(model: VllmObject) -> VllmObject:
    from vllm.model_executor.layers.logits_processor import (  # pyright: ignore[reportMissingImports]
        LogitsProcessor,
    )

    (processor,) = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return processor


def lora_arguments(folder: Path, rank: int | None) -> JsonObject:
    """Return vLLM's arguments for adapters of rank up to `rank`. Raises ValueError where they are unsupported."""
    if not rank:
        return {}
    config = read_config(folder)
    if not torch.cuda.is_available() and "num_moe_experts" in family_of(config).describe(config).transformer:
        raise ValueError(
            "--vllm_enable_lora true: vLLM's CPU build does not support adapters in a model with experts. Remove the "
            "flag: full weights, with the adapter merged, are sent instead."
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank_bucket(rank)}


def unsharded_tensors(model: VllmObject, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors that vLLM's model holds unchanged, including parts of fused projections.

    With adapters it also yields the adapter's tensors, named as in PEFT.
    """
    if has_adapters(model):
        yield from unsharded_adapter_tensors(model, [name for name in names if name.startswith(ADAPTER_PREFIX)])
        names = [name for name in names if not name.startswith(ADAPTER_PREFIX)]
    parameters = {name.replace(BASE_LAYER, "."): tensor for name, tensor in model.named_parameters()}
    modules = {f"{name}.".replace(BASE_LAYER, ".")[:-1]: module for name, module in model.named_modules()}
    mapper = names_mapper(model)
    for checkpoint_name in names:
        name = (mapper._map_name(checkpoint_name) if mapper else checkpoint_name) or checkpoint_name
        module, _, leaf = name.rpartition(".")
        if name in parameters and _is_unsharded(modules[module], leaf):
            yield checkpoint_name, parameters[name]
            continue
        parent, _, part = module.rpartition(".")
        for fused, parts in model.packed_modules_mapping.items() if hasattr(model, "packed_modules_mapping") else ():
            fused_module: VllmObject = modules.get(f"{parent}.{fused}")
            if part in parts and f"{parent}.{fused}.{leaf}" in parameters and _is_unsharded(fused_module, leaf):
                sizes = fused_module.output_sizes
                yield checkpoint_name, parameters[f"{parent}.{fused}.{leaf}"].split(sizes)[parts.index(part)]


def _is_unsharded(module: VllmObject, leaf: str) -> bool:
    """Return whether a tensor is neither sharded over ranks, nor padded, nor repacked."""
    weight = getattr(module, leaf, None)
    if weight is None or getattr(module, "tp_size", 1) > 1:
        return False
    if hasattr(module, "org_vocab_size"):
        return module.num_embeddings_padded == module.org_vocab_size
    sizes = getattr(module, "output_size", None), getattr(module, "input_size", None)
    if leaf != "weight" or None in sizes:
        return True
    if weight.itemsize == 1:  # quantized
        return False
    return tuple(weight.shape) == sizes and weight.is_contiguous()


def _prepare_environment(on_gpu: bool) -> None:
    """Set the environment variables that vLLM reads when imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, so that weights need no copy
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # leaves the terminal to the trainer's output
    if not on_gpu:
        set_cpu_defaults()


def _rename_shared_memory() -> None:
    """Give the shared memory between an engine's ranks a name that is unique to this run. Every rank calls this.

    vLLM's own name is the same in all runs, and stays in use after a run was killed.
    """
    from vllm.distributed.device_communicators import cpu_communicator  # pyright: ignore[reportMissingImports]

    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name)
    memory_class = cpu_communicator._CPUSHMDistributed
    original_name = memory_class.make_group_name
    memory_class.make_group_name = staticmethod(
        lambda communicator: name[0] + original_name(communicator).replace("/", "")
    )


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Disable the allocator's expandable segments while vLLM captures its CUDA graphs.

    vLLM's all-reduce exports the graphs' buffers by cudaIpcGetMemHandle, which rejects memory of expandable segments
    and ends the process (https://github.com/vllm-project/vllm/issues/42609). vLLM itself disables them only around its
    sleep pools, and then enables them again if the environment variables do.
    """
    names = [name for name in ALLOCATOR if EXPANDABLE in os.environ.get(name, "")]
    if not names or not torch.cuda.is_available():
        yield
        return
    original_values = {name: os.environ[name] for name in names}
    os.environ.update({name: text.replace(EXPANDABLE, NOT_EXPANDABLE) for name, text in original_values.items()})
    torch._C._accelerator_setAllocatorSettings(NOT_EXPANDABLE)
    try:
        yield
    finally:
        os.environ.update(original_values)
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)


@contextlib.contextmanager
def _preserve_state() -> Iterator[None]:
    """Restore the trainer's random states and torch.set_num_threads at the end of the context."""
    states = random.getstate(), np.random.get_state()
    set_num_threads = torch.set_num_threads
    devices = [runtime.device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads = set_num_threads
