"""AdamW in one pass over fp32 parameters: it clips, skips what is not finite, and writes copies in half precision."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ...bridge import kernels as fused

TensorRow = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # parameter, gradient, mean, variance, copy


class AdamW(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101), the same with Transformer Engine and without, on GPUs and CPUs.

    As in torch's fused optimizers, gradients are divided by `grad_scale`, and nothing changes where `found_inf` is 1:
    two fp32 numbers on the device, for which the host does not wait. `copies`: of parameters that are the masters of
    others in half precision, those others, which are written in the same pass.
    The state is exp_avg and exp_avg_sq; a group's `step` is that of all its parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], copies: dict[Tensor, Tensor], **defaults: Any):
        super().__init__([{"params": []}], {"step": 0, **defaults})
        # They may hold views of the model's parameters, which torch's own constructor would refuse.
        self.param_groups = [{**self.defaults, **group} for group in groups]
        self.copies = copies
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._tables: dict[int | str, Any] = {}  # address tables (bridge/kernels/adamw.py), by group and for the norm
        for group in self.param_groups:
            for parameter in group["params"]:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                self.state[parameter] = {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            rows: list[TensorRow] = [
                (each, each.grad, self.state[each]["exp_avg"], self.state[each]["exp_avg_sq"], self.copies.get(each))
                for each in group["params"]
                if each.grad is not None and each.numel()
            ]
            if not rows:
                continue
            settings = {name: group[name] for name in ("step", "lr", "betas", "eps", "weight_decay")}
            zero = rows[0][1].new_zeros(())
            settings["grad_scale"] = zero + 1 if self.grad_scale is None else self.grad_scale
            settings["found_inf"] = zero if self.found_inf is None else self.found_inf
            if fused.usable(zero):
                from ...bridge.kernels import adamw as kernels

                half = next((copy.dtype for *_, copy in rows if copy is not None), torch.bfloat16)
                kernels.adamw(self._table(number, rows), half, **settings)
            else:
                _plain(rows, **settings)

    def sum_of_squares(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the gradients of some or all parameters, fp32 []."""
        if not fused.usable(gradients[0]):
            return torch.nn.utils.get_total_norm(gradients).square()
        from ...bridge.kernels import adamw as kernels

        return kernels.sum_of_squares(self._table("norm", [(gradient,) for gradient in gradients]))

    def _table(self, name: int | str, rows: list[Any]) -> Any:
        from ...bridge.kernels.adamw import AddressTable

        table = self._tables.setdefault(name, AddressTable())
        table.update(rows)
        return table

    def state_dict(self) -> dict[str, Any]:
        """Return the state with a step per parameter, as torch's AdamW: megatron-core reads it."""
        state = super().state_dict()
        steps = {number: group["step"] for group in state["param_groups"] for number in group["params"]}
        states = {n: values | {"step": torch.tensor(float(steps[n]))} for n, values in state["state"].items()}
        return state | {"state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {
            number: {name: value for name, value in state.items() if name != "step"}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict(state_dict | {"state": states})


def _plain(rows: list[TensorRow], *, step: int, betas: tuple[float, float], **settings: Any) -> None:
    parameters, gradients, means, variances, copies = (list(column) for column in zip(*rows, strict=True))
    steps = list(gradients[0].new_full((len(rows),), step - 1).unbind())  # torch counts them up
    beta1, beta2 = betas
    adamw(
        parameters, gradients, means, variances, [], steps,
        beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, fused=True, **settings,
    )  # fmt: skip
    if copied := [place for place, copy in enumerate(copies) if copy is not None]:
        torch._foreach_copy_([copies[n] for n in copied], [parameters[n] for n in copied])  # pyright: ignore
