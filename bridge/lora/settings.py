"""Settings of adapters, from the options or from PEFT's adapter_config.json. Does not import torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..mapping.architecture import HfConfig
from ..options import LoraOptions

# Keys of adapter_config.json that change what an adapter computes, with the values that are supported.
SUPPORTED_VALUES: dict[str, tuple[bool | None, ...]] = {
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),  # a bias after B
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
# Pattern of PEFT's fused gate and up of experts, whose adapters are concatenated.
FUSED = r".*\.gate_up_proj"


@dataclass(frozen=True)
class LoraSettings:
    """Settings of a model's adapters."""

    rank: int
    alpha: float
    dropout: float | None  # None: the default
    bias: str  # which of the model's own biases are trained: none, all, lora_only
    dtype: str | None  # None: the model's
    rslora: bool  # https://arxiv.org/abs/2312.03732
    dora: bool  # https://arxiv.org/abs/2402.09353
    targets: tuple[str, ...]  # see adapter_mapping.py
    regex: str | None  # instead of targets
    modules_to_save: tuple[str, ...]

    @property
    def scaling(self) -> float:
        """Factor on the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    def from_options(cls, options: LoraOptions) -> "LoraSettings":
        return cls(
            options.lora_rank,
            options.lora_alpha,
            options.lora_dropout,
            options.lora_bias,
            options.lora_dtype,
            options.use_rslora,
            options.use_dora,
            () if options.target_regex else tuple(options.target_modules),
            options.target_regex,
            tuple(options.modules_to_save),
        )

    @classmethod
    def from_adapter_config(cls, config: HfConfig, modules: Iterable[str] | None = None) -> "LoraSettings":
        """Parse a raw adapter_config.json. modules: those with adapters in the weights file.

        Raises ValueError for another type of adapter, and for unsupported settings.
        """
        peft_type = config.get("peft_type")
        if peft_type != "LORA":
            raise ValueError(f"adapter_config.json has peft_type {peft_type!r}: only LORA is known")
        for key, values in SUPPORTED_VALUES.items():
            if key in config and config[key] not in (None, *values):
                raise ValueError(f"adapter_config.json has {key} {config[key]!r}, which is not known here")
        rank, alpha, rslora = config.get("r", 8), config.get("lora_alpha", 8), bool(config.get("use_rslora"))
        for key, value in (("rank_pattern", rank), ("alpha_pattern", alpha)):
            if config.get(key) and config[key] != {FUSED: 2 * value}:
                raise ValueError(
                    f"adapter_config.json has {key} {config[key]!r}: adapters are of one rank and alpha here"
                )
        init_weights = config.get("init_lora_weights")
        if isinstance(init_weights, str) and init_weights.startswith(("pissa", "olora", "corda", "loftq", "lora_ga")):
            raise ValueError(
                f"adapter_config.json has init_lora_weights {init_weights!r}, which changes the base model: save the "
                "adapter with PEFT's path_initial_model_for_weight_conversion"
            )
        targets, regex = config.get("target_modules") or [], None
        if isinstance(targets, str):
            targets, regex = ([targets], None) if targets == "all-linear" else ([], targets)
        if modules is not None:
            targets, regex = list(modules), None
            # PEFT's fused experts (checkpoint/adapter_experts.py) all get the largest rank.
            if config.get("rank_pattern") and any(name.endswith("experts.linear_fc1") for name in targets):
                if rslora:
                    raise ValueError("adapter_config.json has use_rslora with a rank_pattern, which is not known here")
                rank, alpha = 2 * rank, 2 * alpha
        return cls(
            rank=rank,
            alpha=alpha,
            dropout=config.get("lora_dropout", 0.0),
            bias=config.get("bias", "none"),
            dtype=None,
            rslora=rslora,
            dora=bool(config.get("use_dora")),
            targets=tuple(targets),
            regex=regex,
            modules_to_save=tuple(config.get("modules_to_save") or ()),
        )
