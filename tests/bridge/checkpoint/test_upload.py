"""Uploads against a small stand-in for the hub: which files, what happens when it fails, and what stays secret."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from megaswift.bridge.checkpoint import upload
from megaswift.bridge.options import HubOptions

from tests import prepared, tiny
from tests.bridge.checkpoint.fake_hub import TOKEN, FakeHub, serving

OPTIONS = HubOptions(push_to_hub=True, hub_model_id="me/model", hub_private_repo=True)
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 1000, "tokenizer/vocab.txt": b"a b"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with the state of a run."""
    folder = tmp_path / "checkpoint-5"
    for name, content in (FILES | {"training_state/rank0.safetensors": b"x", ".hidden": b"x"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PAUSE", 0.01)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # read from the environment at import


def push(hub: FakeHub, folder: Path, monkeypatch, token: str = TOKEN, options: HubOptions = OPTIONS) -> str:
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    return upload.upload_folder(folder, options, use_hf=True, token=token)


def test_a_checkpoint_without_its_state(folder: Path, monkeypatch) -> None:
    with serving(FakeHub()) as hub:
        assert push(hub, folder, monkeypatch) == f"{hub.address}/me/model"
        assert hub.files == {"me/model": FILES}
        assert hub.private == {"me/model": True}
        (folder / "config.json").write_bytes(b"[]")
        options = HubOptions(push_to_hub=True, hub_model_id="me/model", commit_message="Again")
        push(hub, folder, monkeypatch, options=options)  # into the repository that exists
        assert hub.files["me/model"]["config.json"] == b"[]"
        assert hub.messages == ["Upload checkpoint-5", "Again"]


def test_a_hub_that_fails_is_tried_again(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr(upload.time, "sleep", lambda seconds: None)
    with serving(FakeHub(failures=2)) as hub:
        push(hub, folder, monkeypatch)
        assert hub.files["me/model"] == FILES
    with serving(FakeHub(failures=10**6)) as hub:
        with pytest.raises(OSError, match=r"is whole, but was not uploaded") as caught:
            push(hub, folder, monkeypatch)
        assert f"by hand: hf upload me/model {folder} . --exclude 'training_state/*'" in str(caught.value)
        assert hub.requests >= upload.TRIES
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert TOKEN not in capsys.readouterr().out


def test_a_wrong_token_is_not_tried_again_nor_said(folder: Path, monkeypatch, capsys) -> None:
    with serving(FakeHub()) as hub:
        with pytest.raises(OSError, match="--hub_token") as caught:
            push(hub, folder, monkeypatch, token="hf_wrong_secret")
        assert hub.requests <= 2  # the client's own second question
    assert "hf_wrong_secret" not in str(caught.value) + capsys.readouterr().out
    assert caught.value.__cause__ is None


def test_modelscope(folder: Path, monkeypatch) -> None:
    calls: list = []

    class HubApi:
        def create_repo(self, name: str, **settings: object) -> None:
            calls.append(("create", name, settings["visibility"], settings["token"]))

        def upload_folder(self, **settings: object) -> None:
            calls.append(("upload", settings["repo_id"], settings["folder_path"], settings["ignore_patterns"]))

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "modelscope.hub", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", SimpleNamespace(HubApi=HubApi))
    address = upload.upload_folder(folder, OPTIONS, use_hf=False, token="t")
    assert address == "https://modelscope.cn/models/me/model"
    assert calls == [
        ("create", "me/model", "private", "t"),
        ("upload", "me/model", str(folder), upload.NOT_UPLOADED),
    ]


@pytest.mark.slow
@pytest.mark.long
def test_a_run_and_an_export_upload_what_they_wrote(tmp_path: Path) -> None:
    """The token stands in no file and in nothing that is printed."""
    tiny.save_tokenizer(tiny.save(tmp_path / "model", "qwen3"))
    (tmp_path / "train.jsonl").write_text('{"query": "What is 2 + 2?", "response": "4"}\n' * 4)
    with serving(FakeHub()) as hub:
        environment = os.environ | {
            "HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"
        }  # fmt: skip
        common = f"--use_hf true --hub_token {TOKEN} --push_to_hub true --hub_model_id me/"
        train = (
            f"megatron sft --model model --dataset train.jsonl --train_iters 1 --global_batch_size 2 --output_dir run "
            f"--dataloader_num_workers 0 --add_version false {common}trained"
        )
        printed = ""
        for words in (train, f"swift export --model model --to_mcore true --output_dir out {common}exported"):
            # A process of its own: huggingface_hub reads the environment when it is imported.
            done = subprocess.run(
                [sys.executable, "-m", "megaswift.cli.main", *words.split()],
                cwd=tmp_path,
                env=environment | prepared.ON_CPU,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            printed += done.stdout + done.stderr
    assert f"to {hub.address}/me/trained" in printed
    checkpoint = tmp_path / "run" / "checkpoint-1"
    files = hub.files["me/trained"]
    assert files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert files.keys() >= {"config.json", "tokenizer.json"}
    assert (checkpoint / "training_state").is_dir()
    assert not any(name.startswith("training_state") for name in files)
    assert any(name.endswith(".distcp") for name in hub.files["me/exported"])
    assert json.loads(files["args.json"])["options"]["hub_model_id"]["value"] == "me/trained"
    assert TOKEN not in printed
    for file in (file for name in ("run", "out") for file in (tmp_path / name).rglob("*") if file.is_file()):
        assert TOKEN.encode() not in file.read_bytes(), file
