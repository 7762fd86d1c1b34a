"""Micro batches of each rank and step, collated ahead of time by worker processes.

The plan is a pure function of the table of lengths, the seed and the position, so every rank computes the same plan
without communication. The state of a run's data is `position` and, for a stream, `cursors`. `resume` restores it.
"""

import signal
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, product

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..dataset.samples import TokenizedSample
from ..dataset.store import TokenStore
from ..formats.schemas import UNGROUPED
from ..json_types import JsonObject
from ..machine import end_with_parent
from .collator import Batch, BatchLayout, GlobalTotals, StepDivision
from .dealing import deal_by_cost
from .sample_order import Epochs
from .shared_slots import shared_slots
from .streaming import StreamedBatches, TokenStream

PREFETCH = 2, 16  # minimum and maximum of micro batches that a worker prepares ahead


class Batches:
    """Micro batches of a data-parallel rank, with the shards of one rank of its context-parallel group.

    store: from `prepare`
    With a stream, `loss_tokens` and `loss_samples` count this rank's samples only (`loss_tokens_are_local`), and the
    trainer sums them over ranks.
    Raises ValueError, naming the flags, if the sizes do not fit together.
    """

    def __init__(
        self,
        store: TokenStore | TokenStream,
        layout: BatchLayout,
        division: StepDivision,
        *,
        shuffle: bool = True,
        seed: int = 42,
        num_workers: int = 0,
        by_length: bool = False,
    ):
        if layout.pack_length and not layout.padding_free:
            raise ValueError("--packing true cannot be used with --padding_free false. Remove one of them.")
        if store.stage not in UNGROUPED and not layout.padding_free:
            raise ValueError(f"--padding_free false cannot be used with {store.stage} data. Remove it.")
        if layout.pack_length and layout.pack_length % layout.row_multiple:
            raise ValueError(
                f"--packing_length (or --max_length) {layout.pack_length}: not a multiple of {layout.row_multiple}, as "
                f"--context_parallel_size {layout.context_parallel_size} and sequence parallelism require. "
                f"Set {-(-layout.pack_length // layout.row_multiple) * layout.row_multiple}."
            )
        self.layout, self.num_workers = layout, num_workers
        self.micro_batches = division.micro_batches
        self.consumed_steps = 0
        self.loss_tokens_are_local = isinstance(store, TokenStream)
        if isinstance(store, TokenStream):
            if (division.equal_lengths or division.equal_over_ranks) and not layout.pack_length:
                feature = (
                    "pipeline parallelism" if division.equal_lengths else "this exchange of tokens between experts"
                )
                raise ValueError(f"--streaming true with {feature} needs rows of one length. Set --packing true.")
            workers = max(num_workers, 1)
            self.plan: PlannedBatches | StreamedBatches = StreamedBatches(
                store, layout, division, workers=workers, shuffle=shuffle, seed=seed
            )
        else:
            self.plan = PlannedBatches(store, layout, division, shuffle=shuffle, seed=seed, by_length=by_length)
        # For a stream: None, and 0 stored samples.
        self.samples = self.plan.samples  # samples (or packs) of an epoch
        self.steps_per_epoch = self.plan.steps_per_epoch
        self.stored_samples = self.plan.stored_samples

    @property
    def padding_share(self) -> float | None:
        """Fraction of padding among the tokens of the first epoch, over all ranks. None for a stream."""
        return self.plan.padding_share()

    def steps(self) -> Iterator[list[Batch]]:
        """Yield this rank's micro batches of each step, endlessly, from the position on."""
        steps = (
            self._streamed_steps(self.plan)
            if isinstance(self.plan, StreamedBatches)
            else self._planned_steps(self.plan)
        )
        for step in steps:
            self.consumed_steps += 1
            yield step

    def one_pass(self) -> Iterator[list[Batch]]:
        """Yield every sample exactly once, in order. Rows of weight 0 fill up the last global batch."""
        if isinstance(self.plan, StreamedBatches):
            raise ValueError("a stream has no end to evaluate to. Set --val_dataset, which is never streamed.")
        yield from self._load(self.plan, product(range(self.plan.steps_per_epoch), range(self.micro_batches), [True]))

    def position(self) -> JsonObject:
        """Return the position after the consumed steps; the same on every rank."""
        return self.plan.position(self.consumed_steps * self.micro_batches)

    @property
    def epoch(self) -> int:
        """Completed epochs. 0 for a stream."""
        return self.position().get("epoch", 0)

    def cursors(self) -> dict[str, np.ndarray]:
        """Return the cursors of this rank's stream workers, int64 arrays named `data/<rank>/...`, or {}."""
        return self.plan.cursors()

    def resume(self, position: JsonObject, cursors: dict[str, np.ndarray]) -> list[str]:
        """Continue from a position, before `steps` has begun. Return notes for the user.

        cursors: those of all data-parallel ranks at that position
        In the same layout the next batches are the same as without the interruption. In a different layout, no document
        of the current epoch is lost or repeated.
        Raises ValueError with the differences if the data is different.
        """
        was_streamed = "epoch" not in position
        if was_streamed != isinstance(self.plan, StreamedBatches):
            raise ValueError(
                f"--streaming {str(not was_streamed).lower()}: the checkpoint's training data was "
                f"{'' if was_streamed else 'not '}streamed. Set --streaming {str(was_streamed).lower()}."
            )
        return self.plan.resume(position, cursors)

    def channels(self) -> set[str]:
        """Return the channels of the rows (--enable_channel_loss). Empty for a stream."""
        return set(self.plan.store.channels) - {""} if isinstance(self.plan, PlannedBatches) else set()

    def number_channels(self, channels: Sequence[str]) -> None:
        """Give batches the number of each token's channel among `channels`."""
        if isinstance(self.plan, PlannedBatches):
            numbers = {channel: number for number, channel in enumerate(channels)}
            self.plan.channels = np.array([numbers.get(channel, -1) for channel in self.plan.store.channels])

    def samples_until(self, epochs: float) -> int | None:
        """Return the samples from the position to the end of epoch `epochs`, at least 0. None for a stream."""
        return self.plan.samples_until(epochs, self.consumed_steps * self.micro_batches)

    def _planned_steps(self, plan: "PlannedBatches") -> Iterator[list[Batch]]:
        steps = count(self.consumed_steps)
        return self._load(plan, ((step, number, False) for step in steps for number in range(self.micro_batches)))

    def _load(self, plan: "PlannedBatches", numbers: Iterable[tuple[int, int, bool]]) -> Iterator[list[Batch]]:
        loader = iter(self._loader(plan, sampler=numbers))
        while step := list(islice(loader, self.micro_batches)):
            yield step

    def _streamed_steps(self, stream: StreamedBatches) -> Iterator[list[Batch]]:
        loader = iter(self._loader(stream))
        while True:
            step = list(islice(loader, self.micro_batches))
            loss_tokens = sum(batch.loss_tokens for batch, _ in step)
            loss_samples = sum(batch.grouping.loss_samples for batch, _ in step if batch.grouping)
            for batch, update in step:
                batch.loss_tokens = loss_tokens
                if batch.grouping:
                    batch.grouping.loss_samples = loss_samples
                stream.trackers[update.shard].update(update)
            yield [batch for batch, _ in step]

    def _loader(self, dataset: Dataset, sampler: Iterable | None = None) -> DataLoader:
        # A full step is prepared ahead, or the maximum of micro batches per worker of a larger step.
        minimum, maximum = PREFETCH
        prefetch = min(max(minimum, -(-self.micro_batches // max(self.num_workers, 1))), maximum)
        # A worker begins a batch when all but `prefetch` of its batches have been read.
        slots = shared_slots(self.num_workers, prefetch + 2) if self.layout.vision else None
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=slots.pack if slots else _identity,
            num_workers=self.num_workers,
            prefetch_factor=prefetch if self.num_workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # keeps the state of torch's default generator for the model
        )


class PlannedBatches(Dataset):
    """Micro batches by number, from a store of known lengths. Epochs follow each other without a gap."""

    def __init__(
        self,
        store: TokenStore,
        layout: BatchLayout,
        division: StepDivision,
        *,
        shuffle: bool,
        seed: int,
        by_length: bool = False,
    ):
        if len(store) == 0:
            raise ValueError("the dataset holds no sample")
        self.store, self.layout, self.division = store, layout, division
        self.shape = (-1, division.ranks, division.micro_batch_size)  # micro batches, ranks, samples
        self.epochs = Epochs(store, layout, shuffle, seed, by_length=by_length)
        self.samples, self.stored_samples = len(self.epochs.full_epoch), len(store)
        self.steps_per_epoch = -(-self.samples // division.global_batch_size)
        self.has_media = layout.vision is not None and store.has_media
        self.label_width = 0
        self.channels: np.ndarray | None = None  # number of each sample's channel: int64 [samples]
        if layout.stage not in UNGROUPED:  # computed before the loader forks its workers
            self.label_width, self.counts = store.label_width, store.document_counts

    def __getitem__(self, number: tuple[int, int, bool]) -> Batch:
        step, micro_batch, one_pass = number
        samples = self._samples(step, one_pass).reshape(self.shape)
        row_lengths = self._row_lengths(samples)[:, self.division.rank]  # [micro batches]
        packs = self._packs(samples[micro_batch, self.division.rank])
        return self.layout.collate(
            [[self._sample(item) for item in pack] for pack in packs],
            self._totals(samples, micro_batch),
            row_length=int(row_lengths[micro_batch]),
            label_width=self.label_width,
        )

    def _sample(self, item: int) -> TokenizedSample:
        channel = -1 if self.channels is None else int(self.channels[item])
        media = self.store.media(item) if self.has_media else ()
        shared = int(self.store.shared[item]) if self.layout.shares_prompts else 0
        return TokenizedSample(self.store.row(item), self.store.label(item), item, channel, media, shared=shared)

    def position(self, micro_batches: int) -> JsonObject:
        return self.epochs.position(self._consumed(micro_batches))

    def cursors(self) -> dict[str, np.ndarray]:
        return {}

    def resume(self, position: JsonObject, cursors: dict[str, np.ndarray]) -> list[str]:
        return self.epochs.resume(position)

    def samples_until(self, epochs: float, micro_batches: int) -> int:
        return self.epochs.samples_until(epochs, self._consumed(micro_batches))

    def padding_share(self) -> float:
        rows_per_sample = 2 if self.layout.has_mismatched else 1
        tokens = self.store.lengths.sum()
        if self.layout.shares_prompts:
            tokens -= self.store.shared.sum()
        if self.layout.pack_length:
            return 1 - tokens / (rows_per_sample * self.epochs.full_epoch.lengths.sum())
        samples = np.stack([self._samples(step, one_pass=True) for step in range(self.steps_per_epoch)])
        samples[samples >= 0] = self.epochs.permutation(self.epochs.full_epoch, 0)[samples[samples >= 0]]
        micro_batches = samples.reshape(len(samples), *self.shape)  # [steps, micro batches, ranks, samples]
        rows = self._row_lengths(micro_batches)
        filled = (micro_batches >= 0).any(-1)  # rows without samples occur in evaluation only
        total = rows[filled].sum() * (1 if self.layout.padding_free else self.shape[-1])
        return 1 - tokens / (rows_per_sample * total)

    def _consumed(self, micro_batches: int) -> int:
        """Return the number of samples in this many micro batches on all ranks."""
        return micro_batches * self.shape[1] * self.shape[2]

    def _samples(self, step: int, one_pass: bool) -> np.ndarray:
        """Return the sample numbers of a global batch, -1 for a filler: [global batch]."""
        size = self.division.global_batch_size
        positions = np.arange(step * size, (step + 1) * size)
        if one_pass:
            return np.where(positions < self.samples, positions, -1)
        samples = self.epochs.numbers(positions)
        if not self.has_media or self.division.ranks == 1:
            return samples
        division = self.division
        shape = division.micro_batches, division.ranks, division.micro_batch_size
        return deal_by_cost(samples, self._visual_tokens(samples), shape)

    def _visual_tokens(self, samples: np.ndarray) -> np.ndarray:
        """Return the visual tokens of each sample."""
        return np.array([self.store.visual_tokens[rows].sum() for rows in self._packs(samples)])

    def _row_lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return row lengths: [..., micro batches, ranks, samples] -> [..., micro batches, ranks]."""
        lengths = np.where(samples >= 0, self.epochs.all_samples.lengths[samples], self.layout.pack_length or 0)
        rows = self.layout.row_length(lengths)
        if self.division.equal_lengths:
            rows = np.broadcast_to(rows.max(-2, keepdims=True), rows.shape)
        if self.division.equal_over_ranks:
            rows = np.broadcast_to(rows.max(-1, keepdims=True), rows.shape)
        return rows

    def _totals(self, samples: np.ndarray, micro_batch: int) -> GlobalTotals:
        """Return the totals of a global batch: [micro batches, ranks, samples]."""
        tokens = float(self.epochs.all_samples.weights[samples[samples >= 0]].sum())
        if self.layout.stage in UNGROUPED:
            return GlobalTotals(tokens)
        items = [np.concatenate(self._packs(rank_samples)) for rank_samples in samples[micro_batch]]
        return GlobalTotals(
            tokens,
            samples=float(sum(map(len, self._packs(samples.ravel())))),
            documents_per_rank=[
                len(rank_samples) if self.layout.has_mismatched else int(self.counts[rank_samples].sum())
                for rank_samples in items
            ],
        )

    def _packs(self, samples: np.ndarray) -> list[np.ndarray]:
        """Return the store indices of each sample's rows; an empty array for a filler."""
        return [self.epochs.all_samples.documents[i] if i >= 0 else np.empty(0, np.int64) for i in samples.tolist()]


def _start_worker(worker: int) -> None:
    """Ignore the signals with which a scheduler stops a run, which needs its workers until it has saved.

    End with the run: otherwise torch waits until the run has taken the last batch, if it is larger than a pipe.
    """
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _identity[T](batch: T) -> T:
    return batch
