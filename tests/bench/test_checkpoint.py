"""scripts/bench/checkpoint.py without a training: figures of a stand-in that saves and resumes."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
import checkpoint
import report

# Saves after step 4, when training has waited 0.25 s, 2 s before the checkpoint is complete. argv: output, first step,
# and what is added to the losses.
STAND_IN = """
import json, pathlib, sys, time
out, first, error = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
out.mkdir(parents=True)
log = (out / "logging.jsonl").open("w", buffering=1)
for step in range(first, 12):
    line = {"step": step, "loss": 12 - step / 10 + error, "grad_norm": 1.0, "memory_gib": 2.0, "tokens": 60 * step,
            "tflops_per_gpu": 1e-3, "seconds_per_step": 0.02}
    print(json.dumps(line), file=log)
    if step == 4:
        print(json.dumps({"step": step, "save_wait": 0.25}), file=log)
    if step == 6 and first == 1:
        folder = out / "checkpoint-4"
        (folder / "training_state").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(1000))
        (folder / "training_state" / "rank-00000.safetensors").write_bytes(bytes(3000))
        print("Saved checkpoint-4 (4 kB, 2.0 s): somewhere", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_figures_of_a_save_and_a_resume(error, tmp_path, monkeypatch):
    def command(system, row, model, data, out, *, steps, flags, **_):
        assert steps == 4 + 2 + 5
        is_first = "--save_steps 4 --async_save true" in flags
        assert is_first or "/first/checkpoint-4" in flags
        assert flags.startswith("--f 1 ")
        return [sys.executable, "-c", STAND_IN, str(out), "1" if is_first else "5", "0" if is_first else str(error)]

    monkeypatch.setattr(checkpoint, "command", command)
    monkeypatch.setattr(checkpoint, "prepare", lambda *_: None)
    monkeypatch.setattr(checkpoint, "visible_gpus", lambda: 0)
    words = ["checkpoint.py", "tiny", "--async", "--out", str(tmp_path), "--flags=--f 1", "--copy-gb", "2e-6"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        checkpoint.main()
    (run,) = json.loads((tmp_path / "results.json").read_text())
    assert (ended.value.code, run["error"]) == (0, None)
    assert (run["bytes"], run["bytes_of_weights"], run["copy"]["bytes"]) == (4000, 1000, 1000)
    assert (run["save_wait"], run["seconds_to_disk"]) == (0.25, 2.25)
    assert [step["step"] for step in run["resumed_steps"]] == [5, 6]
    assert run["difference"] == pytest.approx(error / 11.4)
    assert not (tmp_path / "tiny-checkpoint").exists()
    text = report.markdown([run])
    assert ("| none |" in text) == (not error)
    assert "| 11.900000 | 11.800000 | 11.700000 | 11.600000 | 11.500000 | 11.400000 |" in text
    assert f"| resumed |  |  |  |  | {11.5 + error:.6f} | {11.4 + error:.6f} |" in text


def test_one_file_holds_trainings_too(tmp_path, monkeypatch):
    """run.py appends to the results of the other scripts, and neither takes the other's for its own."""
    import run

    about = {"call": "c", "called": "x", "device": "d", "versions": {}, "error": None}
    kinds = [{"kind": "conversion", "row": "tiny", "system": "1 process", "flags": "", "gpus": 0, **about}]
    (tmp_path / "results.json").write_text(json.dumps([kinds[0] | {"error": "E"}]))
    program = STAND_IN.replace("time.sleep(600)", "")
    words = [sys.executable, "-c", program, str(tmp_path / "runs" / "tiny-ours" / "out"), "5", "0"]
    monkeypatch.setattr(run, "command", lambda *_, **__: words)
    monkeypatch.setattr(run, "prepare", lambda *_: None)
    monkeypatch.setattr(run, "visible_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["run.py", "tiny", "--warmup", "5", "--steps", "7", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main()
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result.get("kind") for result in results] == ["conversion", None]
    text = report.markdown(results)
    assert "| tiny, to try the script | 0 | 1 process | E |" in text
    assert "| tiny, to try the script | 0 | megaswift | 0.0" in text


def test_failures_are_shown_in_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "visible_gpus", lambda: 2)
    monkeypatch.setattr(checkpoint, "prepare", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["checkpoint.py", "30b-pp4", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        checkpoint.main()
    assert ended.value.code == 1
    assert "| Qwen3-30B-A3B, PP4 |  | sync | needs 4 GPUs |" in report.markdown(
        json.loads((tmp_path / "results.json").read_text())
    )
