"""`swift export` and `megatron export` as a user runs them, and training from and to megatron-core's format."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megaswift.bridge.checkpoint.conversion_report import differences
from megaswift.tasks.system.atomic_dir import verify_files
from safetensors.torch import load_file, save_file

from tests import prepared, tiny

pytestmark = pytest.mark.slow
# The export in a process that a fault is planted into: argv, then what to do before.
PLANTED = """
import sys
from megaswift.bridge.checkpoint import distributed, writer
from megaswift.cli.main import main
{fault}
if __name__ == "__main__":
    sys.exit(main("swift", sys.argv[1:]))
"""
FULL_DISK = """
import errno
from torch.distributed.checkpoint import filesystem
real = filesystem._write_item
def full(*arguments):
    if arguments[3].index.fqn == "decoder.final_layernorm.weight":
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(*arguments)
filesystem._write_item = full
"""
WAITING = """
import time
real = distributed.copy_small_files
def waiting(source, destination, *rest):
    (destination.parent / "there").touch()
    time.sleep(60)
distributed.copy_small_files = waiting
"""
WRONG_NORM = """
from megaswift.tasks.convert import export
real = export.load_distributed
def changed(chunks, *rest):
    real(chunks, *rest)
    chunks[0].decoder.layers[0].input_layernorm.weight.data *= 1.5
export.load_distributed = changed
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with models, in several files and with tokenizers."""
    folder = tmp_path_factory.mktemp("exports")
    for family in ("qwen3", "qwen3_moe", "llama"):
        tiny.save_tokenizer(tiny.save(folder / family, family))
        (folder / family / "generation_config.json").write_text('{"temperature": 0.25}')
    return folder


def run(root: Path, command: str, processes: int | None = None, *, fails: bool = False) -> str:
    """Run a command in `place`; what it printed."""
    words = ["-m", "megaswift.cli.main", *command.split()]
    done = prepared.run(words, processes=processes, cwd=root, environment=environment(root))
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def swift(root: Path) -> Callable[..., str]:
    """`run` of `swift export` in one process."""
    return lambda words, **how: run(root, f"swift export {words}", **how)


def environment(root: Path) -> dict[str, str]:
    return os.environ | {"HF_HOME": str(root / "cache")}


def planted(root: Path, fault: str, words: str) -> prepared.Running:
    script = root / f"planted-{len(fault)}.py"
    script.write_text(PLANTED.format(fault=fault))
    return prepared.Running([str(script), *words.split()], processes=None, cwd=root, environment=environment(root))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Path, other: Path, dtype: torch.dtype = torch.float32) -> bool:
    left, right = tensors(one), tensors(other)
    return left.keys() == right.keys() and all(
        right[name].dtype == dtype and torch.equal(left[name].to(dtype), right[name]) for name in left
    )


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def visible(root: Path, name: str) -> list[str]:
    """Return the entries of `root` that contain a name, hidden ones included."""
    return sorted(entry.name for entry in root.iterdir() if name in entry.name)


@pytest.fixture(scope="module")
def mixture(root: Path) -> Path:
    """qwen3_moe in megatron-core's format, written in TP2 PP1 EP2."""
    layout = "--tensor_model_parallel_size 2 --expert_model_parallel_size 2"
    printed = run(root, f"megatron export --model qwen3_moe --to_mcore true {layout} --output_dir mixture", 2)
    assert "2 processes = TP 2 x PP 1" in printed
    assert f"exported: {root / 'mixture'}" in printed
    return root / "mixture"


def test_there_in_tp2_ep2_and_back_in_pp2(root: Path, mixture: Path) -> None:
    assert not verify_files(mixture, checksums=True)
    assert json.loads((mixture / "config.json").read_text()) == json.loads((root / "qwen3_moe/config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json"):
        assert (mixture / name).read_bytes() == (root / "qwen3_moe" / name).read_bytes()
    assert (mixture / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert (mixture / "iter_0000001" / "metadata.json").is_file()
    assert not [*mixture.glob("*.safetensors"), *mixture.glob("*index.json")]
    there = json.loads((mixture / "conversion.json").read_text())
    assert there["tensors"].keys() == tensors(root / "qwen3_moe").keys()
    assert json.loads((mixture / "args.json").read_text())["options"]["to_mcore"]["value"] is True

    layout = "--pipeline_model_parallel_size 2 --pipeline_model_parallel_layout E|tt|t|tL"
    run(root, f"megatron export --mcore_model mixture --to_hf true {layout} --output_dir mixture-back", 2)
    back = root / "mixture-back"
    assert same(root / "qwen3_moe", back)
    assert not verify_files(back, checksums=True) and not differences(back)  # noqa: PT018
    checksums = [{name: entry["xxh3_128"] for name, entry in table["tensors"].items()}
                 for table in (there, json.loads((back / "conversion.json").read_text()))]  # fmt: skip
    assert checksums[0] == checksums[1]
    others = {path.name for path in back.iterdir() if not path.name.startswith("model")}
    wanted = {path.name for path in (root / "qwen3_moe").iterdir() if not path.name.startswith("model")}
    assert others == wanted | {"args.json", "manifest.json", "conversion.json"}


def test_swift_in_bfloat16_with_its_precision_tested(root: Path, swift) -> None:
    printed = run(
        root, "swift export --model llama --to_mcore true --torch_dtype bfloat16 --test_convert_precision true"
    )
    assert "logits in float32: largest difference" in printed
    assert (root / "llama-mcore").is_dir()  # the default
    swift("--mcore_model llama-mcore --to_hf true --output_dir llama-back --max_shard_size 100KB")
    assert same(root / "llama", root / "llama-back", torch.bfloat16)
    assert len([*(root / "llama-back").glob("*.safetensors")]) > 1
    precision = json.loads((root / "llama-mcore" / "args.json").read_text())["precision"]
    assert {one["dtype"]: one["passed"] for one in precision} == {"float32": True, "bfloat16": True}


@pytest.mark.long
def test_a_folder_that_contradicts_its_config_leaves_nothing(root: Path, mixture: Path, swift) -> None:
    other = root / "other"
    shutil.copytree(mixture, other)
    config = json.loads((other / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 3, "mlp_only_layers": [1]}, "has 9 tensors (decoder.layers.3."),
        ({"moe_intermediate_size": 20}, "experts.linear_fc1.weight has shape [8, 80, 48], and by config.json it has"),
        ({"vocab_size": 300}, "has a vocabulary of 261, and by config.json it has 300"),
        ({"vocab_size": 200}, "has a vocabulary of 261, and by config.json it has 200"),
    ):
        (other / "config.json").write_text(json.dumps(config | change))
        printed = swift("--mcore_model other --to_hf true --output_dir wrong", fails=True)
        assert message in printed, printed
        assert "Do the folder and its config.json belong together?" in printed
        assert not visible(root, "wrong")
    (other / "config.json").write_text(json.dumps(config))
    files = sorted((other / "iter_0000001").glob("*.distcp"))
    changed = bytearray(files[0].read_bytes())
    changed[len(changed) // 3] ^= 1
    files[0].write_bytes(changed)
    printed = swift("--mcore_model other --to_hf true --output_dir wrong", fails=True)
    assert f"other is damaged (iter_0000001/{files[0].name} has other bytes than were written)" in printed
    (other / "manifest.json").unlink()
    for file in files:
        file.write_bytes(file.read_bytes()[:1000])
    printed = swift("--mcore_model other --to_hf true --output_dir wrong", fails=True)
    assert "cannot be read" in printed and "Traceback" not in printed  # noqa: PT018
    assert not visible(root, "wrong")


def test_beyond_the_bound_it_fails_and_leaves_nothing(root: Path) -> None:
    process = planted(
        root, WRONG_NORM, "export --model qwen3 --to_mcore true --output_dir bad --test_convert_precision"
    )
    done = process.wait()
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    assert "--test_convert_precision: logits in float32" in printed
    assert "FAILED" in printed
    assert not visible(root, "bad")


@pytest.mark.long
def test_a_full_disk_leaves_nothing(root: Path) -> None:
    process = planted(root, FULL_DISK, "export --model qwen3 --to_mcore true --output_dir full")
    done = process.wait()
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    assert f"The disk is full: {root / 'full'}" in printed
    assert "or set another --output_dir" in printed
    assert not visible(root, "full")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL]
)
def test_one_that_is_ended_leaves_nothing_that_looks_whole(root: Path, swift, number: signal.Signals) -> None:
    process = planted(root, WAITING, "export --model qwen3 --to_mcore true --output_dir ended")
    deadline = time.monotonic() + 100
    while not (root / "there").exists():
        assert time.monotonic() < deadline, process.wait(1)
        time.sleep(0.1)
    (root / "there").unlink()
    assert [name[0] for name in visible(root, "ended")] == ["."]  # hidden while it is written
    os.kill(process.pids[0], number)
    assert process.wait(30).returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert not (root / "ended").exists()
    if number == signal.SIGKILL:  # could not tidy up: the next one does
        assert len(visible(root, "ended")) == 1
        swift("--model qwen3 --to_mcore true --output_dir ended")
        assert visible(root, "ended") == ["ended"]
    else:
        assert not visible(root, "ended")


def test_it_replaces_an_earlier_export_only_when_asked(root: Path, swift) -> None:
    first = "--model qwen3 --to_mcore true --output_dir again"
    swift(first)
    weights = tensors(root / "qwen3")
    shutil.copytree(root / "qwen3", root / "changed")
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    save_file(changed, root / "changed" / "model.safetensors", {"format": "pt"})
    assert "again: it exists. Set another one, or --exist_ok true" in swift(first, fails=True)
    swift("--model changed --to_mcore true --output_dir again --exist_ok")
    swift("--mcore_model again --to_hf true --output_dir again-back")
    assert same(root / "changed", root / "again-back")
    assert visible(root, "again") == ["again", "again-back"]


@pytest.mark.long
def test_training_from_and_to_it(root: Path, mixture: Path) -> None:
    """The same losses from either format; what is saved in megatron-core's goes on, and back."""
    rows = [{"query": f"What is {a} + 2?", "response": str(a + 2)} for a in range(24)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        "--dataset train.jsonl --global_batch_size 4 --micro_batch_size 2 --lr 1e-3 --logging_steps 1 "
        "--train_iters 2 --dataloader_num_workers 0 --no_save_optim true --add_version false"
    )
    run(root, f"megatron sft --model qwen3_moe {common} --output_dir from-hf --save_safetensors false")
    run(
        root,
        f"megatron sft --mcore_model mixture {common} --output_dir from-mcore --pipeline_model_parallel_size 2",
        2,
    )
    one, other = losses(root / "from-hf"), losses(root / "from-mcore")
    assert len(one) == 2
    assert one == pytest.approx(other, rel=1e-5)
    saved = root / "from-hf" / "checkpoint-2"
    assert not verify_files(saved, checksums=True)
    assert (saved / "iter_0000002").is_dir()
    assert (saved / "tokenizer.json").is_file()
    run(root, "swift export --mcore_model from-hf/checkpoint-2 --to_hf true")
    back = tensors(root / "from-hf" / "checkpoint-2-hf")
    wanted = tensors(root / "from-mcore" / "checkpoint-2")
    assert back.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(back[name], wanted[name], rtol=1e-3, atol=1e-4)
    run(root, f"megatron sft --mcore_model from-hf/checkpoint-2 {common} --output_dir on --save_safetensors false")
    assert json.loads((root / "on" / "checkpoint-2" / "conversion.json").read_text())["tensors"].keys() == back.keys()
