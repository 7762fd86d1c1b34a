"""The cases of reference.py in many layouts: one launch each number of processes, for all tests of a session."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.layouts.test_layouts import CP, EP, ETP, FULL, PP, SP, TP, VPP, ZERO
from tests.lora.reference import CASES, EPS, Trained, make_adapter, make_base, options_of, train
from tests.torchrun import torchrun

LAYOUTS = {
    "one process": (1, {}),
    "recompute": (1, FULL | {"recompute_method": "uniform"}),
    "TP2": (2, {TP: 2, SP: False}),
    "TP2 SP": (2, {TP: 2, SP: True}),
    "PP2": (2, {PP: 2}),
    "PP2 VPP2": (2, {PP: 2, VPP: 2}),
    "CP2": (2, {CP: 2}),
    "DP2 ZeRO-1": (2, ZERO),
    "EP2": (2, {EP: 2}),
    "TP2 SP ETP2": (2, {TP: 2, SP: True, ETP: 2}),
    "TP2 SP EP2": (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
    "TP2 SP recompute": (2, FULL | {"recompute_method": "uniform", TP: 2, SP: True}),
    "PP2 recompute": (2, FULL | ZERO | {"recompute_method": "uniform", PP: 2}),
    "EP2 ZeRO-1": (2, ZERO | {EP: 2}),
}
DENSE = ("one process", "recompute", "TP2", "TP2 SP", "PP2", "PP2 VPP2", "CP2", "DP2 ZeRO-1", "TP2 SP recompute")
FEW = ("one process", "TP2 SP", "PP2")
MOE = ("EP2", "TP2 SP ETP2", "TP2 SP EP2")
WHERE = {
    "qwen3": DENSE,
    "llama": FEW,
    "one KV head": ("TP2 SP",),
    "some projections": FEW,
    # Stages, and under VPP chunks, with nothing to train.
    "first layers": ("PP2", "PP2 VPP2"),
    "last layers": (*FEW, "PP2 VPP2", "PP2 recompute"),
    "embedding": (*FEW, "TP2"),
    "DoRA": (*FEW, "TP2"),
    "all biases": FEW,
    "some biases": ("TP2 SP",),
    "tied embeddings": (*FEW, "DP2 ZeRO-1"),
    "dense layers": (*FEW, "TP2 SP EP2"),
    "experts": ("one process", "recompute", *MOE, "PP2 VPP2", "CP2", "EP2 ZeRO-1"),
    "experts and routers": ("one process", *MOE),
}
TRAINED = [(case, layout) for case, layouts in WHERE.items() for layout in layouts]
FAMILIES = ("phi3", "glm4", "gemma3", "Moonlight", "shared experts", "hybrid")
KEPT = {
    "qwen3": ("one process", "TP2 SP", "PP2 VPP2"),
    "some projections": ("TP2",),
    "embedding": ("one process", "TP2 SP"),
    "DoRA": ("one process", "TP2 SP"),
    "all biases": ("TP2 SP",),
    "tied embeddings": ("PP2",),
    "experts": ("one process", "TP2 SP EP2", "TP2 SP ETP2"),
    "experts and routers": ("one process", "TP2 SP EP2"),
    **dict.fromkeys(FAMILIES, ("one process",)),
}
DROPPING = ("one process", "recompute", "TP2", "TP2 SP")
ROUNDED = [("qwen3", "TP2 SP"), ("experts", "one process")]
FAULTS = ("scaling", "swapped", "shard")
# What else is done with an adapter, and where: way -> (what its jobs have beside the others, [(case, layout), ...]).
WAYS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "trained": ({}, TRAINED),
    "kept": ({"steps": 0}, [(case, layout) for case, layouts in KEPT.items() for layout in layouts]),
    "new": ({"steps": 0, "new": True}, [(case, layout) for case, layouts in KEPT.items() for layout in layouts]),
    "merged a hundred times": ({"steps": 0, "merges": 100}, [("some projections", "TP2")]),
    "dropout": ({"options": {"lora_dropout": 0.5}}, [("qwen3", layout) for layout in DROPPING]),
    "bf16": ({"options": {"torch_dtype": "bfloat16"}}, ROUNDED),
    "bf16 beside fp32": ({"options": {"torch_dtype": "bfloat16", "lora_dtype": "float32"}}, ROUNDED),
    **{fault: ({"planted": fault, "steps": 1}, [("qwen3", "TP2 SP")]) for fault in FAULTS},
}


class Launched:
    """References, and what the layouts made of the same adapters: one launch each number of processes."""

    def __init__(
        self, folder: Path, layouts: dict[str, Any] = LAYOUTS, ways: dict[str, Any] = WAYS, *, gpu: bool = False
    ):
        self.folder, self.layouts, self.ways, self.gpu = folder, layouts, ways, gpu
        self._references: dict[str, Trained] = {}
        self._results: dict[int, dict[str, dict]] = {}

    def base(self, case: str) -> Path:
        return make_base(self.folder, CASES[case].tiny)

    def adapter(self, case: str) -> Path:
        """What training starts from."""
        made = self.folder / f"{case}, begun"
        if not made.exists():
            make_adapter(CASES[case], self.base(case), made)
        return made

    def reference(self, case: str) -> Trained:
        if case not in self._references:
            torch.set_num_threads(1)
            self._references[case] = train(CASES[case], self.base(case), self.adapter(case))
        return self._references[case]

    def saved(self, case: str, layout: str, way: str = "trained") -> Path:
        """The folder of a job, which has been done: adapter and merged are in it."""
        self.result(case, layout, way)
        return self.folder / _named(case, layout, way)

    def tensors(self, case: str, layout: str, way: str = "trained") -> dict[str, Tensor]:
        return load_file(self.saved(case, layout, way) / "adapter" / "adapter_model.safetensors")

    def result(self, case: str, layout: str, way: str = "trained") -> dict[str, Any]:
        world = self.layouts[layout][0]
        if world not in self._results:
            self._results[world] = launch(world, self._jobs(world), self.folder / f"world {world}", gpu=self.gpu)
        result = self._results[world].get(_named(case, layout, way))
        assert result is not None, "the launch stopped before this layout"
        assert "error" not in result, result.get("error")
        return result

    def _jobs(self, world: int) -> list[dict[str, Any]]:
        found = []
        for way, (settings, places) in self.ways.items():
            for case, layout in places:
                if self.layouts[layout][0] == world:
                    name = _named(case, layout, way)
                    job = {"name": name, "model": str(self.base(case)), "folder": str(self.folder / name)}
                    options = {"packing": True, "adam_eps": EPS} | options_of(CASES[case]) | self.layouts[layout][1]
                    job |= {"adapter": str(self.adapter(case)), "options": options | settings.get("options", {})}
                    found.append(settings | job)
        return found


def _named(case: str, layout: str, way: str) -> str:
    return f"{case}, {way}, {layout}"


def launch(world: int, jobs: list[dict], folder: Path, *, gpu: bool = False) -> dict[str, dict]:
    """Run tests.lora.worker; what each job gave, by name."""
    folder.mkdir(parents=True)
    inputs, results = folder / "jobs.json", folder / "results.json"
    inputs.write_text(json.dumps(jobs))
    done = torchrun("tests.lora.worker", inputs, results, processes=world, gpu=gpu)
    assert results.exists(), f"the launch gave nothing:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(results.read_text())
