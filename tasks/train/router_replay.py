"""`--router_replay_mode`: the experts that tokens went to in one pass are those of the policy's later passes, too.

R2: those of the pass that finds the log-probabilities of what was drawn. R3: those of the engine that drew it. The
reference, and what an adapter's model is without the adapter, choose for themselves.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge.model.model import Model
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan
from ..distributed.collectives import gloo_group


def check_replay(model: Model, mode: str) -> None:
    """Raise ValueError for a model without routers (of a hub, of whom the command line knew nothing)."""
    if mode != "disabled" and model.config.num_moe_experts is None:
        raise ValueError(f"--router_replay_mode {mode}: the model has no experts. Leave it out")


def by_episode(
    plan: BatchPlan,
    batches: Sequence[Batch],
    recorded: dict[int, list[Tensor]],
    layers: int,
    groups: ProcessGroupCollection,
) -> list[np.ndarray]:
    """Return the experts of all episodes' tokens, on every rank: int16 [length, layers, topk], -1 in dense layers.

    recorded: what this rank's routers chose, as `recording` (bridge/layers/replay.py) tells it. Every rank calls this.
    """
    numbers, of_rank_documents = sorted(recorded), {}
    if numbers and groups.tp.rank() == 0:
        for index, batch in enumerate(batches):
            of_batch = torch.stack([recorded[number][index] for number in numbers], dim=1)
            of_rank_documents |= plan.token_values_by_document(batch, of_batch.numpy())
    ranks: list[tuple[list[int], dict[int, np.ndarray]]] = [([], {})] * dist.get_world_size()
    dist.all_gather_object(ranks, (numbers, of_rank_documents), group=gloo_group())
    episodes: dict[int, np.ndarray] = {}
    for of_stage, of_rank in ranks:
        for item, experts in of_rank.items():
            shape = len(experts), layers, experts.shape[-1]
            episode = episodes.setdefault(item, np.full(shape, -1, np.int16))
            episode[:, of_stage] = np.maximum(episode[:, of_stage], experts)  # -1: another context-parallel rank has it
    return [episodes[item] for item in sorted(episodes)]
