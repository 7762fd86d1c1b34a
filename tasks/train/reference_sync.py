"""TR-DPO: soft updates of the reference towards the policy, as in TRL (https://arxiv.org/abs/2404.09656).

Both models have the same parallel layout, so each rank updates its local parameters. A checkpoint stores the reference
as a Hugging Face folder in its training state.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...bridge.lora.merge import merge_functions
from ...bridge.mapping.fp8 import masters_as_bf16
from ...bridge.mapping.local_params import collect_params, iter_params
from ...bridge.mapping.param_mapping import ParamKey
from ...bridge.model.model import Model
from ..distributed.collectives import run_on_all_ranks
from ..options.further_models import ReferenceOptions
from .step import TrainState

REFERENCE = "reference"  # the folder in a checkpoint's training state


class ReferenceSync:
    """Update of `reference` towards `model` every --ref_model_sync_steps. Every rank constructs one.

    Raises ValueError on every rank if the two models' tensors differ in name or shape.
    """

    def __init__(self, model: Model, reference: Model, options: ReferenceOptions):
        self.reference = reference
        self._sync_steps, self._mixup_alpha = options.ref_model_sync_steps, options.ref_model_mixup_alpha
        run_on_all_ranks(lambda: _check_same_shapes(model, reference))

    @torch.no_grad()
    def __call__(self, training: TrainState, step: int) -> None:
        """Set reference = (1 - alpha) reference + alpha policy after a step, for parameters, in their dtype."""
        if step % self._sync_steps:
            return
        masters = masters_as_bf16(training.optimizer, training.chunks)
        with training.parameters_gathered(), masters:
            chunks = training.model.parts
            params, merges = collect_params(chunks), merge_functions(chunks)
            for key, reference_param in _parameters(self.reference):
                policy_param = merges[key](params[key]) if key in merges else params[key]
                reference_param.mul_(1.0 - self._mixup_alpha).add_(
                    policy_param.to(reference_param.device), alpha=self._mixup_alpha
                )


def _parameters(model: Model) -> Iterator[tuple[ParamKey, Tensor]]:
    for param in iter_params(model.parts):
        if isinstance(param.tensor, nn.Parameter):  # not buffers, which expert load balancing updates
            yield from param.views.items()


def _check_same_shapes(model: Model, reference: Model) -> None:
    shapes = {key: tensor.shape for key, tensor in collect_params(model.parts).items()}
    ref_shapes = {key: tensor.shape for key, tensor in collect_params(reference.parts).items()}
    for key in (key for key in [*ref_shapes, *shapes] if shapes.get(key) != ref_shapes.get(key)):
        raise ValueError(
            f"--sync_ref_model true: the reference follows the model tensor by tensor, and {key} is "
            f"{_format_shape(shapes.get(key))} in the model and {_format_shape(ref_shapes.get(key))} in the reference. "
            "Use a reference of the same shape"
        )


def _format_shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))
