"""`megatron sft --task_type ...` as a user runs it, and the same steps by transformers and sentence-transformers."""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import batched
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import prepared, tiny
from tests.tasks.supervised.oracles import (
    Loaded,
    Row,
    classifier,
    contrastive,
    cosine,
    embedder,
    infonce,
    inputs_of,
    matryoshka,
    online,
    own_negatives,
    reranker,
)

pytestmark = pytest.mark.slow
RATE, EPSILON, STEPS, BATCH = 1e-3, 1e-6, 3, 4
COMMON = (
    f"--lr {RATE} --lr_decay_style constant --weight_decay 0 --adam_eps {EPSILON} --train_iters {STEPS} "
    "--dataset_shuffle false --train_dataloader_shuffle false --logging_steps 1 --dataloader_num_workers 0 "
    "--no_save_optim true --no_save_rng true"
)
WORDS = ["oak", "fir", "elm", "lime", "plum", "birch", "cherry"]


class Case(NamedTuple):
    model: str
    rows: str
    flags: str
    load: Callable[[Path], Loaded]
    together: bool = False  # whether a loss is one of a whole batch, not of its samples


class Layout(NamedTuple):
    flags: str = ""
    processes: int = 1
    packed: bool = False


# --- the rows


def sentence(number: int) -> str:
    random_ = random.Random(number)
    return " ".join(random_.choices(WORDS, k=random_.randint(1, 6)))


def told(number: int) -> Row:
    """A document to classify: a text, or a conversation."""
    if number % 2:
        return {"text": sentence(number)}
    roles = ["system", "user", "assistant"][: 2 + number % 4 // 2][-2:]
    return {"messages": [{"role": role, "content": sentence(10 * number + i)} for i, role in enumerate(roles)]}


def asked(number: int, negatives: int) -> Row:
    """A query, a document that answers it, and some that do not."""
    query, positive, *others = (said(100 * number + part) for part in range(2 + negatives))
    system = [{"role": "system", "content": "Find a tree"}] if number % 3 else []
    row = {"messages": system + query, "positive_messages": [positive]}
    return row | {"negative_messages": others}


def said(number: int) -> list[Row]:
    return [{"role": "user", "content": sentence(number)}]


def columns(number: int, **label: float) -> Row:
    return {"anchor": sentence(number), "positive": sentence(number + 500)} | label


COUNT, HELD_OUT = STEPS * BATCH, 5
ROWS: dict[str, Callable[[int], Row]] = {
    "classes": lambda n: told(n) | {"label": n * 7 % 3},
    "several": lambda n: told(n) | {"label": [[0, 2], [1], [], [0, 1, 2]][n % 4]},
    "numbers": lambda n: told(n) | {"label": [n / 7, -1.5, 2.0 - n / 3]},
    "triplets": lambda n: columns(n) | {"negative": [sentence(900 + n), sentence(1900 + n)]},
    "scored": lambda n: columns(n, score=n % 5 / 4),
    "pairs": lambda n: columns(n, label=float(n % 3 > 0)),
    "lists": lambda n: asked(n, 1 + n % 3),
    "judged": lambda n: asked(n, 1 + n % 3) if n % 4 else asked(n, 0) | {"negative_messages": None, "label": n % 8 > 0},
}


REGRESSION, SINGLE, MULTI = "regression", "single_label_classification", "multi_label_classification"
EMBEDDING, INFONCE = "--task_type embedding", "--task_type embedding --infonce_temperature 0.05"
LISTWISE = "--loss_type listwise_reranker --listwise_temperature 0.5"
RERANKER, GENERATIVE = "--task_type reranker", "--task_type generative_reranker --positive_token y --negative_token n"
CASES = {
    "classes": Case("classes", "classes", "--task_type seq_cls", partial(classifier, problem=SINGLE)),
    "experts": Case("classes_moe", "classes", "--task_type seq_cls", partial(classifier, problem=SINGLE)),
    "several": Case("classes", "several", "--task_type seq_cls", partial(classifier, problem=MULTI)),
    "numbers": Case("classes", "numbers", "--task_type seq_cls", partial(classifier, problem=REGRESSION)),
    "infonce": Case("qwen3", "triplets", INFONCE, partial(embedder, of=infonce), True),
    "mean": Case("qwen3", "triplets", f"{INFONCE} --pooling mean", partial(embedder, of=infonce, pooling="mean"), True),
    "own negatives": Case(
        "qwen3", "triplets", f"{INFONCE} --infonce_use_batch false", partial(embedder, of=own_negatives)
    ),
    "matryoshka": Case(
        "qwen3", "triplets", f"{INFONCE} --mrl_dims 12 48 --mrl_weights 0.5 1.5", partial(embedder, of=matryoshka), True
    ),
    "cosine": Case(
        "qwen3", "scored", f"{EMBEDDING} --loss_type cosine_similarity --pooling mean",
        partial(embedder, of=cosine, pooling="mean"),
    ),
    "contrastive": Case(
        "qwen3", "pairs", f"{EMBEDDING} --loss_type contrastive --contrastive_margin 0.7",
        partial(embedder, of=contrastive),
    ),
    "online": Case(
        "qwen3", "pairs", f"{EMBEDDING} --loss_type online_contrastive", partial(embedder, of=online), True
    ),
    "pointwise": Case("score", "judged", RERANKER, reranker),
    "listwise": Case("score", "lists", f"{RERANKER} {LISTWISE}", partial(reranker, listwise=True)),
    "listwise experts": Case("score_moe", "lists", f"{RERANKER} {LISTWISE}", partial(reranker, listwise=True)),
    "odds": Case("qwen3", "judged", GENERATIVE, partial(reranker, generative=True)),
    "odds listwise": Case(
        "qwen3", "lists", f"{GENERATIVE} {LISTWISE}", partial(reranker, generative=True, listwise=True)
    ),
}  # fmt: skip
LAYOUTS = {
    "one process": Layout(),
    "packed": Layout(packed=True),
    "TP2 SP": Layout("--tensor_model_parallel_size 2 --sequence_parallel true", 2),
    "CP2": Layout("--context_parallel_size 2", 2),
    "CP2 packed": Layout("--context_parallel_size 2", 2, packed=True),
    "PP2": Layout("--pipeline_model_parallel_size 2", 2),
    "DP2": Layout("", 2),
    "EP2": Layout("--expert_model_parallel_size 2", 2),
}
RUNS = [
    ("classes", "one process"),
    ("infonce", "DP2"),
    ("mean", "CP2"),
    ("listwise experts", "EP2"),
    ("odds", "TP2 SP"),
]  # each kind of task once; the losses by themselves are compared in tests/tasks/losses
MORE = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if (case, layout) not in RUNS
    and (layout != "EP2" or "experts" in case)
    and (layout != "DP2" or case != "online")  # which looks for hard pairs on each rank
    and (layout != "TP2 SP" or "experts" not in case)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with models, data and caches."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("heads")
    for family in ("qwen3", "qwen3_moe"):
        tiny.save(folder / family, family)
    for name, family, labels in (
        ("classes", "qwen3", 3), ("classes_moe", "qwen3_moe", 3), ("score", "qwen3", 1), ("score_moe", "qwen3_moe", 1)
    ):  # fmt: skip
        save_scored(folder / name, family, labels)
    for each in list(folder.iterdir()):
        tiny.save_tokenizer(each)
    for name, row in ROWS.items():
        rows = [json.dumps(row(number)) + "\n" for number in range(COUNT + HELD_OUT)]
        (folder / f"{name}.jsonl").write_text("".join(rows[:COUNT]))
        (folder / f"{name}-val.jsonl").write_text("".join(rows[COUNT:]))
    return folder


def save_scored(folder: Path, family: str, labels: int) -> None:
    """As tiny.save, with a head."""
    from transformers import AutoModelForSequenceClassification

    config = tiny.config(family, num_labels=labels)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(labels)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    model.save_pretrained(folder)


def rows_of(place: Path, name: str) -> list[Row]:
    return [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]


def megatron(place: Path, words: str, processes: int = 1, *, codes: tuple[int, ...] = (0,)) -> str:
    """Run `megatron sft {words}` in `place`; what it printed."""
    done = prepared.run(
        ["-m", "megaswift.cli.main", "megatron", "sft", *words.split()],
        processes=processes,
        cwd=place,
        environment=os.environ | {"HF_HOME": str(place / "cache"), "COLUMNS": "200"},
    )
    assert done.returncode in codes, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def train(place: Path, model: str, rows: str, flags: str, processes: int = 1) -> Path:
    """The folder of a run."""
    name = f"run-{len(list(place.glob('run-*')))}"
    data = f"--dataset {rows}.jsonl --val_dataset {rows}-val.jsonl"
    megatron(place, f"--model {model} {data} {COMMON} {flags} --output_dir {name} --add_version false", processes)
    return place / name


def log_of(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


class Reference(NamedTuple):
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def by_hand(of: Loaded, batches: list[Sequence[Row]]) -> Reference:
    """AdamW over a step each."""
    parameters = [parameter for parameter in of.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
    losses, norms = [], []
    for rows in batches:
        loss = of.loss(rows)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Reference(losses, norms, of.model.state_dict())


@pytest.fixture(scope="module")
def reference(place: Path):
    """What others' steps come to, by case and by whether a step is of all rows."""
    found: dict[tuple[str, bool], Reference] = {}

    def of(name: str, whole: bool) -> Reference:
        if (name, whole) not in found:
            case = CASES[name]
            rows = rows_of(place, case.rows)
            batches = [rows] * STEPS if whole else list(batched(rows, BATCH))
            found[name, whole] = by_hand(case.load(place / case.model), batches)
        return found[name, whole]

    return of


def batch_flags(case: Case, layout: Layout, name: str) -> str:
    if layout.packed:
        length = 16384 if "reranker" in case.flags else 2048  # all rows are one pack
        return f"--micro_batch_size 1 --global_batch_size 1 --packing true --packing_length {length}"
    ranks = layout.processes if name in ("DP2", "EP2") else 1
    micro = BATCH // ranks if case.together else BATCH // 2 // ranks
    return f"--micro_batch_size {micro} --global_batch_size {BATCH}"


def check(name: str, layout_name: str, place: Path, reference: Callable) -> None:
    case, layout = CASES[name], LAYOUTS[layout_name]
    flags = f"{case.flags} {layout.flags} {batch_flags(case, layout, layout_name)}"
    folder = train(place, case.model, case.rows, flags, layout.processes)
    expected = reference(name, layout.packed)
    assert log_of(folder, "loss") == pytest.approx(expected.losses, rel=1e-5)
    assert log_of(folder, "grad_norm") == pytest.approx(expected.norms, rel=1e-4)
    checkpoint = folder / f"checkpoint-{STEPS}"
    found = case.load(checkpoint)
    close(found.model.state_dict(), expected.state)
    held_out = rows_of(place, f"{case.rows}-val")
    groups = [held_out] if layout.packed else list(batched(held_out, BATCH))
    with torch.no_grad():
        losses = [float(found.loss(rows)) for rows in groups]
    weights = [sum(map(found.units, rows)) for rows in groups]
    expected_loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert log_of(folder, "eval_loss") == pytest.approx([expected_loss], rel=1e-5)
    shutil.rmtree(folder)


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    apart = {name: float((mine[name] - tensor).norm() / tensor.norm()) for name, tensor in theirs.items()}
    assert max(apart.values()) < 1e-4, apart


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_steps_are_those_of_others(case: str, layout: str, place: Path, reference: Callable) -> None:
    check(case, layout, place, reference)


@pytest.mark.long
@pytest.mark.parametrize(("case", "layout"), MORE)
def test_steps_are_those_of_others_in_every_layout(case: str, layout: str, place: Path, reference: Callable) -> None:
    check(case, layout, place, reference)


# --- folders


def scored(model: nn.Module, folder: Path) -> Tensor:
    """A model's scores of some texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**inputs_of(tokenizer, [sentence(number)])).logits for number in range(5)])


def test_an_adapter_of_a_classifier_is_pefts(place: Path) -> None:
    """From a language model: the head is trained whole, beside the adapters."""
    from peft import AutoPeftModelForSequenceClassification

    flags = "--task_type seq_cls --num_labels 3 --tensor_model_parallel_size 2 --sequence_parallel true"
    folder = train(place, "qwen3", "classes", f"{flags} {ADAPTED}", processes=2)
    checkpoint, merged = folder / f"checkpoint-{STEPS}", folder / f"checkpoint-{STEPS}-merged"
    assert log_of(folder, "loss")[-1] < log_of(folder, "loss")[0]
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(checkpoint, num_labels=3, dtype=torch.float32)
    whole = classifier(merged, problem=SINGLE)
    torch.testing.assert_close(scored(adapted, merged), scored(whole.model, merged), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scored(adapted, merged), scored(adapted.base_model.unload(), merged), atol=1e-2)
    with torch.no_grad():
        losses = [float(whole.loss(rows)) * len(rows) for rows in batched(rows_of(place, "classes-val"), BATCH)]
    assert log_of(folder, "eval_loss") == pytest.approx([sum(losses) / HELD_OUT], rel=1e-5)


ADAPTED = f"--micro_batch_size 2 --global_batch_size {BATCH} --tuner_type lora --lora_rank 4 --lora_dropout 0 --lr 1e-2"


@pytest.mark.long
def test_an_adapter_of_embeddings_is_pefts(place: Path) -> None:
    from peft import AutoPeftModelForCausalLM
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    folder = train(place, "qwen3", "triplets", f"{EMBEDDING} --pooling mean {ADAPTED}")
    checkpoint, merged = folder / f"checkpoint-{STEPS}", folder / f"checkpoint-{STEPS}-merged"
    texts = [sentence(number) for number in range(5)]
    adapted = AutoPeftModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).base_model.model.model
    tokenizer = AutoTokenizer.from_pretrained(place / "qwen3")
    with torch.no_grad():
        means = [adapted(**inputs_of(tokenizer, [text])).last_hidden_state[0].mean(0) for text in texts]
    found = SentenceTransformer(str(merged), device="cpu").encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(found, F.normalize(torch.stack(means), dim=-1), rtol=1e-4, atol=1e-5)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_head_begins_alike_in_every_layout(place: Path) -> None:
    """By the seed alone; and the rest is what it was."""
    began = tensors_of(place / "qwen3")
    heads = []
    for layout in ("one process", "PP2"):
        flags = "--task_type seq_cls --num_labels 3 --train_iters 1 --lr 0 --eval_iters 0"
        flags += f" --micro_batch_size 2 --global_batch_size 2 {LAYOUTS[layout].flags}"
        folder = train(place, "qwen3", "classes", flags, LAYOUTS[layout].processes)
        saved = tensors_of(folder / "checkpoint-1")
        heads.append(saved.pop("score.weight"))
        assert saved.keys() == began.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, began[name]) for name, tensor in saved.items())
    assert heads[0].shape == (3, 48)
    assert 0.015 < heads[0].std() < 0.025  # initializer_range
    assert torch.equal(heads[0], heads[1])


# --- what cannot be

UNFIT = [
    ("qwen3", "classes", "--task_type seq_cls", "--num_labels: missing, and the model has no head yet"),
    ("qwen3", "classes", "--task_type seq_cls --num_labels 2", "a row of the data has the label 2. Raise"),
    ("qwen3", "numbers", "--task_type seq_cls --num_labels 2", "a row of the data has 3 target numbers"),
    (
        "classes",
        "classes",
        "--task_type seq_cls --num_labels 5",
        "has a head of 3 outputs, not that of --num_labels 5",
    ),
    ("classes", "several", f"--task_type seq_cls --problem_type {SINGLE}", "a row of the data has several labels"),
    ("qwen3", "words", "--task_type seq_cls --num_labels 2", "its label is 'good', where a number or a list"),
    ("classes", "triplets", EMBEDDING, "has a head of 3 outputs instead of an output layer"),
    (
        "qwen3",
        "triplets",
        f"{EMBEDDING} --loss_type cosine_similarity",
        "cosine_similarity: a row of the data has no label",
    ),
    (
        "qwen3",
        "scored",
        f"{EMBEDDING} --loss_type contrastive",
        "contrastive: a row of the data has another label than 0 and 1",
    ),
    ("qwen3", "pairs", EMBEDDING, "--loss_type infonce: a row of the data has the"),
    ("classes", "lists", RERANKER, "has a head of 3 outputs, not that of --task_type reranker"),
    ("qwen3", "lists", "--task_type generative_reranker", "--positive_token yes is 3 tokens of this tokenizer"),
]


@pytest.mark.parametrize(
    ("model", "rows", "flags", "said"),
    [pytest.param(*case, marks=pytest.mark.long if number % 4 else ()) for number, case in enumerate(UNFIT)],
)
def test_what_does_not_fit_is_said(model: str, rows: str, flags: str, said: str, place: Path) -> None:
    (place / "words.jsonl").write_text(json.dumps({"text": "oak", "label": "good"}) + "\n")
    batch = "--micro_batch_size 1 --global_batch_size 1 --output_dir never --add_version false"
    words = f"--model {model} --dataset {rows}.jsonl {COMMON} {batch} {flags}"
    printed = megatron(place, words, codes=(1, 2))  # of the task, or of the command line
    assert said in printed
    assert "Traceback" not in printed
