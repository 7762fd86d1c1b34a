"""scripts/bench/conversion.py: comparison of checkpoints, and the figures of commands that are stood in for."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
import conversion
import report


def write(folder: Path, tensors: dict, shards: int = 1) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for number in range(shards):
        part = {name: tensor for place, (name, tensor) in enumerate(tensors.items()) if place % shards == number}
        save_file(part, folder / f"model-{number}.safetensors")


def test_differences_of_checkpoints(tmp_path):
    import torch

    tensors = {name: torch.randn(5, 3) for name in "abcde"}
    write(tmp_path / "one", tensors)
    write(tmp_path / "same", tensors, shards=3)
    assert conversion.differences(tmp_path / "one", tmp_path / "same") == []
    changed = tensors["b"].clone()
    changed[4, 2] = torch.nextafter(changed[4, 2], torch.tensor(10.0))
    faults = {"b": changed, "c": tensors["c"].view(3, 5), "d": tensors["d"].bfloat16()}
    write(tmp_path / "other", {"a": tensors["a"], "extra": tensors["a"]} | faults, shards=2)
    assert conversion.differences(tmp_path / "one", tmp_path / "other") == ["b", "c", "d", "e", "extra"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_figures_of_both_directions(is_damaged, tmp_path, monkeypatch):
    import torch

    source = tmp_path / "work" / "tiny"
    write(source, {"a": torch.zeros(1000)})
    commands = []

    def run(argv, environment, log, **_):
        commands.append((argv[3:5], environment["NPROC_PER_NODE"], "--tensor_model_parallel_size" in argv))
        origin, destination = Path(argv[argv.index("--output_dir") - 3]), Path(argv[-1])
        shutil.copytree(origin, destination)
        if is_damaged and "--to_hf" in argv:
            (file,) = destination.glob("*.safetensors")
            file.write_bytes(file.read_bytes()[:-1] + b"x")
        log.write_text("Reading ... 1.5 s\nWriting ... 0.5 s\n")
        return 9.0

    monkeypatch.setattr(conversion, "prepare", lambda *_: None)
    monkeypatch.setattr(conversion, "copied", lambda *_: {"bytes": 4_000_000_000, "seconds": 2.0})
    monkeypatch.setattr(conversion, "file_system", lambda _: "ext4")
    monkeypatch.setattr(conversion, "visible_gpus", lambda: 0)
    monkeypatch.setattr(conversion, "run_command", run)
    words = ["conversion.py", "tiny", "--processes", "1", "2", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        conversion.main()
    assert ended.value.code == is_damaged
    assert commands == [(["swift", "export"], "1", False)] * 2 + [(["megatron", "export"], "2", True)] * 2
    runs = json.loads((tmp_path / "results.json").read_text())
    text = report.markdown(runs)
    if is_damaged:
        assert "| 1 process | 1 tensors differ from the source, such as a |" in text
        return
    runs[0]["bytes"] = 3 * 10**9
    assert "| 1 process | 3.0 | ext4, cold | 2.00 GB/s | 1.50 GB/s: 1.5 + 0.5 s; command 9 s |" in report.markdown(runs)
    assert not (tmp_path / "tiny-conversion").exists()
