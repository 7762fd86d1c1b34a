"""Classifiers, embedders and rerankers by transformers and sentence-transformers: a model of a folder, and its loss."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"

# Else it gives texts to a chat template, where the tokenizer has one.
PLAIN = {"method": "forward", "method_output_name": "last_hidden_state"}

Row = dict[str, Any]
LossOf = Callable[[Sequence[Row]], Tensor]  # the mean over rows


class Loaded(NamedTuple):
    """Somebody else's model of a folder."""

    model: nn.Module
    loss: LossOf
    units: Callable[[Row], int] = lambda row: 1  # over which a loss is a mean


def classifier(folder: Path, *, problem: str) -> Loaded:
    """transformers', with its own loss."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = loaded(AutoModelForSequenceClassification, folder, problem_type=problem)

    def loss(rows: Sequence[Row]) -> Tensor:
        texts = [
            row.get("text")
            or tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=False)
            for row in rows
        ]
        labels = [row["label"] for row in rows]
        if problem == "multi_label_classification":
            labels = [[float(label in of_row) for label in range(3)] for of_row in labels]
        return model(**inputs_of(tokenizer, texts), labels=torch.tensor(labels)).loss

    return Loaded(model, loss)


def embedder(folder: Path, *, pooling: str = "lasttoken", of: Callable[[Any], Callable]) -> Loaded:
    """sentence-transformers', with its own loss: `of` makes it of a model, and it gives the mean over rows."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if (folder / "modules.json").exists():
        model = SentenceTransformer(str(folder), device="cpu")
    else:
        body = Transformer(str(folder), modality_config={"text": PLAIN}, module_output_name="token_embeddings")
        model = SentenceTransformer(modules=[body, Pooling(48, pooling_mode=pooling)], device="cpu")
    measure = of(model)

    def loss(rows: Sequence[Row]) -> Tensor:
        texts = [[row["anchor"] for row in rows], [row["positive"] for row in rows]]
        texts += [list(column) for column in zip(*(row.get("negative", []) for row in rows), strict=True)]
        labels = torch.tensor([float(row.get("label", row.get("score", 0.0))) for row in rows])
        return measure([model.preprocess(column) for column in texts], labels)

    return Loaded(model, loss)


def infonce(model: Any) -> Callable:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    return MultipleNegativesRankingLoss(model, scale=20.0)


def matryoshka(model: Any) -> Callable:
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    return MatryoshkaLoss(model, infonce(model), [12, 48], [0.5, 1.5])


def own_negatives(model: Any) -> Callable:
    """By hand: an anchor's positive among its own documents."""

    def loss(features: list, labels: Tensor) -> Tensor:
        anchors, *others = (F.normalize(model(column)["sentence_embedding"], dim=-1) for column in features)
        cosines = torch.stack([(anchors * other).sum(-1) for other in others], dim=1)
        return F.cross_entropy(cosines * 20, torch.zeros(len(anchors), dtype=torch.int64))

    return loss


def cosine(model: Any) -> Callable:
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    return CosineSimilarityLoss(model)


def contrastive(model: Any) -> Callable:
    from sentence_transformers.sentence_transformer.losses import ContrastiveLoss

    return ContrastiveLoss(model, margin=0.7)


def online(model: Any) -> Callable:
    """A sum of theirs, which ours is the mean of."""
    from sentence_transformers.sentence_transformer.losses import OnlineContrastiveLoss

    measure = OnlineContrastiveLoss(model, margin=0.5)
    return lambda features, labels: measure(features, labels) / len(labels)


def reranker(folder: Path, *, listwise: bool = False, generative: bool = False) -> Loaded:
    """transformers', by a head or by the odds of "y" over "n"."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = loaded(AutoModelForCausalLM if generative else AutoModelForSequenceClassification, folder)
    yes, no = tokenizer.convert_tokens_to_ids(["y", "n"])

    def scores(texts: list[str]) -> Tensor:
        inputs = inputs_of(tokenizer, texts)
        logits = model(**inputs).logits
        if not generative:
            return logits[:, 0]
        last = logits[torch.arange(len(texts)), inputs["attention_mask"].sum(1) - 1]
        return last[:, yes] - last[:, no]

    def loss(rows: Sequence[Row]) -> Tensor:
        found = [(scores(texts(row)), labels(row)) for row in rows]
        if listwise:
            return torch.stack([F.cross_entropy(score / 0.5, torch.tensor(0)) for score, _ in found]).mean()
        together, wanted = (torch.cat(part) for part in zip(*found, strict=True))
        return F.binary_cross_entropy_with_logits(together, wanted)

    def labels(row: Row) -> Tensor:
        if row.get("label") is not None:
            return torch.tensor([float(row["label"])])
        return F.pad(torch.ones(1), (0, len(row["negative_messages"])))

    def texts(row: Row) -> list[str]:
        *system, query = row["messages"]
        documents = [*row["positive_messages"], *(row["negative_messages"] or [])]
        return [judged(system[0]["content"] if system else INSTRUCT, query, document) for (document,) in documents]

    def judged(instruct: str, query: Row, document: Row) -> str:
        text = f"<Instruct>: {instruct}\n<Query>: {query['content']}\n<Document>: {document['content']}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    return Loaded(model, loss, (lambda row: 1) if listwise else (lambda row: len(labels(row))))


def loaded(kind: Any, folder: Path, **settings: Any) -> nn.Module:
    """In fp32, with every weight found and every weight used."""
    model, report = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, **settings)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def inputs_of(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    found = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    return {name: found[name] for name in ("input_ids", "attention_mask")}
