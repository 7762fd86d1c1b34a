"""The cases of reference.py in many layouts: one launch each number of processes, for all tests of a session."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bridge.lora.reference import CASES, EPS, Trained, make_adapter, make_base, options_of, train
from tests.layouts.test_layouts import ACCOUNTED, CP, EP, ETP, FULL, LAYOUT, PP, SP, TP, VPP, ZERO
from tests.torchrun import torchrun

LAYOUTS = {
    "one process": (1, {}),
    "recompute": (1, FULL | {"recompute_method": "uniform"}),
    "TP2": (2, {TP: 2, SP: False}),
    "TP2 SP": (2, {TP: 2, SP: True}),
    "PP2": (2, {PP: 2}),
    "PP2 VPP2": (2, {PP: 2, VPP: 2}),
    "PP2 VPP3 accounted": (2, {PP: 2, VPP: 3} | ACCOUNTED),
    "PP2 embedding apart": (2, ZERO | {PP: 2, LAYOUT: "E|ttttL"}),
    "PP2 loss apart": (2, ZERO | {PP: 2, LAYOUT: "Et*4|L"}),
    "CP2": (2, {CP: 2}),
    "DP2 ZeRO-1": (2, ZERO),
    "EP2": (2, {EP: 2}),
    "TP2 SP ETP2": (2, {TP: 2, SP: True, ETP: 2}),
    "TP2 SP EP2": (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
    "TP2 SP recompute": (2, FULL | {"recompute_method": "uniform", TP: 2, SP: True}),
    "PP2 recompute": (2, FULL | ZERO | {"recompute_method": "uniform", PP: 2}),
    "EP2 ZeRO-1": (2, ZERO | {EP: 2}),
}
# Each case once, in one process or where it is special; each layout once.
WHERE = {
    "qwen3": ("one process", "recompute", "TP2 SP", "PP2 VPP2", "PP2 embedding apart", "CP2", "DP2 ZeRO-1"),
    "llama": ("one process",),
    "one KV head": ("TP2 SP",),
    "some projections": ("TP2 SP",),
    # Stages, and under VPP chunks, with nothing to train.
    "last layers": ("PP2 recompute",),
    "embedding": ("one process", "TP2"),
    "DoRA": ("one process", "TP2 SP"),
    "all biases": ("one process",),
    "some biases": ("TP2 SP",),
    "tied embeddings": ("PP2",),
    "dense layers": ("TP2 SP EP2",),
    "experts": ("one process", "TP2 SP ETP2", "EP2 ZeRO-1"),
    "experts and routers": ("one process", "EP2"),
    "stacked experts": ("one process", "TP2 SP EP2"),
}
# The product of both: long.
WHERE_LONG = {
    "qwen3": ("TP2", "PP2", "PP2 VPP3 accounted", "PP2 loss apart", "TP2 SP recompute"),
    "llama": ("TP2 SP", "PP2"),
    "some projections": ("one process", "PP2"),
    "first layers": ("PP2", "PP2 VPP2"),
    "last layers": ("one process", "TP2 SP", "PP2", "PP2 VPP2"),
    "embedding": ("TP2 SP", "PP2", "PP2 embedding apart", "PP2 loss apart"),
    "DoRA": ("PP2", "TP2"),
    "all biases": ("TP2 SP", "PP2"),
    "tied embeddings": ("one process", "TP2 SP", "PP2 VPP3 accounted", "DP2 ZeRO-1"),
    "dense layers": ("one process", "TP2 SP", "PP2"),
    "experts": ("recompute", "EP2", "TP2 SP EP2", "PP2 VPP2", "CP2"),
    "experts and routers": ("TP2 SP ETP2", "TP2 SP EP2"),
    "stacked experts": ("TP2 SP ETP2", "EP2"),
    "Mamba-2": ("one process", "TP2 SP", "CP2"),
    "Mamba-2 and experts": ("one process", "TP2 SP ETP2"),
    "Kimi delta attention": ("one process", "TP2 SP ETP2"),
    "pieces of Mamba-2": ("TP2 SP", "CP2"),
    "parallel mixers": ("one process", "TP2 SP"),
    "short convolutions": ("TP2 SP",),
}
FAMILIES = ("phi3", "glm4", "gemma3", "Moonlight", "shared experts", "hybrid")
KEPT = {
    "qwen3": ("one process", "TP2 SP"),
    "some projections": ("TP2",),
    "embedding": ("TP2 SP",),
    "DoRA": ("TP2 SP",),
    "tied embeddings": ("PP2",),
    "experts": ("one process", "TP2 SP EP2"),
    "stacked experts": ("one process", "EP2"),
    **dict.fromkeys(FAMILIES, ("one process",)),
}
KEPT_LONG = {
    "qwen3": ("PP2 VPP2",),
    "embedding": ("one process",),
    "DoRA": ("one process",),
    "all biases": ("TP2 SP",),
    "experts": ("TP2 SP ETP2",),
    "stacked experts": ("TP2 SP ETP2",),
    "stacked experts of Granite": ("one process",),
    "stacked experts of Llama 4": ("TP2 SP EP2",),
    "stacked experts and MLPs": ("TP2 SP EP2",),  # its routers are too close to a choice to train
    "experts and routers": ("one process", "TP2 SP EP2"),
}


def pairs(cases: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(case, layout) for case, layouts in cases.items() for layout in layouts]


TRAINED, TRAINED_LONG = pairs(WHERE), pairs(WHERE_LONG)
DROPPING = ("one process", "recompute", "TP2 SP")
ROUNDED = [("qwen3", "TP2 SP"), ("experts", "one process")]
FAULTS = ("scaling", "swapped", "shard")
# What else is done with an adapter, and where: way -> (what its jobs have beside the others, [(case, layout), ...]).
WAYS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "trained": ({}, TRAINED),
    "kept": ({"steps": 0}, pairs(KEPT)),
    "new": ({"steps": 0, "new": True}, [pair for pair in pairs(KEPT) if len(KEPT[pair[0]]) > 1]),
    "merged a hundred times": ({"steps": 0, "merges": 100}, [("some projections", "TP2")]),
    "dropout": ({"options": {"lora_dropout": 0.5}}, [("qwen3", layout) for layout in DROPPING]),
    "bf16": ({"options": {"torch_dtype": "bfloat16"}}, ROUNDED),
    "bf16 beside fp32": ({"options": {"torch_dtype": "bfloat16", "lora_dtype": "float32"}}, ROUNDED),
    **{fault: ({"planted": fault, "steps": 1}, [("qwen3", "TP2 SP")]) for fault in FAULTS},
}


# The same in the places that are long.
WAYS_LONG: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "trained": ({}, TRAINED_LONG),
    "kept": ({"steps": 0}, pairs(KEPT_LONG)),
    "new": ({"steps": 0, "new": True}, pairs(KEPT_LONG)),
}


class Launched:
    """References, and what the layouts made of the same adapters.

    One launch for each number of processes, with `ways`; and one for each of `ways_long`, when a test asks for it.
    """

    def __init__(
        self,
        folder: Path,
        layouts: dict[str, Any] = LAYOUTS,
        ways: dict[str, Any] = WAYS,
        ways_long: dict[str, Any] = WAYS_LONG,
        *,
        gpu: bool = False,
    ):
        self.folder, self.layouts, self.ways, self.ways_long, self.gpu = folder, layouts, ways, ways_long, gpu
        self._references: dict[str, Trained] = {}
        self._results: dict[tuple[int, bool], dict[str, dict]] = {}

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
        world, is_long = self.layouts[layout][0], (case, layout) in self.ways_long.get(way, ({}, []))[1]
        if (world, is_long) not in self._results:
            jobs = self._jobs(world, self.ways_long if is_long else self.ways)
            folder = self.folder / f"world {world}{' long' * is_long}"
            self._results[world, is_long] = launch(world, jobs, folder, gpu=self.gpu)
        result = self._results[world, is_long].get(_named(case, layout, way))
        assert result is not None, "the launch stopped before this layout"
        assert "error" not in result, result.get("error")
        return result

    def _jobs(self, world: int, ways: dict[str, Any]) -> list[dict[str, Any]]:
        jobs = []
        for way, (settings, places) in ways.items():
            for case, layout in places:
                if self.layouts[layout][0] == world:
                    name = _named(case, layout, way)
                    job = {"name": name, "model": str(self.base(case)), "folder": str(self.folder / name)}
                    options = {"packing": True, "adam_eps": EPS} | options_of(CASES[case]) | self.layouts[layout][1]
                    job |= {"adapter": str(self.adapter(case)), "options": options | settings.get("options", {})}
                    jobs.append(settings | job)
        return jobs


def _named(case: str, layout: str, way: str) -> str:
    return f"{case}, {way}, {layout}"


def launch(world: int, jobs: list[dict], folder: Path, *, gpu: bool = False) -> dict[str, dict]:
    """Run tests.bridge.lora.worker; what each job gave, by name."""
    folder.mkdir(parents=True)
    inputs, results = folder / "jobs.json", folder / "results.json"
    inputs.write_text(json.dumps(jobs))
    done = torchrun("tests.bridge.lora.worker", inputs, results, processes=world, gpu=gpu)
    assert results.exists(), f"the launch gave nothing:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(results.read_text())
