"""Teacher behind a server. Each rank requests the outputs of some of a step's documents."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge import runtime
from ...templates.batching.episode_batches import Sequences
from ..distributed.collectives import broadcast_from_rank0, gloo_group, run_on_all_ranks
from ..distributed.redistribute import document_starts
from ..options import GkdOptions
from ..rollout.engine import Request
from ..rollout.media_requests import with_media
from ..rollout.scoring_client import ScoringClient
from ..run.context import Run, most_media


class RemoteTeacher:
    """`TeacherOutputs` from a server. Every rank creates an instance; errors reach every rank.

    Raises ScoringServerLost if no server answers, ValueError if its vocabulary differs from the student's, or
    if it does not take the media of the data.
    """

    def __init__(self, run: Run, options: GkdOptions, vocab_size: int):
        url, self.top, self.vocab_size = (
            options.teacher.teacher_model_server or "",
            options.teacher.gkd_logits_topk or 0,
            vocab_size,
        )

        def connect() -> ScoringClient:
            return ScoringClient(
                url,
                api_key=options.teacher.teacher_model_server_api_key,
                timeout=options.engine.vllm_server_timeout,
                reconnect_timeout=options.engine.server_reconnect_timeout,
            )

        self.vision = run.vision
        self.reader = run_on_all_ranks(connect, gloo_group())
        broadcast_from_rank0(lambda: self.reader.check_vocabulary(run.tokenizer), gloo_group())
        if run.sees_media:
            most = run.most_images, most_media(run.data, "video"), most_media(run.data, "audio")
            broadcast_from_rank0(lambda: self.reader.check_media(*most), gloo_group())
        if self.top > vocab_size:
            raise ValueError(f"--gkd_logits_topk {self.top}: the vocabulary has {vocab_size} tokens. Set fewer")

    def __call__(self, sequences: Sequences) -> tuple[list[np.ndarray], Tensor]:
        """Return the outputs at positions whose label is trained on."""
        rank, world, starts = dist.get_rank(), dist.get_world_size(), document_starts(sequences)
        positions = [np.flatnonzero(weights[1:]) for weights in sequences.weights]
        label_ids = [
            np.concatenate([starts[n] + positions[n] for n in range(r, len(positions), world)] or [starts[:0]])
            for r in range(world)
        ]
        assigned = [n for n in range(rank, len(positions), world) if len(positions[n])]
        scores = run_on_all_ranks(
            lambda: self.reader.top_log_probs(
                self._documents(sequences, assigned), [positions[n] for n in assigned], self.top, self.vocab_size
            ),
            gloo_group(),
        )
        # fp32 represents every integer below 2^24 exactly, so every token id.
        rows = [np.concatenate([score.log_probs, score.tokens.astype(np.float32)], 1) for score in scores]
        values = np.concatenate([np.empty((0, 2 * self.top), np.float32), *rows])
        return label_ids, torch.from_numpy(values).to(runtime.device())

    def _documents(self, sequences: Sequences, numbers: Sequence[int]) -> list[Request]:
        """Return documents as engines take them."""
        documents = [Request(sequences.tokens[n].tolist(), 0) for n in numbers]
        if not any(sequences.media):
            return documents
        assert self.vision is not None
        return with_media(documents, [sequences.media[n] for n in numbers], self.vision)
