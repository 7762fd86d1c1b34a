"""`megatron sft` and `megatron pt` as a user runs them: processes, folders, logs, checkpoints."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch

from tests import prepared, tiny
from tests.bridge.families.worker import tensors_of
from tests.tasks.report.pages import Page

pytestmark = pytest.mark.slow
MEGATRON = Path(sys.executable).parent / "megatron"
SUMS = [{"query": f"What is {a} + {b}?", "response": str(a + b)} for a in range(3, 9) for b in range(2, 9)]
COUNT = """import glob, json, sys, time, safetensors
time.sleep(1)
files = glob.glob(sys.argv[1] + "/*.safetensors")
print(json.dumps({"tensors": sum(len(safetensors.safe_open(file, "np").keys()) for file in files)}))
"""
COMMON = "--micro_batch_size 2 --global_batch_size 4 --lr 1e-3 --logging_steps 1 --dataloader_num_workers 0"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, data and caches."""
    folder = tmp_path_factory.mktemp("runs")
    for family in ("qwen3", "qwen3_moe"):
        tiny.save_tokenizer(tiny.save(folder / family, family))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[:34]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[34:]))
    (folder / "text.txt").write_text("".join(f"{row['query']} {row['response']}\n" for row in SUMS))
    return folder


def megatron(place: Path, line: str, processes: int | None = None, *, fails=False, command=False) -> str:
    """Run `megatron {line}` in `place`; what it printed. `command`: by its name, so that it starts torchrun."""
    environment = os.environ | {"HF_HOME": str(place / "cache"), "COLUMNS": "200"} | prepared.ON_CPU
    if command:
        done = subprocess.run(
            [MEGATRON, *line.split()],
            cwd=place,
            env=environment | {"NPROC_PER_NODE": str(processes)},
            capture_output=True,
            text=True,
            timeout=240,
        )
    else:
        words = ["-m", "megaswift.cli.main", "megatron", *shlex.split(line)]
        done = prepared.run(words, processes=processes, cwd=place, environment=environment)
    assert (done.returncode != 0) == fails, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in log_of(folder) if "loss" in row]


def run_folder(output: Path) -> Path:
    (folder,) = output.iterdir()
    return folder


@pytest.fixture(scope="module")
def alone(place):
    """A run in one process: evaluation, checkpoints, of which the last is kept."""
    megatron(
        place,
        f"sft --model qwen3 --dataset train.jsonl --val_dataset val.jsonl {COMMON} --num_train_epochs 1 "
        "--save_steps 4 --save_total_limit 1 --output_dir alone",
    )
    return run_folder(place / "alone")


def test_the_log_keeps_its_promise(alone):
    rows = log_of(alone)
    promised = {
        "step", "max_steps", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second_per_gpu",
        "tflops_per_gpu", "mfu", "memory_gib", "data_wait", "elapsed",
    }  # fmt: skip
    training = [row for row in rows if "loss" in row]
    assert all(promised <= row.keys() for row in training)
    assert [row["step"] for row in training] == list(range(1, 10))  # 34 rows in batches of 4: every row is seen
    assert training[-1]["loss"] < training[0]["loss"]
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8, 9]
    for picture in ("loss", "overview"):
        assert (alone / "images" / f"{picture}.png").stat().st_size > 1000
    assert list((alone / "runs").iterdir())
    kept = json.loads((alone / "args.json").read_text())
    assert kept["options"]["lr"] == {"value": 1e-3, "source": "command line"}
    assert "scaled_dot_product_attention" in kept["kernels"]


def test_a_report_is_beside_the_log(alone, place):
    from transformers import AutoTokenizer

    (run,) = Page(alone / "report.html").content["runs"]
    assert run["state"] == "finished"
    assert run["curves"]["loss"]["values"] == pytest.approx(losses(alone), rel=1e-5)
    assert run["curves"]["eval_loss"]["steps"] == [4, 8, 9]
    assert [checkpoint["name"] for checkpoint in run["checkpoints"]] == ["checkpoint-9"]
    assert run["args"]["layout"].startswith("1 process = TP 1")
    assert torch.__version__.startswith(run["args"]["versions"]["torch"])
    tokenizer = AutoTokenizer.from_pretrained(place / "qwen3")
    rows = [
        [{"role": "user", "content": r["query"]}, {"role": "assistant", "content": r["response"]}] for r in SUMS[:34]
    ]
    lengths = [len(tokenizer.encode(tokenizer.apply_chat_template(row, tokenize=False))) for row in rows]
    data = run["data"]["train"]
    assert (data["samples"], data["tokens"]) == (34, sum(lengths))
    assert sum(data["lengths"]["counts"]) == 34


def test_the_checkpoint_is_a_model_for_transformers_and_eval_loss_is_its_loss(alone, place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [entry.name for entry in alone.glob("*checkpoint*")] == ["checkpoint-9"]
    folder = alone / "checkpoint-9"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    (last,) = [row["eval_loss"] for row in log_of(alone) if "eval_loss" in row and row["step"] == 9]
    log_probs = answer_log_probs(place, model, AutoTokenizer.from_pretrained(folder))
    assert last == pytest.approx(-log_probs.mean().item(), rel=1e-5)


def answer_log_probs(place: Path, model, tokenizer) -> torch.Tensor:
    """Log-probabilities of all tokens of the evaluation's answers, by transformers."""
    found = []
    for line in (place / "val.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["query"]}]
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        ids = start + tokenizer.encode(row["response"] + "<|im_end|>", add_special_tokens=False)
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found += [log_probs[place - 1, ids[place]] for place in range(len(start), len(ids))]
    return torch.stack(found)


@pytest.mark.long
def test_dynamic_fine_tuning(place):
    """Each token's loss times its probability, in one process and in two that share each document."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    line = f"sft --model qwen3 --dataset train.jsonl --val_dataset val.jsonl {COMMON} --train_iters 4"
    line = f"{line} --enable_dft_loss true --save_steps 4"
    megatron(place, f"{line} --output_dir dft")
    megatron(place, f"{line} --context_parallel_size 2 --output_dir dft-cp", processes=2)
    one, two = run_folder(place / "dft"), run_folder(place / "dft-cp")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(one / "checkpoint-4", dtype=torch.float32)
    log_probs = answer_log_probs(place, model, AutoTokenizer.from_pretrained(one / "checkpoint-4"))
    (evaluated,) = [row["eval_loss"] for row in log_of(one) if "eval_loss" in row]
    assert evaluated == pytest.approx(-(log_probs * log_probs.exp()).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tp", "--tensor_model_parallel_size 2 --sequence_parallel true"),
        ("dp", "--overlap_grad_reduce true --overlap_param_gather true"),
        ("pp", "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2"),
    ],
)
def test_two_processes_give_the_numbers_of_one(name, flags, alone, place):
    printed = megatron(
        place,
        f"sft --model qwen3 --dataset train.jsonl --val_dataset val.jsonl {COMMON} --num_train_epochs 1 {flags} "
        f"--save_steps 100 --output_dir {name}",
        processes=2,
        command=name == "tp",
    )
    folder = run_folder(place / name)
    assert losses(folder) == pytest.approx(losses(alone), rel=1e-5)
    evaluated = [row["eval_loss"] for row in log_of(folder) if "eval_loss" in row]
    assert evaluated[-1] == pytest.approx([r["eval_loss"] for r in log_of(alone) if "eval_loss" in r][-1], rel=1e-5)
    assert log_of(folder)[-1]["tokens"] == log_of(alone)[-1]["tokens"]
    if name == "tp":
        _, command, torchrun, *lines = (folder / "console.log").read_text(encoding="utf-8").splitlines()
        assert command.startswith("megatron sft --model qwen3 ")
        assert "-m megaswift.cli.torchrun --nproc_per_node=2 " in torchrun
        assert "megaswift.cli.torchrun" not in printed
        shown = [line for line in printed.splitlines() if line.startswith(("Starting", "step ", "Saved ", "Curves"))]
        assert len(shown) > 10
        assert {*shown} <= {*lines}


@pytest.mark.gpu
def test_a_gpus_lines_come_a_step_later_and_say_the_same(alone, place):
    line = f"sft --model qwen3 --dataset train.jsonl {COMMON.replace('--logging_steps 1', '--logging_steps 3')}"
    line += " --num_train_epochs 1 --save_steps 5 --transformer_impl local --output_dir gpu"
    environment = os.environ | {"HF_HOME": str(place / "cache"), "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-m", "megaswift.cli.main", "megatron", *line.split()]
    subprocess.run(command, cwd=place, env=environment, check=True, timeout=240)
    expected = {row["step"]: row for row in log_of(alone) if "loss" in row}
    found = [row for row in log_of(run_folder(place / "gpu")) if "loss" in row]
    assert [row["step"] for row in found] == [1, 3, 6, 9]
    assert [row["tokens"] for row in found] == [expected[row["step"]]["tokens"] for row in found]
    norms = [expected[row["step"]]["grad_norm"] for row in found]
    assert [row["grad_norm"] for row in found] == pytest.approx(norms, rel=1e-3)


def test_pretraining_streams_and_packs_while_a_command_evaluates(place):
    """The command outlasts the training."""
    (place / "count.py").write_text(COUNT)
    printed = megatron(
        place,
        f"pt --model qwen3 --dataset text.txt --streaming true --packing true --max_length 64 {COMMON} "
        f"--train_iters 3 --save_steps 2 --async_save true --eval_command '{sys.executable} count.py {{checkpoint}}' "
        "--metric_for_best_model tensors --output_dir streamed",
        processes=2,
    )
    folder = run_folder(place / "streamed")
    found = losses(folder)
    assert len(found) == 3
    assert found[-1] < found[0]
    assert "checkpoint-3" in printed
    with safetensors.safe_open(folder / "checkpoint-3" / "model.safetensors", "pt") as file:
        tensors = len(file.keys())
    evaluations = [(row["step"], row["eval_tensors"]) for row in log_of(folder) if "eval_tensors" in row]
    assert evaluations == [(2, tensors), (3, tensors)]
    assert (folder / "best").resolve().name == "checkpoint-2"  # the first of two that are as good


def test_experts_report_their_balance(place):
    megatron(
        place,
        f"sft --model qwen3_moe --dataset train.jsonl --packing true --max_length 64 {COMMON} --train_iters 2 "
        "--expert_model_parallel_size 2 --moe_aux_loss_coeff 0.01 --output_dir moe "
        "--profile true --profile_step_start 2 --profile_ranks 1",
        processes=2,
    )
    folder = run_folder(place / "moe")
    balance = [row["load_balancing_loss"] for row in log_of(folder) if "loss" in row]
    # 1 where the experts are evenly loaded, 8 / 2 where two of eight take all.
    assert len(balance) == 2
    assert all(0.9 < value < 4 for value in balance)
    (trace,) = (folder / "profile").glob("*.json")
    assert trace.name == "steps-2-2-rank-1.json"
    assert "aten::mm" in json.dumps(json.loads(trace.read_text())["traceEvents"])
    assert "aten::mm" in trace.with_suffix(".txt").read_text()


def test_indexers_learn_their_attention(place):
    """The warm-up of DeepSeek-V3.2: they alone are trained."""
    model = tiny.save(place / "deepseek_v32", "deepseek_v32", num_nextn_predict_layers=0)
    tiny.save_tokenizer(model)
    megatron(
        place,
        f"sft --model deepseek_v32 --dataset train.jsonl --packing true --max_length 64 {COMMON} --train_iters 8 "
        "--lr 3e-2 --lr_decay_style constant --freeze_parameters_ratio 1 --trainable_parameters_regex indexer "
        "--dsa_indexer_loss_coeff 1 --output_dir indexers",
    )
    folder = run_folder(place / "indexers")
    values = [row["indexer_loss"] for row in log_of(folder) if "loss" in row]
    assert values[-1] < 0.5 * values[0]
    before, after = (tensors_of(path) for path in (model, folder / "last"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}
    assert changed == {name for name in before if ".indexer." in name}


def test_sgd_in_half_precision_says_what_it_skips(place):
    printed = megatron(
        place,
        f"sft --model qwen3 --dataset train.jsonl#3 --val_dataset val.jsonl --eval_iters 0 {COMMON} --train_iters 2 "
        "--optimizer sgd --torch_dtype float16 --lr 1e9 --clip_grad 0 --output_dir half",
    )
    assert "--global_batch_size 4: the data has 3 samples, so a step sees some of them more than once" in printed
    assert "step 2: no update, fp16's gradients overflow" in printed
    assert "eval_loss" not in printed


def test_a_token_beyond_the_vocabulary_is_no_zero(place):
    tiny.save_tokenizer(tiny.save(place / "small", "qwen3", vocab_size=200))
    printed = megatron(
        place,
        f"sft --model small --dataset train.jsonl {COMMON} --train_iters 1 --tensor_model_parallel_size 2 "
        "--output_dir never",
        processes=2,
        fails=True,
    )
    assert "the model's embedding has 200 rows" in printed
    assert "Traceback" not in printed


def test_a_truncated_shard_is_named(place):
    broken = place / "broken"
    tiny.save_tokenizer(tiny.save(broken, "qwen3"))
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    printed = megatron(
        place, f"sft --model broken --dataset train.jsonl {COMMON} --train_iters 1 --output_dir never", fails=True
    )
    assert "model.safetensors" in printed
    assert "Traceback" not in printed


@pytest.mark.long
def test_rope_scaling_is_trained_saved_and_exported(place):
    """transformers has the loss of the first step, for the rope that is meant; the saved config.json has that rope."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tiny.save_tokenizer(
        tiny.save(place / "plain", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    flags = "--model plain --rope_scaling yarn --max_model_len 96"
    config = json.loads((place / "plain/config.json").read_text()) | {"max_position_embeddings": 32}
    (place / "plain/config.json").write_text(json.dumps(config))
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}
    (place / "meant").mkdir()
    (place / "meant/config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    meant = AutoConfig.from_pretrained(place / "meant")
    text = "How long is a long text? " * 9
    (place / "long.jsonl").write_text(json.dumps({"response": text}) + "\n")
    megatron(
        place,
        f"pt {flags} --dataset long.jsonl --torch_dtype float32 --train_iters 1 --global_batch_size 1 --lr 1e-3 "
        "--logging_steps 1 --dataloader_num_workers 0 --output_dir rope",
    )
    tokenizer = AutoTokenizer.from_pretrained(place / "plain")
    tokens = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
    assert tokens.shape[1] > 32
    model = AutoModelForCausalLM.from_pretrained(place / "plain", config=meant, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens, labels=tokens).loss.item()
        without = AutoModelForCausalLM.from_pretrained(place / "plain", dtype=torch.float32)(tokens, labels=tokens).loss
    assert abs(without.item() - expected) > 1e-2
    folder = run_folder(place / "rope")
    assert losses(folder) == pytest.approx([expected], rel=1e-4)
    saved = AutoConfig.from_pretrained(folder / "checkpoint-1")
    assert (saved.rope_parameters, saved.max_position_embeddings) == (meant.rope_parameters, 96)
    words = f"export {flags} --to_mcore true --torch_dtype float32 --test_convert_precision true --output_dir mcore"
    done = prepared.run(["-m", "megaswift.cli.main", "swift", *words.split()], cwd=place, environment=os.environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert AutoConfig.from_pretrained(place / "mcore").rope_parameters == meant.rope_parameters
