"""Dry runs of the guide's examples of pt, sft and DPO, with a small local model and dataset."""

import json
import re
import shlex
from pathlib import Path

import pytest
from megaswift.cli.main import main

from tests.cli.conftest import DENSE, MIXTURE, write_model, write_tokenizer

EXAMPLES = dict(
    re.findall(
        r"^## (.+?)\n(.+?)(?=\n## |\Z)", (Path(__file__).parent / "examples.sh").read_text(), re.DOTALL | re.MULTILINE
    )
)
MULTIMODAL = "Multimodal SFT (e.g., Qwen3-VL)"
STEPS = {  # rows / global batch, rounded up; packed: what the packs give
    "Full Parameter SFT (Dense Model)": (2, "2 processes = TP 2 x PP 1 x CP 1 x DP 1"),
    "MoE Model SFT (e.g., Qwen3-30B-A3B)": (1, "8 processes = TP 4 x PP 2 x CP 1 x DP 1"),
    "Pre-training": (1, "8 processes = TP 2 x PP 1 x CP 1 x DP 4"),
    "LoRA SFT (Dense Model)": (2, "2 processes = TP 2 x PP 1 x CP 1 x DP 1"),
    "MoE LoRA Training": (1, "experts: EP 2 x ETP 1 x PP 1 x DP 1"),
    "Megatron DPO": (3, "2 processes = TP 2 x PP 1 x CP 1 x DP 1"),
}


def parse(name: str) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the arguments of an example."""
    lines = [line for line in EXAMPLES[name].splitlines() if not line.startswith("#")]
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    start = words.index("megatron")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


def test_the_examples_are_there() -> None:
    assert set(EXAMPLES) == {*STEPS, MULTIMODAL}


@pytest.mark.parametrize("name", STEPS)
def test_dry_run(name: str, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    environment, words = parse(name)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", MIXTURE if "MoE" in name else DENSE)
    write_tokenizer(model)
    if words[0] == "rlhf":
        pairs = [json.loads(line) | {"rejected_response": "Nothing."} for line in rows.read_text().splitlines()]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    if words[0] == "pt":
        rows.write_text("".join(json.dumps({"text": f"A line of text, number {n}."}) + "\n" for n in range(40)))
    words[words.index("--model") + 1] = str(model)
    first = words.index("--dataset") + 1
    last = next(i for i in range(first, len(words)) if words[i].startswith("--"))
    words[first:last] = [str(rows)] * (last - first)

    code = main("megatron", [*words, "--dry_run", "true"])
    printed = capsys.readouterr()

    assert code == 0, printed.err
    steps, layout = STEPS[name]
    if "--packing" not in words:
        steps = -(-40 * (last - first) // 16)
    assert f"steps per epoch   {steps}\n" in printed.out
    assert layout in printed.out
    assert f"-m megaswift.cli.main megatron {words[0]}" in printed.out
    assert f"--nproc_per_node={environment['NPROC_PER_NODE']} " in printed.out
    lora = "LoRA" in name
    assert re.search(rf"lr +{1e-4 if lora else 1e-5}   \(command line\)", printed.out)
    assert bool(re.search(r"tuner_type +lora\b", printed.out)) is lora
    assert bool(re.search(r"merge_lora +false   \(command line\)", printed.out)) is lora
    assert not (tmp_path / "megatron_output").exists()


def test_multimodal_models_are_refused_until_they_are_there(tmp_path: Path, capsys) -> None:
    words = parse(MULTIMODAL)[1]
    model = write_model(
        tmp_path / "model", {"model_type": "qwen3_vl", "text_config": DENSE, "vision_config": {"depth": 2}}
    )
    words[words.index("--model") + 1] = str(model)
    assert main("megatron", [*words, "--dry_run", "true"]) == 2
    assert f"--model {model}: multimodal models are not supported" in capsys.readouterr().err
