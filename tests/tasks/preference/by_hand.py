"""What an evaluation should say: transformers' models in fp32, each document by itself, and the papers' formulas."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def tokenized(folder: Path, row: dict[str, Any], answer: list[dict]) -> tuple[list[int], int]:
    """A conversation that ends with `answer`, and how many of its tokens are the prompt's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(row["prompt"] + answer, return_dict=False)
    assert whole[: len(prompt)] == prompt
    return whole, len(prompt)


@torch.no_grad()
def log_prob(model: Any, tokens: list[int], prompt: int) -> Tensor:
    """Of what follows the prompt."""
    found = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None])[prompt - 1 :].sum()


def answers(model: Any, folder: Path, rows: list[dict], side: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities [rows] of the answers on one side, and how many tokens they have."""
    documents = [tokenized(folder, row, row[side]) for row in rows]
    sums = torch.stack([log_prob(model, tokens, prompt) for tokens, prompt in documents])
    return sums, torch.tensor([float(len(tokens) - prompt) for tokens, prompt in documents])


def dpo(policy: Any, reference: Any, folder: Path, rows: list[dict], beta: float = 0.1) -> dict[str, float]:
    """https://arxiv.org/abs/2305.18290, equation 7, and the metrics of its log. `reference` None: there is none."""
    chosen, _ = answers(policy, folder, rows, "chosen")
    rejected, _ = answers(policy, folder, rows, "rejected")
    zeros = torch.zeros_like(chosen)
    ref_chosen = zeros if reference is None else answers(reference, folder, rows, "chosen")[0]
    ref_rejected = zeros if reference is None else answers(reference, folder, rows, "rejected")[0]
    rewards = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    return {
        "loss": float(-logsigmoid(rewards[0] - rewards[1]).mean()),
        **compared(*rewards),
        "logps/chosen": float(chosen.mean()),
        "logps/rejected": float(rejected.mean()),
    }


def compared(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Metrics of rewards [pairs]."""
    return {
        "rewards/chosen": float(chosen.mean()),
        "rewards/rejected": float(rejected.mean()),
        "rewards/margins": float((chosen - rejected).mean()),
        "rewards/accuracies": float((chosen > rejected).float().mean()),
    }


def kto(
    policy: Any, reference: Any, folder: Path, rows: list[dict], batch: int, beta: float = 0.1, **weights: float
) -> dict[str, float]:
    """https://arxiv.org/abs/2402.01306, equation 7, whose zero is a mean over a batch of so many rows."""
    others = [row | {"completion": rows[place - 1]["completion"]} for place, row in enumerate(rows)]
    log_ratios, other_ratios, sums = [], [], []
    for row, other in zip(rows, others, strict=True):
        tokens, prompt = tokenized(folder, row, row["completion"])
        answer = tokenized(folder, other, other["completion"])
        sums.append(log_prob(policy, tokens, prompt))
        log_ratios.append(sums[-1] - log_prob(reference, tokens, prompt))
        other_ratios.append(log_prob(policy, *answer) - log_prob(reference, *answer))
    good = torch.tensor([row["label"] for row in rows])
    ratios, logps = torch.stack(log_ratios), torch.stack(sums)
    zeros = torch.cat([part.mean().clamp(min=0).expand(len(part)) for part in torch.stack(other_ratios).split(batch)])
    wanted = weights["desirable_weight"] * (1 - torch.sigmoid(beta * (ratios - zeros)))
    unwanted = weights["undesirable_weight"] * (1 - torch.sigmoid(beta * (zeros - ratios)))
    rewards = beta * ratios
    return {
        "loss": float(torch.where(good, wanted, unwanted).mean()),
        "kl": float(zeros.mean()),
        "rewards/chosen": float(rewards[good].mean()),
        "rewards/rejected": float(rewards[~good].mean()),
        "rewards/margins": float(rewards[good].mean() - rewards[~good].mean()),
        "logps/chosen": float(logps[good].mean()),
        "logps/rejected": float(logps[~good].mean()),
    }


@torch.no_grad()
def reward(model: Any, folder: Path, rows: list[dict], centering: float = 0.0) -> dict[str, float]:
    """https://arxiv.org/abs/2307.09288, equation 2, with each row's margin, and a pull of rewards to 0."""
    chosen, rejected = (
        torch.stack([model(torch.tensor([tokenized(folder, row, row[side])[0]])).logits[0, 0] for row in rows])
        for side in ("chosen", "rejected")
    )
    margins = torch.tensor([row["margin"] for row in rows])
    losses = -logsigmoid(chosen - rejected - margins) + centering * (chosen + rejected) ** 2
    return {"loss": float(losses.mean()), **compared(chosen, rejected)}
