"""Checks of the parallel layouts of roles: models beside the trained one."""

import re
from math import lcm

from ...tasks.options import SftOptions
from ...tasks.run.planning import SIZES, ProcessLayout, RoleName, length_multiple, role_layout
from ..flags import UsageError

OWNERS = {"ref": "reference", "critic": "critic", "teacher": "teacher"}


def check_role_layout(options: SftOptions, role: RoleName, processes: int) -> None:
    """Raise UsageError if a role's own layout does not divide the processes or the packs."""
    data = options.data
    parallel = role_layout(options, role)
    if parallel is None:
        return
    layout = ProcessLayout.of(parallel.build, processes)
    base = "student" if role == "teacher" else "policy"
    for product, sizes in (
        (layout.tensor * layout.pipeline * layout.context, ("tensor_model", "pipeline_model", "context")),
        (layout.expert * layout.expert_tensor * layout.pipeline, ("expert_model", "expert_tensor", "pipeline_model")),
    ):
        if processes % product:
            flags = " x ".join(f"--{role}_{size}_parallel_size" for size in sizes)
            raise UsageError(
                f"{flags} = {product}: does not divide the number of processes, {processes}. Set sizes that "
                f"divide; unset ones are the {base}'s."
            )
    multiple = lcm(2 * layout.context if layout.context > 1 else 1, layout.context * length_multiple(parallel.build))
    if data.packing and data.packing_length and data.packing_length % multiple:
        raise UsageError(
            f"--packing_length {data.packing_length}: not a multiple of {multiple}, by which the {OWNERS[role]}'s "
            f"processes (--{role}_tensor_model_parallel_size, --{role}_context_parallel_size) split a pack. Set a "
            "multiple."
        )


def to_role_flags(text: str, role: RoleName) -> str:
    """Return text with the flags of the layout replaced by the role's."""
    return re.sub(rf"--({'|'.join(SIZES)})_parallel_size", rf"--{role}_\1_parallel_size", text)
