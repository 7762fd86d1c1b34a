"""Choice between direct copies into a run's engines and their own loaders."""

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist

from ...bridge.checkpoint.direct_weights import DirectWeights
from ...bridge.checkpoint.strided_copy import WeightLayout
from ..distributed.collectives import all_gather_objects
from .engine import Engine, WritableEngine
from .health import notify

PENDING = "pending"  # no update has shown the engine's layout yet


class DirectSync:
    """Plans of direct copies into the engines of all ranks. The engines' first update is by their loaders."""

    def __init__(self, engine: Engine | None):
        self._engine = engine  # a WritableEngine on all ranks, or on none
        self._plans: dict[bool, DirectWeights] = {}  # key: whether the towers are sent too
        self._is_off = False

    def plan(self, make: Callable[[WeightLayout], DirectWeights], *, has_towers: bool) -> DirectWeights | None:
        """Return the plan that `make` has made, or None where the loaders must be used. Every rank calls this."""
        if self._is_off or has_towers in self._plans:
            return self._plans.get(has_towers)
        engine = cast(WritableEngine, self._engine)
        states = all_gather_objects(PENDING if engine.layout is None and not engine.layout_problem else None)
        if PENDING in states:
            return None
        plan, problem = None, engine.layout_problem
        if not any(problems := all_gather_objects(problem)):
            try:
                plan = make(cast(WeightLayout, engine.layout))
            except ValueError as error:
                problem = str(error)
            problems = all_gather_objects(problem)
        if reason := next(filter(None, problems), None):
            self._is_off = True
            if torch.cuda.is_available() and dist.get_rank() == 0:  # kernels for CPUs always repack
                notify(f"Weights go to vLLM through its loaders, which takes several times as long: {reason}.")
            return None
        assert plan is not None
        return self._plans.setdefault(has_towers, plan)
