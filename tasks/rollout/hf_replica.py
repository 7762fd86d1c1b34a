"""transformers' model as a place for weights by the names of a checkpoint, in place, one tensor after another.

transformers holds some tensors in another form than checkpoints have (experts fused, parts renamed). Its own rules,
those of `from_pretrained`, say which.
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
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from ...bridge.checkpoint.hub import read_config
from ...bridge.checkpoint.pretrained import empty_model, load_config, load_model
from ...bridge.families import family_of
from .weight_sync import checksum


class _Place(NamedTuple):
    """Which of the model's tensors is made of a checkpoint's, and by which rule; no rule: it is that tensor."""

    target: str
    rule: str | None


class Replica:
    """A model of `folder` that only generates. `load`: with the folder's weights; else every tensor has to come.

    Raises ValueError where transformers or the bridge does not know the model.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device, load: bool):
        if load:
            self.model: Any = load_model(folder, dtype=dtype).to(device)
        else:
            config = load_config(folder)
            if hasattr(config, "quantization_config"):  # weights come as they are trained
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
        config = read_config(folder)
        pattern = family_of(config).describe(config).passthrough  # vision towers, MTP
        unused = [*(self.model._keys_to_ignore_on_load_unexpected or ()), *([f"^(?:{pattern})"] if pattern else [])]
        self._unused = re.compile("|".join(unused) or "(?!)")
        self._places: dict[str, _Place] = {}
        self._parts = self._count_parts()
        at: dict[int, set[str]] = defaultdict(set)
        for name, tensor in self._state.items():
            at[tensor.data_ptr()].add(name)
        self._same = {name: at[tensor.data_ptr()] for name, tensor in self._state.items()}  # several names where tied
        # What has come neither from the folder nor by `update`.
        self.lacking = set() if load else {name for name in self._state if not self._unused.search(name)}

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors by their checkpoint's names. Raises ValueError for one that has no place, or another shape."""
        gathered: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in weights:
            place = self._place(name)
            if place is None:
                continue
            if place.rule is None:
                self._copy(place.target, name, tensor)
                continue
            gathered[place.target][name] = tensor.to(self._state[place.target].device, copy=True)  # it may be a buffer
            if len(gathered[place.target]) == self._parts.get(place.target):
                self._convert(place.target, gathered.pop(place.target))
        for target, tensors in gathered.items():  # in another form than the one that transformers itself would save
            self._convert(target, tensors)

    def checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Of the model's own tensors, in the form that checkpoints have."""
        found = {}
        for name in names:
            place = self._place(name)
            if place is None:
                continue
            own = {name: self._state[place.target]}
            if place.rule is not None:
                own = revert_weight_conversion(self.model, {place.target: self._state[place.target]})
            if name in own:
                found[name] = checksum(own[name])
        return found

    def move(self, device: torch.device) -> None:
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        self._state = self.model.state_dict()

    def _count_parts(self) -> dict[str, int]:
        """Of how many tensors of a checkpoint each of the model's is made, where a rule makes it."""
        if not self._converters:
            return {}
        shapes = {name: tensor.to("meta") for name, tensor in self._state.items()}
        counts: dict[str, int] = defaultdict(int)
        for name in revert_weight_conversion(self.model, shapes):
            place = self._place(name)
            if place is not None:
                counts[place.target] += 1
        return counts

    def _place(self, name: str) -> _Place | None:
        """None: a tensor that transformers leaves out."""
        if name in self._places:
            return self._places[name]
        found = rename_source_key(name, self._renamings, self._converters, self.model.base_model_prefix, self._state)
        if found[0] not in self._state and name in self._state:
            found = name, None
        if found[0] not in self._state:
            if self._unused.search(name):
                return None
            raise ValueError(f"{name}: transformers' {type(self.model).__name__} has no place for it")
        self._places[name] = _Place(*found)
        return self._places[name]

    def _convert(self, target: str, tensors: dict[str, Tensor]) -> None:
        names = sorted(tensors, key=dot_natural_key)
        rules = [self._places[name].rule for name in names]
        converter = deepcopy(self._by_pattern[str(rules[0])])
        for name, rule in zip(names, rules, strict=True):
            converter.add_tensor(target, name, rule, tensors[name])  # pyright: ignore[reportArgumentType]
        made = converter.convert(target, model=self.model, config=self.model.config)
        for own, value in made.items():
            self._copy(own, names[0], value[0] if isinstance(value, list) else value)

    def _copy(self, target: str, name: str, value: Tensor) -> None:
        own = self._state[target]
        if own.shape != value.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}, and {target} of the engine {list(own.shape)}")
        own.copy_(value)
        self.lacking -= self._same[target]
