"""vLLM in the trainer's own processes: each `tensor_parallel_size` ranks in a row are one engine.

vLLM finds the process groups of the trainer and makes its own beside them. While it sleeps its memory is the trainer's.
"""

import contextlib
import gc
import importlib.util
import logging
import os
import random
import secrets
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge import runtime
from ...bridge.checkpoint.hub import read_config
from ...bridge.checkpoint.pretrained import load_tokenizer
from ...bridge.families import family_of
from ...bridge.lora.adapter_mapping import PREFIX as ADAPTED  # begins the names of an adapter's tensors
from ..options.rollout import EngineOptions
from ..system.memory import unmapped
from .engine import Completion, Request, Sampling
from .eos import end_tokens
from .lora_support import room_for
from .vllm_adapter import adapter_request, has_adapters, held_of_adapter, put_adapter
from .weight_sync import checksum

WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names for what sleeps
BENEATH = ".base_layer."  # in vLLM's names of what has room for an adapter
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # settings of torch's allocator
EXPANDABLE, PLAIN = "expandable_segments:True", "expandable_segments:False"
_CLOSED: list[Any] = []  # engines that were asleep when they were closed
# vLLM's loggers that warn of what is meant to be: tensors of a layer that come one by one, experts that its loader
# does not count, and the compilation of the trainer's own Triton kernels.
NOISY = "model_executor.model_loader.reload.layerwise", "v1.worker.gpu_model_runner", "utils.jit_monitor"


class VllmEngine:
    """An Engine. Every rank makes one, and calls `generate`, `sleep` and `wake` at the same time as the others; the
    ranks of one engine ask for the same, and all get it.

    `load`: begin with the weights of `folder`; else with random ones until the first `update`. `experts`: be ready for
    Sampling.experts. `adapter_rank`: it keeps the weights of `folder`, and what comes by `update` is an adapter of at
    most this rank. `sleep_level` 0: never asleep; 1: its weights wait on the host, its cache is given up; 2: its
    weights are given up too, so that an `update` has to follow. On a CPU it does not sleep. `memory_share`: of the GPU,
    that it may take. Raises ImportError where vLLM is not installed, ValueError where the ranks do not divide, or what
    `check_experts` says.
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
    ):
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "--use_vllm true: vLLM is not installed. Install it (on NVIDIA GPUs: pip install 'megaswift[vllm]'), "
                "or leave the flag out to generate by transformers."
            )
        size, world = options.vllm_tensor_parallel_size, dist.get_world_size()
        if world % size:
            raise ValueError(
                f"--vllm_tensor_parallel_size {size} does not divide the {world} processes: give a size that does"
            )
        arguments = lora_arguments(Path(folder), adapter_rank)
        on_gpu = torch.cuda.is_available()
        _prepare_environment(on_gpu)
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        quiet_vllm()

        self._level = sleep_level if on_gpu else 0
        if not on_gpu and size > 1:
            _name_memory()
        with _undisturbed(), _plain_segments():
            self.llm: Any = LLM(
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
                load_format="auto" if load or adapter_rank else "dummy",
                enable_return_routed_experts=experts,
                use_tqdm_on_load=sys.stderr.isatty(),
                **arguments,
                generation_config="vllm",  # nothing of its own beside Sampling
                logprobs_mode="raw_logprobs",  # see _set_temperature
            )
        if experts:
            check_experts(*self.llm.apply_model(chosen_inside))
        (self._scale,) = self.llm.apply_model(scale_of)
        self._temperature = 1.0
        self._asleep: set[str] = set()
        self._takes_adapters = bool(adapter_rank)
        self.ends = end_tokens(folder, load_tokenizer(Path(folder)))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if not requests:
            return []
        self.wake()
        self._set_temperature(sampling.temperature)
        outputs = self.llm.generate(
            [{"prompt_token_ids": request.tokens} for request in requests],
            [sampling_params(request, sampling, self.ends) for request in requests],
            use_tqdm=False,
            lora_request=adapter_request() if self._takes_adapters else None,
        )
        return [completion_of(output.outputs[0], sampling) for output in outputs]

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See Engine. Asleep, it wakes as far as it has to."""
        if WEIGHTS in self._asleep:
            self._wake(WEIGHTS)
        if self._takes_adapters:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in weights}
            self.llm.apply_model(lambda model: put_adapter(model, tensors))
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        if self._level and not self._asleep:
            self.llm.sleep(level=self._level)
            self._asleep = {WEIGHTS, CACHE}
            unmapped(_bytes_asleep())

    def wake(self) -> None:
        for what in sorted(self._asleep, reverse=True):  # weights first
            self._wake(what)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Of tensors that this rank holds whole; not of those that vLLM splits, or packs for its kernels."""
        (found,) = self.llm.apply_model(lambda model: {name: checksum(own) for name, own in held_whole(model, names)})
        return found

    def close(self) -> None:
        """The process groups stay, which are the trainer's too: vLLM's own shutdown would end them."""
        if self._asleep:  # its memory is unmapped: to free it would unmap it again ("CUDA Error: invalid argument")
            _CLOSED.append(self.llm)
            return
        self.llm.llm_engine.model_executor.shutdown()
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake(self, what: str) -> None:
        torch.cuda.empty_cache()  # what the trainer's allocator keeps for itself is not vLLM's to take
        self.llm.wake_up(tags=[what])
        self._asleep.discard(what)
        unmapped(_bytes_asleep())

    def _set_temperature(self, temperature: float) -> None:
        """vLLM's log-probabilities are either of temperature 1, or of what top_p and the like have left: it is told
        temperature 1, and its logits are made those of `temperature`."""
        temperature = temperature or 1.0
        if temperature != self._temperature:
            self.llm.apply_model(lambda model: set_scale(model, self._scale / temperature))
            self._temperature = temperature


def _bytes_asleep() -> int:
    """That vLLM has unmapped, and torch counts as reserved."""
    from vllm.device_allocator.cumem import CuMemAllocator  # pyright: ignore[reportMissingImports]

    return sum(data.handle[1] for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.is_asleep)


def sampling_params(request: Request, sampling: Sampling, own: Collection[int]) -> Any:
    """What vLLM is told of a request, whose logits are those of the temperature already (`set_scale`). `own`: the
    tokens by which its folder ends a completion."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    limit = min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens)
    return SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=max(1, limit),
        seed=request.seed,
        stop=list(sampling.stop),
        stop_token_ids=sorted(own if sampling.ends is None else sampling.ends),
        ignore_eos=True,  # the folder's, which is among these, or not to count
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(sampling.stop),
        logprobs=0,  # of the token that was drawn alone
    )


def completion_of(output: Any, sampling: Sampling) -> Completion:
    """Of vLLM's CompletionOutput."""
    tokens = list(output.token_ids)
    log_probs = [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]
    finish = "stop" if output.finish_reason == "stop" else "length"
    return Completion(tokens, log_probs, finish, output.routed_experts if sampling.experts else None)


def chosen_inside(model: Any) -> str | None:
    """The kernel of a vLLM model that chooses experts by itself, and does not say which; None: there is none."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner  # pyright: ignore[reportMissingImports]

    methods = [module.routed_experts.quant_method for module in model.modules() if isinstance(module, MoERunner)]
    return next((type(method).__name__ for method in methods if method.is_monolithic), None)


def check_experts(kernel: str | None) -> None:
    """Raise ValueError where vLLM cannot say which experts tokens go to. `kernel`: as `chosen_inside` says."""
    if kernel is not None:
        raise ValueError(
            f"--router_replay_mode R3: vLLM's kernel for experts on this machine ({kernel}) does not say which ones it "
            "chooses. Give R2, or generate by transformers (--use_vllm false; of a server --infer_backend transformers)"
        )


def scale_of(model: Any) -> float:
    """By which vLLM's model multiplies its logits."""
    return _logits_processor(model).scale


def set_scale(model: Any, scale: float) -> None:
    _logits_processor(model).scale = scale


def _logits_processor(model: Any) -> Any:
    from vllm.model_executor.layers.logits_processor import (  # pyright: ignore[reportMissingImports]
        LogitsProcessor,
    )

    (found,) = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return found


def lora_arguments(folder: Path, rank: int | None) -> dict[str, Any]:
    """What vLLM is started with that is to take adapters of up to so many ranks. Raises ValueError where it cannot."""
    if not rank:
        return {}
    config = read_config(folder)
    if not torch.cuda.is_available() and "num_moe_experts" in family_of(config).describe(config).transformer:
        raise ValueError(
            "--vllm_enable_lora true: vLLM's build for the CPU takes no adapters in a model with experts. Leave the "
            "flag out: it is sent all weights, with the adapter in them."
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(rank)}


def held_whole(model: Any, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Those of a checkpoint's tensors that vLLM's model has as they are, and parts of its fused projections; of an
    adapter's, by PEFT's names, those in its layers."""
    if has_adapters(model):
        yield from held_of_adapter(model, [name for name in names if name.startswith(ADAPTED)])
        names = [name for name in names if not name.startswith(ADAPTED)]
    own = {name.replace(BENEATH, "."): tensor for name, tensor in model.named_parameters()}
    modules = {f"{name}.".replace(BENEATH, ".")[:-1]: module for name, module in model.named_modules()}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if name in own and _is_whole(modules[module], leaf):
            yield name, own[name]
            continue
        parent, _, part = module.rpartition(".")
        for fused, parts in model.packed_modules_mapping.items() if hasattr(model, "packed_modules_mapping") else ():
            whole: Any = modules.get(f"{parent}.{fused}")
            if part in parts and f"{parent}.{fused}.{leaf}" in own and _is_whole(whole, leaf):
                sizes = whole.output_sizes
                yield name, own[f"{parent}.{fused}.{leaf}"].split(sizes)[parts.index(part)]


def _is_whole(module: Any, leaf: str) -> bool:
    """Not split over ranks, padded, or repacked."""
    weight = getattr(module, leaf, None)
    if weight is None or getattr(module, "tp_size", 1) > 1:
        return False
    if hasattr(module, "org_vocab_size"):
        return module.num_embeddings_padded == module.org_vocab_size
    sizes = getattr(module, "output_size", None), getattr(module, "input_size", None)
    if leaf != "weight" or None in sizes:
        return True
    return tuple(weight.shape) == sizes and weight.is_contiguous()


def _prepare_environment(on_gpu: bool) -> None:
    """What vLLM reads from the environment before it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where weights come as they are
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # the trainer's own lines are what a user looks at
    if not on_gpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer has the same cores
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else most of the host's memory


def _name_memory() -> None:
    """Shared memory of an engine's ranks has a name of this run: vLLM's own is the same in all runs, and where one was
    killed it is taken for good. Every rank calls this."""
    from vllm.distributed.device_communicators import cpu_communicator  # pyright: ignore[reportMissingImports]

    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name)
    shared = cpu_communicator._CPUSHMDistributed
    named = shared.make_group_name
    shared.make_group_name = staticmethod(lambda communicator: name[0] + named(communicator).replace("/", ""))


def quiet_vllm() -> None:
    """Silence the warnings of NOISY. Call it after the import of vLLM, which sets its loggers' levels."""
    for name in NOISY:
        logging.getLogger(f"vllm.{name}").setLevel(logging.ERROR)


@contextlib.contextmanager
def _plain_segments() -> Iterator[None]:
    """Turn the allocator's expandable segments off while vLLM captures its CUDA graphs.

    vLLM's all-reduce exports the graphs' buffers by cudaIpcGetMemHandle, which rejects memory of expandable segments
    and ends the process (https://github.com/vllm-project/vllm/issues/42609). vLLM itself turns them off around its
    sleep pools alone, and on again after each where the environment says so.
    """
    names = [name for name in ALLOCATOR if EXPANDABLE in os.environ.get(name, "")]
    if not names or not torch.cuda.is_available():
        yield
        return
    before = {name: os.environ[name] for name in names}
    os.environ.update({name: text.replace(EXPANDABLE, PLAIN) for name, text in before.items()})
    torch._C._accelerator_setAllocatorSettings(PLAIN)
    try:
        yield
    finally:
        os.environ.update(before)
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """The trainer's random numbers, and on a CPU torch's number of threads, stay what they are."""
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
