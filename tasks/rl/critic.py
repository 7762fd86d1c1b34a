"""Critic of PPO: a model with a head of one label, whose outputs are expected returns."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...bridge.checkpoint.safetensors_io import tensor_names
from ...bridge.layers.packed_seqs import to_device
from ...bridge.mapping.fp8 import load_as_bf16
from ...bridge.model.build import build_model
from ...bridge.model.model import Model
from ...bridge.model.outputs import TokenValues
from ...bridge.model.score_head import add_score_head, count_labels
from ...bridge.model.trainable import freeze
from ...bridge.model.vision_encoder import Normalization
from ...bridge.options import TrainableOptions, VisionOptions
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import Sequences, ValueExtras
from ...templates.json_types import JsonObject
from ..distributed.collectives import run_on_all_ranks
from ..losses.value import value_losses
from ..observability.flops import Flops
from ..options import PpoOptions
from ..options.rollout import engine_kind
from ..reference.frozen_model import builds_tower, forward_only, open_source
from ..run.context import Run, episode_plan
from ..run.load_weights import read_weights
from ..run.roles import Role
from ..run.run_dir import STATE
from ..train.objective import extras_of
from ..train.step import AsyncScalars, NonFiniteError, StepResult, sum_over_ranks, train_step
from ..train.trained_role import TrainedRole
from .episode import Episode, media_of

NAME = "critic"  # prefix of its flags, and its folder in a checkpoint's training state
METRICS = "loss", "clip_ratio"
TRAINING_PASSES = 3  # cost of a training step, in forward passes
OUTPUT = TokenValues()


class Critic:
    """Critic on every rank, in the policy's layout or in its own. Errors reach every rank."""

    def __init__(self, run: Run, options: PpoOptions, max_steps: int):
        """max_steps: of the run, for the learning rate's schedule."""
        self._cliprange, self._skipped_steps = options.critic.cliprange_value, options.optimizer.iterations_to_skip
        self._role = Role(run, NAME)
        self._result: tuple[StepResult, AsyncScalars] | None = None  # last step's, not read yet
        with self._role.entered():
            model, hf_config, folder, name = _build(self._role.run, options)
            self._plan = episode_plan(self._role.run, model.groups)
        offloads = options.critic.offload_critic
        if offloads is None:
            offloads = engine_kind(options.engine) == "vllm" and torch.cuda.is_available()
        rate, policy_rate = options.critic.critic_lr, options.schedule.lr
        scale = rate / policy_rate if policy_rate else 0.0
        self.trained = TrainedRole(
            NAME,
            self._role,
            model,
            hf_config,
            folder,
            schedule=replace(
                options.schedule,
                lr=rate,
                min_lr=options.schedule.min_lr * scale,
                lr_warmup_init=options.schedule.lr_warmup_init * scale,
            ),
            max_steps=max_steps,
            offloads=offloads,
        )
        self._model, self._chunks = model, self.trained.state.chunks
        self.flops = Flops.of_model(model, scores_tokens=False)
        self.note = f"critic: {name}{self._role.note}{', offloaded between uses' if offloads else ''}"

    def record_values(self, episodes: Sequence[Episode]) -> None:
        """Record the value before each token of the episodes."""
        tokens, masks = [episode.tokens for episode in episodes], [episode.loss_mask for episode in episodes]
        with self.trained.entered():
            sequences = Sequences(tokens, masks, [0.0] * len(tokens), **media_of(episodes))
            values = self._role.label_values(sequences, self._forward)
        for episode, values_of_episode in zip(episodes, values, strict=True):
            episode.values = values_of_episode

    def _forward(self, batches: list[Batch]) -> list[Tensor]:
        return forward_only(self._model, self._chunks, batches, lambda batch: OUTPUT)

    def update(self, episodes: Sequence[Episode], step: int) -> None:
        """Launch one optimizer step on the episodes' returns, without waiting for its end."""
        sequences = Sequences(
            [episode.tokens for episode in episodes],
            [episode.loss_mask * float(not np.isnan(episode.reward)) for episode in episodes],
            [0.0] * len(episodes),
            values=[episode.values for episode in episodes if episode.values is not None],
            returns=[episode.returns for episode in episodes if episode.returns is not None],
            **media_of(episodes),
        )
        with self.trained.entered():
            batches = self._plan.batches(sequences)
            metrics, result = train_step(
                self.trained.state,
                batches,
                self._loss,
                step,
                lambda batch: OUTPUT,
                skips_update=step in self._skipped_steps,
            )
            self._result = result, sum_over_ranks(self._model.groups, metrics, METRICS)

    def _loss(self, batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro batch's share of the mean over the global batch's tokens. output: [1, local length]."""
        extras = extras_of(batch, ValueExtras)
        old_values, returns = (to_device(target, output.device)[0] for target in (extras.values, extras.returns))
        losses, is_clipped = value_losses(output[0], old_values, returns, self._cliprange)
        weights = batch.loss_weights[0] / max(batch.loss_tokens, 1.0)
        loss = (losses * weights).sum()
        return loss, {"loss": loss.detach(), "clip_ratio": (is_clipped * weights).sum()}

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the last step, and wait for its end. Raises RuntimeError if it was not finite."""
        if self._result is None:
            return {}
        (result, means), self._result = self._result, None
        try:
            grad_norm = result.grad_norm
        except NonFiniteError as error:
            raise RuntimeError(f"the critic's {str(error).replace('--lr', '--critic_lr')}") from None
        metrics = dict(zip(METRICS, means.wait(), strict=True)) | {"grad_norm": grad_norm or 0.0}
        return {f"critic/{name}": value for name, value in metrics.items()}


def _build(run: Run, options: PpoOptions) -> tuple[Model, JsonObject, Path, str]:
    """Return the model, its config.json with the head, its folder, and its name for the user."""
    source, typed_flag, name = _source(run, options)
    folder, source_config = open_source(run, source, typed_flag)
    hf_config = run_on_all_ranks(lambda: add_score_head(source_config, 1, pad_token_id=run.tokenizer.pad_token_id))
    # Without dropout, as in TRL: the values of a batch must not differ between passes. The number of layers of
    # --cpu_offloading_num_layers is of the policy's stages.
    build_options = replace(run.options.build, attention_dropout=0.0, hidden_dropout=0.0, cpu_offloading=False)
    has_tower = run_on_all_ranks(lambda: builds_tower(run, hf_config, folder, typed_flag))
    model = run_on_all_ranks(lambda: build_model(hf_config, build_options, run.dtype, vision=has_tower))
    with load_as_bf16(model.chunks):
        run_on_all_ranks(lambda: read_weights(model, hf_config, folder, seed=options.training.seed))
    if count_labels(source_config) is None and model.chunks[-1].post_process:
        head: Any = model.chunks[-1].output_layer
        with torch.no_grad():
            head.weight.zero_()
    _prepare_tower(run, model, hf_config, folder)
    return model, hf_config, folder, name


def _prepare_tower(run: Run, model: Model, hf_config: JsonObject, folder: Path) -> None:
    """Freeze the critic's vision tower as the policy's flags freeze theirs, if it has one."""
    if model.vision is None:
        return
    if run.vision:
        model.vision.normalization = Normalization(*run.vision.normalization)
    flags = run.vision_options
    model.vision.recomputes = flags.vit_gradient_checkpointing
    vision = VisionOptions(freeze_vit=flags.freeze_vit, freeze_aligner=flags.freeze_aligner)
    run_on_all_ranks(lambda: freeze(model, hf_config, TrainableOptions(), vision, names=tensor_names(folder)))


def _source(run: Run, options: PpoOptions) -> tuple[dict[str, Any], str | None, str]:
    """Return the options that name the model to load, the flag with its value, and a name for the user."""
    requested = options.critic.critic_model or options.critic.mcore_critic_model
    flag = "--critic_model" if options.critic.critic_model else "--mcore_critic_model"
    if run.resumed:
        saved = run.resumed.folder / NAME
        if not saved.is_dir():
            raise ValueError(
                f"--resume_from_checkpoint {run.resumed.checkpoint}: it has no {STATE}/{NAME}, so its run was not of "
                "--rlhf_type ppo. Set it as --model of a new run"
            )
        return {"model": str(saved), "mcore_model": None}, None, f"of {run.resumed.checkpoint.name}"
    if requested:
        source = {"model": options.critic.critic_model or "", "mcore_model": options.critic.mcore_critic_model}
        return source, f"{flag} {requested}", requested
    return run.began_from, None, "the initial model with a head of zeros"
