"""Trinity-RFT's dialect: placement, arithmetic of batches, algorithms, data, and its second file."""

from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.dialects.keys import Keys, read_tree
from megaswift.cli.dialects.translation import Translation, translate
from megaswift.cli.dialects.trinity import TRINITY
from megaswift.cli.dialects.trinity_algorithm import ALGORITHMS, OTHERS

from tests.cli.dialects.known_configs import FOLDER


def translated(file: str, *words: str) -> Translation:
    path = FOLDER / f"trinity-{file}.yaml"
    tree, problems = read_tree(str(path), list(words))
    assert problems == []
    return translate(TRINITY, Keys(tree, str(path), frozenset(word.lstrip("~").partition("=")[0] for word in words)))


def flags(file: str, *words: str) -> dict[str, Any]:
    translation = translated(file, *words)
    assert translation.refused == []
    return translation.flags


def test_engines_have_gpus_of_their_own() -> None:
    translation = translated("all")
    assert translation.processes == 8 - 1 * 2 * 2
    names = ("vllm_mode", "rollout_num_gpus", "vllm_tensor_parallel_size", "vllm_max_model_len")
    assert [translation.flags[name] for name in names] == ["server", 4, 2, 512]


def test_no_engines_and_engines_beside_training() -> None:
    translation = translated("all", "explorer.rollout_model.engine_num=0", "synchronizer.sync_offset=0")
    assert (translation.processes, translation.flags["use_vllm"]) == (8, False)
    assert not [name for name in translation.flags if name.startswith(("vllm", "rollout_num"))]
    translation = translated("sapo")
    assert (translation.processes, translation.flags["vllm_mode"]) == (1, "colocate")
    assert translation.flags["vllm_gpu_memory_utilization"] == 0.25


def test_engines_on_other_nodes() -> None:
    translation = translated("boxed")  # two nodes of four GPUs, two engines of two
    assert (translation.nodes, translation.processes) == (1, 4)
    assert "rollout_num_gpus" not in translation.flags
    assert any("start `swift rollout` on the other nodes" in note for note in translation.notes)
    [refused] = translated("boxed", "explorer.rollout_model.engine_num=1").refused
    assert "2 GPUs of engines are no whole nodes of 4" in refused


def test_more_engines_than_gpus() -> None:
    [refused] = translated("distill", "explorer.rollout_model.engine_num=3").refused
    assert refused.startswith("explorer.rollout_model.engine_num 3: leaves none of 4 GPUs for the training")


def test_batches() -> None:
    values = flags("all")
    assert [values[name] for name in ("global_batch_size", "num_generations", "steps_per_generation")] == [16, 4, 2]
    assert flags("all", "~buffer.train_batch_size")["global_batch_size"] == 8 * 4
    assert flags("boxed")["global_batch_size"] == 8 * 16  # DAPO's own repeat_times


def test_lengths() -> None:
    values = flags("all")
    assert (values["max_length"], values["max_completion_length"]) == (128, 64)
    assert flags("all", "~model.max_prompt_tokens")["max_length"] == 256 - 64
    values = flags("sapo")
    assert (values["max_length"], values["max_completion_length"]) == (64, 64)
    values = flags("boxed")  # in the engine's table, as older versions have them
    assert (values["max_length"], values["max_completion_length"]) == (192, 64)
    [refused] = translated("all", "model.max_model_len=100").refused
    assert refused.startswith("model.max_model_len 100: is less than max_prompt_tokens and max_response_tokens")


def test_steps_go_before_epochs() -> None:
    assert flags("all")["train_iters"] == 40
    values = flags("all", "~trainer.total_steps")  # ten generations of 8 x 4 completions, steps of 16
    assert values["train_iters"] == 10 * 8 * 4 // 16
    assert flags("all", "~trainer.total_steps", "~buffer.total_steps")["num_train_epochs"] == 3


def test_a_pack_holds_the_longest_sample() -> None:
    assert flags("all")["packing_length"] == 1024
    assert flags("all", "trainer.max_token_len_per_gpu=100")["packing_length"] == 256


def test_the_first_step_of_the_policy_ends_the_critics_warmup() -> None:
    assert flags("all")["critic_warmup"] == 2
    assert "critic_warmup" not in flags("all", "trainer.critic_warmup=1")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"rlhf_type": "grpo", "loss_type": "dapo", "delta": 3.0, "beta": 0.001, "kl_estimator": "k2"}),
        ("gspo", {"importance_sampling_level": "sequence", "epsilon": 0.0003, "epsilon_high": 0.0004}),
        ("rloo", {"advantage_estimator": "rloo"}),
        ("reinforceplusplus", {"advantage_estimator": "reinforce", "whiten_advantages": True}),
        ("dapo", {"beta": 0.0, "num_generations": 16}),
        ("sapo", {"loss_type": "sapo", "loss_agg_mode": "token-mean", "tau_neg": 1.05}),
        ("ppo", {"rlhf_type": "ppo", "lam": 1.0, "gamma": 1.0, "kl_in_reward": False, "critic_lr": 1e-6}),
    ],
)
def test_algorithms(name: str, expected: dict[str, Any]) -> None:
    values = flags("sapo", f"algorithm.algorithm_type={name}", *(f"~algorithm.{key}" for key in SAPO_KEYS))
    assert {key: values.get(key) for key in expected} == expected


SAPO_KEYS = ("policy_loss_fn_args", "kl_loss_fn", "kl_loss_fn_args")


@pytest.mark.parametrize("name", [*OTHERS, "unheard_of"])
def test_algorithms_that_are_not_supported(name: str) -> None:
    [refused] = translated("sapo", f"algorithm.algorithm_type={name}").refused
    assert refused.startswith(f"algorithm.algorithm_type {name}: no such algorithm here. Fix: ")
    assert any(other in refused for other in ALGORITHMS)


def test_supervised_algorithms_are_of_mode_train() -> None:
    assert translated("dpo").command == "rlhf"
    translation = translated("dpo", "algorithm.algorithm_type=sft")
    assert (translation.command, translation.refused) == ("sft", [])
    assert translation.flags["columns"] == {"question": "query", "answer": "response", "persona": "system",
                                            "functions": "tools"}  # fmt: skip
    [refused] = translated("dpo", "mode=both").refused
    assert refused.startswith("mode both: with algorithm_type dpo only train is supported")


@pytest.mark.parametrize("mode", ["bench", "explore", "serve", "train"])
def test_other_modes(mode: str) -> None:
    [refused] = translated("all", f"mode={mode}").refused
    assert refused.startswith(f"mode {mode}: with algorithm_type ppo only both is supported")


def test_dpo_has_one_beta() -> None:
    assert flags("dpo")["beta"] == 0.1
    assert flags("dpo", "~algorithm.policy_loss_fn_args.beta", "algorithm.kl_loss_fn_args.kl_coef=0.3")["beta"] == 0.3
    [refused] = translated("dpo", "algorithm.kl_loss_fn_args.kl_coef=0.3").refused
    assert refused.startswith("algorithm.kl_loss_fn_args.kl_coef 0.3: is not algorithm.policy_loss_fn_args.beta")


def test_workflows_have_prompts_and_rewards() -> None:
    values = flags("sapo")  # math_workflow
    assert (values["reward_funcs"], values["reward_weights"]) == (["accuracy", "format"], [1.0, 0.2])
    assert "<think> reasoning process here </think>" in values["system"]
    values = flags("boxed")  # a penalty that is off; the boxed workflow leaves out what is truncated
    assert (values["reward_funcs"], values["reward_weights"]) == (["accuracy"], [2.0])
    assert (values["system"], values["overlong_filter"]) == ("Be brief.", True)
    key = "buffer.explorer_input.taskset.default_workflow_type"
    [refused] = translated("sapo", f"{key}=alfworld_workflow").refused
    assert refused.startswith(f"{key} alfworld_workflow: ")
    assert "--multi_turn_scheduler" in refused


def test_a_sampling_of_evaluations() -> None:
    values = flags("all")
    names = ("temperature", "top_p", "top_k", "eval_temperature", "eval_top_p", "eval_top_k", "num_generations_eval")
    assert [values[name] for name in names] == [1.0, 0.95, 20, 0.5, 0.7, 10, 2]
    assert (values["dataset"], values["val_dataset"]) == (["owner/tasks:main"], ["owner/tasks:main@test"])


def test_weights_that_are_a_generation_old() -> None:
    assert flags("all")["async_generate"] is True
    assert "async_generate" not in flags("all", "synchronizer.sync_offset=0")
    [refused] = translated("all", "synchronizer.sync_offset=1").refused
    assert refused.startswith("synchronizer.sync_offset 1: choose 0, or sync_interval 2")


def test_the_second_file_of_older_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text("actor_rollout_ref: {actor: {optim: {lr: 3e-6}, ppo_micro_batch: 1}}\n")
    translation = translated("sapo", "trainer.trainer_config_path=train.yaml")
    assert translation.flags["lr"] == 3e-6
    assert translation.sources["lr"] == "train.yaml: trainer.trainer_config.actor_rollout_ref.actor.optim.lr"
    [refused] = translation.refused
    assert refused.startswith("trainer.trainer_config.actor_rollout_ref.actor.ppo_micro_batch 1: no such key.")
    key = "trainer.trainer_config.actor_rollout_ref.actor.optim.lr"
    assert translated("sapo", "trainer.trainer_config_path=train.yaml", f"{key}=4e-6").flags["lr"] == 4e-6
    [refused] = translated("sapo", "trainer.trainer_config_path=lost.yaml").refused
    assert refused.startswith("trainer.trainer_config_path lost.yaml: no such file")


def test_a_key_in_the_older_and_the_newer_place() -> None:
    key = "trainer.trainer_config.actor_rollout_ref.actor.optim.lr"
    assert flags("all", f"{key}=1e-6")["lr"] == 1e-6
    [refused] = translated("all", f"{key}=2e-6").refused
    assert refused.startswith("algorithm.optimizer.lr 1e-06: ")


def test_a_teacher() -> None:
    translation = translated("distill")
    assert (translation.processes, translation.refused) == (4 - 1 - 1, [])
    names = ("teacher_model", "teacher_kl_coef", "beta")
    assert [translation.flags[name] for name in names] == ["teacher", 0.5, 0.0]
    assert "reward_funcs" not in translation.flags


def test_every_algorithm_is_known_once() -> None:
    assert not set(ALGORITHMS) & set(OTHERS)


def test_keys_of_verl_that_trinity_fills_itself() -> None:
    tree = "trainer.trainer_config"
    words = (
        f"{tree}.trainer.resume_mode=auto",
        f"{tree}.trainer.default_local_dir=other",
        f"{tree}.algorithm.gamma=0.5",
    )
    translation = translated("all", *words)
    assert translation.refused == []
    assert {word.partition("=")[0] for word in words} <= set(translation.needless)
    assert (translation.flags["output_dir"], translation.flags["gamma"]) == ("output/project/group/name", 0.99)
    [refused] = translated("all", f"{tree}.trainer.resume_mod=auto").refused
    assert "The nearest is trainer.trainer_config.trainer.resume_mode" in refused
    assert flags("all", f"{tree}.actor_rollout_ref.actor.ppo_epochs=2")["num_iterations"] == 2
