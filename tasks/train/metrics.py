"""Sums of metrics, tokens and FLOPs since the last log line, on the device."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import Tensor

from ...bridge import runtime
from ...bridge.layers.indexer_loss import METRIC as INDEXER_LOSS
from ...bridge.mapping.architecture import Architecture
from ...bridge.model.model import Model
from ...templates.batching.collator import Batch
from ..observability.flops import Flops
from ..run.context import encoder_rank
from .objective import Objective, scored_tokens
from .step import AsyncScalars, TrainState, sum_over_ranks

# Waits for the device, and returns the means of metrics, and the tokens and FLOPs of all ranks.
Reduced = Callable[[], tuple[dict[str, float], float, float]]


def auxiliary_losses(training: TrainState) -> dict[str, Tensor]:
    """Return and clear the losses of routers and of indexers, summed over this rank's layers and micro batches."""
    if not _has_auxiliary_losses(training):
        return {}
    tracker, data_parallel = get_moe_metrics_tracker(), training.model.groups.dp.size()
    sums = {}
    for name, entry in tracker.metrics.items():
        # Scaled so that MetricsAccumulator's sum over all ranks, divided by the DP size, is this entry's mean.
        share = data_parallel / entry.avg_group.size() if entry.avg_group is not None else 1.0
        sums[name] = entry.values.sum() * (share if entry.needs_dp_avg else data_parallel)
    tracker.clear()
    return sums


def _has_auxiliary_losses(training: TrainState) -> bool:
    return training.model.config.num_moe_experts is not None or training.model.architecture.sparse is not None


@dataclass
class VisionSums:
    """Sums over steps of what is encoded. The cached ones are of this rank's media, the others of its replica's."""

    media: float = 0.0
    visual_tokens: float = 0.0
    slowest_flops: float = 0.0  # sum over micro batches of the rank with the most
    mean_flops: float = 0.0
    cached: float = 0.0  # media whose features are read from the cache
    cached_flops: float = 0.0
    audios: float = 0.0
    audio_tokens: float = 0.0

    def add(self, batches: list[Batch], flops: Flops, groups: ProcessGroupCollection) -> float:
        """Add micro batches, and return the FLOPs of the replica for them."""
        total, ranks = 0.0, groups.tp.size() * groups.cp.size() * groups.pp.size()
        for media in (batch.media for batch in batches if batch.media):
            costs = np.array(flops.of_media(media), np.float64)
            encoders = media.encoders.numpy()
            loads = np.bincount(encoders, costs, minlength=ranks)
            total += costs.sum()
            is_audio = media.uses >= len(media.grids)
            audio_tokens = int(media.counts[media.uses[is_audio]].sum())
            self.media += len(media.grids)
            self.audios += len(media.frames)
            self.visual_tokens += len(media.positions) - audio_tokens
            self.audio_tokens += audio_tokens
            self.slowest_flops += loads.max()
            self.mean_flops += loads.mean()
            if media.cached:
                is_read = media.cached.is_read.numpy()
                self.cached += int(is_read.sum())
                self.cached_flops += costs[encoders == encoder_rank(groups)][is_read].sum()
        return total

    def means(self, steps: int, architecture: Architecture) -> dict[str, float]:
        """Return the values to log, from sums over all ranks."""
        means: dict[str, float] = {}
        if architecture.vision:
            means |= {"images": self.media / steps, "visual_tokens": self.visual_tokens / steps}
        if architecture.audio:
            means |= {"audios": self.audios / steps, "audio_tokens": self.audio_tokens / steps}
        if self.slowest_flops > self.mean_flops:
            means["vision_imbalance"] = self.slowest_flops / self.mean_flops
        return means | ({"cached_images": self.cached / steps} if self.cached else {})


class MetricsAccumulator:
    """Accumulator of metrics, tokens and FLOPs since the last log line, on the device."""

    def __init__(self, objective: Objective, groups: ProcessGroupCollection):
        self.objective, self.names, self.groups = objective, objective.names, groups
        self.balancing_names: list[str] = []  # over all ranks, gathered at the first log line
        self.names_are_gathered = False
        self._reset()

    def _reset(self) -> None:
        self.steps, self.micro_batches, self.tokens, self.flops = 0, 0, 0, 0.0
        self.vision = VisionSums()
        self.metrics: dict[str, Any] = {}
        self.balancing: dict[str, Any] = {}

    def add(self, batches: list[Batch], metrics: dict[str, Tensor], flops: Flops, balancing: dict[str, Tensor]) -> None:
        lengths = [length for batch in batches for length in batch.lengths]
        self.steps += 1
        self.micro_batches += len(batches)
        self.tokens += sum(lengths)
        reused = [length for batch in batches for length in batch.reused_lengths]
        self.flops += flops.training(lengths, scored_tokens(batches, self.groups), reused)
        self.flops += self.objective.extra_flops(batches)
        if flops.vision or flops.audio:
            self.flops += self.vision.add(batches, flops, self.groups)
        for sums, values in ((self.metrics, metrics), (self.balancing, balancing)):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's sums, by their names in the checkpoint."""
        sums = {f"window/metrics/{name}": value for name, value in self.metrics.items()}
        sums |= {f"window/balancing/{name}": value for name, value in self.balancing.items()}
        numbers = [self.steps, self.micro_batches, self.tokens, self.flops, *astuple(self.vision)]
        return sums | {"window/numbers": torch.tensor(numbers, dtype=torch.float64)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name, value in tensors.items():
            kind, _, metric = name.removeprefix("window/").partition("/")
            if name == "window/numbers":
                steps, micro_batches, tokens, self.flops, *visual = value.tolist()
                self.steps, self.micro_batches, self.tokens = int(steps), int(micro_batches), int(tokens)
                self.vision = VisionSums(*visual)
            elif name.startswith("window/"):
                getattr(self, kind)[metric] = value.to(runtime.device())

    def reduce(self, training: TrainState) -> Reduced:
        """Start the sum over all ranks, and reset. Every rank calls this. The returned function waits for the sum."""
        *numbers, cached, cached_flops, audios, audio_tokens = self.tokens, self.flops, *astuple(self.vision)
        numbers, of_every_rank = (*numbers, audios, audio_tokens), (cached, cached_flops)
        steps, sums = (
            self.steps,
            sum_over_ranks(self.groups, self.metrics, self.names, *numbers, of_every_rank=of_every_rank),
        )
        has_vision = training.model.vision is not None
        balance = self._balancing_means(training)
        self._reset()

        def wait() -> tuple[dict[str, float], float, float]:
            values = sums.wait()
            metrics, (tokens, flops, *visual) = values[: len(self.names)], values[len(self.names) :]
            visual = [*visual[:4], *visual[6:], *visual[4:6]]  # in the order of the fields
            means, vision = (
                self.objective.means(dict(zip(self.names, metrics, strict=True)), steps),
                VisionSums(*visual),
            )
            if has_vision:
                means |= vision.means(steps, training.model.architecture)
            if balance is not None:
                means |= zip(self.balancing_names, balance.wait(), strict=True)
            return means, tokens, flops - vision.cached_flops

        return wait

    def _balancing_means(self, training: TrainState) -> AsyncScalars | None:
        if not _has_auxiliary_losses(training):
            return None
        if not self.names_are_gathered:  # pipeline stages differ in their layers
            names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(names, sorted(self.balancing))
            self.balancing_names, self.names_are_gathered = (
                sorted({name for rank_names in names for name in rank_names}),
                True,
            )
        if not self.balancing_names:
            return None
        # Tensor- and context-parallel ranks hold shares of one value, data-parallel ranks hold different values.
        values = self.micro_batches * self.groups.dp.size()
        vector = torch.zeros(len(self.balancing_names), dtype=torch.float64, device=runtime.device())
        for index, name in enumerate(self.balancing_names):
            vector[index] = self.balancing.get(name, 0.0) / (values * _count_layers(training.model, name))
        dist.all_reduce(vector)
        return AsyncScalars(vector)


def _count_layers(model: Model, name: str) -> int:
    """Return the number of layers that have an auxiliary loss."""
    config, sparse = model.config, model.architecture.sparse
    if name == INDEXER_LOSS and sparse:
        return len(set(sparse.sources)) + model.architecture.mtp_depths
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [n % frequency == 0 for n in range(config.num_layers)]
    return sum(map(bool, pattern))
