"""One way to place a run on GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuLayout:
    """Parallel sizes of a run, and its choices of memory against time."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    recomputes: bool = False  # all layers
    offloads: bool = False  # the optimizer's state is on the host

    @property
    def data(self) -> int:
        """Data-parallel size of the weights outside of experts."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the experts."""
        return self.gpus // (self.pipeline * self.expert)

    def micro_batches(self, global_batch: int) -> int:
        """Return the number of micro batches of a rank in a step."""
        return global_batch // (self.micro_batch * self.data)

    def settings(self) -> dict[str, int | str | bool]:
        """Return the flags of `megatron` for this layout with their values, the defaults too."""
        settings = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "sequence_parallel": self.tensor > 1,
            "micro_batch_size": self.micro_batch,
            "recompute_granularity": "full" if self.recomputes else "selective",
            "optimizer_cpu_offload": self.offloads,
        }
        return settings | ({"recompute_method": "uniform", "recompute_num_layers": 1} if self.recomputes else {})

    def flags(self) -> str:
        """Return the words for this layout on a command line."""
        defaults = GpuLayout(self.gpus).settings() | {"micro_batch_size": None}
        return _words({name: value for name, value in self.settings().items() if value != defaults.get(name)})

    def changes(self, other: "GpuLayout") -> str:
        """Return the words to append to a command line with this layout, so that it has the other."""
        settings = self.settings()
        return _words({name: value for name, value in other.settings().items() if value != settings.get(name)})

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "EP": self.expert, "DP": self.data}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one GPU"


def _words(settings: dict[str, int | str | bool]) -> str:
    return " ".join(f"--{name} {str(value).lower()}" for name, value in settings.items())
