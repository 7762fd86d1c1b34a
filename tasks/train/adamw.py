"""Fused AdamW for fp32 parameters: clips, skips non-finite gradients, and writes half-precision copies in one pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ...bridge import kernels as fused

# parameter, gradient, exp_avg, exp_avg_sq, half-precision copy
TensorRow = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class AdamW(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101) on GPUs and CPUs, with or without Transformer Engine.

    As in torch's fused optimizers, gradients are divided by `grad_scale`, and a step changes nothing if `found_inf`
    is 1. Both are fp32 scalars on the device, and the host does not wait for them.

    copies: the half-precision parameter of each fp32 master, written in the same pass.
    The state is exp_avg and exp_avg_sq per parameter, and one `step` per parameter group.
    """

    def __init__(self, groups: list[dict[str, Any]], copies: dict[Tensor, Tensor], **defaults: Any):
        super().__init__([{"params": []}], {"step": 0, **defaults})
        # Set directly, because torch's constructor refuses views of the model's parameters.
        self.param_groups = [{**self.defaults, **group} for group in groups]
        self.copies = copies
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        # Address tables (bridge/kernels/adamw.py): one per parameter group, and "norm"
        self._tables: dict[int | str, Any] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._initial_state(parameter)

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        return {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for number, group in enumerate(self.param_groups):
            group["step"] += 1
            self._step_group(number, group, (p for p in group["params"] if p.grad is not None and p.numel()))

    def _step_group(self, number: int, group: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        """Update parameters that have gradients, of group `number`."""
        rows: list[TensorRow] = [
            (p, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"], self.copies.get(p))  # pyright: ignore
            for p in parameters
        ]
        if rows:
            self._step_rows(number, group, rows, self.grad_scale, self.found_inf)

    def _step_rows(
        self,
        name: int | str,
        group: dict[str, Any],
        rows: list[TensorRow],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update rows of one group's parameters, all on one device. name: key of their address table"""
        settings = {name: group[name] for name in ("step", "lr", "betas", "eps", "weight_decay")}
        zero = rows[0][1].new_zeros(())
        settings["grad_scale"] = zero + 1 if grad_scale is None else grad_scale
        settings["found_inf"] = zero if found_inf is None else found_inf
        if fused.usable(zero):
            from ...bridge.kernels import adamw as kernels

            half_dtype = next((copy.dtype for *_, copy in rows if copy is not None), torch.bfloat16)
            kernels.adamw(self._table(name, rows), half_dtype, **settings)
        else:
            _torch_adamw(rows, **settings)

    def sum_of_squares(self, gradients: list[Tensor]) -> Tensor:
        """Return the squared norm of these gradients, fp32 []."""
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
        """Return the state with a `step` per parameter, which megatron-core reads as from torch's AdamW."""
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


def _torch_adamw(rows: list[TensorRow], *, step: int, betas: tuple[float, float], **settings: Any) -> None:
    parameters, gradients, means, variances, copies = (list(column) for column in zip(*rows, strict=True))
    steps = list(gradients[0].new_full((len(rows),), step - 1).unbind())  # torch increments them
    beta1, beta2 = betas
    adamw(
        parameters, gradients, means, variances, [], steps,
        beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, fused=True, **settings,
    )  # fmt: skip
    if positions := [position for position, copy in enumerate(copies) if copy is not None]:
        torch._foreach_copy_([copies[n] for n in positions], [parameters[n] for n in positions])  # pyright: ignore
