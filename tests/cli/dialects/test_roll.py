"""ROLL's configs: arithmetic of batches, rewards by domain, engines, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.dialects.keys import Keys, Tree, read_tree
from megaswift.cli.dialects.roll import ROLL
from megaswift.cli.dialects.run import translate_words
from megaswift.cli.dialects.run_words import read_words
from megaswift.cli.dialects.translation import Translation, translate

from tests.cli.dialects.known_configs import FOLDER

WORKERS = "roll.pipeline.rlvr.rewards"
JUDGE = [
    f"rewards.llm_judge.worker_cls={WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "rewards.llm_judge.tag_included=[RLVR]",
]
TRAINED, CONFIG = "actor_train.training_args", "actor_train.strategy_args.strategy_config"


def translated(*words: str, name: str = "tiny") -> Translation:
    path = str(FOLDER / f"roll-{name}.yaml")
    tree, problems = read_tree(path, list(words))
    assert problems == []
    return translate(ROLL, Keys(tree, "f.yaml"))


def flags_of(*words: str, name: str = "tiny") -> Mapping[str, Any]:
    translation = translated(*words, name=name)
    assert translation.refused == []
    return translation.flags


def refused(*words: str, name: str = "tiny") -> list[str]:
    return translated(*words, name=name).refused


def test_batches_and_schedule() -> None:
    # 8 prompts x 4 completions on 1 data-parallel rank with micro batches of 2 x 4: 4 steps, twice.
    flags = flags_of(
        f"{TRAINED}.gradient_accumulation_steps=4", "ppo_epochs=2", "max_steps=10", "save_steps=3", "eval_steps=2"
    )
    assert (flags["global_batch_size"], flags["micro_batch_size"], flags["steps_per_generation"]) == (8, 2, 4)
    assert (flags["num_iterations"], flags["train_iters"], flags["save_steps"], flags["eval_steps"]) == (2, 80, 24, 16)
    assert flags["eval_on_start"] is True


def test_replicas_are_of_the_roles_own_gpus() -> None:
    translation = translated(name="ppo")
    assert translation.refused == []
    assert (translation.processes, translation.nodes) == (4, 1)  # actor on 0-1, critic on 2-3
    assert translation.flags["global_batch_size"] == 2 * 16 * 2
    notes = " ".join(translation.notes)
    assert "actor_train.device_mapping" in notes
    assert "critic.device_mapping" in notes


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("rollout_batch_size=6", "rollout_batch_size 6: 6 x num_return_sequences_in_group 4 = 24 completions are not"),
        (f"{CONFIG}.pipeline_model_parallel_size=2", "actor_train.device_mapping list(range(0,2)): 2 GPUs are not a"),
        ("actor_train.device_mapping=range(2)", "actor_train.device_mapping range(2): not a list of GPUs"),
        ("actor_train.strategy_args.strategy_name=jax", "actor_train.strategy_args.strategy_name jax: choose one of"),
        ("actor_train.model_args.dtype=int8", "actor_train.model_args.dtype int8: choose one of bf16, fp16, fp32"),
        ("reference.model_args.dtype=fp16", "reference.model_args.dtype fp16: all models have actor_train"),
        ("num_return_sequences_in_group=1 & rollout_batch_size=32", "num_return_sequences_in_group 1: grpo compares"),
        ("reward_clip=1", "reward_clip 1: scaled rewards have no bound"),
        ("gamma=0.9", "gamma 0.9: discounts are for adv_estimator gae alone"),
        ("add_token_level_kl=true", "add_token_level_kl true: cannot be used with use_kl_loss true"),
        ("adv_estimator=gigpo", "adv_estimator gigpo: is for agentic pipelines"),
        ("loss_agg_mode=seq-mean-token-sum-norm", "loss_agg_mode seq-mean-token-sum-norm: choose one of"),
        ("entropy_loss_coef=0.1", "entropy_loss_coef 0.1: the bonus is of the mean over tokens"),
        ("async_generation_ratio=1", "async_generation_ratio 1: needs engines apart"),
        ("async_generation_ratio=2", "async_generation_ratio 2: at most one generation is drawn ahead"),
        ("reward_norm=group", "reward_norm group: ROLL does not read it. Set norm_mean_type and norm_std_type"),
        ("validation.eval_steps=7", "validation.eval_steps 7: ROLL reads eval_steps, 10"),
        ("validation.generating_args.max_new_tokens=9", "validation.generating_args.max_new_tokens 9: ROLL takes"),
        ("actor_train.data_args.template=chatml", "actor_train.data_args.template chatml: only the tokenizer's own"),
        ("rewards.math_rule.worker_cls=my.Worker", "rewards.math_rule.worker_cls my.Worker: its rule is not known"),
        ("rewards.math_rule.query_filter_config.type=mean_filter", "rewards.math_rule.query_filter_config.type mean"),
        ("actor_train.data_args.domain_interleave_probs={code: 1.0}", "actor_train.data_args.domain_interleave_probs"),
        ("defaults=[../config/other@_here_]", "defaults ../config/other@_here_: ../config/other: there is no such"),
    ],
)  # fmt: skip
def test_one_refused_key(word: str, error: str) -> None:
    lines = refused(*word.split(" & "))
    assert any(line.startswith(error) for line in lines), lines
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("estimator", "mean", "std", "expected"),
    [
        ("grpo", None, None, {"rlhf_type": "grpo"}),
        ("reinforce", None, None, {"advantage_estimator": "reinforce"}),
        ("reinforce", "group", "group", {}),
        ("reinforce", "group", None, {"scale_rewards": "none"}),
        ("reinforce", "running", "running", {"advantage_estimator": "reinforce", "normalize_rewards": True}),
        ("gae", None, None, {"rlhf_type": "ppo", "whiten_advantages": True, "cliprange_value": 1e9}),
    ],
)
def test_advantages(estimator: str, mean: str | None, std: str | None, expected: Mapping[str, Any]) -> None:
    words = [f"adv_estimator={estimator}", f"norm_mean_type={mean or 'null'}", f"norm_std_type={std or 'null'}"]
    critic = ["critic.training_args.per_device_train_batch_size=16"] if estimator == "gae" else []
    flags = flags_of(*words, *critic, f"{CONFIG}.tensor_model_parallel_size=2", "critic.device_mapping=[0]")
    names = ("advantage_estimator", "scale_rewards", "normalize_rewards")
    assert {flag: flags[flag] for flag in flags if flag in (*names, *expected)} == expected
    assert refused("adv_estimator=reinforce", "norm_mean_type=batch", "norm_std_type=group") != []


def test_dual_clip_is_delta_where_it_is_above_the_range() -> None:
    assert flags_of("pg_clip=0.1")["delta"] == pytest.approx(1.2)
    wide = flags_of("pg_clip=0.1", "use_pg_clip_range=true", "pg_clip_low=0.2", "pg_clip_high=0.3")
    assert (wide["epsilon"], wide["epsilon_high"], wide["dual_clip"]) == (0.2, 0.3, pytest.approx(1.2))


def test_a_reward_clip_that_bounds_nothing() -> None:
    # The scaled rewards of 4 completions are largest for 1, 0, 0, 0: (1 - 0.25) / 0.5.
    assert "reward_clip" not in flags_of("reward_clip=1.5")
    assert flags_of("reward_clip=1.5", "adv_estimator=reinforce")["reward_clip"] == 1.5


def test_recomputation() -> None:
    flags = flags_of()
    assert (flags["recompute_method"], flags["recompute_num_layers"]) == ("uniform", 1)
    flags = flags_of(f"{CONFIG}.recompute_granularity=null", f"{CONFIG}.moe_layer_recompute=true")
    assert (flags["recompute_granularity"], flags["recompute_modules"]) == ("selective", ["moe"])


def test_rewards_and_shares_of_domains() -> None:
    flags = flags_of(name="async")
    assert flags["source_rules"] == {
        "deepmath_103k": "math", "aime": "math", "KodCode": "code", "crossthinkqa": "crossthinkqa", "RLVR": "judge",
        "*": "math",
    }  # fmt: skip
    assert list(flags["source_rules"])[-1] == "*"
    assert (flags["judge_server"], flags["judge_model"]) == ("http://localhost:9000/v1", "judge")
    assert flags["interleave_prob"] == [0.5, 0.5]
    probabilities = "actor_train.data_args.domain_interleave_probs"
    flags = flags_of(
        "actor_train.data_args.file_name=[code_a.jsonl, deepmath.jsonl, KodCode-b.jsonl]",
        f"{probabilities}.math_rule=0.4", f"{probabilities}.code_sandbox=0.6", name="async",
    )  # fmt: skip
    assert flags["interleave_prob"] == pytest.approx([0.3, 0.4, 0.3])
    assert flags["stopping_strategy"] == "all_exhausted"
    assert len(refused("actor_train.data_args.file_name=[a.jsonl, b.jsonl]", name="async")) == 2


def test_a_judge_needs_a_server_on_the_line() -> None:
    words = ["~actor_train.data_args.domain_interleave_probs", *JUDGE]
    path = str(FOLDER / "roll-tiny.yaml")
    (line,) = translate_words(read_words([path, *words])).refused
    assert line.startswith("rewards.llm_judge: a judge is behind a server here.")
    assert translate_words(read_words([path, *words, "--judge_server", "http://localhost:9000"])).refused == []


def test_engines() -> None:
    flags = flags_of(name="async")
    assert (flags["vllm_mode"], flags["rollout_num_gpus"], flags["vllm_tensor_parallel_size"]) == ("server", 4, 2)
    assert flags["async_generate"] is True
    assert flags["vllm_engine_kwargs"]["max_num_batched_tokens"] == 8192
    flags = flags_of(name="ppo")  # SGLang
    assert (flags["use_vllm"], flags["vllm_mode"], flags["vllm_tensor_parallel_size"]) == (True, "colocate", 2)
    assert flags["vllm_gpu_memory_utilization"] == 0.6
    (line,) = refused("actor_infer.strategy_args.strategy_config.max_model_len=1000", name="ppo")[:1] or [""]
    assert line == ""
    (line,) = refused("actor_infer.strategy_args.strategy_config.max_model_len=500", name="ppo")
    assert "Set 768 or more" in line


def test_engines_on_other_nodes() -> None:
    words = ["num_gpus_per_node=4", "actor_infer.strategy_args.strategy_name=vllm"]
    translation = translated(*words, "actor_infer.device_mapping=list(range(4,8))")
    assert translation.refused == []
    assert "rollout_num_gpus" not in translation.flags
    assert translation.flags["vllm_mode"] == "server"
    assert any("--vllm_data_parallel_size 4" in note and "--vllm_server_host" in note for note in translation.notes)


def test_layouts_of_frozen_models() -> None:
    flags = flags_of()
    assert (flags["ref_tensor_model_parallel_size"], flags["ref_pipeline_model_parallel_size"]) == (1, 2)
    assert not any(flag.startswith("ref_") for flag in flags_of("use_kl_loss=false"))
    assert not any(flag.startswith("ref_") for flag in flags_of("reference.strategy_args.strategy_name=hf_infer"))
    assert flags_of(name="ppo")["critic_tensor_model_parallel_size"] == 2
    assert flags_of(name="distill")["teacher_tensor_model_parallel_size"] == 1


def test_other_pipelines() -> None:
    assert translated(name="sft").command == "sft"
    sft, dpo = flags_of(name="sft"), flags_of(name="dpo")
    assert (sft["num_train_epochs"], sft["columns"]) == (1, {"system_prompt": "system", "answer": "output"})
    assert (dpo["rlhf_type"], dpo["train_iters"], dpo["global_batch_size"]) == ("dpo", 500, 16)
    distillation = flags_of(name="distill")
    assert (distillation["rlhf_type"], distillation["lmbda"], distillation["beta"]) == ("gkd", 0, 0)
    # 0.2 of the answers' loss and 0.8 of the divergence, divided by 0.8; gradients are clipped at 1 / 0.8.
    assert (distillation["sft_alpha"], distillation["clip_grad"]) == (pytest.approx(0.25), pytest.approx(1.25))
    on_policy = flags_of(name="onpolicy")
    assert (on_policy["rlhf_type"], on_policy["lmbda"], on_policy["beta"]) == ("gkd", 1, 1)
    assert flags_of("kd_objective=reverse_kl", name="distill")["beta"] == 1
    mixed = flags_of(name="ppo")
    assert (mixed["teacher_model"], mixed["teacher_kl_coef"]) == ("Qwen/Qwen2.5-7B", 0.5)


def test_environments_are_refused_by_root_key() -> None:
    words = ["custom_envs={A: {b: 1, c: 2}}", "train_env_manager={tags: [A]}", "max_tokens_per_step=64"]
    lines = refused(*words, "adv_estimator=gigpo")
    assert [line.split(".")[0].split()[0] for line in lines] == [
        "custom_envs",
        "train_env_manager",
        "max_tokens_per_step",
    ]
    assert all("--multi_turn_scheduler" in line for line in lines)


def _written(folder: Path, text: str) -> Tree:
    (folder / "run").mkdir()
    (folder / "run" / "a.yaml").write_text(text)
    tree, problems = read_tree(str(folder / "run" / "a.yaml"), [])
    assert problems == []
    return tree


def test_files_of_defaults_are_read_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nlogging_steps: 2\n")
    tree = _written(tmp_path, "defaults: [../base@_here_, ../gone@_here_]\nseed: 3\nmax_steps: ${logging_steps}\n")
    assert tree == {"seed": 3, "logging_steps": 2, "max_steps": 2, "defaults": ["../gone@_here_"]}


def test_presets_of_deepspeed_are_empty(tmp_path: Path) -> None:
    text = "defaults: [../config/deepspeed_zero3@_here_]\na: {strategy_config: '${deepspeed_zero3}'}\n"
    assert _written(tmp_path, text)["a"] == {"strategy_config": {}}
