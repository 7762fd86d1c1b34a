"""A reward model's rewards, beside what transformers makes of one conversation at a time."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from megaswift.tasks.rewards import model as module
from megaswift.tasks.rewards.model import ModelReward
from megaswift.tasks.rewards.reward_fn import Reward, RewardSample
from megaswift.tasks.rewards.scoring import score

from tests import tiny

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
TALKS = [
    [{"role": "user", "content": "What is 7 + 15?"}, {"role": "assistant", "content": text}]
    for text in ("22", "It is 22, I am sure of it, since it was so yesterday.", "", "é", "23 " * 30)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("rewards") / "model", labels=1)


def save(path: Path, labels: int) -> Path:
    from transformers import AutoModelForSequenceClassification

    config = tiny.config("qwen3", num_labels=labels)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    model.save_pretrained(path)
    tiny.save_tokenizer(path)
    with (path / "chat_template.jinja").open("a") as file:
        file.write("<|endoftext|>")  # the token by which texts are padded, at the end of a text
    return path


def alone(folder: Path) -> list[float]:
    """Return the reward of each conversation by itself, without padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards = []
    for talk in TALKS:
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            rewards.append(model(ids).logits[0, 0].item())
    return rewards


@pytest.mark.parametrize("tokens", [16384, 90, 1])
@pytest.mark.parametrize("pad", [None, 0])
def test_rewards_are_transformers_own(pad, tokens, folder, tmp_path, monkeypatch):
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    settings = json.loads((path / "config.json").read_text()) | {"pad_token_id": pad}
    (path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(module, "TOKENS", tokens)
    wanted = alone(path)
    assert max(wanted) - min(wanted) > 0.5
    assert ModelReward(path, CPU)(TALKS) == pytest.approx(wanted, abs=1e-4)


def test_it_scores_beside_others(folder):
    batch = [RewardSample(str(i), "", talk[:1], talk[1]["content"], [], {}) for i, talk in enumerate(TALKS)]
    rewards = [Reward("reward_model", ModelReward(folder, CPU)), Reward("one", lambda completions: [1] * 5)]
    assert score(rewards, [2, 1], batch, 60).rewards == pytest.approx([1 + 2 * x for x in alone(folder)], abs=1e-4)


def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    causal = tiny.save(tmp_path / "causal", "qwen3")
    tiny.save_tokenizer(causal)
    with pytest.raises(ValueError, match=r"--reward_model .*causal lacks 1 tensor \(score.weight\)"):
        ModelReward(causal, CPU)
    with pytest.raises(ValueError, match=r"it has 3 labels, not one. Set a reward model"):
        ModelReward(save(tmp_path / "three", labels=3), CPU)
    with pytest.raises(ValueError, match=r"no config.json"):
        ModelReward(tmp_path, CPU)
    bare = save(tmp_path / "bare", labels=1)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        ModelReward(bare, CPU)


def test_conversations_that_are_too_long_are_refused(folder):
    long = [{"role": "user", "content": "a " * 100_000}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match=r"--reward_model .* it has \d+ positions, and a conversation \d+ tokens"):
        ModelReward(folder, CPU)([long])
