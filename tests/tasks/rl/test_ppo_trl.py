"""One update of PPO beside TRL's PPOTrainer: weights of policy and critic.

TRL's last version with it is 0.29: the test runs where that is installed. ppo_reference.py has its arithmetic.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tasks.rl.runs import LENGTH, Place, Trained
from tests.tasks.rl.test_ppo import classifier, critic_of, ppo  # noqa: F401
from tests.tasks.rl.upstream import models, rewards_of

FOLDERS = getattr(importlib.util.find_spec("trl"), "submodule_search_locations", None) or ()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any((Path(folder) / "experimental" / "ppo").is_dir() for folder in FOLDERS),
        reason="TRL has no PPOTrainer (0.29 has)",
    ),
]
PAD = 10**6  # no token
RATES = 0.05, 0.02
# Gradient descent without clipping, on whole completions: none ends before the greatest length.
ONE_STEP = (
    "--rlhf_type ppo --model endless --ref_model other --critic_model critic --num_generations 1 --global_batch_size 6 "
    f"--steps_per_generation 1 --train_iters 1 --optimizer sgd --sgd_momentum 0 --clip_grad 0 --lr {RATES[0]} "
    f"--critic_lr {RATES[1]} --gamma 0.9 --lam 0.8 --beta 0.1 --temperature 1"
)


class RewardModel(nn.Module):
    """Stands for the functions' rewards, which `train_with_trl` gives."""


def train_with_trl(run: Trained, policy: Any, ref: Any, critic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train both models on the completions of the run."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # pyright: ignore[reportMissingImports]

    rows = run.completions
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint)
    prompts = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    drawn = {tuple(prompt): row for prompt, row in zip(prompts, rows, strict=True)}

    def collate(samples: list[dict]) -> dict[str, Tensor]:
        width = max(len(sample["input_ids"]) for sample in samples)
        return {"input_ids": torch.tensor([[PAD] * (width - len(s["input_ids"])) + s["input_ids"] for s in samples])}

    def rows_of(queries: Tensor) -> list[dict]:
        return [drawn[tuple(token for token in query if token != PAD)] for query in queries.tolist()]

    def generation(model: Any, queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        completions = torch.tensor([row["completion_ids"] for row in rows_of(queries)])
        sequences = torch.cat((queries, completions), 1)
        return sequences, ppo_trainer.forward(model, sequences, PAD).logits[:, queries.shape[1] - 1 : -1]

    values_of = ppo_trainer.get_reward

    def reward(model: Any, sequences: Tensor, pad: int, length: int) -> tuple[Any, Any, Any]:
        if isinstance(model, RewardModel):
            return None, rewards_of(rows_of(sequences[:, :length])), None
        return values_of(model, sequences, pad, length)

    monkeypatch.setattr(ppo_trainer, "batch_generation", generation)
    monkeypatch.setattr(ppo_trainer, "get_reward", reward)
    groups = [{"params": list(m.parameters()), "lr": r} for m, r in zip((policy, critic), RATES, strict=True)]
    optimizer = torch.optim.SGD(groups)
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=str(run.folder / "trl"),
            per_device_train_batch_size=len(rows),
            gradient_accumulation_steps=1,
            total_episodes=len(rows),
            num_ppo_epochs=1,
            response_length=LENGTH,
            temperature=1.0,
            kl_coef=0.1,
            gamma=0.9,
            lam=0.8,
            vf_coef=1.0,
            num_sample_generations=0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        SimpleNamespace(pad_token_id=PAD, eos_token_id=2),
        policy,
        ref,
        RewardModel(),
        Dataset.from_dict({"input_ids": prompts}),
        critic,
        data_collator=collate,
        eval_dataset=Dataset.from_dict({"input_ids": prompts}),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()


def test_one_update(ppo: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ppo.model("endless", ends=False)
    run = ppo.run(ONE_STEP)
    assert {row["length"] for row in run.completions} == {LENGTH}
    folder: Path = ppo.folder
    policy, ref = models(folder / "endless", folder / "other")
    critic = classifier(folder / "critic")
    starts = [{n: t.clone() for n, t in model.state_dict().items()} for model in (policy, critic)]
    train_with_trl(run, policy, ref, critic, monkeypatch)
    for weights, model, start in ((run.weights, policy, starts[0]), (critic_of(run), critic, starts[1])):
        moved = {name: float((tensor - start[name]).abs().max()) for name, tensor in model.state_dict().items()}
        assert max(moved.values()) > 1e-3
        apart = {name: float((weights[name] - tensor).abs().max()) for name, tensor in model.state_dict().items()}
        assert max(apart.values()) < 1e-6, apart
