"""Places of a training run: its processes and rollout servers, and which launcher starts them. Imports no torch."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..tasks.options import SftOptions
from .launch import STARTED, Processes, environment, start, visible_gpu_names
from .rollout_servers import Placement, RolloutServer, plan_servers


@dataclass
class TrainingLaunch:
    """Processes of a run, its rollout servers, and the variables to set for it."""

    placement: Placement
    processes: Processes
    uses_ray: bool
    servers: list[RolloutServer] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Number of GPUs of a node for training processes; 0: the run uses the CPU."""
        return len(self.placement.training)

    @classmethod
    def of(cls, options: SftOptions) -> "TrainingLaunch":
        """Place a run by its options and the environment. Raises UsageError."""
        uses_ray = options.training.use_ray and not os.environ.get(STARTED)  # not in the processes that Ray has started
        if uses_ray:
            from .ray_launcher import check_ray

            check_ray()
        placement = Placement.of(options, visible_gpu_names(), uses_ray=uses_ray)
        processes = Processes.of_environment(len(placement.training), uses_ray=uses_ray)
        return cls(placement, processes, uses_ray)

    def complete(self, options: SftOptions) -> None:
        """Plan servers and variables by options that have passed the checks."""
        self.settings = environment(options.build, self.processes, self.gpus)
        if self.placement.servers:
            self.servers = plan_servers(options, self.placement)  # pyright: ignore[reportArgumentType]
            if self.gpus and not self.uses_ray:
                self.settings["CUDA_VISIBLE_DEVICES"] = ",".join(self.placement.training)

    def start(self, argv: list[str], options: SftOptions, output: Path) -> int | None:
        """Start the run. Return its exit code, or None if this process is to train."""
        if self.uses_ray:
            from .ray_launcher import run_on_ray

            return run_on_ray(self.processes, argv, self.settings, self.servers, options, gpus=self.gpus, output=output)
        if self.servers:
            from .supervisor import run_with_servers

            return run_with_servers(self.processes, argv, self.settings, self.servers, options.hub_token, output=output)
        start(self.processes, argv, self.settings, output=output)
        return None
