"""Adapters between PEFT's and megatron-core's formats, beside a Hugging Face model: `megatron export`."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import prepared, tiny
from tests.bridge.lora.reference import CASES, make_adapter, make_base

pytestmark = pytest.mark.slow
WEIGHTS = "adapter_model.safetensors"
TP2 = "--tensor_model_parallel_size 2"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("forms")


def make(place: Path, case: str) -> str:
    """Make a case's model and adapter once, and return the adapter's name; the model's ends in -base."""
    name = case.replace(" ", "-")
    base = place / f"{name}-base"
    if not base.exists():
        tiny.save_tokenizer(make_base(place / "made", CASES[case].tiny).rename(base))
        make_adapter(CASES[case], base, place / name)
    return name


def run(place: Path, words: str, processes: int = 1, *, fails: bool = False) -> str:
    environment = os.environ | {"HF_HOME": str(place / "cache"), "NPROC_PER_NODE": str(processes)}
    words = f"-m megaswift.cli.main megatron export {words} --exist_ok true"
    done = prepared.run(
        words.split(), processes=processes if processes > 1 else None, cwd=place, environment=environment
    )
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def same(one: Path, other: Path) -> bool:
    """Whether two adapters have the same bytes, the base's embedding aside, which PEFT writes too."""
    left, right = ({k: v for k, v in load_file(folder / WEIGHTS).items() if ".base_layer." not in k}
                   for folder in (one, other))  # fmt: skip
    return left.keys() == right.keys() and all(
        right[name].dtype == left[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize(
    ("case", "there", "back"),
    [
        ("qwen3", "", ""),
        pytest.param("embedding", TP2, "", marks=pytest.mark.long),
        pytest.param("DoRA", "", TP2, marks=pytest.mark.long),
        pytest.param("experts and routers", f"{TP2} --expert_model_parallel_size 2", TP2, marks=pytest.mark.long),
    ],
)
def test_pefts_files_come_back_bit_equal(case: str, there: str, back: str, place: Path) -> None:
    """PEFT -> megatron-core -> PEFT; an adapter keeps its dtype, whatever the model's."""
    name = make(place, case)
    model = f"--model {name}-base"
    dtype = "" if CASES[case].options.get("modules_to_save") else "--torch_dtype bfloat16"
    run(place, f"{model} --adapters {name} --to_mcore true --merge_lora false {dtype} {there}", 2 if there else 1)
    there_folder = place / f"{name}-mcore"
    assert (there_folder / "iter_0000001" / ".metadata").is_file()
    assert json.loads((there_folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    run(place, f"{model} --mcore_adapter {name}-mcore --to_hf true --merge_lora false {back}", 2 if back else 1)
    assert same(place / name, place / f"{name}-mcore-hf")


@pytest.mark.long
def test_an_adapter_in_bfloat16_stays_so(place: Path) -> None:
    """The model in fp32; without --model, which the adapter's config names."""
    make(place, "qwen3")
    half = place / "half"
    half.mkdir()
    weights = load_file(place / "qwen3" / WEIGHTS)
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, half / WEIGHTS)
    (half / "adapter_config.json").write_bytes((place / "qwen3" / "adapter_config.json").read_bytes())
    run(place, "--adapters half --to_mcore true")
    run(place, "--mcore_adapter half-mcore --to_hf true --merge_lora false")
    assert same(half, place / "half-mcore-hf")


@pytest.mark.long
def test_every_form_gives_the_same_merged_weights(place: Path) -> None:
    """Merged from PEFT's file, from megatron-core's, to Hugging Face and by way of megatron-core; precision tested."""
    model = f"--model {make(place, 'qwen3')}-base"
    assert "passed" in run(place, f"{model} --adapters qwen3 --to_mcore true --merge_lora false "
                                  "--output_dir low --test_convert_precision true")  # fmt: skip
    assert "passed" in run(place, f"{model} --mcore_adapter low --to_hf true --merge_lora false "
                                  "--output_dir alone --test_convert_precision true")  # fmt: skip
    run(place, f"{model} --adapters qwen3 --to_hf true --output_dir wanted")
    wanted = load_file(place / "wanted" / "model.safetensors")
    run(place, "--mcore_adapter low --merge_lora true --output_dir direct")
    printed = run(place, f"{model} --mcore_adapter low --merge_lora true --to_mcore true "
                         f"--output_dir merged {TP2} --test_convert_precision true", 2)  # fmt: skip
    assert "passed" in printed
    assert not (place / "merged" / "adapter-in-peft-format").exists()
    run(place, "--mcore_model merged --to_hf true --output_dir around")
    run(place, f"{model} --to_mcore true --output_dir whole")
    run(place, "--mcore_model whole --adapters qwen3 --to_mcore true --merge_lora true --output_dir whole-merged")
    run(place, "--mcore_model whole-merged --to_hf true --output_dir whole-back")
    for folder in ("direct", "whole-back"):
        found = load_file(place / folder / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), folder
    for name, tensor in load_file(place / "around" / "model.safetensors").items():  # TP2 sums in another order
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)
