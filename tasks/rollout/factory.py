"""Rollout engines of a run: their choice, construction and weight updates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...bridge.checkpoint.direct_weights import DirectWeights
from ...bridge.checkpoint.hub import get_vocab_size
from ...bridge.checkpoint.rope_scaling import scaled_folder
from ...bridge.checkpoint.stream import stream_adapter, stream_weights
from ...bridge.lora.attach import Lora
from ...bridge.model.model import Model
from ..distributed.collectives import rank0_only, run_on_all_ranks
from ..options.rollout import EngineOptions, engine_kind
from ..run.context import Run, has_videos, most_media
from ..system.memory import used_gib
from ..train.offload import HostBuffer, TrainerOffload, free_memory
from ..train.step import TrainState
from .addresses import address_flags, server_urls
from .client import ServerEngine
from .compatibility import turn_flags
from .direct_sync import DirectSync
from .engine import Completion, Engine, Request, Sampling, WritableEngine
from .engine_group import EngineGroup
from .lora_support import unsupported_by_vllm
from .memory_budget import plan_engine_memory
from .server_connection import ClientSettings, WeightsLost
from .transformers_engine import TransformersEngine
from .vllm_images import check_model, takes_videos
from .weight_sync import BaseWeightsCheck, SyncStats, scaled, sync, sync_direct


def open_rollout(run: Run, model: Model, options: EngineOptions, *, experts: bool = False) -> "ModelRollout":
    """Return the engines that the options select. Every rank calls this; errors reach every rank.

    `experts`: record Completion.experts.
    """
    rank = run_on_all_ranks(lambda: adapter_rank(model, options))
    weights, optimizer = bool(options.offload_model), bool(options.offload_optimizer)
    if engine_kind(options) == "server":
        urls, level = server_urls(options), options.sleep_level or 0
        settings = ClientSettings(
            api_key=options.vllm_server_api_key,
            timeout=options.vllm_server_timeout,
            reconnect_timeout=options.server_reconnect_timeout,
            sleep_level=level,
            adapter_rank=rank,
            vocab_size=get_vocab_size(run.hf_config),
            images=run.most_images,
            videos=most_media(run.data, "video"),
            audios=most_media(run.data, "audio"),
            turns=tuple(turn_flags(run.options)),
            address_flags=address_flags(options),
        )
        engine = rank0_only(lambda: ServerEngine(urls, settings))
        note, offload = f"completions: {', '.join(urls)}", OffloadPlan(weights, optimizer)
        offload = offload if weights or optimizer or level else None
        return ModelRollout(
            run,
            model,
            engine,
            None,
            note,
            sleeps=level > 0,
            sends_adapter=bool(rank),
            frees_weights=level > 1,
            moves=offload,
        )
    if engine_kind(options) == "vllm":
        return _colocated(run, model, options, experts=experts, rank=rank)
    engine = run_on_all_ranks(lambda: TransformersEngine(engine_folder(run), dtype=run.dtype, load=False))
    note = "completions: transformers, with a copy of the model in each process"
    return ModelRollout(
        run, model, engine, 1, note, moves=OffloadPlan(weights, optimizer) if weights or optimizer else None
    )


def _colocated(run: Run, model: Model, options: EngineOptions, *, experts: bool, rank: int) -> "ModelRollout":
    """Return vLLM engines in the training processes, with the GPU memory that the trainer can spare."""
    from .vllm_engine import VllmEngine

    # Full weights are sent before each generation anyway. Keeping a copy on the host takes memory, and half a minute at
    # the start (28 GB a process on an H200's host).
    level = (1 if rank else 2) if options.sleep_level is None else options.sleep_level
    moves = OffloadPlan(bool(options.offload_model), bool(options.offload_optimizer))
    memory_share, note = options.vllm_gpu_memory_utilization or 0.9, "completions: vLLM, in this process"
    if torch.cuda.is_available():
        budget = plan_engine_memory(run, model, sleeps=None if options.sleep_level is None else level > 0)
        level = level if budget.sleeps else 0
        memory_share, moves = budget.share, OffloadPlan(budget.offload_weights, budget.offload_optimizer)
        note += f", with {budget}"
    else:
        level = 0
    initial_weights = HostBuffer()
    if moves.weights:
        initial_weights.offload(tensor for chunk in model.chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        free_memory()
    settings = {"dtype": run.dtype, "experts": experts, "sleep_level": level, "memory_share": memory_share}
    settings |= {"most_images": run.most_images, "most_videos": most_media(run.data, "video")}
    settings["most_audios"] = most_media(run.data, "audio")
    settings["adapter_rank"] = rank and max(rank, options.vllm_max_lora_rank or 0)
    engine = run_on_all_ranks(lambda: VllmEngine(engine_folder(run), options, **settings))
    idle = level > 0 or moves.weights or moves.optimizer
    group = options.vllm_tensor_parallel_size
    rollout = ModelRollout(
        run,
        model,
        engine,
        group,
        note,
        sleeps=level > 0,
        sends_adapter=bool(rank),
        frees_weights=level > 1,
        moves=moves if idle else None,
    )
    rollout.sleep()  # to make room for the optimizer
    initial_weights.onload()
    initial_weights.close()
    return rollout


def engine_folder(run: Run) -> Path:
    """Return the model's folder with the run's rope scaling."""
    return scaled_folder(run.model_folder, run.options)


def adapter_rank(model: Model, options: EngineOptions) -> int:
    """Return the rank of the adapters to send, 0 for full weights. Raises ValueError for unsupported adapters."""
    if not options.vllm_enable_lora or model.lora is None:
        return 0
    if model.vision is not None and model.vision.trains:
        raise ValueError(
            "--vllm_enable_lora true: the vision tower is trained, and vLLM is sent adapters of the language model "
            "alone. Remove the flag"
        )
    if feature := unsupported_by_vllm(model.lora.settings, model.lora.plan):
        raise ValueError(f"--vllm_enable_lora true: vLLM does not support {feature}. Remove the flag")
    return model.lora.settings.rank


def check_media(run: Run, options: EngineOptions) -> None:
    """Raise ValueError if the engine does not take the model, or the data's videos or their sound, in this version."""
    if engine_kind(options) == "server" and run.vision and run.vision.sound:
        raise ValueError(
            "USE_AUDIO_IN_VIDEO true: a run does not send the sound of videos to servers in this version. Remove "
            "--vllm_mode server, or give the sound as an audio of the row"
        )
    if engine_kind(options) != "vllm":
        return
    check_model("--use_vllm true", run.hf_config, has_images=run.most_images > 0)
    if has_videos(run.data) and run.vision and not takes_videos(run.vision):
        raise ValueError(
            "--use_vllm true: the data has videos, and vLLM takes those of Qwen3-VL and Qwen3.5 alone. Set "
            "--use_vllm false, which generates with transformers, or remove the videos"
        )


@dataclass(frozen=True)
class OffloadPlan:
    """Trainer state that leaves the GPU while engines generate, besides gradients."""

    weights: bool
    optimizer: bool


class ModelRollout(EngineGroup[Engine]):
    """Engines with the weights of a run's model, updated on request.

    GPU memory is in one of three states. train: engines sleep. sync: the state that only a step needs is offloaded, and
    weights go to the engines. generate: the trainer's weights are offloaded too.

    The vision tower is sent where there are images: if it is trained, with all weights; else once, and again after
    an engine has lost its weights.

    `moves`: state to offload; None: none.
    `frees_weights`: sleeping engines free their weights.
    `held`: GiB in use on the GPU at the end of each state, at its last visit.
    """

    def __init__(
        self,
        run: Run,
        model: Model,
        engine: Engine | None,
        group: int | None,
        note: str,
        *,
        sleeps: bool = False,
        sends_adapter: bool = False,
        frees_weights: bool = False,
        moves: OffloadPlan | None = None,
    ):
        super().__init__(engine, group)
        self.run, self.model, self.note = run, model, note
        self.syncs, self.held = 0, dict[str, float]()
        self._sleeps, self._moves = sleeps, moves
        self._adapter = model.lora if sends_adapter else None  # sent without the base weights
        self._is_base_verified = False
        self._needs_tower, self._has_tower = model.vision is not None and run.sees_media, False
        self._keeps_tower = not (frees_weights or (model.vision is not None and model.vision.trains))
        self._offload: TrainerOffload | None = None
        self._training: TrainState | None = None
        self._direct = DirectSync(engine)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let engines load weights and generate within the context; afterwards the model can train."""
        yield
        self.held["generate"] = used_gib()
        if self._sleeps:
            self.sleep()
        if self._offload is not None:
            self._offload.onload()

    def release(self) -> None:
        """Free the servers for the next run, when this one fails."""
        if isinstance(self.engine, ServerEngine):
            self.engine.release()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Generate as `EngineGroup`; a lost server gets the weights again once it is back."""
        while True:
            try:
                return super().generate(requests, sampling)
            except WeightsLost:
                assert self._training is not None
                self.update_weights(self._training)

    def update_weights(self, training: TrainState) -> SyncStats:
        """Send the weights to the engines. Raises RuntimeError on every rank where an engine ends up with other
        weights."""
        self.syncs, self._training = self.syncs + 1, training
        self.held["train"] = used_gib()
        if self._moves is not None:
            self._offload = self._offload or TrainerOffload(
                training, weights=self._moves.weights, optimizer=self._moves.optimizer
            )
            self._offload.offload_step()
            self._offload.onload_weights()
        stats = self._sent(training)
        self.held["sync"] = used_gib()
        if self._offload is None:
            return stats
        self._offload.offload_weights()
        return replace(stats, held=dict(self.held))

    def _sent(self, training: TrainState) -> SyncStats:
        adapter = self._adapter
        while True:
            try:
                with training.parameters_gathered(), torch.no_grad():
                    done = self._send(self.engine, merge=bool(self.model.lora), adapter=adapter)
                    if adapter and not self._is_base_verified:
                        self._verify_base_weights()
                return done
            except WeightsLost:  # a restarted server
                self._is_base_verified = self._has_tower = False

    def _send(self, engine: Engine | None, *, merge: bool = False, adapter: Lora | None = None) -> SyncStats:
        run, seed = self.run, self.syncs
        if adapter is None:
            stats = self._send_weights(engine, merge)
        else:
            weights = stream_adapter(self.model.chunks, run.hf_config, adapter)
            weights = scaled(weights, adapter.settings.scaling, run.dtype)
            stats = sync(engine, weights, dtype=run.dtype, seed=seed)
        self._has_tower = self._keeps_tower
        return stats

    def _send_weights(self, engine: Engine | None, merge: bool) -> SyncStats:
        run, has_towers = self.run, self._needs_tower and not self._has_tower
        arguments = self.model.parts if has_towers else self.model.chunks, run.hf_config, run.model_folder
        settings = {"dtype": run.dtype, "merge": merge}
        if isinstance(engine, WritableEngine):
            plan = self._direct.plan(
                lambda layout: DirectWeights(*arguments, layout, **settings), has_towers=has_towers
            )
            if plan is not None:
                return sync_direct(engine, plan, seed=self.syncs)
        return sync(engine, stream_weights(*arguments, **settings), dtype=run.dtype, seed=self.syncs)

    def _verify_base_weights(self) -> None:
        """Check that an engine has loaded the adapter's base weights, which it reads by itself."""
        try:
            self._send(self.engine and BaseWeightsCheck(self.engine))  # pyright: ignore[reportArgumentType]
        except WeightsLost:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "--vllm_enable_lora true: its engine has loaded other base weights than this run. Set the same --model "
                f"for `swift rollout` and the run. {error}"
            ) from error
        self._is_base_verified = True
