"""Classifiers, embeddings and rerankers of documents with images: the numbers of transformers, in several layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tasks.vision_oracle import ALL, BATCH, PICTURES, STEPS, Oracle, Place, log, save_with_head

pytestmark = pytest.mark.slow
LABELS = 3
# As Qwen's scripts qwen3_vl_embedding.py and qwen3_vl_reranker.py have them.
REPRESENT = "Represent the user's input."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a search query, retrieve relevant candidates that answer the query."
SHAPE = "<|vision_start|><|image_pad|><|vision_end|>"
NAMES = "loss", "grad_norm", "images"
WORDS = "a red circle", "a blue square", "the sky", "what is it?"
FLAGS = {
    "seq_cls": f"--model classifier --num_labels {LABELS} --problem_type single_label_classification",
    "embedding": "--model qwen3 --infonce_use_batch false",
    "reranker": "--model ranker --loss_type listwise_reranker",
    "generative_reranker": "--model qwen3 --loss_type pointwise_reranker --positive_token a --negative_token s",
}


def file(number: int) -> str:
    return f"{number % PICTURES}.png"


def classified(number: int) -> dict[str, Any]:
    count = number * 7 % 3
    text = "<image>" * count + WORDS[number % 4]
    row = {"images": [file(number + i) for i in range(count)], "label": number % LABELS}
    return row | ({"text": text} if number % 4 == 1 else {"messages": [{"role": "user", "content": text}]})


def compared(number: int) -> dict[str, Any]:
    """A query with an image, or none, which is in a negative too; positives and negatives with and without images."""
    has_image = number % 3 > 0
    return {
        "query": "<image>" * has_image + WORDS[number % 4],
        "images": [file(number)] * has_image,
        "positive": ["<image>" + WORDS[(number + 1) % 4]],
        "positive_images": [[file(number + 1)]],
        "negative": [WORDS[(number + 2) % 4], "<image>" + WORDS[(number + 3) % 4]],
        "negative_images": [[], [file(number + (0 if has_image else 2))]],
    }


ROWS = {
    "classified": [classified(number) for number in range(STEPS * BATCH)],
    "compared": [compared(number) for number in range(STEPS * BATCH)],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("heads"))
    save_with_head(place.folder / "qwen3", place.folder / "classifier", LABELS, "single_label_classification")
    save_with_head(place.folder / "qwen3", place.folder / "ranker", 1)
    for name, rows in ROWS.items():
        place.write(f"{name}.jsonl", rows)
    return place


def train(place: Place, task: str, flags: str = "", processes: int = 1) -> Path:
    data = "classified" if task == "seq_cls" else "compared"
    micro = "" if "micro_batch_size" in flags else "--micro_batch_size 2"
    words = f"sft --task_type {task} {FLAGS[task]} --dataset {data}.jsonl {ALL} {micro} {flags}"
    return place.run(words, processes)


def documents(row: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Text and images of the query, the positive and the negatives."""
    texts = row["query"], *row["positive"], *row["negative"]
    return list(zip(texts, [row["images"], *row["positive_images"], *row["negative_images"]], strict=True))


def by_hand(place: Place, task: str) -> list[list[float]]:
    folder = place.folder / FLAGS[task].split()[1]
    oracle = Oracle(folder, place.folder, has_head=task in ("seq_cls", "reranker"))

    def plain(text: str, images: list[str]) -> dict[str, Tensor]:
        return oracle.inputs(text.replace("<image>", SHAPE), images)

    def represented(text: str, images: list[str]) -> dict[str, Tensor]:
        messages = [{"role": "system", "content": REPRESENT}, {"role": "user", "content": text}]
        return oracle.conversation(messages, images, prompt=True)

    def judged(row: dict[str, Any]) -> list[dict[str, Tensor]]:
        (query, images), *others = documents(row)
        requests = [f"<Instruct>: {INSTRUCT}<Query>:{query}\n<Document>:{text}" for text, _ in others]
        return [
            oracle.conversation(
                [{"role": "system", "content": JUDGE}, {"role": "user", "content": request}], images + more, prompt=True
            )
            for request, (_, more) in zip(requests, others, strict=True)
        ]

    def seq_cls(rows: Any) -> tuple[Tensor, list[float]]:
        inputs = [
            plain(row["text"], row["images"]) if "text" in row else oracle.conversation(row["messages"], row["images"])
            for row in rows
        ]
        logits = torch.stack([oracle.scores(each) for each in inputs])
        return F.cross_entropy(logits, torch.tensor([row["label"] for row in rows])), []

    def embedding(rows: Any) -> tuple[Tensor, list[float]]:
        losses = []
        for row in rows:
            hidden = [oracle.last_hidden(represented(*document)) for document in documents(row)]
            query, *others = (F.normalize(vector, dim=0) for vector in hidden)
            losses.append(F.cross_entropy(torch.stack(others) @ query / 0.1, torch.tensor(0)))
        return torch.stack(losses).mean(), []

    def reranker(rows: Any) -> tuple[Tensor, list[float]]:
        scores = [torch.cat([oracle.scores(inputs) for inputs in judged(row)]) for row in rows]
        return torch.stack([F.cross_entropy(values, torch.tensor(0)) for values in scores]).mean(), []

    def generative_reranker(rows: Any) -> tuple[Tensor, list[float]]:
        yes, no = (oracle.processor.tokenizer(word)["input_ids"][0] for word in ("a", "s"))
        losses = []
        for row in rows:
            logits = torch.stack([oracle.model(**inputs).logits[0, -1] for inputs in judged(row)])
            labels = torch.tensor([1.0] + [0.0] * (len(logits) - 1))
            losses.append(F.binary_cross_entropy_with_logits(logits[:, yes] - logits[:, no], labels, reduction="none"))
        return torch.cat(losses).mean(), []

    makers = {
        "seq_cls": seq_cls,
        "embedding": embedding,
        "reranker": reranker,
        "generative_reranker": generative_reranker,
    }
    return oracle.steps(ROWS["classified" if task == "seq_cls" else "compared"], makers[task])


@pytest.mark.parametrize(
    "task", ["seq_cls", "embedding", "reranker", pytest.param("generative_reranker", marks=pytest.mark.long)]
)
def test_steps_are_those_of_transformers(task, place):
    torch.testing.assert_close(log(train(place, task), "loss", "grad_norm"), by_hand(place, task), rtol=5e-4, atol=1e-6)


LAYOUTS = {
    "TP2 SP": "--tensor_model_parallel_size 2 --sequence_parallel true",
    "CP2": "--context_parallel_size 2",
    "PP2": "--pipeline_model_parallel_size 2",
}
USUAL = (("embedding", "CP2"),)


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, layout, marks=() if (task, layout) in USUAL else pytest.mark.long)
        for task in FLAGS
        for layout in LAYOUTS
    ],
)
def test_a_layout_gives_the_numbers_of_one_process(task, layout, place):
    divided, alone = train(place, task, LAYOUTS[layout], 2), train(place, task)
    torch.testing.assert_close(log(divided, *NAMES), log(alone, *NAMES), rtol=1e-4, atol=0)


@pytest.mark.long
def test_a_saved_embedding_is_that_of_sentence_transformers(place):
    from PIL import Image
    from sentence_transformers import SentenceTransformer

    run = train(place, "embedding", f"--save_steps {STEPS}")
    checkpoint = run / f"checkpoint-{STEPS}"
    picture = Image.open(place.folder / "0.png").convert("RGB")
    model = SentenceTransformer(str(checkpoint), device="cpu", model_kwargs={"dtype": "float32"})
    oracle = Oracle(checkpoint, place.folder)
    texts = [("a blue square", []), ("<image>", ["0.png"]), ("<image>the sky", ["0.png"])]
    inputs = ["a blue square", {"image": picture}, {"image": picture, "text": "the sky"}]
    for (text, images), embedding in zip(texts, model.encode(inputs, convert_to_tensor=True), strict=True):
        messages = [{"role": "system", "content": REPRESENT}, {"role": "user", "content": text}]
        hidden = oracle.last_hidden(oracle.conversation(messages, images, prompt=True))
        torch.testing.assert_close(embedding, F.normalize(hidden, dim=0), rtol=1e-4, atol=1e-6)


def test_a_saved_head_scores_with_transformers_body(place):
    """The checkpoint elsewhere gives the loss of a further step."""
    run = train(place, "seq_cls", f"--save_steps 1 --train_iters {STEPS}")
    oracle = Oracle(run / "checkpoint-1", place.folder, has_head=True)
    rows = ROWS["classified"][BATCH:]
    logits = torch.stack(
        [
            oracle.scores(
                oracle.inputs(row["text"].replace("<image>", SHAPE), row["images"])
                if "text" in row
                else oracle.conversation(row["messages"], row["images"])
            )
            for row in rows
        ]
    )
    loss = F.cross_entropy(logits, torch.tensor([row["label"] for row in rows])).item()
    assert log(run, "loss")[1][0] == pytest.approx(loss, rel=1e-4)
