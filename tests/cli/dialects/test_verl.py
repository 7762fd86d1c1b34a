"""verl's and siiRL's configs: arithmetic, defaults, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.dialects.keys import Keys, read_tree
from megaswift.cli.dialects.run import load_dialect
from megaswift.cli.dialects.run_words import read_words
from megaswift.cli.dialects.translation import Translation, translate
from megaswift.cli.dialects.verl import system_of
from megaswift.cli.flags import UsageError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = (
    "algorithm.adv_estimator=grpo", "data.train_files=a.parquet", "data.train_batch_size=64",
    f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.n=8", "actor_rollout_ref.model.path=m",
)  # fmt: skip
PPO = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=16", "actor_rollout_ref.model.path=m")


def translated(*words: str, system: str = "verl") -> Translation:
    tree, problems = read_tree(None, list(words))
    assert problems == []
    return translate(load_dialect(system), Keys(tree, "f.yaml"))


def flags(*words: str, system: str = "verl") -> dict[str, Any]:
    translation = translated(*words, system=system)
    assert translation.refused == []
    return translation.flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # 16 prompts x 8 completions a step; 64 prompts a generation, so 4 steps
        ((), {"rlhf_type": "grpo", "global_batch_size": 128, "num_generations": 8, "steps_per_generation": 4}),
        ((f"{ACTOR}.ppo_epochs=2", "trainer.save_freq=5"), {"num_iterations": 2, "save_steps": 5 * 4 * 2}),
        (("trainer.total_training_steps=10",), {"train_iters": 40, "num_train_epochs": None}),
        ((), {"num_train_epochs": 30, "train_iters": None}),
        (("trainer.n_gpus_per_node=4", f"{ACTOR}.ppo_micro_batch_size=16"), {"micro_batch_size": 4}),
        ((f"{ACTOR}.optim.lr_warmup_steps=3",), {"lr_warmup_iters": 12}),
        ((f"{ACTOR}.optim.lr_warmup_steps=0", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"), {"lr_warmup_fraction": 0.1}),
        ((f"{ACTOR}.optim.lr=1e-5", f"{ACTOR}.optim.min_lr_ratio=0.1"), {"min_lr": pytest.approx(1e-6)}),
        (("data.val_files=b", "trainer.test_freq=2"), {"eval_steps": 8, "eval_on_start": True, "eval_temperature": 0}),
        (("data.val_files=b", "trainer.val_before_train=false"), {"val_dataset": None, "eval_on_start": None}),
        (("data.val_files=['']", "trainer.test_freq=2"), {"val_dataset": None, "eval_on_start": None}),
        ((f"{ACTOR}.use_kl_loss=true",), {"beta": 0.001, "kl_estimator": "k3", "kl_in_reward": None}),
        (("algorithm.use_kl_in_reward=true",), {"beta": 0.001, "kl_estimator": "k1", "kl_in_reward": True}),
        ((), {"beta": 0, "kl_estimator": None, "kl_in_reward": None}),
        ((), {"freeze_vit": False, "freeze_aligner": False}),
        ((f"{ACTOR}.freeze_vision_tower=true",), {"freeze_vit": True, "freeze_aligner": True}),
        ((f"{ACTOR}.clip_ratio=0.3",), {"epsilon": 0.3, "epsilon_high": 0.3, "delta": 3}),
        ((f"{ACTOR}.clip_ratio_high=0.5", f"{ACTOR}.clip_ratio_c=1.2"), {"dual_clip": 1.2, "delta": None}),
        (
            (f"{ACTOR}.policy_loss.loss_mode=gspo",),
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": None},
        ),
        (
            (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=4"),
            {"loss_type": "cispo", "epsilon_high": 5, "epsilon": None, "delta": None},
        ),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",), {"loss_type": "grpo", "loss_agg_mode": "seq-mean-token-sum"}),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",), {"loss_type": "dr_grpo", "loss_agg_mode": None}),
        (
            ("algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1"),
            {"advantage_estimator": "reinforce", "whiten_advantages": True},
        ),
        ((f"{ROLLOUT}.name=hf", f"{ROLLOUT}.max_model_len=99"), {"use_vllm": False, "vllm_max_model_len": None}),
        (
            (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.megatron.context_parallel_size=2"),
            {"packing": True, "packing_length": 32768, "micro_batch_size": 1},
        ),
        ((f"{ACTOR}.megatron.optimizer_offload=true",), {"offload_optimizer": True}),
        (
            (
                f"{ACTOR}.megatron.optimizer_offload=true",
                f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=true",
            ),
            {"offload_optimizer": None, "optimizer_cpu_offload": True},
        ),
        (("data.shuffle=false",), {"train_dataloader_shuffle": False, "dataset_shuffle": False}),
        (("trainer.logger=[console]",), {"report_to": ["none"]}),
        (
            ("custom_reward_function.path=r.py",),
            {"external_plugins": ["r.py"], "reward_funcs": ["compute_score"]},
        ),
        (("reward_model.enable=true", "reward_model.model.path=rm"), {"reward_model": "rm", "reward_funcs": None}),
    ],
)
def test_arithmetic(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    result = flags(*GRPO, *words)
    assert {name: result.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("word", "refusal"),
    [
        ("data.train_batch_size=40", "40 prompts are not a multiple"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=5", "16 completions of a step on each of 8 data-parallel ranks. Set 4"),
        (f"{ROLLOUT}.prompt_length=100", "is not data.max_prompt_length 512"),
        (f"{ROLLOUT}.tensor_model_parallel_size=16", "does not go beyond a node of 8"),
        (f"{ROLLOUT}.n=1", "grpo compares the completions of a prompt"),
        (f"{ROLLOUT}.multi_turn.enable=true", "only false is supported"),
        (f"{ACTOR}.kl_loss_type=full", "choose one of low_var_kl"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", "not supported. Choose one of vanilla"),
        ("algorithm.adv_estimator=remax", "not supported. Choose one of gae"),
        ("custom_reward_function.reward_kwargs.a=1", "Write it as a reward of --external_plugins"),
        ("data.truncation=right", "would cut off a part of the question"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("trainer.logger=[console,clearml]", "no reporter clearml"),
        ("critic.enable=true", "needs algorithm.adv_estimator=gae"),
    ],
)
def test_refusals(word: str, refusal: str) -> None:
    kl = (f"{ACTOR}.use_kl_loss=true",) if "kl_loss_type" in word else ()
    (text,) = translated(*GRPO, *kl, word).refused
    assert text.startswith(word.partition("=")[0])
    assert refusal in text


def test_all_problems_at_once() -> None:
    refused = translated(*GRPO, "data.truncation=right", "trainer.val_before_trian=true", "data.shuffle=1e5").refused
    assert [text.split()[0] for text in refused] == ["data.truncation", "trainer.val_before_trian", "data.shuffle"]
    assert "The nearest is trainer.val_before_train" in refused[1]


@pytest.mark.parametrize(
    ("word", "is_equal"), [("critic.ppo_epochs=1", True), ("critic.optim.weight_decay=0.1", False)]
)
def test_the_critic_is_trained_as_the_policy(word: str, is_equal: bool) -> None:
    assert (translated(*PPO, word).refused == []) == is_equal


def test_ppo_has_the_systems_defaults() -> None:
    result = flags(*PPO)
    expected = {"lam": 1, "gamma": 1, "cliprange_value": 0.5, "critic_lr": 1e-5, "num_generations": 1, "beta": 0}
    assert {name: result[name] for name in expected} == expected


def test_verl_and_siirl_count_and_decay_differently() -> None:
    words = (*PPO, "trainer.critic_warmup=3")
    assert (flags(*words)["critic_warmup"], flags(*words, system="siirl")["critic_warmup"]) == (8, 12)
    assert (flags(*PPO)["lr_decay_style"], flags(*PPO, system="siirl")["lr_decay_style"]) == ("constant", "linear")
    words = (*GRPO, f"{ACTOR}.megatron.tensor_model_parallel_size=2")
    assert flags(*words)["sequence_parallel"] is True
    assert flags(*words, system="siirl")["sequence_parallel"] is False


def test_a_tree_under_a_prefix() -> None:
    from megaswift.cli.dialects.verl_roles import set_critic

    tree, _ = read_tree(None, ["outer.critic.optim.lr=1e-4", "outer.critic.megatron.tensor_model_parallel_size=4"])
    keys, translation = Keys(tree, "f.yaml"), Translation("other", "f.yaml")
    set_critic(keys.view("outer"), translation, is_used=True)
    assert translation.flags == {
        "critic_tensor_model_parallel_size": 4, "critic_lr": 1e-4, "cliprange_value": 0.5,
    }  # fmt: skip
    assert translation.sources["critic_lr"] == "f.yaml: outer.critic.optim.lr"
    assert keys.untaken() == []


@pytest.mark.parametrize(
    ("words", "system"),
    [
        (["dag.enable_perf=true"], "siirl"),
        (["algorithm.workflow_type=dapo", f"{ROLLOUT}.mode=sync"], "siirl"),
        ([f"{ROLLOUT}.mode=async"], "verl"),
        ([f"{ACTOR}.optim.lr_decay_style=cosine"], "verl"),
    ],
)
def test_the_system_of_a_file(words: list[str], system: str) -> None:
    assert system_of(read_tree(None, words)[0], "f.yaml") == system


def test_a_file_that_both_could_have() -> None:
    with pytest.raises(UsageError, match=r"or name the system: megatron run verl\.trainer\.main_ppo f\.yaml"):
        system_of(read_tree(None, list(GRPO))[0], "f.yaml")


def test_files_of_hydra(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {}")
    module = "verl.trainer.main_ppo"
    words = read_words([module, "--config-path", str(tmp_path), "--config-name=mine", "a=1", "--lr", "1"])
    assert (words.file, words.overrides, words.flags) == (str(tmp_path / "mine.yaml"), ["a=1"], ["--lr", "1"])
    words = read_words([module, "--config-path=config", "--config-name=ppo_megatron_trainer.yaml", "a=1"])
    assert (words.file, words.overrides) == (None, ["a=1"])
    assert read_words(["siirl.main_dag", "f.yaml", "a=1"]).file == "f.yaml"
    with pytest.raises(UsageError, match="--config-name yours: no such file"):
        read_words([module, "--config-name", "yours"])
