"""Workload of a run: its model, batch, tuner and task, as far as memory and time depend on them."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.core.transformer import TransformerConfig

from ...bridge.mapping.architecture import Layer
from ..observability.flops import Flops
from ..system.memory import GIB
from .parameters import ModelParameters
from .task import SFT, TaskWork
from .tower import TowerWork


@dataclass(frozen=True)
class Fp8:
    """Matrix products of the layers in FP8."""

    stores_weights: bool  # their weights are kept in FP8 alone


@dataclass(frozen=True)
class FurtherModel:
    """Model beside the trained one and its reference, in the same layout: a critic, which is trained, or a teacher."""

    work: "Workload"
    is_trained: bool
    is_offloaded: bool  # its states are on the host between uses


@dataclass(frozen=True)
class Workload:
    """Model, batch and tuner of a run, as far as memory and time depend on them."""

    config: TransformerConfig
    parameters: ModelParameters
    vocab_size: int  # 0: a score head replaces the output layer
    length: int  # tokens of a pack
    document_length: int  # mean tokens of a document
    global_batch: int  # packs
    lora_rank: int | None = None  # None: all parameters are trained
    lora_dropout: float = 0.0
    gradient_bytes: int = 4  # bytes of a parameter's gradient
    optimizer_bytes: int = 12  # bytes of a parameter's state in AdamW: a master and two moments
    offload_fraction: float = 1.0  # share of AdamW's state, in layouts with it on the host
    fp8: Fp8 | None = None  # None: bf16
    tower: TowerWork | None = None  # None: none is built
    gathers_keys: bool = False  # context parallelism gathers keys and values; False: sends them in a ring
    gpu_bytes: float = 80 * GIB  # memory of a GPU
    task: TaskWork = SFT
    further: FurtherModel | None = None
    reward_bytes: float = 0.0  # weights of a reward model, which the first process has

    @cached_property
    def further_work(self) -> "Workload | None":
        """Work of the further model on the same batch; None without one."""
        names = "length", "document_length", "global_batch", "gpu_bytes"
        return self.further and replace(self.further.work, **{name: getattr(self, name) for name in names})

    @cached_property
    def alone(self) -> "Workload":
        """Work of the trained model without others beside it."""
        task = replace(self.task, reference="none")
        if self.further is None and not self.reward_bytes and task == self.task:
            return self
        return replace(self, task=task, further=None, reward_bytes=0.0)

    @cached_property
    def with_forward(self) -> "Workload":
        """The same with a forward pass more."""
        return replace(self, task=replace(self.task, forwards=self.task.forwards + 1))

    @property
    def models(self) -> "list[Workload]":
        """Workloads of the model and of the further one."""
        return [self, self.further.work] if self.further else [self]

    @property
    def names_of_models(self) -> str:
        """Return what the models are, for messages."""
        if self.further is None:
            return "the model"
        return f"the model and its {'critic' if self.further.is_trained else 'teacher'}"

    @property
    def batch(self) -> int:
        """Samples of a step, which a layout has to divide."""
        return self.task.completions or self.global_batch

    def layer(self, layer: int) -> Layer:
        return self.config.architecture.layers[layer]  # type: ignore[attr-defined]

    @property
    def trained_tower(self) -> int:
        """Trained parameters of the tower. Every rank holds all of them."""
        if self.tower is None:
            return 0
        tower, mergers = self.parameters.tower.total, self.parameters.mergers.total
        return tower * self.tower.trains_layers + mergers * self.tower.trains_mergers

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer, from 0, has experts."""
        return self._sparse[layer]

    # A search reads these some ten thousand times.
    @cached_property
    def _sparse(self) -> list[bool]:
        layers, frequency = range(self.config.num_layers), self.config.moe_layer_freq
        if not self.config.num_moe_experts:
            return [False] * len(layers)
        return [bool(frequency[n] if isinstance(frequency, list) else n % frequency == 0) for n in layers]

    @cached_property
    def flops(self) -> Flops:
        """Cost of the model without layers of multi-token prediction."""
        return self._flops_with(0)

    @cached_property
    def predicting_flops(self) -> Flops:
        """Cost of the model with its layers of multi-token prediction."""
        return self._flops_with(self.depths)

    def _flops_with(self, depths: int) -> Flops:
        sizes: Any = copy(self.config)
        sizes.architecture = replace(sizes.architecture, mtp_depths=depths)
        return Flops.of(sizes, self.vocab_size, trained=1.0 if self.lora_rank is None else 0.0)

    @property
    def depths(self) -> int:
        """Number of layers of multi-token prediction."""
        return self.config.architecture.mtp_depths  # type: ignore[attr-defined]

    @cached_property
    def prediction_like(self) -> int:
        """Layer of the model whose kind those of multi-token prediction have."""
        layers, has_experts = range(self.config.num_layers), bool(self.config.num_moe_experts)
        alike = (n for n in layers if self.layer(n) == Layer() and self.is_sparse(n) == has_experts)
        return max(alike, default=self.config.num_layers - 1)

    @cached_property
    def kinds(self) -> list[int]:
        """For each layer the first one that is like it."""
        firsts: dict[tuple[Layer, bool], int] = {}
        layers = range(self.config.num_layers)
        return [firsts.setdefault((self.layer(layer), self.is_sparse(layer)), layer) for layer in layers]

    @cached_property
    def has_usual_attention(self) -> bool:
        """Return whether all layers have attention that is not latent."""
        is_latent, layers = self.config.multi_latent_attention, range(self.config.num_layers)
        return not is_latent and all(self.layer(layer).mixer == "attention" for layer in layers)

    @property
    def has_dense_mlps(self) -> bool:
        """Return whether a layer has an MLP that is not of experts."""
        layers = range(self.config.num_layers)
        return any(self.layer(layer).has_mlp and not self.is_sparse(layer) for layer in layers)
