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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from xxhash import xxh3_128

from .. import runtime
from ..layers.deepstack import MediaFeatures
from ..layers.packed_seqs import to_device
from ..layers.patch_plan import PatchPlan, plan_patches
from ..layers.vision_tower import MERGERS, VisionPart, VisionTower
from .feature_exchange import Exchange, FeatureExchange
from .media_inputs import MediaInputs

# Patches that the tower takes at a time, with and without a backward pass, unless one medium has more. Without one, it
# is also the limit of micro batches that are encoded together.
CALL_PATCHES, FORWARD_CALL_PATCHES = 16384, 32768


class Normalization(NamedTuple):
    """Mean and standard deviation of pixel values in 0..1, per channel."""

    mean: Sequence[float]
    std: Sequence[float]


# (key and number of features of each medium, their features [levels, features, output_size])
Store = Callable[[list[tuple[str, int]], Tensor], None]


class _Call(NamedTuple):
    """Media that the tower takes at a time."""

    patches: slice  # range in this rank's patches
    features: slice  # range in this rank's features
    plan: PatchPlan


@dataclass
class _Encoded:
    """Inputs of the backward pass of one micro batch."""

    exchange: Exchange
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
        self.store: Store | None = None  # takes the features that a frozen tower has computed
        self.is_pipelined = groups.pp.size() > 1
        self.recomputes = self.is_pipelined
        self.exchange = FeatureExchange(self.settings, config, groups, stages)
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
                self._features = self._encode(batches)

    def features(self, number: int) -> MediaFeatures | None:
        """Return the features of a micro batch; None without media."""
        if not self.is_pipelined and number == len(self._features):
            with self._timed():
                self._run_backward()
                self._features = [None] * number  # the schedule is done with them
                batches = self._batches[number:]
                self._features += self._encode(batches[: 1 if self._is_trained else self._count_together(batches)])
        return self._features[number]

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
        """Encode micro batches, and exchange their features; together unless they have a backward pass."""
        media = [batch for batch in batches if batch is not None]
        if self._is_trained:
            encoded = [self._encode_trained(batch) for batch in media]
        else:
            parts = zip(media, self._computed(media), strict=True)
            encoded = [self._exchanged(self.exchange.plan(batch), features) for batch, features in parts]
        remaining = iter(encoded)
        return [None if batch is None else next(remaining) for batch in batches]

    def _encode_trained(self, batch: MediaInputs) -> MediaFeatures:
        """Encode a micro batch with a backward pass to come."""
        patches, calls = self._normalize(batch), self._calls(self._local_grids(batch), CALL_PATCHES)
        keeps_graph = self.trains_tower and not self.recomputes
        features, states = [], []
        for call in calls:
            with torch.set_grad_enabled(keeps_graph):
                call_states = self.tower.encode(patches[call.patches], call.plan)
                features.append(self.tower.merge(call_states, call.plan))
            if not self.trains_tower:
                states.append(call_states)
        exchange = self.exchange.plan(batch)
        media = self._exchanged(exchange, torch.cat([self._empty(), *(part.detach() for part in features)], dim=1))
        for leaf in media.levels.values():
            leaf.requires_grad_()
        kept_features = features if keeps_graph else []
        self._pending.append(_Encoded(exchange, media.levels, calls, patches, kept_features, states))
        return media

    def _exchanged(self, exchange: Exchange, features: Tensor) -> MediaFeatures:
        """Return the features of this rank's tokens, from those of the media that the ranks encode."""
        leaves = self.exchange.send(exchange, features)
        return MediaFeatures(to_device(torch.cat(exchange.receives), runtime.device()), leaves)

    def compute_features(self, batches: Sequence[MediaInputs]) -> list[Tensor]:
        """Return the features of the media that this rank encodes, of each micro batch, as MediaInputs.features."""
        return list(self._computed(batches))

    def _computed(self, batches: Sequence[MediaInputs]) -> Iterator[Tensor]:
        while batches:
            count = self._count_together(batches)
            yield from self._compute_together(batches[:count])
            batches = batches[count:]

    def _count_together(self, batches: Sequence[MediaInputs | None]) -> int:
        """Return how many of the first micro batches are encoded together, without a backward pass."""
        patches = accumulate(0 if batch is None else int(batch.grids.prod(1).sum()) for batch in batches)
        return max(sum(total <= FORWARD_CALL_PATCHES * self.exchange.ranks for total in patches), 1)

    @torch.no_grad()
    def _compute_together(self, batches: Sequence[MediaInputs]) -> list[Tensor]:
        """Return the features of micro batches that fit into a call or two of the tower."""
        new_media = [self._new_media(batch) for batch in batches]
        patches = torch.cat([self._normalize(batch) for batch, _ in new_media])
        calls = self._calls(torch.cat([grids for _, grids in new_media]), FORWARD_CALL_PATCHES)
        computed = [self.tower.merge(self.tower.encode(patches[call.patches], call.plan), call.plan) for call in calls]
        counts = [int(self._feature_counts(grids).sum()) for _, grids in new_media]
        parts = torch.cat([self._empty(), *computed], dim=1).split(counts, dim=1)
        return [self._with_stored(batch, part) for batch, part in zip(batches, parts, strict=True)]

    def _new_media(self, batch: MediaInputs) -> tuple[MediaInputs, Tensor]:
        """Return a batch with the pixels of the media to compute alone, and their grids."""
        grids = self._local_grids(batch)
        if batch.features is not None:
            is_new = torch.zeros(len(grids), dtype=torch.bool)
        elif batch.stored is None or self.store is None:
            return batch, grids
        else:
            is_new = ~batch.stored.is_read
        patches, images = is_new.repeat_interleave(grids.prod(1)), len(batch.image_pixels)
        pixels = batch.image_pixels[patches[:images]], batch.video_pixels[patches[images:]]
        return replace(batch, image_pixels=pixels[0], video_pixels=pixels[1]), grids[is_new]

    def _with_stored(self, batch: MediaInputs, computed: Tensor) -> Tensor:
        """Return the features of a batch, from those that are computed and those that are read. Stores the former."""
        if batch.features is not None:
            return batch.features
        if batch.stored is None or self.store is None:
            return computed
        stored, is_new = batch.stored, ~batch.stored.is_read
        counts = self._feature_counts(self._local_grids(batch))
        media = zip(stored.keys, counts.tolist(), is_new.tolist(), strict=True)
        self.store([(key, count) for key, count, is_computed in media if is_computed], computed)
        if is_new.all():
            return computed
        read = to_device(stored.values, runtime.device()).view(self.config.params_dtype)
        # Positions of the media's features behind those that are read, then those that are computed.
        order = is_new.repeat_interleave(counts).long().argsort(stable=True).argsort()
        return torch.cat([read, computed], dim=1).index_select(1, to_device(order, runtime.device()))

    def fingerprint(self) -> str:
        """Return a hash of all that decides the features of given patches, but for the kernels."""
        checksum = xxh3_128(repr((self.settings, self.normalization, self.config.params_dtype)).encode())
        for name, tensor in sorted(self.tower.state_dict().items()):
            checksum.update(repr((name, tensor.dtype, tensor.shape)).encode())
            checksum.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())
        return checksum.hexdigest()

    def free_tower(self) -> None:
        """Free the tower's weights. From now on every batch must have its features."""
        self.part.vision = self.tower = cast(VisionTower, torch.nn.Module())

    def _local_grids(self, batch: MediaInputs) -> Tensor:
        """Return the grids of the media that this rank encodes: [media, 3]."""
        return batch.grids[batch.encoders == self.exchange.rank]

    def _feature_counts(self, grids: Tensor) -> Tensor:
        """Return the number of features of each medium: [media] int64."""
        return grids.prod(1) // self.settings.merge_size**2

    def _backward(self, encoded: _Encoded) -> None:
        features = encoded.calls[-1].features.stop if encoded.calls else 0
        shape = 1 + len(self.settings.deep_layers), features, self.settings.output_size
        gradients = self.exchange.send_back(encoded.exchange, encoded.leaves, shape)
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

    def _calls(self, grids: Tensor, limit: int) -> list[_Call]:
        """Divide media of these grids into calls of the tower."""
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
        width = settings.channels * settings.temporal_patch_size * area
        empty = torch.empty(0, width, dtype=self.config.params_dtype, device=device)
        return torch.cat([empty, *parts])

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
