"""Mamba-2 layers in checkpoints, for models that have them beside attention."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..mapping.architecture import Architecture, HfConfig, Mamba
from ..mapping.param_mapping import COLUMN, ROW, ShardingKind, Span

# Pieces of a group that ranks can have, where models have one group or two.
PIECES = 8
DEFAULTS: HfConfig = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}


def read_time_limits(config: HfConfig) -> tuple[float, float]:
    """Read the bounds of time steps; transformers 5 writes infinity as {"__float__": "Infinity"}."""
    low, high = (float(bound["__float__"] if isinstance(bound, dict) else bound) for bound in config["time_step_limit"])
    return low, high


def read_mamba(config: HfConfig, width: int, **fields: Any) -> Mamba:
    """Read Mamba-2 layers by the names of Bamba's config; width: of all heads. fields: additional ones of `Mamba`."""
    heads, groups, state_dim = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_state"]
    head_dim = width // heads if config["mamba_d_head"] == "auto" else config["mamba_d_head"]
    if heads * head_dim != width or heads % groups:
        raise ValueError(
            f"config.json has mamba_n_heads {heads} of mamba_d_head {head_dim} in mamba_n_groups {groups}: the groups "
            f"must divide the heads, whose width is {width}"
        )
    return Mamba(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=state_dim,
        kernel=config["mamba_d_conv"],
        conv_bias=config["mamba_conv_bias"],
        dt_limits=read_time_limits(config),
        pieces=math.gcd(heads // groups, state_dim, PIECES),
        **fields,
    )


def _spans(length: int, ranks: int, architecture: Architecture, *, is_projection: bool) -> list[Span]:
    """Lay out each unit's values, key and query, and for the projection its gates and time steps too.

    In the checkpoint a projection has the gates first, then all values, all keys, all queries, and all time steps.
    """
    mamba = architecture.mamba
    assert mamba is not None
    heads, key_dim = mamba.heads // mamba.units, mamba.state_dim // mamba.pieces
    sizes = {"gate": heads * mamba.head_dim, "value": heads * mamba.head_dim, "key": key_dim}
    sizes |= {"query": key_dim, "dt": heads}
    starts, start = {}, 0
    for name, size in sizes.items():
        if is_projection or name not in ("gate", "dt"):
            starts[name] = start
            start += mamba.units * size
    order = ("value", "key", "query", "gate", "dt") if is_projection else ("value", "key", "query")

    def lay_out() -> Iterator[Span]:
        for unit in range(mamba.units):
            for name in order:
                first = starts[name] + unit * sizes[name]
                yield Span(0, first, first + sizes[name])

    return list(lay_out())


PROJECTED = ShardingKind(0, partial(_spans, is_projection=True))
CONVOLVED = ShardingKind(0, partial(_spans, is_projection=False))


def mamba_kinds(mamba: Mamba) -> list[tuple[str, ShardingKind]]:
    """List the tensors of a layer, which have the same names on both sides, and their kinds."""
    kinds = [("in_proj.weight", PROJECTED), ("conv1d.weight", CONVOLVED), ("out_proj.weight", ROW)]
    kinds += [("conv1d.bias", CONVOLVED)] if mamba.conv_bias else []
    kinds += [("norm.weight", COLUMN)] if mamba.has_norm else []
    return kinds + [(name, COLUMN) for name in ("A_log", "D", "dt_bias")]
