"""Mends of megatron-core, each bound to the versions that need it.

tests/bridge/test_compat.py fails once one is not needed any more.
"""

from importlib.metadata import version

_APPLIED = False


def mend() -> None:
    """Apply what the installed megatron-core needs. Safe to call again."""
    global _APPLIED
    if _APPLIED:
        return
    _APPLIED = True
    if version("megatron-core").startswith("0.19."):
        _recompute_without_fp8()


def _recompute_without_fp8() -> None:
    # CheckpointWithoutOutput asks `fp8 is not None` of a default of False, and then wants Transformer Engine.
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)
