"""`--router_replay_mode`: the experts that tokens went to in one pass are those of the policy's later passes, too.

R2: those of the pass that finds the log-probabilities of what was drawn. R3: those of the engine that drew it. The
reference, and what an adapter's model is without the adapter, choose for themselves.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ...bridge.layers.replay import replay_experts
from ...bridge.model.build import Model
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan
from ..distributed.collectives import patient_group
from .step import Forward


def replaying(forward: Forward) -> Forward:
    """`forward`, by the experts of a micro batch that has some (Batch.experts)."""

    def replay(model: Model, chunk: torch.nn.Module, batch: Batch, scored: Tensor | None) -> Tensor:
        if batch.experts is not None:
            replay_experts(chunk, batch.experts)
        return forward(model, chunk, batch, scored)

    return replay


def check_replay(model: Model, mode: str) -> None:
    """Raise ValueError for a model without routers (of a hub, of whom the command line knew nothing)."""
    if mode != "disabled" and model.config.num_moe_experts is None:
        raise ValueError(f"--router_replay_mode {mode}: the model has no experts. Leave it out")


def by_episode(
    plan: BatchPlan, batches: Sequence[Batch], recorded: dict[int, list[Tensor]], layers: int
) -> list[np.ndarray]:
    """Of all episodes, on every rank, the experts of their tokens: int16 [length, layers, topk], -1 in dense layers.

    recorded: what this rank's routers chose, as `recording` (bridge/layers/replay.py) tells it. Every rank calls this.
    """
    numbers, own = sorted(recorded), {}
    if numbers and parallel_state.get_tensor_model_parallel_rank() == 0:
        for at, batch in enumerate(batches):
            of_batch = torch.stack([recorded[number][at] for number in numbers], dim=1)
            own |= plan.token_values_by_document(batch, of_batch.numpy())
    everyone: list[tuple[list[int], dict[int, np.ndarray]]] = [([], {})] * dist.get_world_size()
    dist.all_gather_object(everyone, (numbers, own), group=patient_group())
    found: dict[int, np.ndarray] = {}
    for of_stage, of_rank in everyone:
        for item, experts in of_rank.items():
            shape = len(experts), layers, experts.shape[-1]
            whole = found.setdefault(item, np.full(shape, -1, np.int16))
            whole[:, of_stage] = np.maximum(whole[:, of_stage], experts)  # -1: another context-parallel rank has it
    return [found[item] for item in sorted(found)]
