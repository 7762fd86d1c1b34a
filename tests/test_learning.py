"""Models learn the tasks, by the commands that users give; scripts/learn.py says what and how much."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
SCRIPTS = Path(__file__).parents[1] / "scripts"


def learn(folder: Path, *tasks: str, script: str = "learn.py") -> None:
    """The script fails where a result is below its bound, or the run has measured another one."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--folder", folder, "--only", *tasks],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0
    assert "WRONG" not in done.stdout
    for task in tasks:
        assert f"\n{task} " in done.stdout


def test_preferences_classes_and_embeddings_are_learnt(tmp_path: Path) -> None:
    learn(tmp_path, "rm", "seq_cls", "embedding", "dpo")


def test_colours_in_pictures_are_learnt(tmp_path: Path) -> None:
    learn(tmp_path, "images")


def test_rewards_climb(tmp_path: Path) -> None:
    learn(tmp_path, "grpo", script="learn_rl.py")


@pytest.mark.long
def test_rewards_climb_about_pictures(tmp_path: Path) -> None:
    learn(tmp_path, "images", script="learn_rl.py")


def test_rewards_climb_with_a_critic(tmp_path: Path) -> None:
    learn(tmp_path, "ppo", script="learn_rl.py")


@pytest.mark.long
def test_rewards_climb_with_a_critic_in_another_layout(tmp_path: Path) -> None:
    learn(tmp_path, "ppo_layouts", script="learn_rl.py")


@pytest.mark.long
def test_rewards_climb_with_an_adapter_and_by_a_server(tmp_path: Path) -> None:
    learn(tmp_path, "lora", "server", script="learn_rl.py")


@pytest.mark.long
def test_a_student_comes_to_its_teachers_loss(tmp_path: Path) -> None:
    learn(tmp_path, "gkd", script="learn_rl.py")


@pytest.mark.long
def test_single_answers_and_rankings_are_learnt(tmp_path: Path) -> None:
    learn(tmp_path, "kto", "reranker")


def test_configs_of_other_systems_train_as_flags_do(tmp_path: Path) -> None:
    learn(tmp_path, "verl", "siirl", script="learn_dialects.py")
