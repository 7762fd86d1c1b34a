"""Encoding of a step's images and videos.

The ranks of a replica (one data-parallel index; tensor, context and pipeline parallelism) share the media of its micro
batches: each is encoded once, by the rank that the data loader has chosen. The features are then exchanged, so that
each rank has those of its own visual tokens and layers. They enter the language model as leaves of autograd, whose
gradients are sent back for the tower's backward pass. The schedule and its recomputation therefore know nothing of the
tower. Without pipeline parallelism a micro batch is encoded right before its forward pass, and the tower's backward
pass follows that of the language model. If there is none, some micro batches are encoded together, so that the host
launches fewer kernels. With pipeline parallelism all are encoded before the schedule, and have their backward passes
after it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import runtime
from ..layers.deepstack import MediaFeatures
from ..layers.packed_seqs import to_device
from ..layers.vision_tower import MERGERS, PatchPlan, VisionPart, plan_patches

# Patches that the tower takes at a time, with and without a backward pass, unless one medium has more. Without one, it
# is also the limit of micro batches that are encoded together.
CALL_PATCHES, FORWARD_CALL_PATCHES = 16384, 32768


class Normalization(NamedTuple):
    """Mean and standard deviation of pixel values in 0..1, per channel."""

    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True)
class MediaInputs:
    """Images and videos of a micro batch. Images are before videos. Tensors are on the CPU, or pixels on the device.

    All ranks of a replica have the same values, except the pixels, which are of the media that this rank encodes.
    """

    grids: Tensor  # [media, 3] int64: time, height and width in patches
    encoders: Tensor  # [media] int64: rank within the replica that encodes it
    image_pixels: Tensor  # [patches, channels * side * side] uint8
    video_pixels: Tensor  # [patches, channels * frames * side * side] uint8
    uses: Tensor  # [uses] int64: medium of each use in a document; a medium may have several, with all its tokens
    context_ranks: Tensor  # [visual tokens] int64: the context-parallel rank that holds it
    positions: Tensor  # [visual tokens] int64: its index in that rank's rows * local length
    rows: int  # rows of the micro batch
    local_length: int


class _Call(NamedTuple):
    """Media that the tower takes at a time."""

    patches: slice  # range in this rank's patches
    features: slice  # range in this rank's features
    plan: PatchPlan


class _Exchange(NamedTuple):
    """Exchange of one micro batch's features between the ranks of a replica."""

    sends: list[Tensor]  # for each rank: [n] int64, indices of this rank's features that it needs
    receives: list[Tensor]  # from each rank: [n] int64, positions of its features in this rank's hidden states


@dataclass
class _Encoded:
    """Inputs of the backward pass of one micro batch."""

    exchange: _Exchange
    leaves: dict[int, Tensor]
    calls: list[_Call]
    patches: Tensor  # normalized patches of this rank
    features: list[Tensor]  # per call; with a graph if the tower keeps it
    states: list[list[Tensor]]  # per call; of a frozen tower with trained mergers


class VisionEncoder:
    """Encoder of a model's media. Every rank calls every method in the same order.

    normalization: of the pixels; must be set before the first is encoded. recomputes: run the tower's forward pass
    again for its backward pass, instead of keeping its activations.

        encoder.begin(batches, forward_only=...)
        features = encoder.features(number)        # before the forward pass of each micro batch, in order
        encoder.end()                              # after the schedule
    """

    def __init__(
        self,
        part: VisionPart,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        stages: Sequence[Sequence[int]],
    ):
        """stages: the numbers of the layers of each pipeline stage, from 1."""
        self.part, self.config = part, config
        self.tower, self.settings = part.vision, part.vision.vision_settings
        self.normalization: Normalization | None = None
        self.is_pipelined = groups.pp.size() > 1
        self.recomputes = self.is_pipelined
        self.tensor, self.context = groups.tp.size(), groups.cp.size()
        self.sequence_parallel = config.sequence_parallel and self.tensor > 1
        self.replica = _replica_group(groups)
        self.rank, self.ranks = self.replica.rank(), self.replica.size()
        assert self.rank == groups.tp.rank() + self.tensor * (groups.cp.rank() + self.context * groups.pp.rank())
        # Leaves' gradients are of a loss times the ranks of data and context parallelism, whose gradients are averaged;
        # those of the tower are averaged over all ranks.
        self.gradient_scale = dist.get_world_size() / groups.dp_cp.size()
        deep = range(1, len(self.settings.deep_layers) + 1)
        self.levels = [
            [level for level in (0, *deep) if (level == 0 and stage == 0) or level in layers]
            for stage, layers in enumerate(stages)
        ]
        self._batches: list[MediaInputs | None] = []
        self._features: list[MediaFeatures | None] = []
        self._pending: list[_Encoded] = []  # whose backward passes are to come
        self._is_trained, self._is_timed = False, False  # in this step
        self._spans: list[TowerPass] = []

    @property
    def trains_tower(self) -> bool:
        return any(
            parameter.requires_grad
            for name, parameter in self.tower.named_parameters()
            if name.partition(".")[0] not in MERGERS
        )

    @property
    def trains_mergers(self) -> bool:
        return any(
            parameter.requires_grad
            for name, parameter in self.tower.named_parameters()
            if name.partition(".")[0] in MERGERS
        )

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.tower.parameters())

    def begin(self, batches: Sequence[MediaInputs | None], *, forward_only: bool) -> None:
        """Begin a step, or an evaluation, on these micro batches; None: without media."""
        self._is_trained, self._is_timed = self.trains and not forward_only, not forward_only
        self._batches, self._features = list(batches), []
        if self.is_pipelined:
            with self._timed():
                self._features = [features for batch in batches for features in self._encode([batch])]

    def features(self, number: int) -> MediaFeatures | None:
        """Return the features of a micro batch; None without media."""
        if not self.is_pipelined and number == len(self._features):
            with self._timed():
                self._run_backward()
                self._features = [None] * number  # the schedule is done with them
                self._features += self._encode(self._next_batches(number))
        return self._features[number]

    def _next_batches(self, number: int) -> list[MediaInputs | None]:
        """Return the micro batches from `number` on that are encoded together."""
        batches = self._batches[number:]
        if self._is_trained:
            return batches[:1]
        patches = accumulate(0 if batch is None else int(batch.grids.prod(1).sum()) for batch in batches)
        count = sum(total <= FORWARD_CALL_PATCHES * self.ranks for total in patches)
        return batches[: max(count, 1)]

    def end(self) -> None:
        """End the step: run the tower's outstanding backward passes."""
        if self._pending:
            with self._timed():
                self._run_backward()
        self._batches, self._features = [], []

    def _run_backward(self) -> None:
        for encoded in self._pending:
            self._backward(encoded)
            encoded.leaves.clear()
        self._pending = []

    def pop_spans(self) -> "list[TowerPass]":
        """Return the times of the tower's passes since the last call."""
        spans, self._spans = self._spans, []
        return spans

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = _now()
        with torch.profiler.record_function("vision tower"):
            yield
        if self._is_timed:
            self._spans.append(TowerPass(begin, _now()))

    def _encode(self, batches: Sequence[MediaInputs | None]) -> list[MediaFeatures | None]:
        """Encode micro batches together: only one if it has a backward pass."""
        media = [batch for batch in batches if batch is not None]
        if not media:
            return [None] * len(batches)
        trains, calls = self._is_trained, self._calls(media)
        assert not trains or len(media) == 1
        patches = torch.cat([self._normalize(batch) for batch in media])
        keeps_graph = trains and self.trains_tower and not self.recomputes
        features, states = [], []
        for call in calls:
            with torch.set_grad_enabled(keeps_graph):
                call_states = self.tower.encode(patches[call.patches], call.plan)
                features.append(self.tower.merge(call_states, call.plan))
            if trains and not self.trains_tower:
                states.append(call_states)
        local_features = torch.cat([part.detach() for part in features], dim=1) if features else self._empty()
        square = self.settings.merge_size**2
        parts = local_features.split([int(self._local_grids(b).prod(1).sum()) // square for b in media], dim=1)
        results: list[MediaFeatures | None] = [None] * len(batches)
        numbers = [number for number, batch in enumerate(batches) if batch is not None]
        for number, batch, part in zip(numbers, media, parts, strict=True):
            exchange = self._plan_exchange(batch)
            leaves = self._send(exchange, part)
            if trains:
                leaves = {level: leaf.requires_grad_() for level, leaf in leaves.items()}
                kept_features = features if keeps_graph else []
                self._pending.append(_Encoded(exchange, leaves, calls, patches, kept_features, states))
            results[number] = MediaFeatures(to_device(torch.cat(exchange.receives), runtime.device()), leaves)
        return results

    def _local_grids(self, batch: MediaInputs) -> Tensor:
        """Return the grids of the media that this rank encodes: [media, 3]."""
        return batch.grids[batch.encoders == self.rank]

    def _backward(self, encoded: _Encoded) -> None:
        gradients = self._send_back(encoded)
        for number, call in enumerate(encoded.calls):
            if encoded.features:
                features, encoded.features[number] = encoded.features[number], self._empty()
            elif encoded.states:
                features = self.tower.merge(encoded.states[number], call.plan)
            else:
                features = self.tower.merge(self.tower.encode(encoded.patches[call.patches], call.plan), call.plan)
            features.backward(gradients[:, call.features].to(features.dtype))

    def _empty(self) -> Tensor:
        shape = 1 + len(self.settings.deep_layers), 0, self.settings.output_size
        return torch.empty(shape, dtype=self.config.params_dtype, device=runtime.device())

    def _calls(self, batches: Sequence[MediaInputs]) -> list[_Call]:
        """Divide this rank's media into calls of the tower."""
        grids = torch.cat([self._local_grids(batch) for batch in batches])
        limit = CALL_PATCHES if self._is_trained else FORWARD_CALL_PATCHES
        ends = grids.prod(1).cumsum(0).tolist()
        calls: list[_Call] = []
        square, first, start = self.settings.merge_size**2, 0, 0
        for after in range(1, len(ends) + 1):
            if after < len(ends) and ends[after] - start <= limit:
                continue
            end = ends[after - 1]
            plan = plan_patches(grids[first:after], self.settings, runtime.device())
            calls.append(_Call(slice(start, end), slice(start // square, end // square), plan))
            first, start = after, end
        return calls

    def _normalize(self, batch: MediaInputs) -> Tensor:
        """Return this rank's patches as the tower takes them: [patches, channels * frames * side * side]."""
        settings, device = self.settings, runtime.device()
        area = settings.patch_size**2
        mean, std = self._pixel_statistics
        parts = []
        for pixels, frames in ((batch.image_pixels, 1), (batch.video_pixels, settings.temporal_patch_size)):
            if pixels.numel():
                planes = to_device(pixels, device).view(-1, settings.channels, frames, area).float()
                planes = planes.sub_(mean).div_(std).to(self.config.params_dtype)
                parts.append(planes.expand(-1, -1, settings.temporal_patch_size, -1).flatten(1))
        empty = torch.empty(0, settings.channels * settings.temporal_patch_size * area, device=device)
        return torch.cat(parts) if parts else empty

    @cached_property
    def _pixel_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of pixels in 0..255: [1, channels, 1, 1] each.

        As in transformers' processors, which multiply them by 255 instead of dividing the pixels.
        """
        assert self.normalization is not None
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=runtime.device()).mul(255.0).view(1, -1, 1, 1)
            for values in self.normalization
        )
        return mean, std

    def _plan_exchange(self, batch: MediaInputs) -> _Exchange:
        counts = (batch.grids.prod(1) // self.settings.merge_size**2).numpy()
        encoders, uses = batch.encoders.numpy(), batch.uses.numpy()
        starts = np.empty_like(counts)  # index of each medium's first feature among those of its owner
        for owner in range(self.ranks):
            owned_counts = counts[encoders == owner]
            starts[encoders == owner] = owned_counts.cumsum() - owned_counts
        counts = counts[uses]
        # NumPy's repeat: torch's starts a thread per core, and took 77 to 171 ms a step beside data workers (16 cores).
        owners = torch.from_numpy(np.repeat(encoders[uses], counts))
        offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        indices = torch.from_numpy(np.repeat(starts[uses], counts) + offsets)  # a token's feature, among its owner's
        rows, positions = batch.positions // batch.local_length, batch.positions % batch.local_length
        length = batch.local_length // self.tensor if self.sequence_parallel else batch.local_length
        tensor_ranks, hidden = positions // length, positions % length * batch.rows + rows

        def is_needed(rank: int) -> Tensor:
            needed = batch.context_ranks == rank // self.tensor % self.context
            return needed & (tensor_ranks == rank % self.tensor) if self.sequence_parallel else needed

        own_needed, is_own = is_needed(self.rank), owners == self.rank
        return _Exchange(
            [indices[is_own & is_needed(rank)] for rank in range(self.ranks)],
            [hidden[(owners == rank) & own_needed] for rank in range(self.ranks)],
        )

    def _takes(self, rank: int, level: int) -> bool:
        return level in self.levels[rank // (self.tensor * self.context)]

    def _send(self, exchange: _Exchange, features: Tensor) -> dict[int, Tensor]:
        """Return the features of this rank's tokens by level: [tokens, output_size]."""
        leaves = {}
        for level in range(len(features)):
            takers = [rank for rank in range(self.ranks) if self._takes(rank, level)]
            index = to_device(torch.cat([exchange.sends[rank] for rank in takers]), features.device)
            rows = features[level].index_select(0, index)
            if self.ranks > 1:
                sent = [len(exchange.sends[rank]) if rank in takers else 0 for rank in range(self.ranks)]
                received = [len(part) if self.rank in takers else 0 for part in exchange.receives]
                rows = self._all_to_all(rows, sent, received)
            if self.rank in takers:
                leaves[level] = rows
        return leaves

    def _send_back(self, encoded: _Encoded) -> Tensor:
        """Return the gradients of this rank's features: [levels, features, output_size] fp32."""
        exchange = encoded.exchange
        features = encoded.calls[-1].features.stop if encoded.calls else 0
        levels = 1 + len(self.settings.deep_layers)
        gradients = torch.zeros(levels, features, self.settings.output_size, device=runtime.device())
        for level in range(levels):
            # Without sequence parallelism tensor-parallel ranks have the same gradient: the first one sends it.
            takers = [
                rank
                for rank in range(self.ranks)
                if self._takes(rank, level) and (self.sequence_parallel or rank % self.tensor == 0)
            ]
            leaf = encoded.leaves.get(level)
            rows = self._empty()[0]
            if leaf is not None and self.rank in takers:
                rows = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if self.ranks > 1:
                sent = [len(part) if self.rank in takers else 0 for part in exchange.receives]
                received = [len(exchange.sends[rank]) if rank in takers else 0 for rank in range(self.ranks)]
                rows = self._all_to_all(rows, sent, received)
            index = torch.cat([exchange.sends[rank] for rank in takers])
            gradients[level].index_add_(0, to_device(index, rows.device), rows.float())
        return gradients.mul_(self.gradient_scale)

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        output = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=self.replica)
        return output


class TowerPass(NamedTuple):
    """Begin and end of a pass: events of the device, or the host's clock on a CPU."""

    begin: torch.cuda.Event | float
    end: torch.cuda.Event | float

    def seconds(self) -> float:
        """Return its duration. The device must have reached its end."""
        if isinstance(self.begin, torch.cuda.Event) and isinstance(self.end, torch.cuda.Event):
            return self.begin.elapsed_time(self.end) / 1000
        assert isinstance(self.begin, float)
        assert isinstance(self.end, float)
        return self.end - self.begin


def _now() -> torch.cuda.Event | float:
    if runtime.device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _replica_group(groups: ProcessGroupCollection) -> ProcessGroup:
    """Return the group of this rank's replica: the ranks with the same data-parallel index. Every rank calls this."""
    indices: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(indices, groups.dp.rank())
    replicas = [
        dist.new_group([rank for rank, other in enumerate(indices) if other == index]) for index in sorted(set(indices))
    ]
    return cast(ProcessGroup, replicas[groups.dp.rank()])
