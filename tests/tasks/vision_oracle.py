"""Numbers of documents with images by transformers and its processor: each document alone, in fp32."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import prepared, tiny_vision

RATE, EPSILON, STEPS, BATCH = 1e-3, 1e-6, 2, 4
COMMON = (
    f"--lr {RATE} --lr_decay_style constant --weight_decay 0 --adam_eps {EPSILON} --train_iters {STEPS} "
    f"--global_batch_size {BATCH} --dataset_shuffle false --train_dataloader_shuffle false --clip_grad 1e9 "
    "--logging_steps 1 --dataloader_num_workers 0 --no_save_optim true --no_save_rng true --add_version false"
)
ALL = "--freeze_vit false --freeze_aligner false"
PICTURES = 9
MAIN = "-m megaswift.cli.main"
COUNTED = str(Path(__file__).with_name("counted_encoding.py"))  # writes what its towers encode


class Place:
    """A folder with a tiny Qwen3-VL, pictures, and runs on them. Equal runs are done once."""

    def __init__(self, folder: Path):
        self.folder, self._runs = folder, {}
        tiny_vision.qwen3_vl(folder / "qwen3")
        for number in range(PICTURES):
            tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(folder / f"{number}.png")

    def write(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, words: str, processes: int = 1, *, fails: bool = False, program: str = MAIN) -> Any:
        """Run `megatron {words}`. Returns its folder; what it printed if it fails."""
        key = words, processes, program
        if key in self._runs:
            return self._runs[key]
        output = self.folder / f"run-{len(self._runs)}"
        command, _, flags = words.partition(" ")
        done = prepared.run(
            f"{program} megatron {command} {COMMON} {flags} --output_dir {output}".split(),
            processes=processes,
            cwd=self.folder,
            environment=os.environ | {"HF_HOME": str(self.folder / "cache"), "COLUMNS": "200"},
        )
        printed = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, printed[-6000:]
        self._runs[key] = printed if fails else output
        return self._runs[key]


def log(run: Path, *names: str) -> list[list[float]]:
    rows = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    return [[row[name] for name in names] for row in rows if "loss" in row]


def encoded_patches(run: Path) -> int:
    """Patches that the towers of all ranks have encoded in a run of the program COUNTED."""
    files = run.parent.glob(f"{run.name}-encoded-*.txt")
    return sum(int(line) for file in files for line in file.read_text().split())


class Oracle:
    """A model of transformers with its processor. head: `score.weight` of a folder without such a class."""

    auto_class = "AutoModelForImageTextToText"

    def __init__(self, folder: Path, pictures: Path, *, has_head: bool = False):
        import transformers

        self.processor, self.pictures = transformers.AutoProcessor.from_pretrained(folder), pictures
        self.model: Any = getattr(transformers, self.auto_class).from_pretrained(folder, dtype=torch.float32)
        self.score: Any = None
        if has_head:
            weights = [load_file(file) for file in folder.glob("*.safetensors")]
            (score,) = [file["score.weight"] for file in weights if "score.weight" in file]
            self.score = torch.nn.Parameter(score)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.model.parameters(), *([] if self.score is None else [self.score])]

    def inputs(self, text: str, images: Sequence[str], videos: Sequence[Sequence[str]] = ()) -> dict[str, Tensor]:
        """videos: lists of frames, two of which pass in a second"""
        from PIL import Image

        opened = [Image.open(self.pictures / name).convert("RGB") for name in images]
        frames = [
            np.stack([np.array(Image.open(self.pictures / name).convert("RGB")) for name in names]) for names in videos
        ]
        facts = [
            {"fps": 2.0, "total_num_frames": len(names), "frames_indices": [*range(len(names))]} for names in videos
        ]
        options = {"videos": frames, "video_metadata": facts, "do_sample_frames": False} if frames else {}
        return self.processor(text=[text], images=opened or None, **options, return_tensors="pt")

    def conversation(
        self,
        messages: list[dict[str, str]],
        images: Sequence[str],
        videos: Sequence[Sequence[str]] = (),
        *,
        prompt: bool = False,
    ) -> dict[str, Tensor]:
        blocks = [{"role": message["role"], "content": blocks_of(message["content"])} for message in messages]
        text = self.processor.apply_chat_template(blocks, tokenize=False, add_generation_prompt=prompt)
        return self.inputs(text, images, videos)

    def answer(self, messages: list[dict[str, str]], images: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Logits of the last message, with the token that ends it, and its ids."""
        inputs = self.conversation(messages, images)
        header = self.processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
        ids = inputs["input_ids"][0].tolist()
        start = max(i for i in range(len(ids)) if ids[i : i + len(header)] == header) + len(header)
        end = max(i for i, token in enumerate(ids) if token == self.processor.tokenizer.eos_token_id) + 1
        return self.model(**inputs).logits[0, start - 1 : end - 1], torch.tensor(ids[start:end])

    def completion(self, prompt: dict[str, Tensor], ids: Tensor) -> Tensor:
        """Logits of tokens after a prompt, the inputs of `conversation`: [tokens, vocabulary]."""
        length = prompt["input_ids"].shape[1]
        return self.model(**self.continued(prompt, ids)).logits[0, length - 1 : -1]

    @staticmethod
    def continued(prompt: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        inputs, added = dict(prompt), ids[None]
        for name, values in (("input_ids", added), ("attention_mask", added * 0 + 1), ("mm_token_type_ids", added * 0)):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], values], dim=1)
        return inputs

    def log_prob(self, messages: list[dict[str, str]], images: Sequence[str]) -> Tensor:
        """Log-probability of the last message, with the token that ends it."""
        logits, ids = self.answer(messages, images)
        return logits.log_softmax(-1).gather(1, ids[:, None]).sum()

    def last_hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model.model(**inputs).last_hidden_state[0, -1]

    def scores(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.last_hidden(inputs) @ self.score.t()

    def steps(self, rows: Sequence[Any], loss: Callable[[Sequence[Any]], tuple[Tensor, list[float]]]):
        """Train as a run does. Returns [loss, gradient norm, further metrics of `loss`] of each step."""
        optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            value, metrics = loss(rows[step * BATCH : (step + 1) * BATCH])
            value.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
            optimizer.step()
            found.append([value.item(), norm.item(), *metrics])
        return found


def blocks_of(content: str) -> list[dict[str, str]]:
    """Return a text with tags as content blocks."""
    parts = re.split("<(image|video|audio)>", content)
    blocks = [{"type": part} if place % 2 else {"type": "text", "text": part} for place, part in enumerate(parts)]
    return [block for block in blocks if block.get("text") != ""]


def save_with_head(source: Path, folder: Path, labels: int, problem: str | None = None) -> Path:
    """Write a model with a random head in place of its output layer, and return its folder."""
    import shutil

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    (output,) = [name for name in weights if name.removeprefix("thinker.") == "lm_head.weight"]
    del weights[output]
    generator = torch.Generator().manual_seed(5)
    weights["score.weight"] = torch.randn(labels, 48, generator=generator) * 0.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForConditionalGeneration", "ForSequenceClassification")
    config |= {"architectures": [architecture], "problem_type": problem}
    config["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
    config["label2id"] = {name: int(label) for label, name in config["id2label"].items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
