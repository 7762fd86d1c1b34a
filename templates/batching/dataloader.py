"""Which samples each rank sees in each step, and the processes that lay them out ahead of time.

The plan is a pure function of the table of lengths, the seed and the place: every rank computes the same one, none asks
another. Where a run is in its data is known as `position` and, of a stream, `cursors`; `resume` goes on from there.
"""

import signal
from collections.abc import Iterable, Iterator
from itertools import count, islice, product
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..dataset.store import Group, TokenStore
from ..formats.schemas import ALONE
from .collator import Batch, Layout, Totals
from .sample_order import Epochs
from .streaming import StreamedBatches, TokenStream


class Batches:
    """The micro batches of one data-parallel rank (and of one rank of its context-parallel group).

    `store` is what `prepare` gives. `max_length` is the length of a pack. `length_multiple` divides the local length of
    every row; `equal_lengths` pads the rows of all micro batches of a step to the longest of them, `equal_over_ranks`
    those of a micro batch to the longest of any rank.
    With a stream, `loss_tokens` and `loss_samples` count this rank's share alone (`loss_tokens_are_local`): the trainer
    adds them up.
    Raises ValueError where the sizes do not fit together, naming the flags.
    """

    def __init__(
        self,
        store: TokenStore | TokenStream,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        context_parallel_rank: int = 0,
        context_parallel_size: int = 1,
        length_multiple: int = 1,
        equal_lengths: bool = False,
        equal_over_ranks: bool = False,
        packing: bool = False,
        padding_free: bool = True,
        max_length: int | None = None,
        shuffle: bool = True,
        seed: int = 42,
        num_workers: int = 0,
        pad_token_id: int = 0,
    ):
        if global_batch_size % (micro_batch_size * data_parallel_size):
            raise ValueError(
                f"--global_batch_size {global_batch_size} must be a multiple of --micro_batch_size {micro_batch_size} "
                f"x {data_parallel_size} data-parallel ranks = {micro_batch_size * data_parallel_size}"
            )
        if packing and not padding_free:
            raise ValueError("--packing true lays documents end to end, which --padding_free false forbids: drop one")
        if store.stage not in ALONE and not padding_free:
            raise ValueError(f"--padding_free false cannot be used with {store.stage} data: drop it")
        pack_length = max_length if packing else None
        if packing and not pack_length:
            raise ValueError("--packing true needs the length of a pack: give --packing_length or --max_length")
        self.layout = Layout(
            padding_free=padding_free,
            pack_length=pack_length,
            length_multiple=length_multiple,
            context_parallel_rank=context_parallel_rank,
            context_parallel_size=context_parallel_size,
            pad_token_id=pad_token_id,
            stage=store.stage,
        )
        if pack_length and pack_length % self.layout.row_multiple:
            raise ValueError(
                f"--packing_length (or --max_length) {pack_length} must be a multiple of {self.layout.row_multiple} by "
                f"--context_parallel_size {context_parallel_size} and sequence parallelism: "
                f"take {-(-pack_length // self.layout.row_multiple) * self.layout.row_multiple}"
            )
        self.num_workers = num_workers
        self.micro_batches = global_batch_size // (micro_batch_size * data_parallel_size)
        self.given = 0  # steps
        self.loss_tokens_are_local = isinstance(store, TokenStream)
        if isinstance(store, TokenStream):
            if (equal_lengths or equal_over_ranks) and not packing:
                what = "pipeline parallelism" if equal_lengths else "this exchange of tokens between experts"
                raise ValueError(f"--streaming true with {what} needs --packing true: rows of one length")
            self.steps_per_epoch = None
            self.plan = StreamedBatches(
                store, self.layout, micro_batch_size, data_parallel_rank, data_parallel_size, max(num_workers, 1),
                shuffle, seed,
            )  # fmt: skip
        else:
            self.plan = PlannedBatches(
                store, self.layout, micro_batch_size, global_batch_size, data_parallel_rank, data_parallel_size,
                equal_lengths, equal_over_ranks, shuffle, seed,
            )  # fmt: skip
            self.steps_per_epoch = self.plan.steps_per_epoch

    @property
    def samples(self) -> int | None:
        """Samples (packs, where packed) of an epoch. None for a stream."""
        return None if isinstance(self.plan, StreamedBatches) else self.plan.samples

    @property
    def stored(self) -> int:
        """Samples of the store, of which a pack has several. 0 for a stream."""
        return 0 if isinstance(self.plan, StreamedBatches) else len(self.plan.store)

    @property
    def padding_share(self) -> float | None:
        """Share of the tokens of the first epoch, over all ranks, that are padding. None for a stream."""
        return None if isinstance(self.plan, StreamedBatches) else self.plan.padding_share()

    def steps(self) -> Iterator[list[Batch]]:
        """Optimizer steps from the position on, without end: this rank's micro batches of each."""
        steps = self._stream(self.plan) if isinstance(self.plan, StreamedBatches) else self._planned(self.plan)
        for step in steps:
            self.given += 1
            yield step

    def once(self) -> Iterator[list[Batch]]:
        """Every sample exactly once, in order. The last global batch is filled up with rows of weight 0."""
        if isinstance(self.plan, StreamedBatches) or self.steps_per_epoch is None:
            raise ValueError("a stream has no end: evaluate on a --val_dataset, which is never streamed")
        yield from self._load(self.plan, product(range(self.steps_per_epoch), range(self.micro_batches), [True]))

    def position(self) -> dict[str, Any]:
        """Where the data is after the steps that `steps` has given so far, as JSON; the same on every rank."""
        if isinstance(self.plan, StreamedBatches):
            return self.plan.position(self.given * self.micro_batches)
        return self.plan.epochs.position(self.given * self.plan.global_batch_size)

    @property
    def epoch(self) -> int:
        """Epochs that are over after the steps given so far. 0 for a stream."""
        return self.position().get("epoch", 0)

    def cursors(self) -> dict[str, np.ndarray]:
        """Of a stream: where this data-parallel rank's workers are, int64 arrays named `data/<rank>/...`. Else {}."""
        return self.plan.cursors() if isinstance(self.plan, StreamedBatches) else {}

    def resume(self, position: dict[str, Any], cursors: dict[str, np.ndarray]) -> list[str]:
        """Have `steps`, not yet begun, go on from a position. `cursors`: those of all data-parallel ranks of then.

        In the same layout the batches are those that would have come. In another, of the epoch at hand no document is
        lost or repeated. Returns notes for the user; raises ValueError, saying what differs, where the data is another.
        """
        if ("epoch" in position) == isinstance(self.plan, StreamedBatches):
            then = "not streamed" if "epoch" in position else "streamed"
            raise ValueError(f"the checkpoint's training data was {then}: --streaming must be what it was")
        if isinstance(self.plan, StreamedBatches):
            return self.plan.resume(position, cursors)
        return self.plan.epochs.resume(position)

    def samples_until(self, epochs: float) -> int | None:
        """Samples from the position on until so many epochs are over; 0 where they are. None for a stream."""
        if isinstance(self.plan, StreamedBatches):
            return None
        return self.plan.epochs.until(epochs, self.given * self.plan.global_batch_size)

    def _planned(self, plan: "PlannedBatches") -> Iterator[list[Batch]]:
        return self._load(plan, ((step, m, False) for step in count(self.given) for m in range(self.micro_batches)))

    def _load(self, plan: "PlannedBatches", numbers: Iterable[tuple[int, int, bool]]) -> Iterator[list[Batch]]:
        loader = iter(self._loader(plan, sampler=numbers))
        while step := list(islice(loader, self.micro_batches)):
            yield step

    def _stream(self, stream: StreamedBatches) -> Iterator[list[Batch]]:
        loader = iter(self._loader(stream))
        while True:
            step = list(islice(loader, self.micro_batches))
            loss_tokens = sum(batch.loss_tokens for batch, _ in step)
            loss_samples = sum(batch.grouping.loss_samples for batch, _ in step if batch.grouping)
            for batch, given in step:
                batch.loss_tokens = loss_tokens
                if batch.grouping:
                    batch.grouping.loss_samples = loss_samples
                stream.followers[given.share].follow(given)
            yield [batch for batch, _ in step]

    def _loader(self, dataset: Dataset, sampler: Iterable | None = None) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            # A whole step is ready, in pinned memory, before it is asked for (of very many micro batches, a good part).
            prefetch_factor=min(max(2, -(-self.micro_batches // self.num_workers)), 16) if self.num_workers else None,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # its own: the loader must not move the model's random numbers
        )


class PlannedBatches(Dataset):
    """Micro batches by number, from a store whose lengths are known. Epochs run on without a gap between them."""

    def __init__(
        self,
        store: TokenStore,
        layout: Layout,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        equal_lengths: bool,
        equal_over_ranks: bool,
        shuffle: bool,
        seed: int,
    ):
        if len(store) == 0:
            raise ValueError("the dataset holds no sample")
        self.store, self.layout = store, layout
        self.equal_lengths, self.equal_over_ranks = equal_lengths, equal_over_ranks
        self.global_batch_size = global_batch_size
        self.shape = (-1, data_parallel_size, micro_batch_size)  # micro batches, ranks, samples
        self.rank = data_parallel_rank
        self.epochs = Epochs(store, layout, shuffle, seed)
        self.width = 0  # of labels
        if layout.stage not in ALONE:  # found before the loader's processes are forked
            self.width, self.counts = store.label_width, store.document_counts

    @property
    def samples(self) -> int:
        return len(self.epochs.whole)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch_size)

    def __getitem__(self, number: tuple[int, int, bool]) -> Batch:
        step, micro_batch, once = number
        samples = self._samples(step, once)  # [global batch]
        samples = samples.reshape(self.shape)  # [micro batches, ranks, samples of one]
        lengths = self._row_lengths(samples)[:, self.rank]  # [micro batches]
        return self.layout.lay(
            [[self._group(i) for i in pack] for pack in self._packs(samples[micro_batch, self.rank])],
            self._totals(samples, micro_batch),
            row_length=int(lengths[micro_batch]),
            width=self.width,
        )

    def padding_share(self) -> float:
        rows_of_a_sample = 2 if self.layout.beside else 1
        if self.layout.pack_length:
            return 1 - self.store.lengths.sum() / (rows_of_a_sample * self.epochs.whole.lengths.sum())
        samples = np.stack([self._samples(step, once=True) for step in range(self.steps_per_epoch)])
        samples[samples >= 0] = self.epochs.permutation(self.samples, 0)[samples[samples >= 0]]
        micro_batches = samples.reshape(len(samples), *self.shape)  # [steps, micro batches, ranks, samples]
        rows = self._row_lengths(micro_batches)
        filled = (micro_batches >= 0).any(-1)  # rows without any sample are an evaluation's, not training's
        total = rows[filled].sum() * (1 if self.layout.padding_free else self.shape[-1])
        return 1 - self.store.lengths.sum() / (rows_of_a_sample * total)

    def _samples(self, step: int, once: bool) -> np.ndarray:
        """Numbers of the samples of a global batch, -1 for a filler: [global batch]."""
        places = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        if once:
            return np.where(places < self.samples, places, -1)
        return self.epochs.numbers(places)

    def _row_lengths(self, samples: np.ndarray) -> np.ndarray:
        """[..., micro batches, ranks, samples of one] -> lengths of the rows [..., micro batches, ranks]."""
        rows = self.layout.row_length(self._lengths(samples))
        if self.equal_lengths:
            rows = np.broadcast_to(rows.max(-2, keepdims=True), rows.shape)
        if self.equal_over_ranks:
            rows = np.broadcast_to(rows.max(-1, keepdims=True), rows.shape)
        return rows

    def _lengths(self, samples: np.ndarray) -> np.ndarray:
        return np.where(samples >= 0, self.epochs.all.lengths[samples], self.layout.pack_length or 0)

    def _totals(self, samples: np.ndarray, micro_batch: int) -> Totals:
        """[micro batches, ranks, samples of one]"""
        tokens = float(self.epochs.all.weights[samples[samples >= 0]].sum())
        if self.layout.stage in ALONE:
            return Totals(tokens)
        items = self._items(samples.ravel())
        of_ranks = [self._items(of_rank) for of_rank in samples[micro_batch]]
        return Totals(
            tokens,
            samples=float(len(items)),
            peers=[len(some) if self.layout.beside else int(self.counts[some].sum()) for some in of_ranks],
        )

    def _packs(self, samples: np.ndarray) -> list[np.ndarray]:
        """Numbers in the store of what each of these samples holds; of a filler none."""
        return [self.epochs.all.documents[i] if i >= 0 else np.empty(0, np.int64) for i in samples.tolist()]

    def _items(self, samples: np.ndarray) -> np.ndarray:
        """Numbers in the store of all that these samples hold."""
        return np.concatenate(self._packs(samples))

    def _group(self, item: int) -> Group:
        return Group(self.store.row(item), self.store.label(item), item)


def _ignore_signals(worker: int) -> None:
    """A scheduler tells every process that the run is to stop: these are needed until it has saved."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch
