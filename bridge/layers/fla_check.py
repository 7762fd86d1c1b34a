"""Check of flash-linear-attention's kernels on this machine, before a model is trained by them.

Which of their variants is right depends on the GPU and the versions of Triton and fla. The first tokens of a run are
computed by them and in plain PyTorch, as two documents, forward and backward.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from .delta_rule import DeltaLayout, make_delta_layout

logger = logging.getLogger(__name__)

TOKENS, CUT = 150, 70  # lengths of both documents together, and of the first: neither is a multiple of a chunk
BOUND = 0.1  # distance relative to the norm; two ways in bf16 are 0.01 to 0.03 apart

Mix = Callable[..., Tensor]
_results: dict[tuple, bool] = {}


def is_right(name: str, run: Mix, plain: Mix, inputs: Sequence[Tensor], layout: DeltaLayout) -> bool:
    """Return whether `run` computes `plain`, and warn if it does not. One check for each `name` and shape of inputs.

    run(*inputs, layout) -> [tokens, ...], where inputs are [tokens, ...] or parameters; so does `plain`
    """
    tokens = len(inputs[0])
    key = name, *(tuple(x.shape[len(x) == tokens :]) for x in inputs)
    if key not in _results:
        _results[key] = _check(name, run, plain, inputs, layout)
    return _results[key]


def _check(name: str, run: Mix, plain: Mix, inputs: Sequence[Tensor], layout: DeltaLayout) -> bool:
    tokens, device = len(inputs[0]), inputs[0].device
    documents = len(layout.cu_seqlens_cpu) - 1
    kernel = (layout.conv_length - tokens) // documents + 1
    count = min(tokens, TOKENS)
    bounds = [0, CUT, count] if count > CUT else [0, count]
    small = make_delta_layout(bounds, 1, 1, kernel, device)
    parts = [x.detach()[: count if len(x) == tokens else None] for x in inputs]
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()

    def compare() -> float:
        with torch.enable_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            results = zip(_results_of(run, parts, small), _results_of(plain, parts, small), strict=True)
            return max(_distance(result, expected) for result, expected in results)

    # On another thread: hooks of saved tensors, such as those of activation recomputation, belong to this one.
    with ThreadPoolExecutor(1) as pool:
        try:
            distance = pool.submit(compare).result()
        except Exception as error:  # Triton's compiler has kinds of its own
            reason = f"fail: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            if distance < BOUND:
                return True
            reason = f"are wrong here: {distance:.2g} from plain PyTorch, relative to the norm"
    logger.warning(
        f"warning: flash-linear-attention's kernels of {name} {reason}. Plain PyTorch is used, which is much slower"
    )
    return False


def _results_of(run: Mix, inputs: Sequence[Tensor], layout: DeltaLayout) -> list[Tensor]:
    """Return the output of run(*inputs, layout), and the gradients of the inputs for an arbitrary gradient of it."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = run(*leaves, layout).flatten(1)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).sin().view_as(output)
    gradients = torch.autograd.grad((output.float() * weights).sum(), leaves, allow_unused=True)
    return [output.detach(), *(x for x in gradients if x is not None)]


def _distance(result: Tensor, expected: Tensor) -> float:
    """Return the distance relative to the norm; infinite for results that are not numbers."""
    distance = (result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    return distance.nan_to_num(nan=torch.inf).item()
