"""A tiny checkpoint with what transformers makes of it: fp32, eager attention, one document at a time."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.bridge.families import VOCAB, Tiny

# The packs of one global batch: uneven documents, one longer than the chunks of linear attention (64), one shorter
# than its convolution (4). Context parallelism pads each to a multiple of 4: PACK leaves room for that, and a tail.
PACKS = ((70, 5, 23), (33, 2, 46))
PACK, LONGEST = 112, 72
LABELS = slice(None, None, -9)  # whose log-probabilities are compared: from the vocabulary's last token down
MASKED = -1e30  # transformers' scores of future keys are about torch.finfo(torch.float32).min
SMALLEST_MARGIN = 2e-5  # between the last expert that is chosen and the next: rounding moves scores by about 1e-6
SMALLEST_DISTANCE = 4e-6  # of an activation's inputs from jumps of its slope: rounding moves them by less than 1e-6

Document = tuple[np.ndarray, np.ndarray]  # token ids, loss weights


def documents() -> list[list[Document]]:
    """The packs' documents, of which uneven parts are trained on."""
    rng = np.random.default_rng(5)
    return [[(rng.integers(3, VOCAB, n), (rng.random(n) < 0.7).astype(np.float32)) for n in pack] for pack in PACKS]


def make(folder: Path, tiny: Tiny) -> None:
    """Write `folder`/fp32 and `folder`/bf16, two checkpoints, and `folder`/reference.pt:

    {"log_probs": [all documents' tokens, LABELS] fp32, "gradients": {name in files: Tensor}}.
    Takes the first seed whose routing is at no tie, and whose activations are at no jump of their slope.
    """
    for seed in range(20):
        model = random_model(tiny, seed)
        with routing_margins() as margins, jump_distances(model) as distances:
            log_probs, loss = _run(model)
        if min(margins, default=1.0) > SMALLEST_MARGIN and min(distances, default=1.0) > SMALLEST_DISTANCE:
            break
    else:
        raise RuntimeError("no seed gives a routing without ties: are all scores of some token equal?")
    model.save_pretrained(folder / "fp32")
    settings = json.loads((folder / "fp32" / "config.json").read_text())
    if callable(tiny.raw):
        settings = tiny.raw(settings)
    else:
        settings |= tiny.raw
        settings = {key: value for key, value in settings.items() if tiny.raw.get(key, "kept") is not None}
    (folder / "fp32" / "config.json").write_text(json.dumps(settings, indent=2))
    weights = load_file(folder / "fp32" / "model.safetensors")
    weights = tiny.files(weights) if tiny.files else weights
    if tiny.extra:
        weights |= tiny.extra(model.config, _noise(seed))
    _write(folder / "fp32", weights)
    rounded = {name: tensor if _found(tiny.fp32, name) else tensor.bfloat16() for name, tensor in weights.items()}
    (folder / "bf16").mkdir()
    (folder / "bf16" / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}, indent=2))
    _write(folder / "bf16", rounded)

    loss.backward()
    gradients = _by_names_in_files(
        model, {name: gradient(p) for name, p in model.named_parameters() if p.requires_grad}
    )
    gradients = tiny.files(gradients) if tiny.files else gradients
    torch.save({"log_probs": log_probs, "gradients": gradients}, folder / "reference.pt")


def random_model(tiny: Tiny, seed: int) -> Any:
    """transformers' model in fp32, with every parameter and persistent buffer random."""
    from transformers import AutoModelForCausalLM

    config = tiny.config()
    config._attn_implementation = "eager"
    with _without_fla():
        if tiny.model:
            model = tiny.model(config).float()
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    noise = _noise(seed)
    means = {**tiny.means, r"norm\.weight$": 1.0, "": 0.0}
    stds = {**tiny.stds, "": 0.2}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            mean, std = (next(v for pattern, v in rules.items() if re.search(pattern, name)) for rules in (means, stds))
            tensor.copy_(mean + noise(*tensor.shape) * (std / 0.2))
    return model.eval()


@contextmanager
def _without_fla() -> Iterator[None]:
    """Models of transformers that are imported within compute linear attention in torch: fla's kernels are for GPUs."""
    fla = sys.modules.get("fla")
    sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if fla is not None:
            sys.modules["fla"] = fla


def _noise(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.2 * torch.randn(shape, generator=generator)

    return noise


def _run(model) -> tuple[Tensor, Tensor]:
    """Log-probabilities [tokens, LABELS] and the mean cross entropy of what is trained on."""
    found, total, count = [], torch.zeros(()), 0.0
    for ids, weights in (document for pack in documents() for document in pack):
        logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        log_probs = logits.log_softmax(-1)
        found.append(log_probs[:, range(log_probs.shape[1])[LABELS]].detach())
        chosen = log_probs[:-1].gather(1, torch.from_numpy(ids[1:, None])).squeeze(1)
        total = total - (chosen * torch.from_numpy(weights[1:])).sum()
        count += float(weights[1:].sum())
    return torch.cat(found), total / count


@contextmanager
def routing_margins() -> Iterator[list[float]]:
    """Within, every torch.topk leaves the distance between the least that it takes and the most that it leaves.

    Scores of future keys are the smallest numbers, and which of them it takes is the same.
    """
    margins: list[float] = []
    real, real_method = torch.topk, torch.Tensor.topk

    def topk(values: Tensor, k: int, dim: int = -1, **options):
        if k < values.shape[dim]:
            best = real(values.detach().float(), k + 1, dim=dim).values.unbind(dim)
            margin = (best[k - 1] - best[k])[best[k] > MASKED]
            margins.extend(margin.min()[None].tolist() if margin.numel() else [])
        return real(values, k, dim=dim, **options)

    torch.topk = torch.Tensor.topk = topk  # type: ignore[assignment]
    try:
        yield margins
    finally:
        torch.topk, torch.Tensor.topk = real, real_method


@contextmanager
def jump_distances(model: torch.nn.Module) -> Iterator[list[float]]:
    """Within, every call of an xIELU leaves the least distance of its inputs from 0 and its limit."""
    from transformers.activations import XIELUActivation

    distances: list[float] = []

    def measure(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        distances.extend((inputs[0].detach() - jump).abs().min().item() for jump in (0.0, module.eps))

    handles = [part.register_forward_pre_hook(measure) for part in model.modules() if isinstance(part, XIELUActivation)]
    try:
        yield distances
    finally:
        for handle in handles:
            handle.remove()


def gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _by_names_in_files(model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As save_pretrained renames, splits and turns them: transformers 5 holds experts in a form of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, tensors).items()}


def _write(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def _found(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
