"""`--router_replay_mode`: routing replay, which reuses recorded experts in the policy's later passes.

R2 records them in the trainer's pass for the old log-probabilities, R3 in the rollout engine. The reference model, also
as the base model of an adapter, routes by itself.
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
    """Raise ValueError for a model without routers, which the command line cannot check for hub models."""
    if mode != "disabled" and model.config.num_moe_experts is None:
        raise ValueError(f"--router_replay_mode {mode}: the model has no experts. Leave it out")


def gather_experts(
    plan: BatchPlan,
    batches: Sequence[Batch],
    experts_by_layer: dict[int, list[Tensor]],
    layers: int,
    groups: ProcessGroupCollection,
) -> list[np.ndarray]:
    """Return the experts of each episode's tokens on every rank: int16 [length, layers, topk], -1 in dense layers.

    Every rank calls this. experts_by_layer: the experts of this rank's routers for each micro batch, by layer number
    (`record_experts` in bridge/layers/replay.py).
    """
    layer_numbers, rank_documents = sorted(experts_by_layer), {}
    if layer_numbers and groups.tp.rank() == 0:
        for index, batch in enumerate(batches):
            batch_experts = torch.stack([experts_by_layer[number][index] for number in layer_numbers], dim=1)
            rank_documents |= plan.token_values_by_document(batch, batch_experts.numpy())
    ranks: list[tuple[list[int], dict[int, np.ndarray]]] = [([], {})] * dist.get_world_size()
    dist.all_gather_object(ranks, (layer_numbers, rank_documents), group=gloo_group())
    episodes: dict[int, np.ndarray] = {}
    for stage_layers, documents in ranks:
        for number, experts in documents.items():
            shape = len(experts), layers, experts.shape[-1]
            episode = episodes.setdefault(number, np.full(shape, -1, np.int16))
            # -1: held by another context-parallel rank
            episode[:, stage_layers] = np.maximum(episode[:, stage_layers], experts)
    return [episodes[number] for number in sorted(episodes)]
