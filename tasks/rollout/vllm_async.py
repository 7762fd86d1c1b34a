"""Backend over vLLM's own processes, which batch all concurrent requests."""

import asyncio
import contextlib
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ...bridge.checkpoint.pretrained import load_tokenizer
from ..options.rollout import RolloutOptions
from .engine import Completion, Request, Sampling, TopLogProbs
from .eos import eos_token_ids
from .lora_support import DEFAULT_RANK, lora_rank_bucket
from .vllm_adapter import VllmObject, lora_request
from .vllm_engine import (
    check_expert_recording,
    check_experts,
    lora_arguments,
    scheduler_kwargs,
)
from .vllm_errors import refusals_as_value_errors
from .vllm_images import PromptWriter, image_arguments
from .vllm_kwargs import engine_kwargs, model_settings, quantization_kwargs, set_cpu_defaults
from .vllm_requests import sampling_params, to_completion
from .weight_buckets import Bucket


class VllmBackend:
    """Backend over vLLM's AsyncLLM.

    With several engines (data parallel), vLLM sends each request to the least busy engine. Weights go to all engines.
    """

    name = "vllm"

    def __init__(self, folder: Path, options: RolloutOptions, dtype: torch.dtype):
        quantization = quantization_kwargs(options.vllm_quantization, folder)
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            set_cpu_defaults()
        else:  # CUDA is initialised in this process, which therefore cannot be forked
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        if options.vllm_enable_return_routed_experts:
            check_expert_recording("--vllm_enable_return_routed_experts true", "Remove it")
        from .vllm_transfer import EXTENSION, NAME, SERVER

        os.environ[SERVER] = str(os.getpid())
        self.workers = options.vllm_tensor_parallel_size * options.vllm_data_parallel_size
        max_rank = options.vllm_max_lora_rank or DEFAULT_RANK if options.vllm_enable_lora else None
        self.max_adapter_rank = lora_rank_bucket(max_rank) if max_rank else 0
        settings = engine_kwargs(model_settings(options.vllm_engine_kwargs, folder))
        self.llm: VllmObject = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder),
                dtype=str(dtype).removeprefix("torch."),  # vLLM would choose bf16 for an fp32 model
                tensor_parallel_size=options.vllm_tensor_parallel_size,
                data_parallel_size=options.vllm_data_parallel_size,
                gpu_memory_utilization=options.vllm_gpu_memory_utilization,
                max_model_len=options.vllm_max_model_len,
                max_num_seqs=options.vllm_max_num_seqs,
                enforce_eager=options.vllm_enforce_eager or not on_gpu,  # compiling costs minutes on a CPU
                enable_prefix_caching=options.vllm_enable_prefix_caching,
                enable_sleep_mode=on_gpu,
                enable_return_routed_experts=options.vllm_enable_return_routed_experts,
                use_tqdm_on_load=sys.stderr.isatty(),
                generation_config="vllm",  # no defaults other than Sampling's
                logprobs_mode="raw_logprobs",  # of logits that are divided by the temperature (`_at_temperature`)
                max_logprobs=-1,  # unlimited
                disable_log_stats=True,
                weight_transfer_config=WeightTransferConfig(backend=NAME),
                worker_extension_cls=EXTENSION,
                **lora_arguments(folder, max_rank),
                **image_arguments(folder, options),
                **quantization,
                **scheduler_kwargs(settings, experts=options.vllm_enable_return_routed_experts),
                **settings,
            )
        )
        self.has_nccl, self._has_expert_recording = on_gpu, options.vllm_enable_return_routed_experts
        self._adapter: VllmObject = None  # LoRARequest, once an adapter has arrived
        self._gpus: list[str] = []
        self._tokenizer, self._to_prompt = load_tokenizer(folder), PromptWriter(folder)
        self._eos_ids = eos_token_ids(folder, self._tokenizer)
        self._temperature, self._generating, self._idle = 1.0, 0, asyncio.Condition()

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if sampling.experts:
            await self._check_experts()
        try:
            async with self._at_temperature(sampling.temperature or 1.0), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate_one(request, sampling)) for request in requests]
        except ExceptionGroup as errors:  # the first error cancelled the others
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _check_experts(self) -> None:
        """Raise ValueError where vLLM cannot record the chosen experts."""
        if not self._has_expert_recording:
            raise ValueError(
                "--router_replay_mode R3: this server does not record the chosen experts. Start it with "
                "--vllm_enable_return_routed_experts true"
            )
        for kernel in await self.llm.collective_rpc("monolithic_moe_kernel"):
            check_experts(kernel)

    async def _generate_one(self, request: Request, sampling: Sampling) -> Completion:
        settings = sampling_params(request, sampling, self._eos_ids)
        prompt = self._to_prompt(request)
        with refusals_as_value_errors():
            async for output in self.llm.generate(
                prompt, settings, request_id=uuid.uuid4().hex, lora_request=self._adapter
            ):
                if output.finished:
                    request.check_length(len(output.prompt_token_ids))
                    return to_completion(output, sampling)
        raise RuntimeError("vLLM aborted a request")

    async def top_log_probs(self, document: Request, positions: list[int], top: int, vocab_size: int) -> TopLogProbs:
        """Score tokens as `ScoringEngine`, but without the limit to `vocab_size`.

        vLLM scores all prompt tokens, and generates one token more.
        """
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        settings = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=top, flat_logprobs=True, detokenize=False
        )
        prompt = self._to_prompt(document)
        async with self._at_temperature(1.0):
            with refusals_as_value_errors():
                async for output in self.llm.generate(prompt, settings, request_id=uuid.uuid4().hex):
                    if output.finished:
                        document.check_length(len(output.prompt_token_ids))
                        return _parse_top_log_probs(output.prompt_logprobs, positions, top)
        raise RuntimeError("vLLM aborted a request")

    async def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    @contextlib.asynccontextmanager
    async def _at_temperature(self, temperature: float) -> AsyncIterator[None]:
        """Set the temperature within the context. Workers divide all logits by it, so concurrent requests share it."""
        async with self._idle:
            await self._idle.wait_for(lambda: temperature == self._temperature or not self._generating)
            if temperature != self._temperature:
                await self.llm.collective_rpc("set_temperature", args=(temperature,))
                self._temperature = temperature
            self._generating += 1
        try:
            yield
        finally:
            async with self._idle:
                self._generating -= 1
                self._idle.notify_all()

    async def begin(self) -> None:
        await self.llm.start_weight_update()

    async def load(self, bucket: Bucket) -> None:
        info = {"entries": bucket.entries, "handle": bucket.handle, "start": bucket.start, "bytes": bucket.bytes}
        await self.llm.collective_rpc("update_weights", kwargs={"update_info": info})

    async def finish(self) -> None:
        await self.llm.finish_weight_update()
        if self.max_adapter_rank:
            await self.llm.collective_rpc("load_received_adapter")
        await self.llm.reset_encoder_cache()  # features of images by an earlier tower
        self._adapter = lora_request() if self.max_adapter_rank else None

    async def abort(self) -> None:
        await self.llm.collective_rpc("abort_weight_update")

    async def group(self, host: str, port: int) -> None:
        info = {"host": host, "port": port, "size": self.workers + 1}
        await self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})

    async def _rpc_all_workers(self, method: str, *arguments: object) -> list[VllmObject]:
        core = self.llm.engine_core  # the collective_rpc of the engine core returns only the first engine's results
        call = ("collective_rpc", method, None, arguments)
        responses = [core._call_utility_async(*call, engine=engine) for engine in core.core_engines]
        return list(itertools.chain(*await asyncio.gather(*responses)))

    async def gpus(self) -> list[str]:
        if self.has_nccl and not self._gpus:
            self._gpus = await self._rpc_all_workers("gpu")
        return self._gpus

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return checksums of the workers' tensors. Raises RuntimeError if they differ between workers."""
        checksums: dict[str, str] = {}
        for worker_checksums in await self._rpc_all_workers("weight_checksums", list(names)):
            for name, checksum in worker_checksums.items():
                if checksums.setdefault(name, checksum) != checksum:
                    raise RuntimeError(f"{name} differs between vLLM's workers")
        return checksums

    async def reset_cache(self) -> None:
        await self.llm.reset_prefix_cache()

    async def sleep(self, level: int) -> None:
        await self.llm.sleep(level)

    async def wake(self) -> None:
        await self.llm.wake_up()

    def has_failed(self) -> bool:
        return self.llm.engine_core.resources.engine_dead

    def close(self) -> None:
        self.llm.shutdown()


def _parse_top_log_probs(logprobs: VllmObject, positions: list[int], top: int) -> TopLogProbs:
    """Return the top tokens of vLLM's FlatLogprobs: per position the actual token, then the likeliest ones."""
    rows = [
        slice(logprobs.end_indices[position + 1] - top, logprobs.end_indices[position + 1]) for position in positions
    ]
    log_probs = [logprobs.logprobs[row] for row in rows]
    return TopLogProbs(np.array(log_probs, np.float32), np.array([logprobs.token_ids[row] for row in rows], np.int32))
