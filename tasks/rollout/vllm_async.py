"""vLLM behind the rollout server: its own processes, which share requests among themselves and generate all at once."""

import asyncio
import contextlib
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...bridge.checkpoint.pretrained import load_tokenizer
from ..options.rollout import RolloutOptions
from .engine import Completion, Request, Sampling, Top
from .eos import end_tokens
from .lora_support import SERVERS_RANK, room_for
from .vllm_adapter import adapter_request
from .vllm_engine import check_experts, completion_of, lora_arguments, sampling_params
from .weight_buckets import Bucket


class VllmBackend:
    """A server's backend over vLLM's AsyncLLM. With several engines (data parallel) vLLM gives a request to the one
    that has least to do; weights go to all."""

    name = "vllm"

    def __init__(self, folder: Path, options: RolloutOptions, dtype: torch.dtype):
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else most of the host's memory
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a run may have the same cores
        else:  # this process has asked CUDA what there is, after which it cannot be forked
            os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        from vllm import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        from .vllm_transfer import EXTENSION, NAME, SERVER

        os.environ[SERVER] = str(os.getpid())
        self.workers = options.vllm_tensor_parallel_size * options.vllm_data_parallel_size
        rank = options.vllm_max_lora_rank or SERVERS_RANK if options.vllm_enable_lora else None
        self.adapters = room_for(rank) if rank else 0
        self.llm: Any = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder),
                dtype=str(dtype).removeprefix("torch."),  # vLLM's own choice for a model in fp32 is bf16
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
                generation_config="vllm",  # nothing of its own beside Sampling
                logprobs_mode="raw_logprobs",  # of logits that are divided by the temperature: `_at`
                max_logprobs=-1,  # as many as a student asks for
                disable_log_stats=True,
                weight_transfer_config=WeightTransferConfig(backend=NAME),
                worker_extension_cls=EXTENSION,
                **lora_arguments(folder, rank),
            )
        )
        self.nccl, self._experts = on_gpu, options.vllm_enable_return_routed_experts
        self._adapter: Any = None  # what a request says of it, once one has come
        self._gpus: list[str] = []
        self._tokenizer = load_tokenizer(folder)
        self._ends = end_tokens(folder, self._tokenizer)
        self._temperature, self._generating, self._idle = 1.0, 0, asyncio.Condition()

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if sampling.experts:
            await self._check_experts()
        try:
            async with self._at(sampling.temperature or 1.0), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(request, sampling)) for request in requests]
        except ExceptionGroup as errors:  # the others were given up because of the first
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _check_experts(self) -> None:
        """Raise ValueError where it is not known which experts tokens go to."""
        if not self._experts:
            raise ValueError(
                "--router_replay_mode R3: this server does not say which experts its tokens go to. Start it with "
                "--vllm_enable_return_routed_experts true"
            )
        for kernel in await self.llm.collective_rpc("chosen_inside"):
            check_experts(kernel)

    async def _one(self, request: Request, sampling: Sampling) -> Completion:
        settings = sampling_params(request, sampling, self._ends)
        prompt = {"prompt_token_ids": request.tokens}
        async for output in self.llm.generate(
            prompt, settings, request_id=uuid.uuid4().hex, lora_request=self._adapter
        ):
            if output.finished:
                return completion_of(output.outputs[0], sampling)
        raise RuntimeError("vLLM gave up a request")

    async def top_log_probs(self, tokens: list[int], places: list[int], top: int, vocab_size: int) -> Top:
        """See Reader; not below `vocab_size` alone. vLLM gives them of all prompt tokens, and generates one more."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        settings = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=top, flat_logprobs=True, detokenize=False
        )
        async with self._at(1.0):
            async for output in self.llm.generate({"prompt_token_ids": tokens}, settings, request_id=uuid.uuid4().hex):
                if output.finished:
                    return _top_of(output.prompt_logprobs, places, top)
        raise RuntimeError("vLLM gave up a request")

    async def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    @contextlib.asynccontextmanager
    async def _at(self, temperature: float) -> AsyncIterator[None]:
        """All that is generated at a time has one temperature, by which the workers divide their logits."""
        async with self._idle:
            await self._idle.wait_for(lambda: temperature == self._temperature or not self._generating)
            if temperature != self._temperature:
                await self.llm.collective_rpc("divide_logits", args=(temperature,))
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
        info = {"entries": bucket.entries, "place": bucket.place, "start": bucket.start, "bytes": bucket.bytes}
        await self.llm.collective_rpc("update_weights", kwargs={"update_info": info})

    async def finish(self) -> None:
        await self.llm.finish_weight_update()
        self._adapter = adapter_request() if self.adapters else None

    async def abort(self) -> None:
        await self.llm.collective_rpc("break_off_weights")

    async def group(self, host: str, port: int) -> None:
        info = {"host": host, "port": port, "size": self.workers + 1}
        await self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})

    async def _of_all_workers(self, method: str, *arguments: Any) -> list[Any]:
        core = self.llm.engine_core  # whose own collective_rpc gives the answers of the first engine alone
        ask = ("collective_rpc", method, None, arguments)
        engines = [core._call_utility_async(*ask, engine=engine) for engine in core.core_engines]
        return list(itertools.chain(*await asyncio.gather(*engines)))

    async def gpus(self) -> list[str]:
        if self.nccl and not self._gpus:
            self._gpus = await self._of_all_workers("gpu")
        return self._gpus

    async def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Raises RuntimeError where workers differ."""
        found: dict[str, str] = {}
        for of_worker in await self._of_all_workers("weight_checksums", list(names)):
            for name, checksum in of_worker.items():
                if found.setdefault(name, checksum) != checksum:
                    raise RuntimeError(f"{name} is not the same in all of vLLM's workers")
        return found

    async def reset_cache(self) -> None:
        await self.llm.reset_prefix_cache()

    async def sleep(self, level: int) -> None:
        await self.llm.sleep(level)

    async def wake(self) -> None:
        await self.llm.wake_up()

    def failed(self) -> bool:
        return self.llm.engine_core.resources.engine_dead

    def close(self) -> None:
        self.llm.shutdown()


def _top_of(found: Any, places: list[int], top: int) -> Top:
    """Of vLLM's FlatLogprobs, an entry a token: what the token itself has, then the likeliest in the place of it."""
    rows = [slice(found.end_indices[place + 1] - top, found.end_indices[place + 1]) for place in places]
    log_probs = [found.logprobs[row] for row in rows]
    return Top(np.array(log_probs, np.float32), np.array([found.token_ids[row] for row in rows], np.int32))
