"""TRL's GKD trainer, and a loop of plain PyTorch around its divergence, on the same folders, rows and settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.tasks.preference.runs import BETAS, CLIP, EPSILON, RATE
from tests.tasks.preference.upstream import SETTINGS, Log, causal


def trained(folder: Path, rows: list[dict], *, beta: float) -> tuple[Log, Any]:
    """The log of three of TRL's steps on the data's answers, and the student after them."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    settings = SETTINGS | {"lmbda": 0.0, "beta": beta, "output_dir": str(folder / "trl")}
    trainer = GKDTrainer(
        model=causal(folder / "qwen3"),
        teacher_model=causal(folder / "teacher"),
        args=GKDConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "qwen3"),
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], trainer.model


Sample = tuple[list[int], int]  # tokens, and how many of them the prompt has
Samples = Callable[[int, Any], list[Sample]]  # of a step, by the student as it is then


def answers(folder: Path, rows: list[dict]) -> Samples:
    """Four rows a step, with their own answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen3")

    def samples(step: int, student: Any) -> list[Sample]:
        found = []
        for row in rows[4 * step : 4 * step + 4]:
            prompt = tokenizer.apply_chat_template(row["messages"][:-1], return_dict=False, add_generation_prompt=True)
            found.append((tokenizer.apply_chat_template(row["messages"], return_dict=False), len(prompt)))
        return found

    return samples


def by_hand(
    folder: Path,
    samples: Samples,
    *,
    teacher: str = "wide",
    alpha: float = 0.0,
    top: int | None = None,
    **settings: Any,
) -> tuple[Log, Any]:
    """Three steps in plain PyTorch: of each the mean of TRL's divergence over the tokens behind the prompts."""
    from trl.experimental.gkd import GKDTrainer

    student, teacher_model = causal(folder / "qwen3"), causal(folder / teacher)
    student.get_input_embeddings().padding_idx = None  # a student may write that token, and learns from it
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    log = []
    for step in range(3):
        jsd, nll, tokens = torch.zeros(()), torch.zeros(()), 0
        for ids, first in samples(step, student):
            labels = torch.tensor(ids[first:])
            logits = student(torch.tensor([ids])).logits[0, first - 1 : -1]
            with torch.no_grad():
                theirs = teacher_model(torch.tensor([ids])).logits[0, first - 1 : -1, : logits.shape[1]]
            pair = (logits, theirs)
            if top:
                best = theirs.topk(top).indices
                pair = (logits.gather(1, best), theirs.gather(1, best))
            jsd = jsd + GKDTrainer.generalized_jsd_loss(*pair, reduction="sum", **settings)
            nll = nll + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            tokens += len(labels)
        loss = (jsd + alpha * nll) / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        row = {"loss": loss, "jsd": jsd / tokens, "grad_norm": norm} | ({"nll_loss": nll / tokens} if alpha else {})
        log.append({name: value.item() for name, value in row.items()})
    return log, student
