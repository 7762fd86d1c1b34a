"""Oumi's dialect: arithmetic of batches and stages, data, rewards, and what its trainers do not read."""

from typing import Any

import pytest
from megaswift.cli.dialects.keys import Keys, read_tree
from megaswift.cli.dialects.oumi import OUMI
from megaswift.cli.dialects.translation import Translation, translate

from tests.cli.dialects.known_configs import FOLDER


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "NNODES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NPROC_PER_NODE", "1")


def translated(file: str, *words: str) -> Translation:
    tree, problems = read_tree(str(FOLDER / f"oumi-{file}.yaml"), list(words))
    assert problems == []
    return translate(OUMI, Keys(tree, "f.yaml"))


def flags(file: str, *words: str) -> dict[str, Any]:
    translation = translated(file, *words)
    assert translation.refused == []
    return translation.flags


def test_a_batch_is_of_all_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags("trl")["global_batch_size"] == 2
    assert flags("trl", "training.gradient_accumulation_steps=3")["global_batch_size"] == 2 * 3
    monkeypatch.setenv("NPROC_PER_NODE", "8")
    assert flags("trl", "megatron.tensor_model_parallel_size=2")["global_batch_size"] == 2 * 4
    [refused] = translated("trl", "megatron.tensor_model_parallel_size=3").refused
    assert "take 3 processes, of which 8 (NPROC_PER_NODE x NNODES) are no multiple. Start 3" in refused


def test_a_config_for_many_processes_is_converted_on_one() -> None:
    translation = translated("trl", "megatron.tensor_model_parallel_size=8", "megatron.pipeline_model_parallel_size=2")
    assert translation.refused == []
    assert translation.flags["global_batch_size"] == 2
    assert translation.sources["global_batch_size"].endswith("1 data-parallel rank of 16 processes")
    assert (translation.processes, translation.flags["tensor_model_parallel_size"]) == (None, 8)


@pytest.mark.parametrize(("batch", "count", "steps"), [(4, 4, 1), (1, 2, 2), (6, 4, 2), (2, 8, 4), (8, 4, 1)])
def test_a_generation_has_whole_prompts(batch: int, count: int, steps: int) -> None:
    values = flags("all", f"megatron.global_batch_size={batch}", f"grpo.num_generations={count}")
    assert values["steps_per_generation"] == steps
    assert values["global_batch_size"] * steps % count == 0


@pytest.mark.parametrize(("stages", "chunks", "ours"), [(16, 32, 2), (2, 4, 2), (2, 2, None), (1, 4, None)])
def test_virtual_stages_are_counted_per_stage(stages: int, chunks: int, ours: int | None) -> None:
    names = ("megatron.pipeline_model_parallel_size", "megatron.virtual_pipeline_model_parallel_size")
    values = flags("all", f"{names[0]}={stages}", f"{names[1]}={chunks}")
    assert values.get("virtual_pipeline_model_parallel_size") == ours


def test_virtual_stages_that_do_not_divide() -> None:
    [refused] = translated("all", "megatron.virtual_pipeline_model_parallel_size=3").refused
    assert refused.startswith("megatron.virtual_pipeline_model_parallel_size 3: not a multiple of")


def test_grpo_at_two_places() -> None:
    translation = translated("all", "training.grpo.epsilon=0.1")
    assert translation.refused == ["training.grpo.epsilon 0.1: the config has a table grpo, too. Remove one of them"]


def test_steps_go_before_epochs() -> None:
    values = flags("all")
    assert values["train_iters"] == 20
    assert "num_train_epochs" not in values
    values = flags("all", "training.max_steps=-1")
    assert values["num_train_epochs"] == 2
    assert "train_iters" not in values


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["dataset_name=gsm8k"], "openai/gsm8k:verl"),
        (["dataset_name=countdown"], "d1shs0ap/countdown"),
        (["dataset_name=a/b", "subset=c", "split=test"], "a/b:c@test"),
        (["dataset_name=a/b", "split='train[:10]'"], "a/b@train:10"),
        (["dataset_name=a/b", "sample_count=7"], "a/b#7"),
        (["dataset_name=text_sft", "dataset_path=x.jsonl", "split=train", "sample_count=7"], "x.jsonl#7"),
    ],
)
def test_names_of_datasets(words: list[str], name: str) -> None:
    table = "data.train.datasets"
    values = flags("trl", f"{table}=[{{{', '.join(word.replace('=', ': ', 1) for word in words)}}}]")
    assert values["dataset"] == [name]


def test_a_part_of_a_split_that_is_not_its_beginning() -> None:
    [refused] = translated("trl", "data.train.datasets=[{dataset_name: a, split: 'train[10:20]'}]").refused
    assert "only NAME and NAME[:ROWS] are supported" in refused


def test_rewards_of_datasets_of_oumi() -> None:
    assert flags("all", "~training.reward_functions")["reward_funcs"] == ["gsm8k", "countdown"]
    assert flags("all", "~training.reward_function_kwargs")["countdown_format_score"] == 0.0
    assert "reward_funcs" not in flags("trl", "~training.reward_functions")
    [refused] = translated("trl", "training.reward_functions=[count_letters]").refused
    assert "--external_plugins" in refused


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        ([], "default"),
        (["data.train.train_target=FINAL_ASSISTANT_TURN"], "last_round"),
        (["data.train.collator_name=text_with_padding", "data.train.datasets=[{dataset_name: a}]"], "all"),
    ],
)
def test_tokens_that_sft_trains_on(words: list[str], scale: str) -> None:
    assert flags("lora", *words)["loss_scale"] == scale


def test_oumi_gives_verl_not_all_of_its_keys() -> None:
    translation = translated("verl", "training.weight_decay=0.5", "training.lr_scheduler_type=linear")
    assert translation.flags["weight_decay"] == 0.01  # verl's default
    assert translation.flags["lr_decay_style"] == "constant"
    assert "training.weight_decay" in translation.needless
    assert (translation.processes, translation.flags["save_steps"]) == (2, 10 * 256 // 64)


def test_a_key_of_verl_goes_before_that_of_oumi() -> None:
    override = "training.verl_config_overrides.actor_rollout_ref.actor.optim.lr=3e-6"
    assert flags("verl", override)["lr"] == 3e-6
    assert flags("verl")["lr"] == 1e-6


def test_fsdp_beside_a_layout() -> None:
    assert any(note.startswith("fsdp.enable_fsdp true: megatron-core trains") for note in translated("lora").notes)
    [refused] = translated("lora", "megatron.tensor_model_parallel_size=2").refused
    assert refused.startswith("fsdp.enable_fsdp true: cannot be used with megatron.tensor_model_parallel_size")


def test_a_trainer_that_is_not_supported_is_all_that_is_refused() -> None:
    [refused] = translated("all", "training.trainer_type=TRL_GOLD").refused
    assert refused == "training.trainer_type TRL_GOLD: no such trainer here. Fix: TRL_GKD is the nearest"
