"""Check of flash-linear-attention's kernels on this machine, before a model is trained by them.

Which of their variants is right depends on the GPU and the versions of Triton and fla. The first tokens of a run are
computed by them and in plain PyTorch, as two documents, forward and backward.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from .delta_rule import DeltaLayout, make_delta_layout

logger = logging.getLogger(__name__)

TOKENS, CUT = 150, 70  # lengths of both documents together, and of the first: neither is a multiple of a chunk
BOUND = 0.1  # distance relative to the norm; two ways in bf16 are 0.01 to 0.03 apart

Mix = Callable[..., Tensor]
_results: dict[tuple, bool] = {}


def is_right(
    name: str, run: Mix, plain: Mix, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None], layout: DeltaLayout
) -> bool:
    """Return whether `run` computes `plain`, and warn if it does not. One check for each `name` and sizes.

    run(*inputs, *parameters, layout) -> [tokens, ...], of inputs [tokens, ...]; so does `plain`
    """
    key = name, *(tuple(x.shape[1:]) for x in inputs), *(x is not None and tuple(x.shape) for x in parameters)
    if key not in _results:
        problem = _problem(run, plain, inputs, parameters, layout)
        _results[key] = problem is None
        if problem:
            logger.warning(
                f"warning: flash-linear-attention's kernels of {name} {problem}. Plain PyTorch is used, which is much "
                "slower"
            )
    return _results[key]


def _problem(
    run: Mix, plain: Mix, inputs: Sequence[Tensor], parameters: Sequence[Tensor | None], layout: DeltaLayout
) -> str | None:
    """Return how `run` differs from `plain` or fails, or None."""
    tokens, device = len(inputs[0]), inputs[0].device
    documents = len(layout.cu_seqlens_cpu) - 1
    kernel = (layout.conv_length - tokens) // documents + 1
    count = min(tokens, TOKENS)
    bounds = [0, CUT, count] if count > CUT else [0, count]
    small = make_delta_layout(bounds, 1, 1, kernel, device)
    parts: list[Tensor | None] = [x.detach()[:count].requires_grad_() for x in inputs]
    parts += [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in parameters]
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()

    def compare() -> float:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if device.type == "cuda":
                from ..kernels.autotuning import parallel_compilation

                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(parallel_compilation())
            results = zip(_results_of(run, parts, small), _results_of(plain, parts, small), strict=True)
            return max(_distance(result, expected) for result, expected in results)

    # On another thread: hooks of saved tensors, such as those of activation recomputation, belong to this one.
    with ThreadPoolExecutor(1) as pool:
        try:
            distance = pool.submit(compare).result()
        except Exception as error:  # Triton's compiler has kinds of its own
            return f"fail: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None if distance < BOUND else f"are wrong here: {distance:.2g} from plain PyTorch, relative to the norm"


def _results_of(run: Mix, inputs: Sequence[Tensor | None], layout: DeltaLayout) -> list[Tensor]:
    """Return the output of run(*inputs, layout), and for an arbitrary gradient of it those of the trained inputs."""
    copies = [None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    output = run(*copies, layout).flatten(1)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).sin().view_as(output)
    leaves = [x for x in copies if x is not None and x.requires_grad]
    return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), leaves)]


def _distance(result: Tensor, expected: Tensor) -> float:
    """Return the distance relative to the norm; infinite for results that are not numbers."""
    distance = (result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    return distance.nan_to_num(nan=torch.inf).item()
