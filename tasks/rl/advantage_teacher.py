"""Teacher of GRPO: its log-probabilities of what the policy has generated are added to the advantages.

On-policy distillation as RL (https://thinkingmachines.ai/blog/on-policy-distillation): the advantage of each token gets
--teacher_kl_coef x (log-probability by the teacher - by the policy that has sampled), an estimate of -KL.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from ...bridge import runtime
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import Sequences
from ..observability.flops import Flops
from ..options import GrpoOptions
from ..reference.frozen_model import build_frozen, offloaded
from ..reference.reference_model import token_log_probs
from ..run.context import Run
from ..run.roles import Role
from .episode import Episode, media_of


class AdvantageTeacher:
    """Frozen teacher on every rank, in the policy's layout or in its own. Errors reach every rank."""

    def __init__(self, run: Run, options: GrpoOptions):
        teacher = options.teacher
        name = teacher.teacher_model or teacher.mcore_teacher_model
        flag = "--teacher_model" if teacher.teacher_model else "--mcore_teacher_model"
        source = {
            "model": teacher.teacher_model or "",
            "mcore_model": teacher.mcore_teacher_model,
            "rope_scaling": {},  # --rope_scaling is the policy's
            "max_model_len": None,
        }
        self._role = Role(run, "teacher")
        with self._role.entered():
            self._model, _ = build_frozen(self._role.run, source, f"{flag} {name}", [])
        self._temperature = options.sampling.temperature
        offloads = teacher.offload_teacher_model and runtime.device().type == "cuda"
        self._on_device: Callable[[], Any] = offloaded(self._model) if offloads else nullcontext
        self.flops = Flops.of_model(self._model)
        self.note = f"teacher: {name}{self._role.note}"

    def log_probs(self, episodes: Sequence[Episode]) -> list[np.ndarray]:
        """Return the log-probabilities of each episode's generated tokens, on every rank: fp32 [length] each.

        They are at --temperature, as the policy's.
        """
        tokens, masks = [episode.tokens for episode in episodes], [episode.loss_mask for episode in episodes]
        sequences = Sequences(tokens, masks, [0.0] * len(tokens), **media_of(episodes))
        return self._role.label_values(sequences, self._forward)

    def _forward(self, batches: list[Batch]) -> list[Tensor]:
        with self._on_device():
            return token_log_probs(self._model, self._model.chunks, batches, self._temperature)
