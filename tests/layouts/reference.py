"""The same training in plain transformers and torch: one document at a time, AdamW, global norm clipping."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.tiny import VOCAB

STEPS = 3
SAMPLES = 4  # of a global batch
PACK = 64  # tokens of a sample
LR, WEIGHT_DECAY, BETAS, EPS, CLIP = 1e-3, 0.1, (0.9, 0.95), 1e-4, 1.0

Sample = list[tuple[np.ndarray, np.ndarray]]


def samples(step: int) -> list[Sample]:
    """The documents of a step: packs of uneven documents, of which uneven parts are trained on."""
    rng = np.random.default_rng(step)
    packs = []
    for _ in range(SAMPLES):
        lengths = rng.permutation([8, 16, 36])  # 60 of 64 tokens: a tail of padding, and divisible by 2 x CP
        packs.append([(rng.integers(3, VOCAB, n), (rng.random(n) < 0.7).astype(np.float32)) for n in lengths.tolist()])
    return packs


@dataclass
class Reference:
    """What three steps gave."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, Tensor]
    log_probs: list[float]  # of the trained tokens of every step, in order


def loss_of(model, packs: list[Sample], log_probs: list[float] | None = None) -> Tensor:
    """Mean cross entropy over the trained tokens, each document by itself; their log-probabilities into `log_probs`."""
    total, weight = torch.zeros(()), 0.0
    for ids, weights in (document for pack in packs for document in pack):
        logits = model(torch.from_numpy(ids)[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none")
        if log_probs is not None:
            log_probs += (-losses[torch.from_numpy(weights[1:]) > 0]).tolist()
        total = total + (losses * torch.from_numpy(weights[1:])).sum()
        weight += float(weights[1:].sum())
    return total / weight


def train(model, steps: int = STEPS) -> Reference:
    """Train `model` (transformers, fp32) in place."""
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms, log_probs = [], [], []
    for step in range(steps):
        loss = loss_of(model, samples(step), log_probs)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Reference(losses, norms, as_in_files(model.state_dict()), log_probs)


def as_in_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names that files have: transformers stacks experts in memory, and writes them one by one."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found |= {f"{stem}.{number}.gate_proj.weight": gate, f"{stem}.{number}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{stem}.{number}.down_proj.weight": expert for number, expert in enumerate(tensor)}
        else:
            found[name] = tensor
    return {name: tensor.detach().clone() for name, tensor in found.items()}
