"""In-memory store of pairs of answers, which have more or less of their tokens in common."""

from collections.abc import Sequence

import numpy as np
from megaswift.templates.dataset.shared_beginning import shared_beginning

from tests.bridge.families import VOCAB

# Of each pair: tokens of the prompt, of the answers, and of the turn with loss that both go on with before they differ.
SIZES = [(21, 9, 5, 0), (40, 12, 17, 0), (1, 8, 6, 0), (30, 3, 9, 7), (2, 20, 25, 0), (26, 1, 6, 0), (12, 9, 14, 11)]


class PairStore:
    """Pairs of these sizes. A turn that both have ends with five tokens without loss, as of a tool's result."""

    stage = "preference"
    label_width = 0
    has_media = False

    def __init__(self, sizes: Sequence[tuple[int, int, int, int]] = SIZES, seed: int = 3):
        random = np.random.default_rng(seed)
        self.samples = []
        for prompt, chosen, rejected, turn in sizes:
            result = 5 if turn else 0
            common = random.integers(3, VOCAB, prompt + turn + result)
            weights = np.concatenate([np.zeros(prompt), random.choice([0.5, 1.0], turn), np.zeros(result)])
            documents = []
            for first, length in ((3, chosen), (4, rejected)):  # different first tokens
                answer = np.concatenate([[first], random.integers(3, VOCAB, length - 1)])
                all_weights = np.concatenate([weights, np.ones(length)]).astype(np.float32)
                documents.append((np.concatenate([common, answer]).astype(np.int32), all_weights))
            self.samples.append(documents)
        self.shared = np.array([shared_beginning(documents) for documents in self.samples], np.int64)
        self.lengths = np.array([sum(len(ids) for ids, _ in documents) for documents in self.samples], np.int64)
        self.weights = np.array([documents[0][1][1:].sum() for documents in self.samples], np.float64)
        self.document_counts = np.full(len(self.samples), 2, np.int32)
        self.labels = np.empty((len(self.samples), 0), np.float32)

    def __len__(self) -> int:
        return len(self.samples)

    def row(self, i: int):
        return self.samples[i]

    def label(self, i: int):
        return self.labels[i]

    def padded_lengths(self, multiple: int, separate_rows: bool):
        padded = [[-(-len(ids) // multiple) * multiple for ids, _ in documents] for documents in self.samples]
        return np.array([(max if separate_rows else sum)(lengths) for lengths in padded], np.int64)
