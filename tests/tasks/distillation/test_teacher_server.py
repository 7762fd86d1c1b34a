"""A teacher behind a server teaches what it does in the run's own processes, whatever their layout; and what a user
reads where it cannot."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import tiny
from tests.prepared import ROOT, free_port
from tests.tasks.distillation.runs import OFF_POLICY, ON_POLICY, TEACHER, Distilled, assert_same_run
from tests.tasks.distillation.test_layouts import CP, PP, TP
from tests.tasks.preference.runs import assert_same_weights

TOP = "--gkd_logits_topk 9"
later = pytest.mark.long


@contextmanager
def teaching(folder: Path, port: int | None = None, **options) -> Iterator[tuple[str, subprocess.Popen]]:
    """`swift rollout` of the model in `folder`, by transformers: its address, and its process."""
    port = port or free_port()
    given = {"model": str(folder), "port": port, "infer_backend": "transformers"} | options
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tasks.rollout.serve_worker", json.dumps(given)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def served(place: Distilled) -> Iterator[str]:
    with teaching(place.folder / "teacher") as (url, _):
        yield f'--teacher_model "" --teacher_model_server {url}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "layout", "processes"),
    [
        pytest.param(f"{OFF_POLICY} --sft_alpha 0.4", "", None, id="one process", marks=later),
        pytest.param(f"{ON_POLICY}", TP, 2, id="TP2 SP on policy", marks=later),
        pytest.param(f"{OFF_POLICY}", f"{PP} --packing true --packing_length 256", 2, id="PP2 packed", marks=later),
        pytest.param(f"{OFF_POLICY}", CP, 2, id="CP2", marks=later),
        pytest.param(f"{OFF_POLICY} --seq_kd true --max_completion_length 8", "", 2, id="DP2 seq_kd", marks=later),
    ],
)
def test_the_same_run(base: str, layout: str, processes: int | None, served: str, place: Distilled) -> None:
    found = place.run(f"{base} {TOP} {layout} {served}", processes)
    wanted = place.run(f"{base} {TOP} --teacher_model teacher")
    assert ", a server (swift rollout)" in found.printed
    assert_same_run(found, wanted)
    assert_same_weights(found.weights, wanted.weights, load_file(place.folder / "qwen3" / "model.safetensors"))
    assert found.steps[0]["loss"] == pytest.approx(wanted.steps[0]["loss"], rel=1e-6)


LINE = "--rlhf_type gkd --model qwen3 --dataset train.jsonl --use_vllm false --global_batch_size 4 --lmbda 0"
LINE += " --logging_steps 1 --no_save_optim true --output_dir bad"


@pytest.mark.slow
@later
def test_teachers_that_do_not_fit(place: Distilled) -> None:
    from transformers import AutoTokenizer

    folder = place.tokenized(tiny.save(place.folder / "foreign-served", "qwen3", **TEACHER))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["stone"])
    tokenizer.save_pretrained(folder)
    with teaching(folder) as (url, _):
        said = place.megatron(f"{LINE} --train_iters 1 {TOP} --teacher_model_server {url}", fails=True)
    assert f"--teacher_model_server {url} has another vocabulary than the trained model: 'stone' is" in said
    assert "Traceback" not in said
    start = time.monotonic()
    line = f"{LINE} --train_iters 1 {TOP} --teacher_model_server {url} --vllm_server_timeout 1"
    assert f"--teacher_model_server {url}: no server answers (" in place.megatron(line, 2, fails=True)
    assert time.monotonic() - start < 90


@pytest.mark.slow
@later
def test_a_server_that_dies(place: Distilled) -> None:
    """Named within seconds; where it is waited for, and comes back, the run is that of one that never died."""
    line = f"{LINE} --train_iters 400 {TOP} --save_steps 1000 --output_dir dies --add_version false"

    def first_line(folder: Path) -> None:
        while not (folder / "logging.jsonl").exists() or '"loss"' not in (folder / "logging.jsonl").read_text():
            time.sleep(0.1)

    with teaching(place.folder / "teacher") as (url, process):
        ended: list[float] = []

        def kill() -> None:
            first_line(place.folder / "dies")
            process.kill()
            ended.append(time.monotonic())

        threading.Thread(target=kill, daemon=True).start()
        said = place.megatron(f"{line} --teacher_model_server {url}", 2, fails=True)
        assert time.monotonic() - ended[0] < 30  # of it the processes' own end
    assert f"The teacher's server {url} is gone" in said
    assert "--server_reconnect_timeout" in said
    assert "Traceback" not in said

    port = free_port()
    short = f"{OFF_POLICY} {TOP} --server_reconnect_timeout 120"
    with teaching(place.folder / "teacher", port) as (url, process):
        output = place.folder / f"run-{len(place._runs)}"

        def kill_and_start() -> None:
            first_line(output)
            process.kill()
            process.wait()
            again.append(subprocess.Popen(process.args, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}))

        again: list[subprocess.Popen] = []
        threading.Thread(target=kill_and_start, daemon=True).start()
        try:
            found = place.run(f'{short} --teacher_model "" --teacher_model_server {url}')
        finally:
            for each in again:
                each.kill()
                each.wait()
    assert_same_run(found, place.run(f"{OFF_POLICY} {TOP} --teacher_model teacher"))


def test_flags_that_cannot_be() -> None:
    from megaswift.bridge.option_groups import compose
    from megaswift.cli.checks.generation import check_generation
    from megaswift.cli.checks.teacher import check_teacher
    from megaswift.cli.flags import UsageError
    from megaswift.tasks.options import GkdOptions

    url = "http://t:8000"
    served = {"teacher_model_server": url, "gkd_logits_topk": 8}
    for changes, said in (
        ({"teacher_model_server": url}, f"--teacher_model_server {url} needs --gkd_logits_topk"),
        ({"teacher_model_server": "t:8000"}, "--teacher_model_server t:8000: it must begin with http"),
        (served | {"teacher_model": "t"}, f"--teacher_model t and --teacher_model_server {url}: set one of them"),
        (
            served | {"offload_teacher_model": True},
            "--offload_teacher_model true cannot be used with --teacher",
        ),
        (
            served | {"teacher_context_parallel_size": 2},
            "--teacher_context_parallel_size 2 cannot be used with",
        ),
        ({"teacher_model": "t", "teacher_model_server_api_key": "k"}, "_api_key: only for --teacher_model_server"),
        ({}, "--teacher_model: missing.* as --teacher_model_server"),
    ):
        with pytest.raises(UsageError, match=said):
            check_teacher(compose(GkdOptions, model="m", **changes), 1)
    assert check_teacher(compose(GkdOptions, model="m", **served, seq_kd=True), 1) is None
    typed = {"server_reconnect_timeout": "command line", "vllm_server_timeout": "command line"}
    check_generation(compose(GkdOptions, model="m", use_vllm=False, server_reconnect_timeout=3.0, **served), typed)
    with pytest.raises(
        UsageError, match=r"--(vllm_server_timeout|server_reconnect_timeout) .*: only for --vllm_mode server"
    ):
        check_generation(
            compose(GkdOptions, model="m", use_vllm=False, server_reconnect_timeout=3.0, teacher_model="t"), typed
        )
