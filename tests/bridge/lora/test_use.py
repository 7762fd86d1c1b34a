"""`swift export` and `swift infer` with adapters: what they make gives what PEFT, or matrices added by hand, give."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megaswift.tasks import infer
from megaswift.tasks.infer_media import EncodedPrompt
from megaswift.tasks.options import InferOptions
from megaswift.tasks.system.atomic_dir import verify_files
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests import prepared, tiny
from tests.bridge.lora.reference import (
    ALPHA,
    CASES,
    RANK,
    adapt_by_hand,
    distance,
    load_base,
    log_probs_of,
    make_adapter,
    make_base,
)

pytestmark = pytest.mark.slow
BOUND = 1e-4  # of log-probabilities, relative to the largest
PREFIX = "base_model.model."
USED = ("some projections", "DoRA", "embedding", "all biases", "experts", "experts and routers")
# The command line in a process that a fault is planted into: argv, then what to do before.
PLANTED = """
import sys
from megaswift.cli.main import main
from megaswift.tasks.convert import export
real = export.merge_and_unload
def doubled(chunks):
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("layers.2.mlp.linear_fc2.adapter.lora_B"):
                parameter.data *= 1.5
    real(chunks)
export.merge_and_unload = doubled
if __name__ == "__main__":
    sys.exit(main("swift", sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with tiny models and adapters, each under its case's name without blanks."""
    folder = tmp_path_factory.mktemp("use")
    for case in USED:
        base = make_base(folder / "made", CASES[case].tiny).rename(folder / f"{named(case)}-base")
        tiny.save_tokenizer(base)
        make_adapter(CASES[case], base, folder / named(case))
    (folder / "train.jsonl").write_text('{"query": "What is 2 + 2?", "response": "4"}\n' * 4)
    return folder


def named(case: str) -> str:
    return case.replace(" ", "-")


def run(place: Path, command: str, processes: int | None = None, *, fails: bool = False) -> str:
    """Run a command in `place`; what it printed."""
    done = prepared.run(
        ["-m", "megaswift.cli.main", *command.split()], processes=processes, cwd=place, environment=environment(place)
    )
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def environment(place: Path) -> dict[str, str]:
    return os.environ | {"HF_HOME": str(place / "cache")}


def wanted(place: Path, case: str) -> Any:
    """transformers' model with the adapter of a case: PEFT's doing, or for experts ours by hand."""
    base, adapter = load_base(place / f"{named(case)}-base"), place / named(case)
    if not CASES[case].by_hand:
        return PeftModel.from_pretrained(base, adapter)
    adapt_by_hand(base, load_file(adapter / "adapter_model.safetensors"), ALPHA / RANK)
    return base


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    left, right = tensors(one), tensors(other)
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def visible(place: Path, name: str) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if name in entry.name)


@pytest.fixture(scope="module")
def merged(place: Path):
    """`swift export --merge_lora true` of a case, once, in one process: the folder that it made."""

    def folder(case: str) -> Path:
        made = place / f"{named(case)}-merged"  # the default
        if not made.exists():
            model = f"--model {named(case)}-base" if CASES[case].by_hand else ""  # PEFT's name theirs
            printed = run(place, f"swift export --adapters {named(case)} --merge_lora true {model}")
            assert f"exported: {made}" in printed
        return made

    return folder


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in ("all biases", "experts") else ()) for case in USED]
)
def test_a_merged_folder_gives_what_the_adapter_does(case: str, place: Path, merged) -> None:
    folder, base = merged(case), place / f"{named(case)}-base"
    expected = log_probs_of(wanted(place, case))
    assert distance(log_probs_of(load_base(folder)), expected) < BOUND
    assert distance(log_probs_of(load_base(base)), expected) > 0.01
    assert not verify_files(folder, checksums=True)
    assert tensors(folder).keys() == tensors(base).keys()
    for name in ("config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    options = json.loads((folder / "args.json").read_text())["options"]
    assert options["adapters"]["value"] == [named(case)]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("some projections", "--tensor_model_parallel_size 2"),
        ("experts and routers", "--pipeline_model_parallel_size 2"),
        pytest.param("embedding", "--tensor_model_parallel_size 2", marks=pytest.mark.long),
        pytest.param("DoRA", "--tensor_model_parallel_size 2", marks=pytest.mark.long),
        pytest.param(
            "experts", "--tensor_model_parallel_size 2 --expert_model_parallel_size 2", marks=pytest.mark.long
        ),
    ],
)
def test_two_processes_merge_what_one_does_and_by_way_of_megatron(case, layout, place: Path, merged) -> None:
    """Up to rounding: a product of a part of a matrix may be summed in another order."""
    there, back = f"{named(case)}-there", f"{named(case)}-back"
    line = f"megatron export --adapters {named(case)} --model {named(case)}-base --merge_lora true --to_mcore true"
    run(place, f"{line} {layout} --output_dir {there}", 2)
    run(place, f"swift export --mcore_model {there} --to_hf true --output_dir {back}")
    expected, found = tensors(merged(case)), tensors(place / back)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_in_bfloat16_a_sum_is_rounded_once(place: Path) -> None:
    """Of weights in bf16: what the fp32 sum of each with scaling * B @ A is rounded to."""
    case, base = "some projections", place / "half-base"
    shutil.copytree(place / f"{named(case)}-base", base)
    half = {name: tensor.bfloat16() for name, tensor in tensors(base).items()}
    save_file(half, base / "model.safetensors", {"format": "pt"})
    line = f"swift export --adapters {named(case)} --model {base} --merge_lora true --torch_dtype bfloat16"
    printed = run(place, f"{line} --output_dir half --test_convert_precision true")
    assert "logits in float32" in printed
    assert "FAILED" not in printed
    low, twice = load_file(place / named(case) / "adapter_model.safetensors"), 0
    for name, tensor in tensors(place / "half").items():
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in low:
            assert torch.equal(tensor, half[name]), name
            continue
        product = ALPHA / RANK**0.5 * low[f"{module}.lora_B.weight"] @ low[f"{module}.lora_A.weight"]
        once = (half[name].float() + product).bfloat16()
        assert (tensor == once).float().mean() > 0.999, name  # but where an fp32 sum is on the edge
        twice += int((tensor != half[name] + product.bfloat16()).sum())
    assert twice > 100


@pytest.fixture(scope="module")
def in_megatron(place: Path):
    """A case's base and adapter in megatron-core's format: a run that learns nothing has saved the adapter, in TP2."""

    def folders(case: str) -> tuple[str, str]:
        base, adapter = f"{named(case)}-base-mcore", f"{named(case)}-run/checkpoint-1"
        if not (place / base).exists():
            run(place, f"swift export --model {named(case)}-base --to_mcore true")
            line = f"megatron sft --mcore_model {base} --adapters {named(case)} --tuner_type lora --lr 0"
            line += " --weight_decay 0 --train_iters 1 --global_batch_size 2 --dataset train.jsonl"
            line += " --dataloader_num_workers 0 --no_save_optim true --save_safetensors false --add_version false"
            run(
                place,
                f"{line} --tensor_model_parallel_size 2 --sequence_parallel true --output_dir {named(case)}-run",
                2,
            )
        return base, adapter

    return folders


@pytest.mark.parametrize(
    "case", ["DoRA", *(pytest.param(case, marks=pytest.mark.long) for case in ("embedding", "experts and routers"))]
)
def test_from_megatrons_format_merged_and_alone(case: str, place: Path, merged, in_megatron) -> None:
    base, adapter = in_megatron(case)
    line = f"swift export --mcore_model {base} --mcore_adapter {adapter} --to_hf true"
    printed = run(place, f"{line} --test_convert_precision true")
    assert "passed" in printed
    folder = place / f"{adapter}-merged"  # the default
    assert same(merged(case), folder)

    # The type is the model's, of which --modules_to_save are; an adapter keeps its own.
    dtype = "float32" if "modules_to_save" in CASES[case].options else "bfloat16"
    run(place, f"{line} --merge_lora false --torch_dtype {dtype}")
    alone = place / f"{adapter}-hf"
    begun = load_file(place / named(case) / "adapter_model.safetensors")
    begun.pop(f"{PREFIX}model.embed_tokens.base_layer.weight", None)  # the base's, which PEFT writes too
    saved = load_file(alone / "adapter_model.safetensors")
    assert saved.keys() == begun.keys()
    assert all(torch.equal(tensor, begun[name]) for name, tensor in saved.items())
    model = PeftModel.from_pretrained(load_base(place / f"{named(case)}-base"), alone)
    assert distance(log_probs_of(model), log_probs_of(wanted(place, case))) < BOUND

    # With what PEFT opens the tested side is theirs: the adapter of experts one by one too.
    printed = run(
        place,
        f"swift export --adapters {alone} --model {named(case)}-base --merge_lora true --test_convert_precision true "
        f"--output_dir {named(case)}-tested",
    )
    assert "passed" in printed
    assert same(merged(case), place / f"{named(case)}-tested")


@pytest.mark.parametrize("case", ["DoRA", pytest.param("experts and routers", marks=pytest.mark.long)])
def test_it_answers_as_the_merged_folder(case: str, place: Path, merged, in_megatron) -> None:
    _, adapter = in_megatron(case)
    alone = place / f"{adapter}-hf-answering"
    base, line = in_megatron(case)[0], "--to_hf true --merge_lora false"
    run(place, f"swift export --mcore_model {base} --mcore_adapter {adapter} {line} --output_dir {alone}")
    prompts = [EncodedPrompt([5, 80, 7, 100, 9]), EncodedPrompt([4, 33, 250, 16, 17, 18, 2, 19])]

    def answers(model: Path, **given: Any) -> list[str]:
        options = InferOptions(model=str(model), temperature=0.0, max_new_tokens=16, torch_dtype="float32", **given)
        return infer.TransformersChat(model, infer.checked_adapter(options), options).generate(prompts)

    base = place / f"{named(case)}-base"
    expected = answers(merged(case))
    assert answers(base, adapters=[str(alone)]) == expected
    assert answers(base, adapters=[str(alone)], merge_lora=True) == expected
    assert answers(base) != expected


def test_a_wrong_merge_fails_its_test_and_leaves_nothing(place: Path) -> None:
    script = place / "planted.py"
    script.write_text(PLANTED)
    words = "export --adapters some-projections --merge_lora true --test_convert_precision true --output_dir bad"
    done = prepared.run([str(script), *words.split()], cwd=place, environment=environment(place))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout + done.stderr
    assert not visible(place, "bad")


def test_adapters_that_do_not_fit_leave_nothing(place: Path) -> None:
    adapter = place / "some-projections"
    tiny.save_tokenizer(tiny.save(place / "shallow", "qwen3", num_hidden_layers=2))
    line = "swift export --merge_lora true --output_dir never --adapters"
    changed = shutil.copytree(adapter, place / "changed")
    low = load_file(adapter / "adapter_model.safetensors")
    first, last = sorted(name for name in low if "layers.0.mlp.up_proj" in name)  # A and B
    for tensors_of, model, what in (
        (low, "shallow", "model.layers.2.mlp.up_proj"),
        (
            {name: tensor for name, tensor in low.items() if name != last},
            "some-projections-base",
            f"lacks 1 tensor ({last}",
        ),
        (
            {name: tensor for name, tensor in low.items() if name != first},
            "some-projections-base",
            f"has 1 tensor ({last}",
        ),
        (low | {first: low[first][:, 1:].contiguous()}, "some-projections-base", "shape"),
    ):
        save_file(tensors_of, changed / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(place / model)
        (changed / "adapter_config.json").write_text(json.dumps(config))
        printed = run(place, f"{line} changed", fails=True)
        assert "changed" in printed
        assert what in printed, printed
        assert "Traceback" not in printed
    config["base_model_name_or_path"] = "/gone"
    (changed / "adapter_config.json").write_text(json.dumps(config))
    assert "its base model, /gone, does not exist. Set --model" in run(place, f"{line} changed", fails=True)
    assert not visible(place, "never")
