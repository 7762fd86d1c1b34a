"""References that follow the policy: TR-DPO's soft updates (https://arxiv.org/abs/2404.09656), as TRL does them.

Both models are laid out alike, so that every rank moves what it holds of the reference towards what it holds of the
policy. A checkpoint has the reference beside the policy, as a Hugging Face folder in its training state.
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
from ..options.groups import ReferenceOptions
from .step import TrainState

REFERENCE = "reference"  # the folder in a checkpoint's training state


class Follower:
    """A `reference` that is drawn to `model` every --ref_model_sync_steps. Every rank makes one.

    Raises ValueError, on every rank, where the two have other tensors.
    """

    def __init__(self, model: Model, reference: Model, options: ReferenceOptions):
        self.reference = reference
        self._every, self._share = options.ref_model_sync_steps, options.ref_model_mixup_alpha
        run_on_all_ranks(lambda: _check_alike(model, reference))

    @torch.no_grad()
    def __call__(self, training: TrainState, step: int) -> None:
        """After a step: reference = (1 - share) reference + share policy, of parameters, in their dtype."""
        if step % self._every:
            return
        masters = masters_as_bf16(training.optimizer, training.chunks)
        with training.parameters_gathered(), masters:
            chunks = training.model.chunks
            params, with_adapters = collect_params(chunks), merge_functions(chunks)
            for key, reference_param in _parameters(self.reference):
                policy_param = with_adapters[key](params[key]) if key in with_adapters else params[key]
                reference_param.mul_(1.0 - self._share).add_(policy_param.to(reference_param.device), alpha=self._share)


def _parameters(model: Model) -> Iterator[tuple[ParamKey, Tensor]]:
    for _, tensor, views in iter_params(model.chunks):
        if isinstance(tensor, nn.Parameter):  # no buffer: rules that balance experts change those
            yield from views.items()


def _check_alike(model: Model, reference: Model) -> None:
    shapes = {key: tensor.shape for key, tensor in collect_params(model.chunks).items()}
    ref_shapes = {key: tensor.shape for key, tensor in collect_params(reference.chunks).items()}
    for key in (key for key in [*ref_shapes, *shapes] if shapes.get(key) != ref_shapes.get(key)):
        raise ValueError(
            f"--sync_ref_model true: the reference follows the model tensor by tensor, and {key} is "
            f"{_shown(shapes.get(key))} in the model and {_shown(ref_shapes.get(key))} in the reference. Use a "
            "reference of the same shape"
        )


def _shown(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))
