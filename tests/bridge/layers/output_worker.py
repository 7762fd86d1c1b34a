"""What is made of the output matrix, over the tensor-parallel ranks of a job, beside torch's own on whole logits.

    torchrun --nproc-per-node 2 -m tests.bridge.layers.output_worker results.json

With TRITON_INTERPRET=1 by the fused kernels.
results.json: {case: {what: distance, relative to the largest number there}}, of the rank that is furthest off.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megaswift.bridge.layers import divergence, logprobs
from torch import Tensor

from tests.bridge.kernels.interpreted import with_indices

SEQUENCE, BATCH, SIZE, TEACHER_SIZE, PADDED = 6, 2, 8, 5, 24
SCORED = [0, 3, 4, 7, 8, 10, 11]
TEMPERATURES = (0.7, 1.3)
BETAS = (0.0, 0.3, 1.0)
# Two tensor-parallel ranks have 12 rows each: the second all padding of a vocabulary of 21, nothing of one of 11.
CASES = {
    "all": {"vocab_size": 21, "scored": None, "sequence_parallel": False},
    "some": {"vocab_size": 21, "scored": SCORED, "sequence_parallel": False},
    "sequence parallel": {"vocab_size": 21, "scored": None, "sequence_parallel": True},
    "few": {"vocab_size": 11, "scored": SCORED, "sequence_parallel": True},
    "capped": {"vocab_size": 21, "scored": None, "sequence_parallel": True, "caps": (2.0, 3.0)},
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sides:
    """The student's and the teacher's tensors, whole and this rank's."""

    def __init__(
        self,
        vocab_size: int,
        scored: list[int] | None,
        sequence_parallel: bool,
        group: Any,
        caps: tuple[float | None, float | None] = (None, None),
    ):
        self.caps = caps  # the student's and the teacher's, on logits
        self.vocab_size, self.rank, world = vocab_size, dist.get_rank(group), dist.get_world_size(group)
        self.hidden = random(SEQUENCE, BATCH, SIZE, seed=1).requires_grad_()
        self.weight = random(PADDED, SIZE, seed=2)
        self.teacher_hidden, self.teacher_weight = random(SEQUENCE, BATCH, TEACHER_SIZE, seed=3), random(26, 5, seed=4)
        for weight in (self.weight, self.teacher_weight):
            weight[vocab_size:] = 1e3  # padding is far larger than all else
        self.weight.requires_grad_()
        self.labels = torch.randint(0, vocab_size, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))
        kept = torch.ones(BATCH * SEQUENCE) if scored is None else torch.zeros(BATCH * SEQUENCE)
        self.kept = (kept if scored is None else kept.index_fill(0, torch.tensor(scored), 1.0)).view(BATCH, SEQUENCE)
        self.slopes = random(BATCH, SEQUENCE, seed=6)

        parts = world if sequence_parallel else 1
        self.place = slice(self.rank % parts * SEQUENCE // parts, (self.rank % parts + 1) * SEQUENCE // parts)
        self.rows = slice(self.rank * PADDED // world, (self.rank + 1) * PADDED // world)
        self.local = {
            "hidden": self.hidden.detach()[self.place].requires_grad_(),
            "weight": self.weight.detach()[self.rows].clone().requires_grad_(),
        }
        teachers = self.teacher_weight.chunk(world)[self.rank]
        self.teacher = {
            "teacher_hidden": self.teacher_hidden[self.place],
            "teacher_weight": divergence.reshard_rows(teachers, PADDED // world, group),
        }
        positions = None if scored is None else torch.tensor(scored)
        self.output = logprobs.OutputMatrix(
            self.local["weight"],
            vocab_size,
            group,
            sequence_parallel=sequence_parallel,
            positions=positions,
            cap=caps[0],
        )

    def divergence(self, **settings: Any) -> Tensor:
        settings |= {"teacher_cap": self.caps[1]}
        return divergence.divergence(self.local["hidden"], self.output, **self.teacher, **settings)

    def top_divergence(self, log_probs: Tensor, ids: Tensor, **settings: Any) -> Tensor:
        return divergence.top_divergence(self.local["hidden"], self.output, log_probs, ids, **settings)

    def top_log_probs(self, k: int) -> tuple[Tensor, Tensor]:
        output = replace(self.output, weight=self.teacher["teacher_weight"], cap=self.caps[1])
        return divergence.top_log_probs(self.teacher["teacher_hidden"], output, k)

    def log_probs(self, temperature: float) -> Tensor:
        """[batch, sequence, vocabulary]"""
        logits = self.hidden.transpose(0, 1) @ self.weight[: self.vocab_size].t()
        return (capped(logits, self.caps[0]) / temperature).log_softmax(-1)

    def teachers(self, temperature: float) -> Tensor:
        logits = self.teacher_hidden.transpose(0, 1) @ self.teacher_weight[: self.vocab_size].t()
        return (capped(logits, self.caps[1]) / temperature).log_softmax(-1)

    def distances(self, found: Tensor, expected: Tensor) -> dict[str, float]:
        """Of a number for each position, and of its gradients."""
        expected = expected * self.kept
        mine = torch.autograd.grad((found * self.slopes).sum(), tuple(self.local.values()))
        wholes = torch.autograd.grad((expected * self.slopes).sum(), (self.hidden, self.weight))
        wholes = wholes[0][self.place], wholes[1][self.rows]
        return {
            "values": distance(found, expected),
            "gradient of hidden": distance(mine[0], wholes[0]),
            "gradient of weight": distance(mine[1], wholes[1]),
        }


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * (logits / cap).tanh()


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Over the last dimension, of log-probabilities, as in the paper; in probabilities."""
    p, q = student.exp(), teacher.exp()
    if beta in (0, 1):
        return (q * (q / p).log()).sum(-1) if beta == 0 else (p * (p / q).log()).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1)


def of_labels(sides: Sides) -> dict[str, float]:
    arguments = (sides.local["hidden"], sides.output, sides.labels)
    found, entropies = logprobs.log_probs_and_entropies(*arguments, temperature=TEMPERATURES[0])
    trained = logprobs.log_probs_and_entropies(*arguments, temperature=TEMPERATURES[0], trains_entropy=True)
    alone = logprobs.label_log_probs(*arguments, temperature=TEMPERATURES[0])
    log_probs = sides.log_probs(TEMPERATURES[0])
    expected = -(log_probs.exp() * log_probs).sum(-1) * sides.kept
    chosen = log_probs.gather(2, sides.labels[..., None]).squeeze(2)
    total = chosen - 3 * (log_probs.exp() * log_probs).sum(-1)
    together = sides.distances(trained[0] + 3 * trained[1], total)
    return {
        **sides.distances(found, sides.log_probs(TEMPERATURES[0]).gather(2, sides.labels[..., None]).squeeze(2)),
        **{f"{name}, with the entropies'": value for name, value in together.items()},
        "entropies": distance(entropies, expected),
        "without": float(not torch.equal(found, alone)),
        "entropies know gradients": float(entropies.requires_grad),
    }


def of_divergence(sides: Sides) -> dict[str, float]:
    found = {}
    for beta in BETAS:
        mine = sides.divergence(beta=beta, temperatures=TEMPERATURES)
        expected = jensen_shannon(sides.log_probs(TEMPERATURES[0]), sides.teachers(TEMPERATURES[1]), beta)
        found |= {f"{name}, beta {beta}": value for name, value in sides.distances(mine, expected).items()}
    return found


def of_top(sides: Sides) -> dict[str, float]:
    k = 4
    values, ids = sides.top_log_probs(k)
    whole = sides.teachers(1.0)
    wanted, places = whole.topk(k)
    kept = sides.kept[..., None]
    found = {"top": distance(values, wanted * kept), "ids": float(not torch.equal(ids, (places * kept).long()))}
    for beta in BETAS:
        mine = sides.top_divergence(values, ids, beta=beta, temperatures=TEMPERATURES)
        student = sides.log_probs(TEMPERATURES[0]).gather(2, places).log_softmax(-1)
        teacher = (wanted / TEMPERATURES[1]).log_softmax(-1)
        expected = jensen_shannon(student, teacher, beta)
        found |= {f"{name}, beta {beta}": value for name, value in sides.distances(mine, expected).items()}
    return found


def compare(group: Any) -> dict[str, dict[str, float]]:
    """By case and what is computed, in chunks that do not divide."""
    found = {}
    chunks = mock.patch.multiple(divergence, CHUNK_LOGITS=4 * PADDED, FUSED_CHUNK_LOGITS=4 * PADDED)
    with chunks, mock.patch.object(logprobs, "CHUNK_TOKENS", 4):
        for case, settings in CASES.items():
            for what in (of_labels, of_divergence, of_top):
                found[f"{what.__name__}: {case}"] = what(Sides(**settings, group=group))
    return found


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """A fault in what is computed."""
    terms, mixture, ranks = divergence._terms, divergence._mixture, logprobs.over_ranks
    faults: dict[str, list[tuple[Any, str, Callable]]] = {
        "teacher and student swapped": [(divergence, "_terms", lambda p, q, beta: terms(q, p, beta))],
        "the other share": [
            (divergence, "_mixture", lambda p, q, beta: mixture(p, q, beta if beta == 1 else 1 - beta))
        ],
        "each rank by itself": [
            (module, "over_ranks", lambda sums, chosen, entropies, group: (sums, chosen, entropies))
            for module in (divergence, logprobs)
        ],
        "one rank's entropy": [(logprobs, "over_ranks", lambda s, c, e, group: (*ranks(s, c, e, group)[:2], e))],
    }
    with contextlib.ExitStack() as stack:
        for module, name, wrong in faults[fault]:
            stack.enter_context(mock.patch.object(module, name, wrong))
        yield


def worst(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {case: {what: max(one[case][what] for one in everyone) for what in values} for case, values in found.items()}


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime import interpreter

        interpreter._patch_lang_tensor = with_indices(interpreter._patch_lang_tensor)
    from megaswift.bridge import parallel
    from megaswift.bridge.options import BuildOptions
    from megatron.core import parallel_state

    parallel.initialize(BuildOptions(tensor_model_parallel_size=2), seed=1)
    group = parallel_state.get_tensor_model_parallel_group()
    found = worst(compare(group))
    for fault in ("each rank by itself", "one rank's entropy"):
        with planted(fault):
            found |= {f"{fault}: {case}": values for case, values in worst(compare(group)).items()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
