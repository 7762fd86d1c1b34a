"""Tables of layouts."""

from collections.abc import Sequence

from ...templates.plural import plural
from .gpu_layout import GpuLayout

RECOMPUTED = {"none": "none", "mlp": "MLPs", "full": "all layers"}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines: the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def choices(layout: GpuLayout) -> tuple[str, str, str, str]:
    """Return the cells of a layout: parallel sizes, micro batch, recomputation, and where the optimizer is."""
    optimizer = "host" if layout.offloads else "GPU"
    recomputed = RECOMPUTED[layout.recompute]
    if layout.recompute == "full" and layout.recomputed is not None:
        recomputed = plural(layout.recomputed, "layer")
    if layout.offloaded_layers:
        recomputed += f", {layout.offloaded_layers} on the host"
    return str(layout), str(layout.micro_batch), recomputed, optimizer
