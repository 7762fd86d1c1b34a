"""Encoding of a step's images, videos and audios.

The ranks of a replica (one data-parallel index; tensor, context and pipeline parallelism) share the media of its micro
batches: each is encoded once, by the rank that the data loader has chosen. The features are then exchanged, so that
each rank has those of its own visual tokens and layers. They enter the language model as leaves of autograd, whose
gradients are sent back for the tower's backward pass. The schedule and its recomputation therefore know nothing of the
tower. Without pipeline parallelism micro batches are encoded right before their forward passes, and the tower's
backward pass follows those of the language model. With pipeline parallelism all are encoded before the schedule, and
have their backward passes after it.

Micro batches are encoded together, so that the host launches fewer and longer kernels. Where activations are kept for a
backward pass, their number is bounded by memory: by `kept_patches` of each rank, but as many as the ranks of a replica
take what one micro batch takes on one rank. With pipeline parallelism the first `kept_patches` of a step keep their
activations, and the others are recomputed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from xxhash import xxh3_128

from .. import runtime
from ..layers.audio_plan import plan_audios
from ..layers.deepstack import MediaFeatures
from ..layers.packed_seqs import to_device
from ..layers.patch_plan import PatchPlan, plan_patches
from ..layers.tile_features import plan_features
from ..layers.tower_part import TowerPart
from ..layers.vision_tower import MERGERS
from ..mapping.architecture import Vision
from .encoding_groups import CALL_PATCHES, FORWARD_CALL_PATCHES, FRAME_PATCHES, count_evenly, count_kept, patch_counts
from .feature_exchange import Exchange, FeatureExchange
from .media_inputs import MediaInputs
from .tower_pass import TowerPass, now


class Normalization(NamedTuple):
    """Mean and standard deviation of pixel values in 0..1, per channel."""

    mean: Sequence[float]
    std: Sequence[float]
    is_bf16: bool = False  # computed in bfloat16, as Llama 4's processor does


# (key and number of features of each medium, their features [levels, features, output_size])
Store = Callable[[list[tuple[str, int]], Tensor], None]


class _LocalMedia(NamedTuple):
    """Media that this rank encodes. Tensors of sizes are on the CPU."""

    patches: Tensor  # [patches, channels * frames * side * side], normalized, on the device
    grids: Tensor  # [images and videos, 3]
    layouts: Tensor  # [images and videos, 4]; zeros: none
    counts: Tensor  # [images and videos]: features of each
    spectrograms: Tensor  # [frames, mel bins], on the device
    frames: Tensor  # [audios]


class _Call(NamedTuple):
    """Images and videos that the vision tower takes at a time."""

    patches: slice  # range in this rank's patches
    features: slice  # range in this rank's features
    plan: PatchPlan


class _Pass(NamedTuple):
    """Forward pass of a tower over media that it takes at a time."""

    encode: Callable[[], list[Tensor]]  # returns what the mergers take
    merge: Callable[[list[Tensor]], Tensor]  # returns features [levels, features, output_size]
    features: slice  # range in this rank's features


class _Counts(NamedTuple):
    """Features of a micro batch that this rank encodes."""

    seen: int  # images' and videos'
    heard: int  # audios'


@dataclass
class _Encoded:
    """Inputs of the backward pass of micro batches that were encoded together."""

    exchanges: list[Exchange]
    leaves: list[dict[int, Tensor]]
    counts: list[_Counts]
    passes: list[_Pass]
    features: list[Tensor]  # per pass; with a graph if the tower keeps it
    states: list[list[Tensor]]  # per pass; of a frozen tower with trained mergers


class VisionEncoder:
    """Encoder of a model's media. Every rank calls every method in the same order.

    normalization: of the pixels; must be set before the first is encoded
    recomputes: run the tower's forward pass again for its backward pass, instead of keeping its activations; None: with
    pipeline parallelism, for the patches beyond `kept_patches`
    kept_patches: patches of each rank whose activations fit into memory; the same on all ranks of a replica

        encoder.begin(batches, forward_only=...)
        features = encoder.features(number)        # before the forward pass of each micro batch, in order
        encoder.end()                              # after the schedule
    """

    def __init__(
        self,
        part: TowerPart,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        stages: Sequence[Sequence[int]],
    ):
        """stages: the numbers of each pipeline stage's layers, from 1, and 0 of an embedding."""
        self.part, self.config, self.levels = part, config, part.levels
        self.output_size: int = config.hidden_size
        self.normalization: Normalization | None = None
        self.store: Store | None = None  # takes the features that a frozen tower has computed
        self.is_pipelined = groups.pp.size() > 1
        self.recomputes: bool | None = None
        self.kept_patches = 0
        self.exchange = FeatureExchange(self.levels, config, groups, stages)
        self._batches: list[MediaInputs | None] = []
        self._patches: list[int] = []  # a number for each micro batch, on all ranks of a replica
        self._features: list[MediaFeatures | None] = []
        self._pending: list[_Encoded] = []  # whose backward passes are to come
        self._is_trained, self._is_timed = False, False  # in this step
        self._room = 0.0  # patches of a replica's ranks whose activations can still be kept in this pipelined step
        self._spans: list[TowerPass] = []

    @property
    def trains_tower(self) -> bool:
        return any(
            parameter.requires_grad
            for name, parameter in self.part.named_parameters()
            if name.split(".")[1] not in MERGERS
        )

    @property
    def trains_mergers(self) -> bool:
        return any(
            parameter.requires_grad for name, parameter in self.part.named_parameters() if name.split(".")[1] in MERGERS
        )

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.part.parameters())

    def begin(self, batches: Sequence[MediaInputs | None], *, forward_only: bool) -> None:
        """Begin a step, or an evaluation, on these micro batches; None: without media."""
        self._is_trained, self._is_timed = self.trains and not forward_only, not forward_only
        self._batches, self._features = list(batches), []
        self._patches = patch_counts(batches)
        if self.is_pipelined:
            self._room = self._kept_limit if self.recomputes is None else math.inf
            with self._timed():
                while len(self._features) < len(batches):
                    self._encode_next()

    def features(self, number: int) -> MediaFeatures | None:
        """Return the features of a micro batch; None without media."""
        if not self.is_pipelined and number == len(self._features):
            with self._timed():
                self._run_backward()
                self._features = [None] * number  # the schedule is done with them
                self._encode_next()
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
            for leaves in encoded.leaves:
                leaves.clear()
        self._pending = []

    def pop_spans(self) -> list[TowerPass]:
        """Return the times of the tower's passes since the last call."""
        spans, self._spans = self._spans, []
        return spans

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = now()
        with torch.profiler.record_function("vision tower"):
            yield
        if self._is_timed:
            self._spans.append(TowerPass(begin, now()))

    def _encode_next(self) -> None:
        """Encode the next micro batches together, and exchange their features."""
        first = len(self._features)
        count, keeps_graph = self._next_encoding(list(accumulate(self._patches[first:])))
        batches = self._batches[first : first + count]
        media = [batch for batch in batches if batch is not None]
        encoded: list[MediaFeatures] = []
        if media:
            encoded = self._encode_trained(media, keeps_graph) if self._is_trained else self._encode_frozen(media)
        features = iter(encoded)
        self._features += [None if batch is None else next(features) for batch in batches]

    def _encode_frozen(self, batches: Sequence[MediaInputs]) -> list[MediaFeatures]:
        """Encode micro batches together, without a backward pass."""
        return self._exchanged([self.exchange.plan(batch) for batch in batches], self._compute_together(batches))

    def _encode_trained(self, batches: Sequence[MediaInputs], keeps_graph: bool) -> list[MediaFeatures]:
        """Encode micro batches together, with a backward pass to come."""
        local_media = [self._local_media(batch) for batch in batches]
        passes = self._passes(_concatenated(local_media), FORWARD_CALL_PATCHES if keeps_graph else CALL_PATCHES)
        features, states = [], []
        for tower_pass in passes:
            with torch.set_grad_enabled(keeps_graph):
                pass_states = tower_pass.encode()
                features.append(tower_pass.merge(pass_states))
            if not self.trains_tower:
                states.append(pass_states)
        counts = [self._feature_counts(batch, self._counts(batch)) for batch in batches]
        parts = _split(torch.cat([self._empty(), *(part.detach() for part in features)], dim=1), counts)
        exchanges = [self.exchange.plan(batch) for batch in batches]
        media = self._exchanged(exchanges, parts)
        leaves = [one.levels for one in media]
        for leaf in (leaf for levels in leaves for leaf in levels.values()):
            leaf.requires_grad_()
        kept_features = features if keeps_graph else []
        self._pending.append(_Encoded(exchanges, leaves, counts, passes, kept_features, states))
        return media

    def _exchanged(self, exchanges: Sequence[Exchange], features: Sequence[Tensor]) -> list[MediaFeatures]:
        """Return the features of this rank's tokens in micro batches, from those of the media that the ranks encode."""
        pairs = zip(exchanges, self.exchange.send(exchanges, features), strict=True)
        device = runtime.device()
        return [MediaFeatures(to_device(torch.cat(one.receives), device), leaves) for one, leaves in pairs]

    def compute_features(self, batches: Sequence[MediaInputs]) -> list[Tensor]:
        """Return the features of the media that this rank encodes, of each micro batch, as MediaInputs.features."""
        return [features for group in self._groups(batches) for features in self._compute_together(group)]

    def _groups(self, batches: Sequence[MediaInputs]) -> Iterator[Sequence[MediaInputs]]:
        """Yield the micro batches that are encoded together without a backward pass."""
        while batches:
            count = count_evenly(list(accumulate(patch_counts(batches))), FORWARD_CALL_PATCHES * self.exchange.ranks)
            yield batches[:count]
            batches = batches[count:]

    @property
    def _kept_limit(self) -> int:
        """Patches of all ranks of a replica whose activations fit into memory."""
        return self.kept_patches * self.exchange.ranks

    def _next_encoding(self, ends: list[int]) -> tuple[int, bool]:
        """Return how many of the next micro batches are encoded together, and whether their activations are kept.

        ends: patches of each micro batch and those before it. All ranks of a replica return the same.
        """
        ranks = self.exchange.ranks
        if not self._is_trained:
            return count_evenly(ends, FORWARD_CALL_PATCHES * ranks), False
        count = count_evenly(ends, CALL_PATCHES * ranks)
        if self.recomputes or not self.trains_tower:
            return count, False
        if not self.is_pipelined:
            return max(min(count, ranks), count_evenly(ends, self._kept_limit)), True
        kept = count_kept(ends, self._room, FORWARD_CALL_PATCHES * ranks)
        if not kept:
            return count, False
        self._room -= ends[kept - 1]
        return kept, True

    @torch.no_grad()
    def _compute_together(self, batches: Sequence[MediaInputs]) -> list[Tensor]:
        """Return the features of micro batches that fit into a call or two of each tower."""
        media = _concatenated([self._local_media(batch, self._is_new(batch)) for batch in batches])
        passes = self._passes(media, FORWARD_CALL_PATCHES)
        features = torch.cat([self._empty(), *(one.merge(one.encode()) for one in passes)], dim=1)
        counts = [self._feature_counts(batch, self._counts(batch) * self._is_new(batch)) for batch in batches]
        parts = zip(batches, _split(features, counts), strict=True)
        return [self._with_stored(batch, computed) for batch, computed in parts]

    def _feature_counts(self, batch: MediaInputs, counts: Tensor) -> _Counts:
        """Return the sums of this rank's numbers of features [media], of images and videos and of audios."""
        is_seen = self._is_visual(batch)
        return _Counts(int(counts[is_seen].sum()), int(counts[~is_seen].sum()))

    def _is_new(self, batch: MediaInputs) -> Tensor:
        """Return which of this rank's media have to be computed: [media] bool."""
        if batch.features is not None:
            return torch.zeros(len(self._counts(batch)), dtype=torch.bool)
        if batch.stored is None or self.store is None:
            return torch.ones(len(self._counts(batch)), dtype=torch.bool)
        return ~batch.stored.is_read

    def _with_stored(self, batch: MediaInputs, computed: Tensor) -> Tensor:
        """Return the features of a batch, from those that are computed and those that are read. Stores the former."""
        if batch.features is not None:
            return batch.features
        if batch.stored is None or self.store is None:
            return computed
        stored, is_new = batch.stored, ~batch.stored.is_read
        counts = self._counts(batch)
        media = zip(stored.keys, counts.tolist(), is_new.tolist(), strict=True)
        self.store([(key, count) for key, count, is_computed in media if is_computed], computed)
        if is_new.all():
            return computed
        read = to_device(stored.values, runtime.device()).view(self.config.params_dtype)
        # Positions of the media's features behind those that are read, then those that are computed.
        order = is_new.repeat_interleave(counts).long().argsort(stable=True).argsort()
        return torch.cat([read, computed], dim=1).index_select(1, to_device(order, runtime.device()))

    def fingerprint(self) -> str:
        """Return a hash of all that decides the features of decoded media, but for the kernels."""
        architecture = self.config.architecture  # type: ignore[attr-defined]
        settings = architecture.vision, architecture.audio, self.normalization, self.config.params_dtype
        checksum = xxh3_128(repr(settings).encode())
        for name, tensor in sorted(self.part.state_dict().items()):
            checksum.update(repr((name, tensor.dtype, tensor.shape)).encode())
            checksum.update(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())
        return checksum.hexdigest()

    def free_tower(self) -> None:
        """Free the towers' weights. From now on every batch must have its features."""
        self.part.vision = self.part.audio = None

    def _is_local(self, batch: MediaInputs) -> Tensor:
        """Return which media this rank encodes: [media] bool."""
        return batch.encoders == self.exchange.rank

    def _counts(self, batch: MediaInputs) -> Tensor:
        """Return the number of features of each medium that this rank encodes: [media] int64."""
        return batch.counts[self._is_local(batch)]

    def _is_visual(self, batch: MediaInputs) -> Tensor:
        """Return which of this rank's media are images or videos: [media] bool."""
        return (torch.arange(len(batch.encoders)) < len(batch.grids))[self._is_local(batch)]

    def _local_media(self, batch: MediaInputs, is_used: Tensor | None = None) -> _LocalMedia:
        """Return the media that this rank encodes, as the towers take them. is_used: [media] bool; None: all"""
        is_local, visual = self._is_local(batch), len(batch.grids)
        grids, frames = batch.grids[is_local[:visual]], batch.frames[is_local[visual:]]
        counts = batch.counts[:visual][is_local[:visual]]
        layouts = torch.zeros(len(grids), 4, dtype=torch.int64)
        if batch.layouts is not None:
            layouts = batch.layouts[is_local[:visual]]
        pixels, spectrograms = (batch.image_pixels, batch.video_pixels), batch.spectrograms
        if is_used is not None and not is_used.all():
            is_seen, is_heard = is_used[: len(grids)], is_used[len(grids) :]
            patches, images = is_seen.repeat_interleave(grids.prod(1)), len(batch.image_pixels)
            pixels = batch.image_pixels[patches[:images]], batch.video_pixels[patches[images:]]
            spectrograms = spectrograms[is_heard.repeat_interleave(frames)]
            grids, layouts, counts = grids[is_seen], layouts[is_seen], counts[is_seen]
            frames = frames[is_heard]
        spectrograms = to_device(spectrograms, runtime.device()).to(self.config.params_dtype)
        return _LocalMedia(self._normalize(*pixels), grids, layouts, counts, spectrograms, frames)

    def _backward(self, encoded: _Encoded) -> None:
        shape = self.levels, self.output_size
        gradients = self.exchange.send_back(encoded.exchanges, encoded.leaves, list(map(sum, encoded.counts)), shape)
        gradients = _in_order_of_towers(gradients, encoded.counts)
        for number, tower_pass in enumerate(encoded.passes):
            if encoded.features:
                features, encoded.features[number] = encoded.features[number], self._empty()
            elif encoded.states:
                features = tower_pass.merge(encoded.states[number])
            else:
                features = tower_pass.merge(tower_pass.encode())
            if features.requires_grad:
                features.backward(gradients[:, tower_pass.features].to(features.dtype))

    def _empty(self) -> Tensor:
        shape = self.levels, 0, self.output_size
        return torch.empty(shape, dtype=self.config.params_dtype, device=runtime.device())

    def _passes(self, media: _LocalMedia, limit: int) -> list[_Pass]:
        """Divide media into passes of the towers."""
        passes, tower = [], self.part.vision
        calls = self._calls(media, limit) if tower else []
        for call in calls:
            assert tower is not None
            encode = partial(tower.encode, media.patches[call.patches], call.plan)
            passes.append(_Pass(encode, partial(tower.merge, plan=call.plan), call.features))
        return passes + self._audio_passes(media, limit * FRAME_PATCHES, calls[-1].features.stop if calls else 0)

    def _audio_passes(self, media: _LocalMedia, limit: int, first_feature: int) -> list[_Pass]:
        """Divide audios into passes of their tower. first_feature: number of features before them"""
        passes: list[_Pass] = []
        tower, frames = self.part.audio, media.frames.tolist()
        first = start = 0
        while first < len(frames):
            assert tower is not None
            count = max(sum(total <= limit for total in accumulate(frames[first:])), 1)
            lengths = frames[first : first + count]
            plan, stop = plan_audios(lengths, tower.audio_settings, runtime.device()), start + sum(lengths)
            features = slice(first_feature, first_feature + plan.features)
            encode = partial(tower.encode, media.spectrograms[start:stop], plan)
            passes.append(_Pass(encode, partial(tower.merge, plan=plan), features))
            first, start, first_feature = first + count, stop, features.stop
        return passes

    def _calls(self, media: _LocalMedia, limit: int) -> list[_Call]:
        """Divide images and videos into calls of the vision tower."""
        settings, grids, device = self._vision, media.grids, runtime.device()
        feature_ends = [0, *media.counts.cumsum(0).tolist()]
        ends = grids.prod(1).cumsum(0).tolist()
        calls: list[_Call] = []
        first, start = 0, 0
        for after in range(1, len(ends) + 1):
            if after < len(ends) and ends[after] - start <= limit:
                continue
            end = ends[after - 1]
            sizes = grids[first:after], media.layouts[first:after], media.counts[first:after]
            plan = plan_patches(grids[first:after], settings, device)
            plan = replace(plan, tile_features=plan_features(*sizes, settings, device))
            calls.append(_Call(slice(start, end), slice(feature_ends[first], feature_ends[after]), plan))
            first, start = after, end
        return calls

    @property
    def _vision(self) -> Vision:
        assert self.part.vision is not None
        return self.part.vision.vision_settings

    def _normalize(self, image_pixels: Tensor, video_pixels: Tensor) -> Tensor:
        """Return this rank's patches as the tower takes them: [patches, channels * frames * side * side]."""
        if not image_pixels.numel() and not video_pixels.numel():  # perhaps there is no vision tower
            return torch.empty(0, 0, dtype=self.config.params_dtype, device=runtime.device())
        settings, device = self._vision, runtime.device()
        area = settings.patch_size**2
        parts = []
        for pixels, frames in ((image_pixels, 1), (video_pixels, settings.temporal_patch_size)):
            if pixels.numel():
                planes = self._normalized(to_device(pixels, device).view(-1, settings.channels, frames, area))
                parts.append(planes.expand(-1, -1, settings.temporal_patch_size, -1).flatten(1))
        return torch.cat(parts)

    def _normalized(self, pixels: Tensor) -> Tensor:
        """Normalize pixels as transformers' processors do: uint8 [patches, channels, frames, area]."""
        assert self.normalization is not None
        mean, std = self._pixel_statistics
        values = pixels.bfloat16().mul_(1 / 255) if self.normalization.is_bf16 else pixels.float()
        return values.sub_(mean).div_(std).to(self.config.params_dtype)

    @cached_property
    def _pixel_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of pixels: [1, channels, 1, 1] each.

        Most of transformers' processors multiply them by 255 instead of dividing the pixels.
        """
        assert self.normalization is not None
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=runtime.device()).view(1, -1, 1, 1)
            for values in (self.normalization.mean, self.normalization.std)
        )
        return (mean.bfloat16(), std.bfloat16()) if self.normalization.is_bf16 else (mean * 255.0, std * 255.0)


def _concatenated(media: Sequence[_LocalMedia]) -> _LocalMedia:
    """Return media behind each other. Tensors without rows may have another width."""
    columns = zip(*media, strict=True)
    return _LocalMedia(*(torch.cat([part for part in parts if len(part)] or [parts[0]]) for parts in columns))


def _split(features: Tensor, counts: Sequence[_Counts]) -> list[Tensor]:
    """Return the features [levels, features, size] of each of some micro batches: what is seen, then what is heard.

    Those that the towers return have what is seen of all micro batches before what is heard.
    """
    parts = features.split([*(count.seen for count in counts), *(count.heard for count in counts)], dim=1)
    pairs = zip(parts[: len(counts)], parts[len(counts) :], strict=True)
    return [torch.cat(pair, dim=1) if pair[1].numel() else pair[0] for pair in pairs]


def _in_order_of_towers(features: Tensor, counts: Sequence[_Counts]) -> Tensor:
    """Return features [levels, features, size], of micro batches behind each other, in the towers' order."""
    if len(counts) == 1 or not any(count.heard for count in counts):
        return features
    parts = features.split([size for count in counts for size in count], dim=1)
    return torch.cat([*parts[::2], *parts[1::2]], dim=1)
