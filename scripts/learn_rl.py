"""Proof that models learn from their completions, in minutes on two cores: sums with verified answers.

    python scripts/learn_rl.py [--only grpo server lora gkd ...] [--folder megatron_output/learn-rl]

First `megatron sft` teaches a random Qwen3 to answer sums, a fifth of them right. Then GRPO trains it, with completions
by transformers or (`--engine vllm`, if installed) by vLLM, in the process or in `swift rollout`. It fails unless the
rewards of the first steps are below 0.3, those of the last steps above 0.8 (0.7 with an adapter: the frozen embeddings
keep every probability below 0.87), and the checkpoint's answers, by transformers, are as good.

ppo: the same with one completion of a prompt, and a critic, which must explain 0.3 of the variance of the last returns.
ppo_layouts: in two processes, with the critic in another parallel layout than the policy.

images: a random Qwen3-VL is taught to name the colours in pictures (mosaics.py), a fifth of them rightly; then GRPO
trains it to the same bounds. It must name half of the pictures with held-out arrangements. images_server: with
`swift rollout`.

gkd: a teacher says two words in either order. A random student learns its distributions, half of the time on the
student's completions. It fails unless the student's loss on held-out answers is within 15 % of the teacher's.
"""

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mosaics
import torch
from learn import PAIRS, WORDS, answer_log_probs, both_orders, make_model, tokens_of, train, write_data
from transformers import AutoModelForCausalLM, AutoTokenizer

BEFORE, AFTER = 0.3, {"grpo": 0.8, "lora": 0.7, "server": 0.8, "ppo": 0.8, "ppo_layouts": 0.8}
HELD_OUT = 0.5  # share of exact answers about arrangements of colours that were never trained on
EXPLAINED = 0.3  # share of the variance of returns that a critic explains at last
BIN = Path(sys.executable).parent
# With 8 completions per prompt and a learning rate of 3e-3, the right answer to a question can become improbable before
# it is sampled: the rewards then stay at 0.53 on a CPU with AVX2, and reach 0.97 on another CPU.
GRPO = (
    "rlhf --rlhf_type grpo --external_plugins exact.py --reward_funcs exact --num_generations 16 "
    "--global_batch_size 256 --micro_batch_size 128 --max_completion_length 3 --temperature 1 "
    "--beta 0 --train_iters 200 --lr 1e-3"
)
# One completion of a prompt. Its advantage is over what the critic expects, which begins with a head of zeros.
PPO = (
    GRPO.replace("rlhf_type grpo", "rlhf_type ppo").replace("num_generations 16", "num_generations 1")
    + " --critic_lr 1e-3 --critic_warmup 5"
)
# Not `accuracy`, which accepts "1 + 2" for 3, so that the model would learn to repeat the question.
EXACT = """
from megaswift.tasks.rewards import reward


@reward("exact")
def exact(completions, solution, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, solution)]
"""
RUNS = {
    "grpo": GRPO,
    "lora": GRPO + " --tuner_type lora --lora_rank 16 --lora_alpha 128 --target_modules all-linear",
    "server": GRPO + " --vllm_mode server",
    "ppo": PPO,
    "ppo_layouts": PPO + " --critic_pipeline_model_parallel_size 2",  # policy DP2, critic PP2
}
PROCESSES = {"ppo_layouts": "2"}
TOWER = "--freeze_vit false --freeze_aligner false"
IMAGES = (
    "rlhf --rlhf_type grpo --external_plugins exact.py --reward_funcs exact --num_generations 16 "
    "--global_batch_size 512 --micro_batch_size 256 --max_completion_length 5 --temperature 1 "
    f"--beta 0 --train_iters 150 --lr 6e-4 --lr_warmup_fraction 0.05 {TOWER}"
)
IMAGE_RUNS = {"images": IMAGES, "images_server": IMAGES + " --vllm_mode server"}


def sums() -> list[tuple[str, int]]:
    return [(f"say {a} + {b}", a + b) for a in range(6) for b in range(6)]


def write_sums(folder: Path) -> None:
    """Write answers, of which every fifth is right, and questions with their solutions."""
    rng = random.Random(0)
    answers, questions = [], []
    for question, total in sums():
        wrong = [number for number in range(11) if number != total]
        for answer in (total, *rng.sample(wrong, 4)):
            answers.append({"query": question, "response": str(answer)})
        questions.append({"query": question, "solution": str(total)})
    for name, rows in (("answers", answers), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "exact.py").write_text(EXACT)


def megatron(folder: Path, line: str, output: str, processes: str = "1") -> Path:
    """Run `megatron {line}` and return its checkpoint."""
    words = f"{line} --output_dir {output} --add_version false --dataloader_num_workers 0 --no_save_optim true"
    print(f"$ megatron {words}", flush=True)
    environment = os.environ | {"NPROC_PER_NODE": processes}
    process = subprocess.run(
        [BIN / "megatron", *words.split()], cwd=folder, capture_output=True, text=True, env=environment
    )
    if process.returncode:
        raise SystemExit(process.stdout[-3000:] + process.stderr[-5000:])
    (checkpoint,) = (folder / output).glob("checkpoint-*[0-9]")
    return checkpoint


def logged(folder: Path, name: str) -> list[float]:
    """Return a number of each step of a run, where it was logged."""
    rows = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@torch.no_grad()
def answer_probability(folder: Path) -> float:
    """Return the mean probability of a checkpoint's right answers, with transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    probabilities = []
    for question, total in sums():
        prompt = tokens_of(tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True)
        answer = [*tokenizer.encode(str(total), add_special_tokens=False), tokenizer.eos_token_id]
        log_probs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        probabilities.append(log_probs.gather(1, torch.tensor(answer)[:, None]).sum().exp())
    return float(torch.stack(probabilities).mean())


@contextmanager
def server(folder: Path, model: str, engine: str):
    """Start a `swift rollout`; yield its port and process id."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with (folder / "rollout.log").open("w") as log:
        argv = [
            "rollout",
            "--model",
            model,
            "--infer_backend",
            engine,
            "--port",
            str(port),
            "--torch_dtype",
            "float32",
            "--log_level",
            "warning",
        ]
        process = subprocess.Popen([BIN / "swift", *argv], cwd=folder, stdout=log, stderr=log)
        try:
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(60)


def distill(folder: Path, engine: str) -> bool:
    """Train a teacher and its student. Return whether the student reaches the teacher's loss on held-out rows."""
    folder.mkdir()
    make_model(folder / "model", [" ".join(WORDS)], head_dim=32)
    for name in ("teacher", "student"):
        write_data(folder, name, both_orders)
    teacher = train(folder, "teacher", "model", f"sft {PAIRS} --train_iters 600 --save_steps 600 --lr 3e-3")
    start_time = time.perf_counter()
    line = f"rlhf --rlhf_type gkd --teacher_model {teacher} --lmbda 0.5 --beta 0.5 --temperature 1 {PAIRS} --lr 3e-3"
    line += f" --max_completion_length 3 --train_iters 900 --save_steps 900 --use_vllm {str(engine == 'vllm').lower()}"
    student, seconds = train(folder, "student", "model", line), time.perf_counter() - start_time
    rows = [json.loads(line)["messages"] for line in (folder / "student-val.jsonl").read_text().splitlines()]
    base, target, loss = (
        -float(answer_log_probs(model, rows).mean()) for model in (folder / "model", teacher, student)
    )
    is_good = loss < 1.15 * target
    print(f"\ngkd       held-out loss {loss:.4f}, the teacher's {target:.4f}, before {base:.4f}, {seconds:.0f} s")
    print("" if is_good else "WRONG")
    return is_good


def run(folder: Path, flags: str, base: Path, name: str, engine: str) -> Path:
    """Run a task with generation on questions.jsonl, and return its checkpoint; with a server, start that too."""
    line = f"{flags} --model {base.relative_to(folder)} --dataset questions.jsonl --logging_steps 1"
    if "--vllm_mode server" in flags:
        with server(folder, str(base), engine) as (port, _):
            return megatron(folder, f"{line} --vllm_server_port {port}", name)
    return megatron(folder, f"{line} --use_vllm {str(engine == 'vllm').lower()}", name, PROCESSES.get(name, "1"))


def name_colours(folder: Path, names: list[str], engine: str) -> bool:
    """Train a model that names the colours of a fifth of its pictures. Return whether it learns to name all."""
    folder.mkdir()
    mosaics.write_data(folder)
    mosaics.make_model(folder / "model")
    (folder / "exact.py").write_text(EXACT)
    right, wrong, held_out = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("images", "control", "images-val")
    )
    answers = [pair[number % 5 > 0] for number, pair in enumerate(zip(right, wrong, strict=True))]
    questions = [row | {"messages": row["messages"][:1], "solution": row["messages"][1]["content"]} for row in right]
    for name, rows in (("answers", answers), ("questions", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = megatron(
        folder,
        f"sft --model model --dataset answers.jsonl --global_batch_size 32 --micro_batch_size 32 --train_iters 500 "
        f"--lr 1e-3 {TOWER}",
        "base",
    )
    table = []
    for name in names:
        start_time = time.perf_counter()
        checkpoint = run(folder, IMAGE_RUNS[name], base, name, engine)
        rewards = logged(checkpoint.parent, "reward")
        exact = [mosaics.measure(model, held_out)["exact answers"] for model in (base, checkpoint)]
        numbers = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5, *exact
        table.append((name, numbers, time.perf_counter() - start_time))
    is_good = True
    print(f"\n{'':<14}{'reward':>10}{'at last':>10}{'held out':>10}{'at last':>10}{'seconds':>10}")
    for name, numbers, seconds in table:
        has_learned = numbers[0] < BEFORE and numbers[1] > AFTER["grpo"] and numbers[3] > HELD_OUT
        columns = "".join(f"{number:>10.3f}" for number in numbers)
        print(f"{name:<14}{columns}{seconds:>10.0f}{'' if has_learned else '  WRONG'}")
        is_good = is_good and has_learned
    return is_good


def main(folder: Path, names: list[str], engine: str) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache")}
    make_model(folder / "model", ["say", "+", *map(str, range(19))], head_dim=32)  # vLLM on CPUs supports this head_dim
    write_sums(folder)
    is_good = distill(folder / "gkd", engine) if "gkd" in names else True
    if image_names := [name for name in names if name in IMAGE_RUNS]:
        is_good = name_colours(folder / "images", image_names, engine) and is_good
    names = [name for name in names if name in RUNS]
    if not names:
        return 0 if is_good else 1
    base = megatron(
        folder,
        "sft --model model --dataset answers.jsonl --global_batch_size 64 --micro_batch_size 64 --train_iters 300 "
        "--lr 3e-3 --weight_decay 0",
        "base",
    )
    before, table = answer_probability(base), []
    for name in names:
        start_time = time.perf_counter()
        checkpoint = run(folder, RUNS[name], base, name, engine)
        merged = checkpoint.with_name(f"{checkpoint.name}-merged")
        step_rewards, after = (
            logged(checkpoint.parent, "reward"),
            answer_probability(merged if merged.exists() else checkpoint),
        )
        first, last = sum(step_rewards[:3]) / 3, sum(step_rewards[-5:]) / 5
        has_learned = first < BEFORE and last > AFTER[name] and after > AFTER[name]
        explained = logged(checkpoint.parent, "critic/explained_variance")[-5:]
        if explained:
            print(f"{name}: the critic explains {sum(explained) / 5:.3f} of the variance of returns")
            has_learned = has_learned and sum(explained) / 5 > EXPLAINED
        is_good = is_good and has_learned
        seconds = time.perf_counter() - start_time
        numbers = "".join(f"{number:>10.3f}" for number in (first, last, before, after))
        table.append(f"{name:<12}{numbers}{seconds:>10.0f}{'' if has_learned else '  WRONG'}")
    print(f"\n{'':<12}{'reward':>10}{'at last':>10}{'p(right)':>10}{'at last':>10}{'seconds':>10}", *table, sep="\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*RUNS, *IMAGE_RUNS, "gkd"], default=[*RUNS, "images", "gkd"])
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--folder", type=Path, default=Path("megatron_output/learn-rl"))
    arguments = parser.parse_args()
    sys.exit(main(arguments.folder.absolute(), arguments.only, arguments.engine))
