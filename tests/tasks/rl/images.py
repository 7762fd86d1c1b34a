"""Prompts with images, tiny models for them, and transformers' numbers on the completions of a run."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import tiny_vision
from tests.tasks.rl import upstream
from tests.tasks.rl.ppo_reference import Ppo, Settings
from tests.tasks.rl.runs import Place, Trained
from tests.tasks.vision_oracle import Oracle, save_with_head

FLAGS = "--model vision --dataset images.jsonl"
PICTURES, FRAMES = 6, 5


def question(number: int) -> dict[str, Any]:
    """A prompt with no to three images, an answer in a column, and what rewards read."""
    count = (number + 1) % 4
    text = "what <image>" * count + "colour?"
    images = [f"{(number + i) % PICTURES}.png" for i in range(count)]
    return {"messages": [{"role": "user", "content": text}], "images": images, "goal": number, "solution": 5}


def question_of_video(number: int) -> dict[str, Any]:
    """A prompt with a video, and an image in some."""
    row = question(2 * number)
    frames = [f"frame-{(number + i) % FRAMES}.png" for i in range(2 + number % 3)]
    images = row["images"][:1]
    messages = [{"role": "user", "content": "<video>" + "<image>?" * len(images)}]
    return row | {"messages": messages, "images": images, "videos": [frames], "goal": number}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_images(place: Place) -> Place:
    """Add vision-language models, a critic (or reward model) and pictures to a place."""
    for name, seed in (("vision", 0), ("vision-other", 1)):
        tiny_vision.qwen3_vl(place.folder / name, seed=seed)
    save_with_head(place.folder / "vision-other", place.folder / "vision-critic", 1)
    for number in range(PICTURES):
        tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(place.folder / f"{number}.png")
    for number in range(FRAMES):
        tiny_vision.picture(70, 60, 20 + number).save(place.folder / f"frame-{number}.png")
    write(place.folder / "images.jsonl", [question(number) for number in range(6)])
    write(place.folder / "videos.jsonl", [question_of_video(number) for number in range(6)])
    return place


def seen(row: dict[str, Any]) -> list[str]:
    """Return the files of images or audios of a row."""
    return row.get("images") or row.get("audios") or []


class Seen(upstream.Reference):
    """As the reference of texts; each completion passes through the model by itself, with its images."""

    oracles: list[Oracle]

    def _completion(self, model: Any, row: dict) -> tuple[Tensor, Tensor]:
        oracle = next(oracle for oracle in self.oracles if oracle.model is model)
        media = seen(row), row.get("videos", [])
        return self._drawn(oracle, oracle.conversation(row["messages"], *media, prompt=True), row)

    def _drawn(self, oracle: Oracle, prompt: dict[str, Tensor], row: dict) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a completion. prompt: inputs of a model"""
        drawn = torch.tensor(row["completion_ids"])
        logits = oracle.completion(prompt, drawn).float() / self.temperature
        log_probs = logits.log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(1, drawn[:, None])[:, 0], entropies.detach()


class Reference(Seen):
    """GRPO of `vision` with the reference `vision-other`."""

    def __init__(self, place: Place, run: Trained):
        self.oracles = [Oracle(place.folder / name, place.folder) for name in ("vision", "vision-other")]
        super().__init__(place.folder / "vision", run, *(oracle.model for oracle in self.oracles))


class Scored(torch.nn.Module):
    """A model of transformers with a head, as `save_with_head` writes it."""

    def __init__(self, folder: Path, pictures: Path, oracle: type[Oracle] = Oracle):
        super().__init__()
        self.oracle = oracle(folder, pictures)
        self.model = self.oracle.model
        self.score = torch.nn.Parameter(load_file(folder / "model.safetensors")["score.weight"])

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def values(self, row: dict) -> Tensor:
        """Before each token of a completion."""
        prompt = self.oracle.conversation(row["messages"], seen(row), prompt=True)
        inputs = self.oracle.continued(prompt, torch.tensor(row["completion_ids"]))
        hidden = self.model.model(**inputs).last_hidden_state[0, prompt["input_ids"].shape[1] - 1 : -1]
        return (hidden @ self.score.t())[:, 0]

    def weights(self) -> dict[str, Tensor]:
        """As files have them."""
        state = {name: tensor for name, tensor in self.model.state_dict().items() if not name.startswith("lm_head")}
        return upstream.as_filed(self.model, state) | {"score.weight": self.score.detach().clone()}


class SeenPpo(Seen, Ppo):
    """PPO of `{name}` with the reference `{name}-other` and the critic `{name}-critic`."""

    name, tower, oracle = "vision", "visual", Oracle

    def __init__(self, place: Place, run: Trained, settings: Settings, *, trains_tower: bool):
        folders = [place.folder / f"{self.name}{suffix}" for suffix in ("", "-other", "-critic")]
        self.oracles = [self.oracle(folder, place.folder) for folder in folders[:2]]
        critic = Scored(folders[2], place.folder, self.oracle)
        policy, ref = (oracle.model for oracle in self.oracles)
        for model in (policy, critic.model):
            getattr(model.model, self.tower).requires_grad_(trains_tower)
        Ppo.__init__(self, folders[0], run, policy, ref, critic, settings)

    def values(self, rows: list[dict]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([self.critic.values(row) for row in rows], batch_first=True)
