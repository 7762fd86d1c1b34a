"""Heads of Omni models on documents with images and audios: the numbers of transformers' thinkers."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import prepared, tiny_omni
from tests.bridge.families.worker import tensors_of
from tests.tasks.audio_oracle import write_sounds
from tests.tasks.vision_oracle import ALL, BATCH, PICTURES, STEPS, Oracle, Place, log, save_with_head
from tests.templates.media.test_omni import reference

pytestmark = pytest.mark.slow
MODELS = "qwen3_omni_moe", pytest.param("qwen2_5_omni", marks=pytest.mark.long)
LABELS, PROBLEM = 3, "single_label_classification"
# As Qwen's Qwen3-Reranker has them.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
TURN = "{{- '<|im_start|>' + message.role + '\\n' }}", "{{- '<|im_end|>\\n' }}"  # pieces of the chat template
FLAGS = {
    "seq_cls": "sft --task_type seq_cls --model {}-classifier --num_labels 3 --problem_type " + PROBLEM,
    "embedding": "sft --task_type embedding --model {} --infonce_use_batch false",
    "reranker": "sft --task_type reranker --model {}-ranker --loss_type listwise_reranker",
    "rm": "rlhf --rlhf_type rm --model {}-ranker",
}
TASKS = "seq_cls", *(pytest.param(task, marks=pytest.mark.long) for task in ("embedding", "reranker", "rm"))


def media(number: int) -> dict[str, list[str]]:
    """An image, an audio of more than a second, both or none: transformers pads shorter ones beside others."""
    images, audios = [f"{number % PICTURES}.png"] * (number % 2), [f"{3 + number % 6}.wav"] * (number // 2 % 2)
    return {"images": images, "audios": audios}


def tagged(number: int, text: str) -> str:
    files = media(number)
    return "<image>" * len(files["images"]) + "<audio>" * len(files["audios"]) + text


def row_of(task: str, number: int) -> dict[str, Any]:
    """A labelled conversation; a pair of answers; or a query with a positive and two negatives."""
    messages = [{"role": "user", "content": tagged(number, "what is it?")}]
    if task == "seq_cls":
        return {"messages": messages, **media(number), "label": number % LABELS}
    if task == "rm":
        answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
        return {"messages": [*messages, answer], **media(number), "rejected_response": "a blue square"}
    return {
        "query": tagged(number, "the sky"), **media(number),
        "positive": [tagged(number + 3, "a red circle")],
        **{f"positive_{kind}": [files] for kind, files in media(number + 3).items()},
        "negative": ["a blue square", tagged(number + 1, "what?")],
        **{f"negative_{kind}": [[], files] for kind, files in media(number + 1).items()},
    }  # fmt: skip


def documents(row: dict[str, Any]) -> list[tuple[str, dict[str, list[str]]]]:
    """Text and files of the query, the positive and the negatives."""
    texts, kinds = (row["query"], *row["positive"], *row["negative"]), ("images", "audios")
    files = [{kind: row[kind] for kind in kinds}]
    files += [
        {kind: row[f"{part}_{kind}"][i] for kind in kinds}
        for part, i in (("positive", 0), ("negative", 0), ("negative", 1))
    ]
    return list(zip(texts, files, strict=True))


class OmniOracle(Oracle):
    auto_class = "AutoModelForMultimodalLM"

    def __init__(self, folder: Path, pictures: Path, *, has_head: bool = False):
        super().__init__(folder, pictures, has_head=has_head)
        self.model = self.model.thinker
        self.model.lm_head = torch.nn.Identity()  # logits are hidden states

    def last_hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model(**inputs).logits[0, -1]

    def of_messages(
        self, messages: list[dict[str, str]], files: dict[str, list[str]], *, prompt: bool = False
    ) -> dict[str, Tensor]:
        paths = {kind: [str(self.pictures / name) for name in files[kind]] for kind in ("images", "audios")}
        return reference(self.processor, {"messages": messages, **paths, "videos": []}, 2, prompt=prompt)

    def of_text(self, text: str, files: dict[str, list[str]]) -> dict[str, Tensor]:
        """A text without a chat template."""
        template = self.processor.chat_template
        for around in TURN:
            assert around in template
            self.processor.chat_template = self.processor.chat_template.replace(around, "")
        try:
            return self.of_messages([{"role": "user", "content": text}], files)
        finally:
            self.processor.chat_template = template


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("heads"))
    for name, make in tiny_omni.FAMILIES.items():
        make(place.folder / name)
        save_with_head(place.folder / name, place.folder / f"{name}-classifier", LABELS, PROBLEM)
        save_with_head(place.folder / name, place.folder / f"{name}-ranker", 1)
    write_sounds(place.folder)
    for task in FLAGS:
        place.write(f"{task}.jsonl", [row_of(task, number) for number in range(STEPS * BATCH)])
    return place


def losses(oracle: OmniOracle) -> dict[str, Callable[[Sequence[Any]], tuple[Tensor, list[float]]]]:
    def seq_cls(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        logits = torch.stack([oracle.scores(oracle.of_messages(row["messages"], row)) for row in rows])
        return F.cross_entropy(logits, torch.tensor([row["label"] for row in rows])), []

    def embedding(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        found = []
        for row in rows:
            hidden = [oracle.last_hidden(oracle.of_text(*document)) for document in documents(row)]
            query, *others = (F.normalize(vector, dim=0) for vector in hidden)
            found.append(F.cross_entropy(torch.stack(others) @ query / 0.1, torch.tensor(0)))
        return torch.stack(found).mean(), []

    def reranker(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        found = []
        for row in rows:
            (query, files), *others = documents(row)
            scores = []
            for text, more in others:
                request = f"<Instruct>: {INSTRUCT}\n<Query>: {query}\n<Document>: {text}"
                messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": request}]
                both = {kind: files[kind] + more[kind] for kind in files}
                scores.append(oracle.scores(oracle.of_messages(messages, both, prompt=True)))
            found.append(F.cross_entropy(torch.cat(scores), torch.tensor(0)))
        return torch.stack(found).mean(), []

    def rm(rows: Sequence[Any]) -> tuple[Tensor, list[float]]:
        margins = []
        for row in rows:
            rejected = [row["messages"][0], {"role": "assistant", "content": row["rejected_response"]}]
            scores = [oracle.scores(oracle.of_messages(messages, row)) for messages in (row["messages"], rejected)]
            margins.append(scores[0] - scores[1])
        return -F.logsigmoid(torch.cat(margins)).mean(), []

    return {"seq_cls": seq_cls, "embedding": embedding, "reranker": reranker, "rm": rm}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_steps_are_those_of_transformers(task: str, model: str, place: Place) -> None:
    words = FLAGS[task].format(model)
    oracle = OmniOracle(
        place.folder / words.split("--model ")[1].split()[0], place.folder, has_head=task != "embedding"
    )
    run = place.run(f"{words} --dataset {task}.jsonl {ALL} --micro_batch_size 2 --save_steps 1")
    rows = [row_of(task, number) for number in range(STEPS * BATCH)]
    expected = oracle.steps(rows, losses(oracle)[task])
    for found, wanted in zip(log(run, "loss", "grad_norm"), expected, strict=True):
        assert found == [pytest.approx(wanted[0], rel=5e-4), pytest.approx(wanted[1], rel=3e-3)]
    # The checkpoint elsewhere gives the loss of a further step.
    saved = OmniOracle(run / "checkpoint-1", place.folder, has_head=task != "embedding")
    loss, _ = losses(saved)[task](rows[BATCH:])
    assert log(run, "loss")[1][0] == pytest.approx(loss.item(), rel=5e-4)


@pytest.mark.long
@pytest.mark.parametrize("model", tiny_omni.FAMILIES)
def test_an_export_is_the_checkpoint(model: str, place: Place) -> None:
    """To megatron-core's format and back, with what speaks."""
    source = f"{model}-classifier"
    for words in (
        f"--model {source} --to_mcore true --output_dir {model}-mcore",
        f"--mcore_model {model}-mcore --to_hf true --output_dir {model}-saved",
    ):
        done = prepared.run(
            f"-m megaswift.cli.main swift export {words} --torch_dtype float32".split(),
            cwd=place.folder,
            environment=os.environ | {"HF_HOME": str(place.folder / "cache")},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    saved, tensors = tensors_of(place.folder / f"{model}-saved"), tensors_of(place.folder / source)
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in saved.items())
    configs = [json.loads((place.folder / name / "config.json").read_text()) for name in (source, f"{model}-saved")]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["id2label"] == configs[1]["id2label"]


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", ["--tensor_model_parallel_size 2 --sequence_parallel true", "--pipeline_model_parallel_size 2"]
)
def test_a_layout_gives_the_numbers_of_one_process(flags: str, place: Place) -> None:
    words = f"{FLAGS['rm'].format('qwen3_omni_moe')} --dataset rm.jsonl {ALL} --micro_batch_size 2 --save_steps 1"
    divided, alone = place.run(f"{words} {flags}", 2), place.run(words)
    names = "loss", "grad_norm", "images", "audios"
    torch.testing.assert_close(log(divided, *names), log(alone, *names), rtol=1e-4, atol=0)
