"""Mends of megatron-core, each bound to the versions that need it; tests/bridge/test_compat.py fails once one is not needed."""

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
        _optimizer_state_without_step()


def _recompute_without_fp8() -> None:
    # CheckpointWithoutOutput asks `fp8 is not None` of a default of False, and then wants Transformer Engine.
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _optimizer_state_without_step() -> None:
    # torch's AdamW keeps `step` among a parameter's state; the distributed optimizer then misses it in what it loads.
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self, parameter, tensors):
        return original(self, parameter, {"step": None, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
