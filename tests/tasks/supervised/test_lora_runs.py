"""LoRA as a user runs it: from `megatron sft --tuner_type lora` to what PEFT makes of the checkpoints."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from megaswift.tasks.system.atomic_dir import verify_files
from safetensors.torch import load_file

from tests import prepared, tiny
from tests.cli.test_examples import parse

pytestmark = pytest.mark.slow
SUMS = [{"query": f"What is {a} + {b}?", "response": str(a + b)} for a in range(3, 9) for b in range(2, 9)]
DATA = (
    "--dataset train.jsonl --val_dataset val.jsonl --micro_batch_size 2 --global_batch_size 4 --logging_steps 1 "
    "--dataloader_num_workers 0 --num_train_epochs 1 --no_save_optim true"
)
# No dropout, whose random numbers differ from layout to layout; a rate at which so few steps change something.
LORA = f"{DATA} --tuner_type lora --lora_rank 5 --lora_alpha 10 --lora_dropout 0 --lr 1e-2"
# The command line in a process that a fault is planted into: argv, then what to do before.
PLANTED = """
import errno, os, signal, sys
from megaswift.cli.main import main
from megaswift.tasks.system import atomic_dir
from megaswift.tasks.train import checkpointer
{fault}
if __name__ == "__main__":
    sys.exit(main("megatron", sys.argv[1:]))
"""
KILLED = """
real = atomic_dir._rename
def place(folder, path):
    if path.name == "checkpoint-1":
        os.kill(os.getpid(), signal.SIGKILL)
    real(folder, path)
atomic_dir._rename = place
"""
FULL_DISK = """
def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")
checkpointer.commit_together = full
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with models, data and caches."""
    folder = tmp_path_factory.mktemp("lora-runs")
    for family in ("qwen3", "qwen3_moe"):
        tiny.save_tokenizer(tiny.save(folder / family, family))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[:34]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[34:]))
    return folder


def run(place: Path, command: str | list[str], processes: int | None = None, *, fails: bool = False) -> str:
    """Run a command in `place`; what it printed."""
    words = shlex.split(command) if isinstance(command, str) else command
    done = prepared.run(
        ["-m", "megaswift.cli.main", *words], processes=processes, cwd=place, environment=environment(place)
    )
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def environment(place: Path) -> dict[str, str]:
    return os.environ | {"HF_HOME": str(place / "cache"), "COLUMNS": "200"}


def planted(place: Path, fault: str, words: str) -> prepared.Running:
    script = place / f"planted-{len(fault)}.py"
    script.write_text(PLANTED.format(fault=fault))
    return prepared.Running([str(script), *words.split()], processes=None, cwd=place, environment=environment(place))


def run_folder(output: Path) -> Path:
    (folder,) = output.iterdir()
    return folder


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in log_of(folder) if "loss" in row]


def eval_loss(folder: Path) -> float:
    return [row["eval_loss"] for row in log_of(folder) if "eval_loss" in row][-1]


def with_adapter(adapter: Path):
    """transformers' model of an adapter's base, with the adapter by PEFT."""
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Two layouts' tensors: the same up to what sums in another order do."""
    assert one.keys() == other.keys()
    differing = {name: float((other[name] - tensor).norm() / tensor.norm()) for name, tensor in one.items()}
    assert max(differing.values()) < 1e-3, differing


@torch.no_grad()
def negative_log_likelihood(model, folder: Path, rows: Path) -> float:
    """The mean over the tokens of the answers of `rows`, by transformers."""
    from transformers import AutoTokenizer

    tokenizer, total, count = AutoTokenizer.from_pretrained(folder), 0.0, 0
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["query"]}]
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        ids = start + tokenizer.encode(row["response"] + "<|im_end|>", add_special_tokens=False)
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(float(log_probs[place - 1, ids[place]]) for place in range(len(start), len(ids)))
        count += len(ids) - len(start)
    return total / count


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """A run in one process: checkpoints with merged weights, of which the last pair is kept."""
    before = (place / "qwen3" / "model.safetensors").read_bytes()
    printed = run(place, f"megatron sft --model qwen3 {LORA} --save_steps 4 --save_total_limit 1 --output_dir alone")
    folder = run_folder(place / "alone")
    for name in ("checkpoint-9", "checkpoint-9-merged"):
        assert re.search(rf"Saved {name} \([\d.]+ [kM]B, [\d.]+ s\): {folder}/{name}\n", printed)
    assert (place / "qwen3" / "model.safetensors").read_bytes() == before
    (folder / "printed.txt").write_text(printed)
    return folder


def test_the_log_tells_what_is_trained_and_names_both_folders(alone: Path) -> None:
    rows = log_of(alone)
    assert losses(alone)[-1] < losses(alone)[0] - 0.5
    assert rows[-1]["last_checkpoint"] == str(alone / "checkpoint-9")
    assert rows[-1]["last_merged_checkpoint"] == str(alone / "checkpoint-9-merged")
    model = with_adapter(alone / "checkpoint-9")
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    wanted = f"trainable parameters: {trained:,} of {total:,} ({trained / total:.2%})"
    assert wanted in (alone / "printed.txt").read_text()


def test_both_folders_are_whole_and_the_pair_before_is_gone(alone: Path) -> None:
    assert sorted(path.name for path in alone.glob("*checkpoint*")) == ["checkpoint-9", "checkpoint-9-merged"]
    assert [path.name for path in alone.glob(".*")] == [".lock"]
    for name in ("checkpoint-9", "checkpoint-9-merged"):
        assert not verify_files(alone / name, checksums=True)
        assert (alone / name / "manifest.json").is_file()
        assert (alone / name / "args.json").read_bytes() == (alone / "args.json").read_bytes()
    assert {path.name for path in (alone / "checkpoint-9").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "args.json", "manifest.json",
        "training_state",
    }  # fmt: skip


def test_peft_and_the_merged_folder_have_the_runs_own_loss(alone: Path, place: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = json.loads((alone / "checkpoint-9" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(place / "qwen3")
    adapted = with_adapter(alone / "checkpoint-9")
    merged = AutoModelForCausalLM.from_pretrained(alone / "checkpoint-9-merged", dtype=torch.float32)
    tokens = torch.arange(40)[None] * 7 % 261
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)
    wanted = negative_log_likelihood(adapted, place / "qwen3", place / "val.jsonl")
    assert eval_loss(alone) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tp", "--tensor_model_parallel_size 2 --sequence_parallel true"),
        pytest.param("dp", "--overlap_grad_reduce true --overlap_param_gather true", marks=pytest.mark.long),
        pytest.param(
            "pp",
            "--pipeline_model_parallel_size 2 --recompute_granularity full --recompute_method uniform "
            "--recompute_num_layers 1",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_processes_train_the_adapter_of_one(name: str, flags: str, alone: Path, place: Path) -> None:
    line = f"megatron sft --model qwen3 {LORA} {flags} --merge_lora false --save_steps 100 --output_dir {name}"
    run(place, line, processes=2)
    folder = run_folder(place / name)
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    assert eval_loss(folder) == pytest.approx(eval_loss(alone), rel=1e-5)
    close(adapter_of(alone / "checkpoint-9"), adapter_of(folder / "checkpoint-9"))
    assert not (folder / "checkpoint-9-merged").exists()


def test_a_run_goes_on_from_an_adapter(alone: Path, place: Path) -> None:
    """With nothing to learn, it is the adapter that it was; its rank and its base come with it."""
    adapter = alone / "checkpoint-9"
    line = f"megatron sft --adapters {adapter} {DATA} --tuner_type lora --lr 0 --weight_decay 0 --train_iters 1"
    run(place, f"{line} --merge_lora false --output_dir on")
    folder = run_folder(place / "on")
    assert eval_loss(folder) == pytest.approx(eval_loss(alone), rel=1e-6)
    there, here = adapter_of(adapter), adapter_of(folder / "checkpoint-1")
    assert there.keys() == here.keys()
    assert all(torch.equal(tensor, here[name]) for name, tensor in there.items())
    config = json.loads((folder / "checkpoint-1" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 10)


@pytest.fixture(scope="module")
def traditional(place: Path) -> Path:
    """The run of `alone`, with megatron-core's format before and after it, in TP2."""
    run(place, "swift export --model qwen3 --to_mcore true --output_dir qwen3-mcore")
    line = f"megatron sft --mcore_model qwen3-mcore {LORA} --save_safetensors false --save_steps 100"
    run(place, f"{line} --tensor_model_parallel_size 2 --output_dir traditional", processes=2)
    return run_folder(place / "traditional")


def test_the_traditional_workflow_saves_the_adapter_alone(traditional: Path, alone: Path) -> None:
    assert losses(traditional) == pytest.approx(losses(alone), rel=1e-5)
    assert not verify_files(traditional / "checkpoint-9", checksums=True)
    names = {path.name for path in (traditional / "checkpoint-9").iterdir()}
    assert names == {
        "adapter_config.json", "args.json", "iter_0000009", "latest_checkpointed_iteration.txt", "manifest.json",
        "training_state",
    }  # fmt: skip
    size = sum(file.stat().st_size for file in (traditional / "checkpoint-9").rglob("*.distcp"))
    stored = sum(tensor.nbytes for tensor in adapter_of(alone / "checkpoint-9").values())
    assert stored < size < 3 * stored
    assert not list(traditional.glob("*merged*"))


def test_the_traditional_workflow_goes_on_and_back(traditional: Path, alone: Path, place: Path) -> None:
    adapter = traditional / "checkpoint-9"
    line = f"megatron sft --mcore_model qwen3-mcore --mcore_adapter {adapter} {DATA} --tuner_type lora --lr 0"
    run(place, f"{line} --weight_decay 0 --train_iters 1 --merge_lora false --output_dir back")
    folder = run_folder(place / "back")
    assert eval_loss(folder) == pytest.approx(eval_loss(alone), rel=1e-5)
    close(adapter_of(alone / "checkpoint-9"), adapter_of(folder / "checkpoint-1"))
    line = f"swift export --mcore_model qwen3-mcore --mcore_adapter {adapter} --to_hf true --output_dir"
    run(place, f"{line} merged --merge_lora true")
    close(load_file(alone / "checkpoint-9-merged" / "model.safetensors"), load_file(place / "merged/model.safetensors"))


@pytest.mark.long
def test_experts_go_through_both_formats(place: Path) -> None:
    """Each expert's adapter: trained and saved in TP2 EP2 in megatron-core's format, read and saved again in PEFT's."""
    short = f"{LORA} --use_rslora true --train_iters 2 --merge_lora false"
    run(place, f"megatron sft --model qwen3_moe {short} --output_dir experts-alone")
    layout = "--tensor_model_parallel_size 2 --sequence_parallel true --expert_model_parallel_size 2"
    run(place, f"megatron sft --model qwen3_moe {short} {layout} --save_safetensors false --output_dir experts", 2)
    adapter = run_folder(place / "experts") / "checkpoint-2"
    line = f"megatron sft --model qwen3_moe --mcore_adapter {adapter} {DATA} --tuner_type lora --lr 0 --weight_decay 0"
    run(place, f"{line} --train_iters 1 --merge_lora false --output_dir experts-back")
    there = run_folder(place / "experts-alone") / "checkpoint-2"
    back = run_folder(place / "experts-back") / "checkpoint-1"
    assert any(".experts.7.down_proj.lora_B" in name for name in adapter_of(there))
    close(adapter_of(there), adapter_of(back))
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (there, adapter, back)]
    assert configs[0] == configs[1] == configs[2]


@pytest.mark.long
def test_a_model_learns_by_its_adapter(place: Path) -> None:
    """Random weights answer nothing, and stay; after a few seconds all answers are right."""
    batches = "--micro_batch_size 34 --global_batch_size 34 --logging_steps 20 --dataloader_num_workers 0"
    line = f"megatron sft --model qwen3 --dataset train.jsonl {batches} --tuner_type lora --lora_rank 16 --lr 1e-2"
    run(place, f"{line} --lora_dropout 0 --train_iters 80 --merge_lora false --output_dir learnt")
    checkpoint = run_folder(place / "learnt") / "checkpoint-80"
    ask = "--val_dataset train.jsonl --temperature 0 --max_new_tokens 8 --max_batch_size 34 --result_path"
    before = run(place, f"swift infer --model qwen3 {ask} before.jsonl")
    after = run(place, f"swift infer --adapters {checkpoint} {ask} after.jsonl")
    assert "equal to the dataset's response: 0 of 34" in before
    assert "equal to the dataset's response: 34 of 34" in after


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [
        ("LoRA SFT (Dense Model)", "qwen3", "TP 2"),
        pytest.param("MoE LoRA Training", "qwen3_moe", "EP 2", marks=pytest.mark.long),
    ],
)
def test_the_guides_examples_run(name: str, family: str, layout: str, place: Path) -> None:
    """As they are written, but for the model, the data, and what is told of GPUs."""
    _, words = parse(name)
    words[words.index("--model") + 1] = family
    first = words.index("--dataset") + 1
    last = next(place for place in range(first, len(words)) if words[place].startswith("--"))
    words[first:last] = ["train.jsonl"] * (last - first)
    where = words.index("--output_dir") + 1
    words[where] = f"example-{family}"
    printed = run(place, ["megatron", *words], processes=2)
    assert layout in printed
    folder = run_folder(place / f"example-{family}")
    (checkpoint,) = folder.glob("checkpoint-*")
    options = json.loads((checkpoint / "args.json").read_text())["options"]
    assert (options["lora_rank"]["value"], options["lr"]["value"]) == (8, 1e-4)
    model = with_adapter(checkpoint)
    parameters = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    assert all(parameter.any() for parameter in parameters.values())
    assert losses(folder)[0] > 0


def test_of_a_killed_run_no_adapter_is_there_without_its_merged_weights(place: Path) -> None:
    line = f"sft --model qwen3 {LORA} --train_iters 1 --add_version false --output_dir killed"
    assert planted(place, KILLED, line).wait().returncode != 0
    assert [path.name for path in (place / "killed").glob("checkpoint-*")] == ["checkpoint-1-merged"]  # comes first
    assert not verify_files(place / "killed" / "checkpoint-1-merged", checksums=True)
    assert len(list((place / "killed").glob(".checkpoint-1.partial-*"))) == 1
    run(place, f"megatron {line}")
    assert {path.name for path in (place / "killed").glob("*checkpoint-*")} == {"checkpoint-1", "checkpoint-1-merged"}
    assert [path.name for path in (place / "killed").glob(".*")] == [".lock"]


@pytest.mark.long
def test_a_full_disk_leaves_nothing(place: Path) -> None:
    line = f"sft --model qwen3 {LORA} --train_iters 1 --add_version false --output_dir full"
    done = planted(place, FULL_DISK, line).wait()
    assert done.returncode != 0
    assert f"The disk is full: {place}/full/checkpoint-1: No space left on device. Free some space" in done.stderr
    assert not list((place / "full").glob("*checkpoint*"))
    assert [path.name for path in (place / "full").glob(".*")] == [".lock"]


def test_an_adapter_of_another_model_is_refused(alone: Path, traditional: Path, place: Path) -> None:
    tiny.save_tokenizer(tiny.save(place / "wide", "qwen3", hidden_size=64))
    printed = run(
        place, f"megatron sft --model wide --adapters {alone}/checkpoint-9 {LORA} --output_dir never", fails=True
    )
    assert "hidden_size" in printed
    assert f"--adapters {alone}/checkpoint-9" in printed
    printed = run(
        place,
        f"megatron sft --model wide --mcore_adapter {traditional}/checkpoint-9 {LORA} --output_dir never",
        fails=True,
    )
    assert f"--mcore_adapter {traditional}/checkpoint-9" in printed
    assert not (place / "never").exists()


@pytest.mark.long
def test_an_adapter_whose_base_is_gone_is_refused_by_its_shapes(traditional: Path, place: Path) -> None:
    tiny.save_tokenizer(tiny.save(place / "narrow", "qwen3", intermediate_size=64))
    adapter = shutil.copytree(traditional / "checkpoint-9", place / "orphan")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone"}))
    line = f"megatron sft --model narrow --mcore_adapter {adapter} {LORA} --output_dir orphans"
    printed = run(place, line, fails=True)
    wanted = r"orphan/iter_0000009: decoder\.layers\.0\.mlp\.\S+ has shape \[.+\]\. Is it an adapter of another model\?"
    assert re.search(wanted, printed)
    assert "Traceback" not in printed


def test_an_adapter_with_other_bytes_is_refused(traditional: Path, place: Path) -> None:
    adapter = shutil.copytree(traditional / "checkpoint-9", place / "altered")
    file = max(adapter.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    line = f"megatron sft --model qwen3 --mcore_adapter {adapter} {LORA} --output_dir altered-run"
    printed = run(place, line, fails=True)
    assert f"{file.name} has other bytes than were written" in printed
    assert "Traceback" not in printed
