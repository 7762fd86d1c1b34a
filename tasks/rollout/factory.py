"""Which engine generates for a run, and how it is given the run's weights."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...bridge.checkpoint.hub import vocab_size_of
from ...bridge.model.model import Model
from ..distributed.collectives import kept_by_first_rank, on_every_rank
from ..options.rollout import EngineOptions
from ..run.context import Run
from ..system.memory import held_gib
from ..train.offload import Parked, Trainer, free_memory
from ..train.step import TrainState
from .addresses import flags_given, server_urls
from .client import ServerEngine
from .engine import Completion, Engine, Request, Sampling
from .engine_group import Rollout
from .lora_support import refused
from .memory_budget import room_beside
from .server_connection import WeightsLost
from .transformers_engine import TransformersEngine
from .weight_sync import Beneath, SyncStats, sync


def open_rollout(run: Run, model: Model, options: EngineOptions, *, experts: bool = False) -> "ModelRollout":
    """The engines that the options ask for. Every rank calls this; errors reach every rank. `experts`: they will be
    asked for Completion.experts."""
    rank = on_every_rank(lambda: adapter_rank(model, options))
    weights, optimizer = bool(options.offload_model), bool(options.offload_optimizer)
    if kind_of(options) == "server":
        urls, level = server_urls(options), options.sleep_level or 0
        engine = kept_by_first_rank(
            lambda: ServerEngine(
                urls,
                api_key=options.vllm_server_api_key,
                timeout=options.vllm_server_timeout,
                wait=options.server_reconnect_timeout,
                sleep_level=level,
                adapters=rank,
                vocab_size=vocab_size_of(run.hf_config),
                given=flags_given(options),
            )
        )
        note, moves = f"completions: {', '.join(urls)}", Moves(weights, optimizer)
        moves = moves if weights or optimizer or level else None
        return ModelRollout(run, model, engine, None, note, sleeps=level > 0, alone=bool(rank), moves=moves)
    if kind_of(options) == "vllm":
        return _colocated(run, model, options, experts=experts, rank=rank)
    engine = on_every_rank(lambda: TransformersEngine(run.model_folder, dtype=run.dtype, load=False))
    note = "completions: transformers, a copy of the model in each process"
    return ModelRollout(run, model, engine, 1, note, moves=Moves(weights, optimizer) if weights or optimizer else None)


def _colocated(run: Run, model: Model, options: EngineOptions, *, experts: bool, rank: int) -> "ModelRollout":
    """vLLM in the training processes, with as much of a GPU as the trainer leaves."""
    from .vllm_engine import VllmEngine

    # Whole weights are sent before each generation. To keep them on the host takes its memory, and once half a minute
    # (28 GB a process on an H200's host).
    default = 1 if rank else 2
    level = (default if options.sleep_level is None else options.sleep_level) if torch.cuda.is_available() else 0
    moves = Moves(bool(options.offload_model), bool(options.offload_optimizer))
    share, note = options.vllm_gpu_memory_utilization or 0.9, "completions: vLLM, in this process"
    if torch.cuda.is_available():
        room = room_beside(run, model, sleeps=level > 0)
        share, moves = room.share, Moves(room.weights, room.optimizer)
        waits = " and ".join(["the model"] * moves.weights + ["the optimizer's state"] * moves.optimizer)
        note += f", with {share:.2f} of the GPU" + (f"; {waits} on the host meanwhile" if waits else "")
    before = Parked()
    if moves.weights:
        before.leave(tensor for chunk in model.chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        free_memory()
    made = {"dtype": run.dtype, "experts": experts, "sleep_level": level, "memory_share": share}
    made["adapter_rank"] = rank and max(rank, options.vllm_max_lora_rank or 0)
    engine = on_every_rank(lambda: VllmEngine(run.model_folder, options, **made))
    idle = level > 0 or moves.weights or moves.optimizer
    group = options.vllm_tensor_parallel_size
    rollout = ModelRollout(
        run, model, engine, group, note, sleeps=level > 0, alone=bool(rank), moves=moves if idle else None
    )
    rollout.sleep()  # the optimizer is yet to be made
    before.come_back()
    before.close()
    return rollout


def adapter_rank(model: Model, options: EngineOptions) -> int:
    """Of the adapters that engines are sent; 0: they are sent whole weights. Raises ValueError for what is refused."""
    if not options.vllm_enable_lora or model.lora is None:
        return 0
    if what := refused(model.lora.settings, model.lora.plan):
        raise ValueError(f"--vllm_enable_lora true: vLLM does not take {what}. Leave the flag out")
    return model.lora.settings.rank


def kind_of(options: EngineOptions) -> str:
    """server, vllm or transformers."""
    if options.vllm_mode == "server" or options.vllm_server_host or options.vllm_server_base_url:
        return "server"
    there = importlib.util.find_spec("vllm") is not None
    uses = there if options.use_vllm is None else options.use_vllm
    return "vllm" if uses or options.vllm_mode == "colocate" else "transformers"


@dataclass(frozen=True)
class Moves:
    """What leaves the GPU while engines generate, besides gradients."""

    weights: bool
    optimizer: bool


class ModelRollout(Rollout[Engine]):
    """Engines that have the weights of a run's model, as these are when it says so.

    The GPU's memory is in one of three states: train, in which engines sleep; sync, in which what only a step needs has
    left it, and weights go to the engines; generate, in which the trainer's weights have left it too. `moves`: what
    leaves; None: nothing. `held`: GiB that the GPU has in use at the end of each state, the last time.
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
        alone: bool = False,
        moves: Moves | None = None,
    ):
        super().__init__(engine, group)
        self.run, self.model, self.note = run, model, note
        self.syncs, self.held = 0, dict[str, float]()
        self._sleeps, self._moves = sleeps, moves
        self._adapter = model.lora if alone else None  # which is sent without the rest
        self._compared = False  # what is beneath the adapter
        self._trainer: Trainer | None = None
        self._training: TrainState | None = None

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within, engines take weights and generate; they wake as far as these need. Afterwards the model can train."""
        yield
        self.held["generate"] = held_gib()
        if self._sleeps:
            self.sleep()
        if self._trainer is not None:
            self._trainer.come_back()

    def release(self) -> None:
        """Free the servers, for the next run, where this one fails."""
        if isinstance(self.engine, ServerEngine):
            self.engine.release()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """As Rollout; where a server was lost and has come back, after it has been given the weights again."""
        while True:
            try:
                return super().generate(requests, sampling)
            except WeightsLost:
                assert self._training is not None
                self.update_weights(self._training)

    def update_weights(self, training: TrainState) -> SyncStats:
        """Every rank calls this. Raises RuntimeError on every rank where an engine has other weights afterwards."""
        self.syncs, self._training = self.syncs + 1, training
        self.held["train"] = held_gib()
        if self._moves is not None:
            self._trainer = self._trainer or Trainer(
                training, weights=self._moves.weights, optimizer=self._moves.optimizer
            )
            self._trainer.leave_step()
            self._trainer.weights_come_back()
        found = self._sent(training)
        self.held["sync"] = held_gib()
        if self._trainer is None:
            return found
        self._trainer.leave_weights()
        return replace(found, held=dict(self.held))

    def _sent(self, training: TrainState) -> SyncStats:
        adapter = self._adapter
        while True:
            try:
                with training.parameters_gathered(), torch.no_grad():
                    done = self._send(self.engine, merge=bool(self.model.lora), adapter=adapter)
                    if adapter and not self._compared:
                        self._compare_beneath()
                return done
            except WeightsLost:  # a server went, and has come back
                self._compared = False

    def _send(self, engine: Engine | None, **what: Any) -> SyncStats:
        run = self.run
        settings = {"dtype": run.dtype, "seed": self.syncs}
        return sync(engine, self.model.chunks, run.hf_config, run.model_folder, **settings, **what)

    def _compare_beneath(self) -> None:
        """Whether an engine has the weights that the adapter is of, which it read by itself."""
        try:
            self._send(self.engine and Beneath(self.engine))  # pyright: ignore[reportArgumentType]
        except WeightsLost:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "with --vllm_enable_lora true an engine loads the weights beneath the adapter by itself, and they are "
                f"not this run's: give `swift rollout` and the run the same --model. {error}"
            ) from error
        self._compared = True
