"""A run that stopped goes on as if it had not, in the layout that it had and in others."""

import json
import math
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint.shard_regions import ShardRegion, load_regions, split_regions
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny
from tests.bridge.lora.reference import CASES, make_base
from tests.bridge.lora.reference import options_of as adapters_of
from tests.layouts import reference
from tests.layouts.test_layouts import CP, EP, ETP, OVERLAP, PP, SP, TP, VPP, ZERO
from tests.selection import selected_params
from tests.torchrun import torchrun

BOUND = 1e-5  # relative
BF16 = {"torch_dtype": "bfloat16"}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 0.02}
MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "lr": 3e-4}
HOST = {"optimizer_cpu_offload": True}
NARROW = BF16 | HOST | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "optimizer_offload_fraction": 0.5}
SCALED = BF16 | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS = {
    "one process": (1, {}),
    "DP2": (2, {}),
    "DP2 ZeRO-1": (2, ZERO),
    "DP2 ZeRO-1 overlapped in small buckets": (2, OVERLAP | {"bucket_size": 8000}),
    "TP2 SP": (2, {TP: 2, SP: True}),
    "PP2": (2, {PP: 2}),
    "PP2 VPP2": (2, {PP: 2, VPP: 2}),
    "EP2": (2, {EP: 2}),
    "TP2 SP EP2": (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
    "TP2 SP ETP2": (2, {TP: 2, SP: True, ETP: 2}),
    "CP2 ZeRO-1": (2, ZERO | {CP: 2}),
    "DP2 EP2 of whole parameters": (2, {EP: 2, "optimizer": "dist_muon"}),
    "TP4 SP": (4, {TP: 4, SP: True}),
    "PP2 VPP2 ZeRO-1": (4, ZERO | {PP: 2, VPP: 2}),
    "TP2 SP EP2 ZeRO-1": (4, ZERO | {TP: 2, SP: True, EP: 2, ETP: 1}),
}
WHOLE = "DP2 EP2 of whole parameters"
ONE, DP, ZERO1, SMALL, TP2, PP2, VPP2 = list(LAYOUTS)[:7]
# What is trained: what more its runs are given -> {layout that it stops in: layouts that it goes on in}.
WAYS: dict[str, tuple[str, dict, dict[str, tuple[str, ...]]]] = {
    "tied": ("qwen2", {}, {
        ONE: (ONE, SMALL, VPP2, "TP4 SP"),
        ZERO1: (ZERO1, DP, ONE, TP2, PP2),
        SMALL: (SMALL, "PP2 VPP2 ZeRO-1", "CP2 ZeRO-1"),
        TP2: (TP2, PP2, "TP4 SP", ZERO1),
        VPP2: (VPP2, PP2, DP),
        "PP2 VPP2 ZeRO-1": ("PP2 VPP2 ZeRO-1", TP2, SMALL),
    }),
    "experts": ("qwen3_moe", {}, {
        "EP2": ("EP2", ONE, "TP2 SP ETP2", ZERO1),
        "TP2 SP EP2": ("TP2 SP EP2", "EP2", PP2),
        "TP2 SP EP2 ZeRO-1": ("TP2 SP EP2 ZeRO-1", ONE, VPP2),
    }),
    "bf16": ("qwen2", BF16, {ZERO1: (ZERO1, DP, TP2), DP: (DP, SMALL, PP2), SMALL: (SMALL,)}),
    "fp16": ("qwen2", {"torch_dtype": "float16"}, {DP: (DP, ZERO1)}),
    "SGD": ("qwen2", SGD, {DP: (DP, ONE, TP2), TP2: (TP2, VPP2)}),
    "SGD bf16": ("qwen2", SGD | BF16, {DP: (DP, ONE)}),
    "Muon": ("qwen3_moe", MUON, {
        WHOLE: (WHOLE, ONE, "TP2 SP ETP2"), ONE: (ONE, WHOLE), "TP2 SP EP2": ("TP2 SP EP2", WHOLE, PP2),
    }),
    "Muon bf16": ("qwen3_moe", MUON | BF16, {WHOLE: (WHOLE, ONE), DP: (DP,)}),
    "host": ("qwen2", HOST, {ZERO1: (ZERO1, ONE, TP2)}),
    "host, moments in bf16": ("qwen2", NARROW, {ZERO1: (ZERO1, DP)}),
    "scaled states": ("qwen2", SCALED | HOST, {ZERO1: (ZERO1,)}),
    "scaled states on the device": ("qwen2", SCALED, {DP: (DP,)}),
    "dropout": ("qwen2", DROPOUT, {ZERO1: (ZERO1,), TP2: (TP2,), PP2: (PP2,)}),
    "adapters, one KV head": ("one KV head", {}, {
        TP2: (TP2, ONE), "TP4 SP": ("TP4 SP", TP2, PP2), ZERO1: (ZERO1, "TP4 SP"),
    }),
    "adapters, tied": ("tied embeddings", {}, {PP2: (PP2, ZERO1, TP2), SMALL: (SMALL, PP2)}),
    "adapters, no first stage": ("last layers", {}, {PP2: (PP2, ONE), ONE: (PP2,)}),
    "adapters, experts": ("experts", {}, {"EP2": ("EP2", ONE), "TP2 SP EP2": ("TP2 SP EP2", "TP2 SP ETP2", PP2)}),
    "adapters, DoRA bf16": ("DoRA", BF16, {TP2: (TP2, ZERO1)}),
}  # fmt: skip
FAULTS = {"one row off": ("tied", PP2, {"planted": True}), "other random numbers": ("dropout", TP2, {"same": False})}
SAME_AS_TRANSFORMERS = (TP2, PP2, ZERO1)  # where "tied" goes on in, from TP2
SCALED_WAYS = ("scaled states", "scaled states on the device")
# Where layouts differ by more than BOUND.
ROUNDED = ("bf16", "fp16", "SGD bf16", "Muon bf16", "adapters, DoRA bf16", "host, moments in bf16", *SCALED_WAYS)
GONE_ON = [(way, old, new) for way, (_, _, layouts) in WAYS.items() for old in layouts for new in layouts[old]]
# Each way of training once in the same layout and once in another; the other pairs are long.
DEFAULT = {
    ("tied", ONE, SMALL), ("tied", SMALL, SMALL), ("tied", TP2, TP2), ("tied", TP2, PP2), ("tied", TP2, ZERO1),
    ("tied", VPP2, VPP2),
    ("experts", "EP2", "EP2"), ("experts", "EP2", ONE),
    ("bf16", ZERO1, ZERO1), ("fp16", DP, DP), ("SGD", DP, DP),
    ("Muon", WHOLE, WHOLE), ("Muon", WHOLE, "TP2 SP ETP2"), ("dropout", TP2, TP2),
    ("host", ZERO1, ZERO1), ("host", ZERO1, TP2), ("host, moments in bf16", ZERO1, ZERO1),
    ("scaled states", ZERO1, ZERO1),
    ("adapters, one KV head", TP2, TP2), ("adapters, one KV head", TP2, ONE), ("adapters, tied", PP2, TP2),
    ("adapters, experts", "EP2", "EP2"),
}  # fmt: skip
assert set(GONE_ON) >= DEFAULT


def marked(case: tuple[str, ...]):
    """Return the parameters of a test of what stopped (way, layout), or of what goes on from there (way, old, new)."""
    is_default = any(case == each[: len(case)] for each in DEFAULT)
    return pytest.param(*case, marks=() if is_default else pytest.mark.long, id=f"{case[0]}: {' to '.join(case[1:])}")


class Launched:
    """Runs that stop (and, in the same processes, go on), then `gone_on`: those that go on from there, and faults."""

    def __init__(self, folder: Path, stopped: list[tuple[str, str]], gone_on: list[tuple[str, str, str]]):
        self.folder = folder
        self.stopped = self._launch([self._job(way, layout) for way, layout in stopped])
        jobs = [self._job(*case) for case in gone_on]
        jobs += [
            self._job(way, TP2, new) | {"name": name, "folder": str(folder / name)} | planted
            for name, (way, new, planted) in FAULTS.items()
            if (way, TP2, new) in gone_on
        ]
        self.gone_on = self._launch(jobs)

    def place(self, way: str, *layouts: str) -> Path:
        return self.folder / ": ".join((way, " to ".join(layouts)))

    def model(self, way: str) -> Path:
        model = WAYS[way][0]
        if model in CASES:
            return make_base(self.folder, CASES[model].tiny)
        folder = self.folder / model
        return folder if folder.exists() else tiny.save(folder, model)

    def _job(self, way: str, *layouts: str) -> dict:
        """One that stops in its first layout, or goes on in its second."""
        model, more, _ = WAYS[way]
        old, new = layouts[0], layouts[-1]
        world, flags = LAYOUTS[new]
        adapters = adapters_of(CASES[model]) if model in CASES else {}
        begun = {"from": str(self.place(way, old)), "same": old == new} if len(layouts) > 1 else {}
        return begun | {
            "name": str(self.place(way, *layouts)),
            "world": world,
            "model": str(self.model(way)),
            "options": {"packing": True} | adapters | more | {k: v for k, v in flags.items() if k != "bucket_size"},
            "bucket_size": flags.get("bucket_size"),
            "lora": model in CASES,
            "folder": str(self.place(way, *layouts)),
        }

    def _launch(self, jobs: list[dict]) -> dict[str, dict]:
        results = {}
        for world in sorted({job["world"] for job in jobs}):
            inputs, outputs = self.folder / "jobs.json", self.folder / "results.json"
            inputs.write_text(json.dumps([job for job in jobs if job["world"] == world]))
            outputs.unlink(missing_ok=True)
            done = torchrun("tests.tasks.train.train_state_worker", inputs, outputs, processes=world)
            assert outputs.exists(), f"the launch gave nothing:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
            results |= json.loads(outputs.read_text())
        return results


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """The runs of the tests that this session has selected, and of those that have no parameters."""
    chosen = {(params["way"], params["old"], params["new"]) for params in selected_params(request) if "new" in params}
    chosen |= {("tied", TP2, new) for new in SAME_AS_TRANSFORMERS}
    chosen |= {(way, TP2, new) for way, new, _ in FAULTS.values()}
    stopped = {(params["way"], params["layout"]) for params in selected_params(request) if "layout" in params}
    stopped |= {(way, old) for way, old, _ in chosen}
    return Launched(tmp_path_factory.mktemp("state"), sorted(stopped), [case for case in GONE_ON if case in chosen])


def result_of(results: dict[str, dict], name: object) -> dict:
    found = results.get(str(name), {"error": "the launch stopped before this job"})
    assert "error" not in found, found["error"]
    return found


def whole(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors put together from all files of a folder; every element has to be there once."""
    boxes: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in folder.glob("*.safetensors"):
        for label, tensor in load_file(file).items():
            if label.startswith("optimizer/"):
                name, _, offset = label.rpartition("@")
                boxes.setdefault(name, []).append(([int(at) for at in offset.split(",")], tensor))
    tensors = {}
    for name, found in boxes.items():
        shape = [max(at[dim] + tensor.shape[dim] for at, tensor in found) for dim in range(found[0][1].ndim)]
        tensors[name], times = torch.zeros(shape), torch.zeros(shape, dtype=torch.int)
        for at, tensor in found:
            here = tuple(slice(start, start + size) for start, size in zip(at, tensor.shape, strict=True))
            tensors[name][here] = tensor
            times[here] += 1
        assert bool((times == 1).all()), name
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize(("way", "old", "new"), [*map(marked, GONE_ON)])
def test_goes_on_as_if_it_had_not_stopped(way, old, new, launched):
    wanted = result_of(launched.stopped, launched.place(way, old))
    found = result_of(launched.gone_on, launched.place(way, old, new))
    if old == new:
        assert found == wanted
    else:
        bound = 0.02 if way in ROUNDED else BOUND
        assert found["losses"] == pytest.approx(wanted["losses"], rel=bound)
        assert found["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=5 * bound)
    before, after = whole(launched.place(way, old) / "state"), whole(launched.place(way, old, new) / "state")
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "layout"), [marked((way, old)) for way, (_, _, olds) in WAYS.items() for old in olds])
def test_files_have_each_element_once(way, layout, launched):
    """8 bytes for a parameter in fp32, 4 more with a master, 4 less under SGD and for Muon's matrices."""
    place = launched.place(way, layout)
    result_of(launched.stopped, place)
    assert len(list((place / "state").iterdir())) == LAYOUTS[layout][0]
    state = whole(place / "state")
    if way.startswith("adapters"):
        return  # their files have no padding, and some things twice
    weights = {}
    for file in (place / "weights").glob("*.safetensors"):
        weights |= load_file(file)
    small = {name: "SGD" in way or ("Muon" in way and "layers" in name and x.ndim == 2) for name, x in weights.items()}
    masters = 4 if way in ROUNDED else 0
    expected = sum(tensor.numel() * ((4 if small[name] else 8) + masters) for name, tensor in weights.items())
    assert sum(tensor.nbytes for tensor in state.values()) == expected


@pytest.mark.slow
def test_goes_on_as_transformers_does(launched):
    """What transformers and torch's AdamW do without a stop, and with the optimizer's state as torch has it."""
    expected = reference.train(tiny.model("qwen2"), steps=4)
    for new in SAME_AS_TRANSFORMERS:
        found = result_of(launched.gone_on, launched.place("tied", TP2, new))
        assert found["losses"] == pytest.approx(expected.losses[2:], rel=BOUND)
        assert found["grad_norms"] == pytest.approx(expected.grad_norms[2:], rel=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, launched):
    way, new, _ = FAULTS[fault]
    found = result_of(launched.gone_on, fault)
    wanted = result_of(launched.gone_on, launched.place(way, TP2, new))
    assert found["losses"][1] != pytest.approx(wanted["losses"][1], rel=10 * BOUND)


def test_what_no_file_has_is_named(tmp_path):
    """Boxes of 2 x 3 and 2 x 1 of a tensor of 4 x 4; the last rows are in a file of their own."""
    tensor = torch.arange(16.0).view(4, 4)
    save_file({"t@0,0": tensor[:2, :3].contiguous(), "t@0,3": tensor[:2, 3:].contiguous()}, tmp_path / "a.safetensors")
    save_file({"t@2,0": tensor[2:].clone(), "other": tensor}, tmp_path / "b.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    box = ShardRegion("t", (range(1, 4), range(1, 4)), torch.zeros(3, 3), first=True)
    load_regions([box], files)
    assert torch.equal(box.values, tensor[1:, 1:])
    with pytest.raises(ValueError, match="6 of 9 elements of t are in no file"):
        load_regions([box], files[:1])
    with pytest.raises(ValueError, match="of u are in no file"):
        load_regions([box._replace(name="u")], files)


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 1, 4), (2, 3, 2, 3)])
def test_regions_of_a_run(shape):
    tensor = torch.arange(math.prod(shape)).view(shape)
    for start in range(tensor.numel()):
        for stop in range(start, tensor.numel() + 1):
            regions = list(split_regions(shape, start, stop))
            found = [tensor[tuple(slice(each.start, each.stop) for each in region)].flatten() for region in regions]
            assert torch.cat([tensor.flatten()[:0], *found]).tolist() == list(range(start, stop))
            assert len(regions) <= 2 * len(shape) - 1
