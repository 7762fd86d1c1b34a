"""One way to place a run on GPUs."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ...bridge.options import ParallelOptions
from ...bridge.pipeline_layout import divide_layers

Recompute = Literal["none", "mlp", "full"]  # in the backward pass: the first half of dense MLPs, or layers
RECOMPUTE: tuple[Recompute, ...] = ("none", "mlp", "full")  # the faster first
Settings = dict[str, int | str | bool | list[str]]


@dataclass(frozen=True)
class GpuLayout:
    """Parallel sizes of a run, and its choices of memory against time."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    offloads: bool = False  # the optimizer's state is on the host
    virtual: int = 1  # chunks of layers on each pipeline stage
    first: int | None = None  # layers of the first pipeline stage; None: as the others
    last: int | None = None  # layers of the last pipeline stage; None: as the others
    recomputed: int | None = None  # layers of each chunk that are recomputed in full; None: all
    offloaded_layers: int = 0  # first layers of each pipeline stage whose activations are kept on the host
    expert_tensor: int = 1

    @property
    def data(self) -> int:
        """Data-parallel size of the weights outside of experts."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the experts."""
        return self.gpus // (self.pipeline * self.expert_shards)

    @property
    def expert_shards(self) -> int:
        """Ranks that together have the experts of a layer."""
        return self.expert * self.expert_tensor

    def micro_batches(self, global_batch: int) -> int:
        """Return the number of micro batches of a rank in a step, of which the last may be padding."""
        return max(1, math.ceil(global_batch / (self.micro_batch * self.data)))

    def stages(self, num_layers: int) -> list[range]:
        """Return the layers of each pipeline stage; with virtual stages as many of them as are on it.

        Raises ValueError if the layout does not divide them.
        """
        options = ParallelOptions(
            pipeline_model_parallel_size=self.pipeline,
            virtual_pipeline_model_parallel_size=self.virtual,
            decoder_first_pipeline_num_layers=self.first,
            decoder_last_pipeline_num_layers=self.last,
        )
        sizes = divide_layers(options, num_layers)
        sizes = [sum(sizes[stage :: self.pipeline]) for stage in range(self.pipeline)]
        ends = list(accumulate(sizes))
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def divides(self, num_layers: int) -> bool:
        """Return whether the layout divides the layers over its pipeline stages."""
        try:
            return bool(self.stages(num_layers))
        except ValueError:
            return False

    def chunks_in_flight(self, stage: int, micro_batches: int) -> int:
        """Return the chunks of layers of a stage whose activations are kept at once, over all micro batches."""
        if self.virtual == 1:
            return min(self.pipeline - stage, micro_batches)
        warmup = 2 * (self.pipeline - stage - 1) + (self.virtual - 1) * self.pipeline
        return min(warmup + 1, self.virtual * micro_batches)

    def recomputed_share(self, layers: int) -> float:
        """Return the share of `layers` layers of a stage that are recomputed in full."""
        if self.recompute != "full":
            return 0.0
        return 1.0 if self.recomputed is None else min(self.recomputed * self.virtual / layers, 1.0)

    def settings(self) -> Settings:
        """Return the flags of `megatron` for this layout with their values, the defaults too."""
        settings: Settings = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "sequence_parallel": self.tensor > 1,
            "micro_batch_size": self.micro_batch,
            "recompute_granularity": "full" if self.recompute == "full" else "selective",
            "recompute_modules": ["mlp" if self.recompute == "mlp" else "core_attn"],
            "optimizer_cpu_offload": self.offloads,
            "cpu_offloading": self.offloaded_layers > 0,
            "cpu_offloading_num_layers": self.offloaded_layers,
        }
        division = {
            "virtual_pipeline_model_parallel_size": self.virtual if self.virtual > 1 else None,
            "decoder_first_pipeline_num_layers": self.first,
            "decoder_last_pipeline_num_layers": self.last,
        }
        settings |= {name: value for name, value in division.items() if value is not None}
        if self.recompute != "full":
            return settings
        if self.recomputed is not None:
            return settings | {"recompute_method": "block", "recompute_num_layers": self.recomputed}
        return settings | {"recompute_method": "uniform", "recompute_num_layers": 1}

    def flags(self) -> str:
        """Return the words for this layout on a command line."""
        defaults = GpuLayout(self.gpus).settings()
        del defaults["micro_batch_size"]
        return _words({name: value for name, value in self.settings().items() if value != defaults.get(name)})

    def changes(self, other: "GpuLayout") -> str:
        """Return the words to append to a command line with this layout, so that it has the other."""
        settings = self.settings()
        return _words({name: value for name, value in other.settings().items() if value != settings.get(name)})

    def __str__(self) -> str:
        sizes = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "VPP": self.virtual,
            "CP": self.context,
            "EP": self.expert,
            "ETP": self.expert_tensor,
            "DP": self.data,
        }
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["one GPU"]
        ends = {"first": self.first, "last": self.last}
        words += [f"{name} {layers}" for name, layers in ends.items() if layers is not None]
        return " ".join(words)


def flag_text(value: int | str | bool | list[str]) -> str:
    """Return a setting as it is written on a command line."""
    return " ".join(value) if isinstance(value, list) else str(value).lower()


def _words(settings: Settings) -> str:
    return " ".join(f"--{name} {flag_text(value)}" for name, value in settings.items())
