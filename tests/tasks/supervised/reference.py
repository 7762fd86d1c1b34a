"""Tiny models and what transformers makes of their documents: fp32, eager attention, each document by itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bridge import families
from tests.bridge.families.reference import (
    SMALLEST_MARGIN,
    _by_names_in_files,
    documents,
    gradient,
    random_model,
    routing_margins,
)

LABELS = 3
CHOICES = (7, 250, 19)  # of which each tensor-parallel rank has some
KINDS = ("scores", "last", "mean", "choices", "sums")


def make(folder: Path, name: str, **changes: Any) -> None:
    """Write `folder`/scored and `folder`/causal, checkpoints of a family's tiny model with a head and without, and
    `folder`/reference.pt:

    {kind: {"outputs": [documents, n], "gradients": {name in files: Tensor}}} for each of KINDS.
    """
    tiny = families.tinies()[name]
    tiny = replace(tiny, config=lambda config=tiny.config: config(**changes))
    for seed in range(20):
        causal, scored = random_model(tiny, seed), random_model(replace(tiny, model=_with_head), seed + 1)
        scored.model.load_state_dict(causal.model.state_dict())
        found = {}
        with routing_margins() as margins:
            for kind in KINDS:
                found[kind] = _run(scored if kind == "scores" else causal, kind)
        if min(margins, default=1.0) > SMALLEST_MARGIN:
            break
    else:
        raise RuntimeError("no seed gives a routing without ties")
    scored.save_pretrained(folder / "scored")
    causal.save_pretrained(folder / "causal")
    torch.save(found, folder / "reference.pt")


def coefficients(outputs: int) -> Tensor:
    """[documents, outputs]: the loss is the mean over documents of outputs times these."""
    count = sum(map(len, documents()))
    return torch.randn(count, outputs, generator=torch.Generator().manual_seed(3))


def score_of(model: Any, ids: Tensor) -> Tensor:
    """A document's scores: [labels]."""
    return model(ids[None], use_cache=False).logits[0]


def last_of(model: Any, ids: Tensor) -> Tensor:
    return model.model(ids[None], use_cache=False).last_hidden_state[0, -1]


def mean_of(model: Any, ids: Tensor) -> Tensor:
    return model.model(ids[None], use_cache=False).last_hidden_state[0].mean(0)


def choices_of(model: Any, ids: Tensor) -> Tensor:
    return model(ids[None], use_cache=False).logits[0, -1].log_softmax(-1)[list(CHOICES)]


def sum_of(model: Any, ids: Tensor) -> Tensor:
    """Of the log-probabilities of every second token."""
    log_probs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[1:, None])[::2].sum(0)


OF: dict[str, Callable[[Any, Tensor], Tensor]] = dict(
    zip(KINDS, (score_of, last_of, mean_of, choices_of, sum_of), strict=True)
)


def _run(model: Any, kind: str) -> dict[str, Any]:
    model.zero_grad()
    outputs = torch.stack([OF[kind](model, torch.from_numpy(ids)) for pack in documents() for ids, _ in pack])
    (outputs * coefficients(outputs.shape[1])).sum().div(len(outputs)).backward()
    gradients = {name: gradient(parameter) for name, parameter in model.named_parameters()}
    return {"outputs": outputs.detach(), "gradients": _by_names_in_files(model, gradients)}


def _with_head(config: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    config.num_labels = LABELS
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
