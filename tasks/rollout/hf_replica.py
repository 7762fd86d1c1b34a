"""Model of transformers whose weights are updated in place from checkpoint tensors.

transformers stores some tensors in another form than checkpoints do (fused experts, renamed parts). Updates apply the
same conversion rules as `from_pretrained`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from ...bridge.checkpoint.hub import has_weights, read_config
from ...bridge.checkpoint.pretrained import empty_model, load_config, load_model
from ...bridge.checkpoint.safetensors_io import SafetensorsFolder
from ...bridge.families import family_of
from ...bridge.mapping.architecture import HfConfig
from ...bridge.mapping.param_mapping import expand_mappings
from .weight_sync import checksum


class _Target(NamedTuple):
    """Model tensor that a checkpoint tensor is part of, and the conversion rule; None: both are the same tensor."""

    target: str
    rule: str | None


class Replica:
    """Generation-only model of `folder`.

    `load`: load the folder's weights; otherwise every tensor must arrive by `update`. Raises ValueError where
    transformers or the bridge does not support the model.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device, load: bool):
        if load:
            self.model: Any = load_model(folder, dtype=dtype).to(device)
        else:
            config = load_config(folder)
            if hasattr(config, "quantization_config"):  # updates send unquantized weights
                delattr(config, "quantization_config")
            with torch.device(device), no_init_weights():
                self.model = empty_model(config, dtype=dtype)
            self.model.tie_weights()
        self.model.eval().requires_grad_(False)
        self._state: dict[str, Tensor] = self.model.state_dict()
        rules = get_model_conversion_mapping(self.model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        config_json = read_config(folder)
        # Tensors that generation from text does not use: image towers, MTP.
        unused_pattern = family_of(config_json).describe(config_json).passthrough
        unused_patterns = [
            *(self.model._keys_to_ignore_on_load_unexpected or ()),
            *([f"^(?:{unused_pattern})"] if unused_pattern else []),
        ]
        self._unused = re.compile("|".join(unused_patterns) or "(?!)")
        self._targets: dict[str, _Target] = {}
        self._converted: dict[str, list[str]] = {}  # target of a conversion: all tensors that it makes, as a split one
        self._part_counts = self._count_parts()
        names_by_pointer: dict[int, set[str]] = defaultdict(set)
        for name, tensor in self._state.items():
            names_by_pointer[tensor.data_ptr()].add(name)
        # Tied tensors have several names.
        self._tied_names = {name: names_by_pointer[tensor.data_ptr()] for name, tensor in self._state.items()}
        self._towers = set() if load else self._tower_names(folder, config_json)
        self._missing = set() if load else set(self._state)  # neither the folder nor `update` has loaded these yet

    def missing(self, *, for_images: bool) -> list[str]:
        """Return the names of tensors that generation needs and that have not been loaded yet.

        for_images: also those of the vision tower
        """
        return sorted(
            name
            for name in self._missing
            if not self._unused.search(name) or (for_images and not self._towers.isdisjoint(self._tied_names[name]))
        )

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their checkpoint names. Raises ValueError for unknown names and wrong shapes."""
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in weights:
            target = self._target_of(name)
            if target is None:
                continue
            if target.rule is None:
                self._copy(target.target, name, tensor)
                continue
            # A copy, since the source may be a reused buffer.
            parts[target.target][name] = tensor.to(self._state[target.target].device, copy=True)
            if len(parts[target.target]) == self._part_counts.get(target.target):
                self._convert(target.target, parts.pop(target.target))
        for target, tensors in parts.items():  # these have another number of parts than transformers saves
            self._convert(target, tensors)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return checksums of the model's tensors, converted to the checkpoint's form."""
        checksums = {}
        for name in names:
            target = self._target_of(name)
            if target is None:
                continue
            tensors = {name: self._state[target.target]}
            if target.rule is not None:
                parts = self._converted.get(target.target, [target.target])
                tensors = revert_weight_conversion(self.model, {part: self._state[part] for part in parts})
            if name in tensors:
                checksums[name] = checksum(self._transpose_back(tensors[name], target.rule))
        return checksums

    def move(self, device: torch.device) -> None:
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        self._state = self.model.state_dict()

    def _tower_names(self, folder: Path, hf_config: HfConfig) -> set[str]:
        """Return the model's tensors of its towers that the bridge sends: it has none that no computation reads."""
        family = family_of(hf_config)
        if not family.has_tower(hf_config):
            return set()
        names = SafetensorsFolder(folder).tensors if has_weights(folder) else ()
        entries = expand_mappings(family, hf_config, family.describe(hf_config, vision=True), names)
        sent = {name for entry in entries.values() for name in entry.hf if self._unused.search(name)}
        return {target.target for name in sent if (target := self._target_of(name))}

    def _count_parts(self) -> dict[str, int]:
        """Return the number of checkpoint tensors of each model tensor that has a conversion rule."""
        if not self._converters:
            return {}
        shapes = {name: tensor.to("meta") for name, tensor in self._state.items()}
        counts: dict[str, int] = defaultdict(int)
        for name in revert_weight_conversion(self.model, shapes):
            target = self._target_of(name)
            if target is not None:
                counts[target.target] += 1
        return counts

    def _target_of(self, name: str) -> _Target | None:
        """Return the target of a checkpoint tensor, None if transformers ignores it."""
        if name in self._targets:
            return self._targets[name]
        target = rename_source_key(name, self._renamings, self._converters, self.model.base_model_prefix, self._state)
        if target[0] not in self._state and name in self._state:
            target = name, None
        if target[0] not in self._state:
            if self._unused.search(name):
                return None
            raise ValueError(f"{name}: transformers' {type(self.model).__name__} has no such tensor")
        self._targets[name] = _Target(*target)
        return self._targets[name]

    def _transpose_back(self, tensor: Tensor, rule: str | None) -> Tensor:
        """Revert a Transpose(check_dims=True), as of Qwen3-VL-MoE's experts, which transformers 5.17 does not."""
        for operation in self._by_pattern[rule].operations if rule in self._by_pattern else ():
            if isinstance(operation, Transpose) and operation.check_dims:
                return tensor.transpose(operation.dim0, operation.dim1).contiguous()
        return tensor

    def _convert(self, target: str, tensors: dict[str, Tensor]) -> None:
        names = sorted(tensors, key=dot_natural_key)
        rules = [self._targets[name].rule for name in names]
        converter = deepcopy(self._by_pattern[str(rules[0])])
        for name, rule in zip(names, rules, strict=True):
            converter.add_tensor(target, name, rule, tensors[name])  # pyright: ignore[reportArgumentType]
        converted = converter.convert(target, model=self.model, config=self.model.config)
        self._converted[target] = list(converted)
        for converted_name, value in converted.items():
            self._copy(converted_name, names[0], value[0] if isinstance(value, list) else value)

    def _copy(self, target_name: str, name: str, value: Tensor) -> None:
        parameter = self._state[target_name]
        if parameter.shape != value.shape:
            raise ValueError(
                f"{name} has shape {list(value.shape)}, and {target_name} of the engine has {list(parameter.shape)}"
            )
        parameter.copy_(value)
        self._missing -= self._tied_names[target_name]
