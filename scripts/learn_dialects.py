"""Proof that configs of other systems train as the flags that they stand for, in minutes on two cores.

    python scripts/learn_dialects.py [--only verl siirl ...] [--folder megatron_output/learn-dialects]

The task is that of learn_rl.py: a small Qwen3 that answers a fifth of its sums rightly. Each config of RUNS, in the
words of its system, and the flags written beside it train it for five generations. It fails unless the rewards, losses
and gradient norms of every step are equal to the last digit. A system is added by an entry in RUNS.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from learn import make_model
from learn_rl import BIN, megatron, write_sums

GENERATIONS = 5
CONFIGS = Path(__file__).parent / "dialects"
PLUGIN = "--external_plugins exact.py --reward_funcs exact"
NUMBERS = ("reward", "loss", "grad_norm", "learning_rate", "critic/loss", "values/mean")
LOGGED = "--logging_steps 1 --dataloader_num_workers 0 --no_save_optim true"


class DialectRun(NamedTuple):
    """Config in another system's words, and our flags for the same training."""

    words: str  # words of `megatron run`
    flags: str  # the same in flags of `megatron rlhf`
    processes: int  # NPROC_PER_NODE beside the flags; a config says it
    file: tuple[str, str] | None = None  # name and text of a config to write; {base}: the model


VERL = """
verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml
algorithm.adv_estimator=grpo
data.train_files=sums.parquet data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=3
actor_rollout_ref.model.path={base}
actor_rollout_ref.actor.strategy=megatron
actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.optim.lr=3e-3 actor_rollout_ref.actor.optim.lr_warmup_steps=1
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01
actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=8
trainer.n_gpus_per_node=2 trainer.total_training_steps=5 trainer.resume_mode=disable
"""
SIIRL = """
siirl.main_dag
algorithm.adv_estimator=gae
data.train_files=sums.parquet data.train_batch_size=32 data.max_prompt_length=16 data.max_response_length=3
actor_rollout_ref.model.path={base}
actor_rollout_ref.actor.strategy=megatron
actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.grad_clip=0.5
actor_rollout_ref.rollout.name=hf
algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05
critic.optim.lr=1e-3 critic.megatron.pipeline_model_parallel_size=2
trainer.n_gpus_per_node=2 trainer.total_training_steps=5 trainer.critic_warmup=2 trainer.resume_mode=off
dag.enable_perf=False
"""
ROLL = """
pretrain: {base}
num_gpus_per_node: 2
max_steps: 5
rollout_batch_size: 32
num_return_sequences_in_group: 8
prompt_length: 16
response_length: 3
adv_estimator: reinforce
whiten_advantages: true
advantage_clip: 2.0
reward_clip: 10
dual_clip_loss: true
use_kl_loss: true
kl_loss_coef: 0.01
actor_train:
  model_args: {dtype: fp32}
  training_args: {learning_rate: 3.0e-3, lr_scheduler_type: constant, per_device_train_batch_size: 32,
                  gradient_accumulation_steps: 2, warmup_steps: 2}
  data_args: {template: native, file_name: sums.parquet, messages: prompt, domain_interleave_probs: {math_rule: 1.0}}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {recompute_granularity: full}
  device_mapping: list(range(0,2))
actor_infer:
  generating_args: {temperature: 1.0, top_p: 1.0, top_k: -1, max_new_tokens: "${response_length}"}
  strategy_args: {strategy_name: hf_infer}
  device_mapping: list(range(0,1))
reference:
  model_args: {dtype: fp32}
  strategy_args: {strategy_name: megatron_infer, strategy_config: {pipeline_model_parallel_size: 2}}
  device_mapping: list(range(0,2))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [math]
"""
COMMON = (
    "--dataset sums.parquet --reward_funcs by_source --use_vllm false --temperature 1 --max_length 16 "
    "--max_completion_length 3 --loss_type dapo --delta 3 --weight_decay 0.01 --adam_beta2 0.999 "
)
RUNS = {
    "verl": DialectRun(
        VERL,
        COMMON + "--rlhf_type grpo --num_generations 8 --global_batch_size 128 --steps_per_generation 2 "
        "--micro_batch_size 32 --pipeline_model_parallel_size 2 --lr 3e-3 --lr_warmup_iters 2 "
        "--lr_decay_style constant --beta 0.01 --train_iters 10",
        processes=2,
    ),
    "siirl": DialectRun(
        SIIRL,
        COMMON + "--rlhf_type ppo --global_batch_size 32 --micro_batch_size 8 --lr 1e-3 --lr_decay_style linear "
        "--clip_grad 0.5 --kl_in_reward true --beta 0.05 --kl_estimator k1 --gamma 1 --lam 1 --critic_lr 1e-3 "
        "--cliprange_value 0.5 --critic_pipeline_model_parallel_size 2 --critic_warmup 2 --train_iters 5",
        processes=2,
    ),
    "roll": DialectRun(
        "roll.yaml",
        "--dataset sums.parquet --reward_funcs by_source --use_vllm false --temperature 1 --max_length 16 "
        "--max_completion_length 3 --rlhf_type grpo --advantage_estimator reinforce --whiten_advantages true "
        "--advantage_clip 2 --reward_clip 10 --delta 1.4 --beta 0.01 --ref_pipeline_model_parallel_size 2 "
        "--num_generations 8 --global_batch_size 128 --steps_per_generation 2 --micro_batch_size 32 --lr 3e-3 "
        "--lr_warmup_iters 2 --lr_decay_style constant --weight_decay 0 --adam_beta2 0.999 --train_iters 10",
        processes=2,
        file=("roll.yaml", ROLL),
    ),
    # Configs of the GRPO run of learn_rl.py.
    **{
        name: DialectRun(
            f"{name}.yaml {steps}=5 {PLUGIN}",
            f"{PLUGIN} --rlhf_type grpo --dataset questions.jsonl --use_vllm false --num_generations 16 "
            "--global_batch_size 256 --micro_batch_size 128 --max_completion_length 3 --temperature 1 --beta 0 "
            "--lr 1e-3 --train_iters 5",
            processes=1,
            file=(f"{name}.yaml", (CONFIGS / f"{name}.yaml").read_text().replace(": base,", ": {base},")),
        )
        for name, steps in (("trinity", "trainer.total_steps"), ("oumi", "training.max_steps"))
    },
}


def write_parquet(folder: Path) -> None:
    """Write the questions with verl's columns."""
    questions = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    rows = [
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": row["query"]}],
            "reward_model": {"style": "rule", "ground_truth": row["solution"]},
            "extra_info": {"split": "train", "index": number},
        }
        for number, row in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sums.parquet")


def train(folder: Path, words: list[str], output: str, processes: int | None) -> list[dict[str, float]]:
    """Run `megatron` and return its numbers of each step. processes: None: the config says."""
    line = [*words, *LOGGED.split(), "--output_dir", output, "--add_version", "false"]
    print(f"$ megatron {' '.join(line)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "NPROC_PER_NODE"}
    if processes:
        environment["NPROC_PER_NODE"] = str(processes)
    process = subprocess.run([BIN / "megatron", *line], cwd=folder, capture_output=True, text=True, env=environment)
    if process.returncode:
        raise SystemExit(process.stdout[-3000:] + process.stderr[-5000:])
    rows = [json.loads(line) for line in (folder / output / "logging.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in NUMBERS if name in row} for row in rows if "loss" in row]


def main(folder: Path, names: list[str]) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "cache")}
    make_model(folder / "model", ["say", "+", *map(str, range(19))], head_dim=32)
    write_sums(folder)
    write_parquet(folder)
    line = (
        "sft --model model --dataset answers.jsonl --global_batch_size 64 --micro_batch_size 64 --train_iters 300 "
        "--lr 3e-3 --weight_decay 0"
    )
    base = str(megatron(folder, line, "base").relative_to(folder))
    table, is_good = [], True
    for name in names:
        run = RUNS[name]
        if run.file:
            (folder / run.file[0]).write_text(run.file[1].replace("{base}", base))
        config_steps = train(folder, ["run", *run.words.replace("{base}", base).split()], name, None)
        flags = f"rlhf --model {base} {run.flags}".split()
        flag_steps = train(folder, flags, f"{name}-flags", run.processes)
        rewards = [step["reward"] for step in config_steps if "reward" in step]  # one per generation
        is_equal = config_steps == flag_steps and len(rewards) == GENERATIONS
        is_good = is_good and is_equal
        text = " ".join(f"{reward:.4f}" for reward in rewards)
        table.append(
            f"{name:<12}{text}{'' if is_equal else f'  WRONG: by flags {flag_steps}, by the config {config_steps}'}"
        )
    print(f"\n{'':<12}rewards of the generations, by the config as by flags", *table, sep="\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--folder", type=Path, default=Path("megatron_output/learn-dialects"))
    arguments = parser.parse_args()
    sys.exit(main(arguments.folder.absolute(), arguments.only))
