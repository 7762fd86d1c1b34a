"""Roles: models beside the trained one (reference, critic, teacher), each in the run's parallel layout or in its own.

Log-probabilities and values are one number per token. They are gathered on every rank by document, from where each
layout's micro batches take them: roles in different layouts exchange nothing else.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch.distributed as dist
from torch import Tensor

from ...bridge.parallel import ProcessGroups, current_groups
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import Sequences
from ..distributed.collectives import run_on_all_ranks
from ..distributed.redistribute import gather_by_document
from .context import Run, episode_plan
from .planning import ProcessLayout, RoleName, role_layout


class Role:
    """Place of a model beside the trained one. Every rank creates it; errors reach every rank.

    run: the run, with the options of the role's layout. Raises ValueError if the world size does not fit the layout.
    """

    def __init__(self, run: Run, name: RoleName):
        layout = role_layout(run.options, name)
        self.run = replace(run, options=layout or run.options)
        self._groups = run_on_all_ranks(lambda: ProcessGroups(layout.build)) if layout else None
        self.note = f", {ProcessLayout.of(layout.build, dist.get_world_size())}" if layout else ""

    @property
    def has_own_layout(self) -> bool:
        return self._groups is not None

    def entered(self) -> AbstractContextManager[None]:
        """Return a context within which megatron-core's process groups are the role's."""
        return self._groups.entered() if self._groups else nullcontext()

    def label_values(self, sequences: Sequences, forward: Callable[[list[Batch]], list[Tensor]]) -> list[np.ndarray]:
        """Return one number per token of each document, on every rank: float32 [length], the first token's is 0.

        forward: returns the numbers of micro batches' labels, [1, local length] each; none before the last stage.
        """
        with self.entered():
            groups = current_groups()
            plan = episode_plan(self.run, groups)
            batches = plan.batches(sequences)
            return gather_by_document(plan, groups, batches, forward(batches))
