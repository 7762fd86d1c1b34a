"""`megatron tune`: its trials, what they leave, and what a user reads of those that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from megaswift.cli import tune
from megaswift.cli.main import main, read_options

from tests import tiny
from tests.prepared import ON_CPU, ROOT

# In the place of a run: it fails or hangs as its micro batch says, or writes a log.
STAND_IN = """
import json, os, subprocess, sys, time
from pathlib import Path
import yaml

assert sys.argv[1:3] == ["megatron", "sft"]
flags = yaml.safe_load(Path(sys.argv[3]).read_text())
micro = flags["micro_batch_size"]
Path(os.environ["TMPDIR"], "left").write_text("")
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(flags) + "\\n")
if micro == 1:
    print("error: CUDA out of memory. Tried to allocate 2 GiB. To lower it, use ...", flush=True)
    sys.exit(1)
if micro == 2:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    time.sleep(600)
if micro == 4:
    print("error: --packing true: something else", flush=True)
    sys.exit(2)
log = Path(flags["output_dir"], "logging.jsonl")
log.parent.mkdir()
seconds = [9.0, 0.5 * micro, 0.7 * micro, 0.6 * micro]
rows = [
    {"step": n + 1, "loss": 1.0, "seconds_per_step": at, "tokens_per_second_per_gpu": 100 / at, "memory_gib": 1.0 + n}
    for n, at in enumerate(seconds)
]
log.write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
LINE = "--dataset rows.jsonl --packing true --max_length 64 --global_batch_size 32 --torch_dtype bfloat16 --lr 1e-3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    config = tiny.config("qwen3").to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(tune, "MAIN", (sys.executable, str(tmp_path / "stand_in.py")))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("CALLS", "CHILD"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("NPROC_PER_NODE", "1")
    return tmp_path


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_trials_that_fail_are_rows_of_the_table(folder: Path, capsys) -> None:
    words = f"tune sft --model model {LINE} --num_train_epochs 1 --save_steps 2 --trials 5 --trial_steps 4"
    assert main("megatron", [*words.split(), "--trial_timeout", "2", "--trial_dir", "tuned"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((folder / "tuned" / "trials.json").read_text())
    assert (rows["command"], rows["processes"], rows["device"]) == ("sft", 1, "CPU")
    by_micro_batch = {row["flags"]["micro_batch_size"]: row for row in rows["trials"]}
    results = {micro: row["result"] for micro, row in by_micro_batch.items()}
    assert results == {1: "out of memory", 2: "timed out", 4: "failed", 8: "measured", 16: "measured"}
    assert by_micro_batch[8]["measured"] == {
        "memory_gib": 4.0, "seconds_per_step": 4.8, "tokens_per_second_per_gpu": 100 / 4.8
    }  # fmt: skip
    assert all(row["planned"]["memory_gib"] > 0 for row in rows["trials"])
    assert by_micro_batch[4]["reason"] == "--packing true: something else"
    table = [line.split() for line in printed.splitlines() if line.startswith("one GPU")]
    assert [line[2] for line in table][:2] == ["8", "16"]  # the fastest first
    assert "failed: --packing true: something else" in printed
    assert "The plan is for NVIDIA H100s: there is no GPU here." in printed

    assert not list((folder / "temporary").glob("megaswift-trial-*"))
    assert sorted(file.name for file in (folder / "tuned").iterdir()) == [
        "best.yaml", *(f"trial-{number}.log" for number in range(1, 6)), "trials.json"
    ]  # fmt: skip
    assert not is_alive(int((folder / "CHILD").read_text()))
    for line in (folder / "CALLS").read_text().splitlines():
        flags = json.loads(line)
        assert (flags["train_iters"], flags["eval_iters"], flags["lr"]) == (4, 0, 1e-3)
        assert flags.keys().isdisjoint({"num_train_epochs", "save_steps"})

    options, _, _ = read_options("megatron", ["sft", "tuned/best.yaml"])
    assert options.training.micro_batch_size == 8
    assert (options.training.num_train_epochs, options.checkpoint.save_steps) == (1.0, 2)
    assert options.data.dataset == ["rows.jsonl"]
    assert "hub_token" not in yaml.safe_load((folder / "tuned" / "best.yaml").read_text())


def test_flags_of_the_layout_stay(folder: Path, capsys, monkeypatch) -> None:
    """They may be in a config file. Tokens are in no file."""
    config = {"model": "model", "dataset": ["rows.jsonl"], "packing": True, "max_length": 64, "micro_batch_size": 8}
    monkeypatch.delenv("OF_THE_RUN", raising=False)
    config["ENV"] = {"OF_THE_RUN": 7}
    (folder / "run.yaml").write_text(yaml.safe_dump(config | {"global_batch_size": 8, "torch_dtype": "bfloat16"}))
    words = "tune run.yaml --recompute_granularity full --trial_dir tuned --hub_token secret --train_iters 1000"
    assert main("megatron", words.split()) == 0
    capsys.readouterr()
    calls = [json.loads(line) for line in (folder / "CALLS").read_text().splitlines()]
    assert {(call["micro_batch_size"], call["recompute_granularity"]) for call in calls} == {(8, "full")}
    written = yaml.safe_load((folder / "tuned" / "best.yaml").read_text())
    assert written["train_iters"] == 1000
    assert written["ENV"] == {"OF_THE_RUN": "7", "NPROC_PER_NODE": 1}
    for file in (folder / "tuned").iterdir():
        assert "secret" not in file.read_text()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--micro_batch_size 1 --trial_dir none", 1, "No layout could be measured: the logs say why."),
        ("--trial_dir temporary", 2, "cannot be made (File exists). Set a new folder"),
        ("--micro_batch_size 64", 2, "megatron tune: no layout of 1 GPU of"),
        ("--torch_dtype float32", 2, "megatron tune: not planned: weights in float32. Try layouts by hand"),
        ("--trials 0", 2, "--trials 0"),
        ("--rows 3", 2, "--rows: a flag of `megatron plan`"),
    ],
)
def test_what_a_user_reads(flags: str, code: int, said: str, folder: Path, capsys) -> None:
    base = LINE.replace("--torch_dtype bfloat16", "") if "--torch_dtype" in flags else LINE
    assert main("megatron", ["tune", "sft", "--model", "model", *base.split(), *flags.split()]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_ended_with_its_command(tmp_path: Path) -> None:
    """SIGTERM, and SIGKILL, which nobody can handle, both end them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        code = (
            "import sys; from megaswift.cli import tune; tune._end_on_signals(); "
            "tune._wait([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'], "
            "{}, 1, 600)"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout
        child = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(20)
        deadline = time.monotonic() + 10
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(child)


@pytest.mark.slow
@pytest.mark.long
def test_trials_of_two_processes(tmp_path: Path) -> None:
    """The config file of the fastest trains."""
    tiny.save_tokenizer(tiny.save(tmp_path / "model", "qwen3", 0))
    rows = (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * n}]} for n in range(64)
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | ON_CPU | {"NPROC_PER_NODE": "2", "HF_HOME": str(tmp_path / "cache")}

    def megatron(words: str) -> str:
        command = [sys.executable, "-m", "megaswift.cli.main", "megatron", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    words = f"tune --model model {LINE.replace('32', '8')} --trials 3 --trial_steps 3 --trial_dir tuned --train_iters 9"
    printed = megatron(words)
    trials = json.loads((tmp_path / "tuned" / "trials.json").read_text())["trials"]
    assert [trial["result"] for trial in trials] == ["measured"] * 3, printed
    assert len({json.dumps(trial["flags"]) for trial in trials}) == 3
    assert not list(tmp_path.rglob("checkpoint-*"))
    megatron("sft tuned/best.yaml --train_iters 1 --output_dir run --add_version false")
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
