"""Proof that models learn: each task with a user's command, on a tiny model, in minutes on two cores.

    python scripts/learn.py [--only dpo rm ...] [--folder megatron_output/learn] [--figure FILE]

First `megatron sft` teaches a random Qwen3 to say two words in either order. The tasks start from that model. Their
results are measured on held-out prompts, with transformers on the saved checkpoints, and compared with the run's own
evaluation. It fails if a result is out of its bound or differs from the run's.

images: a random Qwen3-VL learns to name the colours in pictures (mosaics.py). Its control, which learns the answers of
other pictures, must fail. --figure: draw some of their answers as a PNG file.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, permutations
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import mosaics
import torch
from quickstart.make_model import CHAT_TEMPLATE
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

WORDS = [
    "oak", "elm", "fir", "ash", "yew", "bay", "fig", "plum", "pear", "lime", "palm", "pine", "teak", "sloe", "rose",
    "reed", "fern", "moss", "iris", "sage", "mint", "dill", "leek", "kale", "hemp", "rye", "oat", "pea", "bean", "beet",
    "corn", "rue", "nut", "hop", "flax", "lily", "ivy", "gorse", "hazel", "larch",
]  # fmt: skip
OTHERS = [word[::-1] for word in WORDS]  # translations
HELD_OUT = 64
BETA = 0.1
MEGATRON = Path(sys.executable).parent / "megatron"
Row = dict[str, Any]
Pair = tuple[str, str]


# --- the data: two words, in the requested or the reverse order


def conversation(pair: Pair, answer: str) -> list[Row]:
    return [{"role": "user", "content": "say " + " ".join(pair)}, {"role": "assistant", "content": answer}]


def both_orders(pair: Pair) -> list[Row]:
    """Return both orders as right answers."""
    return [{"messages": conversation(pair, answer)} for answer in (" ".join(pair), " ".join(pair[::-1]))]


def preferences(pair: Pair) -> list[Row]:
    """Return a pair of answers with the same words; the chosen one has the requested order."""
    return [{"messages": conversation(pair, " ".join(pair)), "rejected_response": " ".join(pair[::-1])}]


def answers(pair: Pair) -> list[Row]:
    """Return the answers of a preference pair as rows with a label each."""
    return [row | {"label": label} for row, label in zip(both_orders(pair), (True, False), strict=True)]


def classes(pair: Pair) -> list[Row]:
    """Return a row whose label is the class of the first word, of four."""
    return [{"text": " ".join(pair), "label": WORDS.index(pair[0]) % 4}]


def translations(pair: Pair) -> list[Row]:
    return [{"anchor": " ".join(pair), "positive": " ".join(OTHERS[WORDS.index(word)] for word in pair)}]


def rankings(pair: Pair) -> list[Row]:
    """Return the reverse order as the positive, and texts with one of the words or none as negatives."""
    first, second = other_words(pair)
    texts = [f"{pair[1]} {pair[0]}", f"{pair[1]} {first}", f"{second} {pair[0]}", f"{first} {second}"]
    query, positive, *negatives = ([{"role": "user", "content": text}] for text in (" ".join(pair), *texts))
    return [{"messages": query, "positive_messages": [positive], "negative_messages": negatives}]


def other_words(pair: Pair) -> Pair:
    first, second = random.Random(" ".join(pair)).sample([word for word in WORDS if word not in pair], 2)
    return first, second


# --- the measurements, with transformers


class Bounds(NamedTuple):
    """Bounds of a metric, and its value by chance."""

    chance: float
    at_least: float = -inf
    at_most: float = inf

    def __str__(self) -> str:
        return f"<= {self.at_most:.2f}" if self.at_most < inf else f">= {self.at_least:.2f}"


class Task(NamedTuple):
    line: str
    rows: Callable[[Pair], list[Row]] | None  # None: pictures, of which mosaics.py writes the rows
    measure: Callable[[Path, Path, list[Row]], dict[str, float]]  # (checkpoint, base, rows) -> metrics
    bounds: dict[str, Bounds]  # of the metrics


def answer_log_probs(folder: Path, rows: list[list[Row]]) -> Tensor:
    """Return the log-probability of the last answer of each conversation: [rows]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log_prob_sums = []
    for messages in rows:
        start = len(tokens_of(tokenizer, messages[:-1], add_generation_prompt=True))
        ids = torch.tensor([tokens_of(tokenizer, messages)])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        log_prob_sums.append(log_probs.gather(1, ids[0, 1:, None])[start - 1 :].sum())
    return torch.stack(log_prob_sums)


def tokens_of(tokenizer: Any, messages: list[Row], **settings: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, return_dict=False, **settings)


def rejected(row: Row) -> list[Row]:
    return [row["messages"][0], {"role": "assistant", "content": row["rejected_response"]}]


def rewards(folder: Path, base: Path, conversations: list[list[Row]]) -> Tensor:
    return BETA * (answer_log_probs(folder, conversations) - answer_log_probs(base, conversations))


def measure_dpo(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    better = rewards(folder, base, [row["messages"] for row in rows])
    return margins(better, rewards(folder, base, [rejected(row) for row in rows]))


def margins(better: Tensor, worse: Tensor) -> dict[str, float]:
    share = (better > worse).float().mean()
    return {"rewards/accuracies": float(share), "rewards/margins": float((better - worse).mean())}


def measure_kto(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    rewards_by_row = rewards(folder, base, [row["messages"] for row in rows])
    is_desirable = torch.tensor([row["label"] for row in rows])
    return {
        "rewards/margins": float(rewards_by_row[is_desirable].mean() - rewards_by_row[~is_desirable].mean()),
        "right signs": float(((rewards_by_row > 0) == is_desirable).float().mean()),
    }


def scores(folder: Path, texts: list[str] | list[list[Row]], **settings: Any) -> Tensor:
    """Return a score head's logits of plain texts or conversations: [rows, labels]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = [
        tokenizer.encode(text) if isinstance(text, str) else tokens_of(tokenizer, text, **settings) for text in texts
    ]
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokens])).logits for tokens in ids])


def measure_rm(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    better = scores(folder, [row["messages"] for row in rows])
    return margins(better, scores(folder, [rejected(row) for row in rows]))


def measure_classes(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    predictions = scores(folder, [row["text"] for row in rows]).argmax(1)
    return {"accuracy": float((predictions == torch.tensor([row["label"] for row in rows])).float().mean())}


def measure_embedding(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    anchors, positives = (
        model.encode([row[name] for row in rows], convert_to_tensor=True) for name in ("anchor", "positive")
    )
    nearest = (anchors @ positives.t()).argmax(1)
    return {"accuracy": float((nearest == torch.arange(len(rows))).float().mean())}


def measure_reranker(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    questions = [
        question(row["messages"][0]["content"], document["content"])
        for row in rows
        for (document,) in [*row["positive_messages"], *row["negative_messages"]]
    ]
    logits = scores(folder, questions, add_generation_prompt=True).view(len(rows), -1)
    return {"mrr": float((1 / (1 + (logits > logits[:, :1]).sum(1))).mean())}


def measure_images(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    return {"exact answers before": mosaics.measure(base, rows)["exact answers"]} | mosaics.measure(folder, rows)


def measure_control(folder: Path, base: Path, rows: list[Row]) -> dict[str, float]:
    return mosaics.measure(folder, rows)


def question(query: str, document: str) -> list[Row]:
    """Return the messages of Qwen3-Reranker's prompt."""
    judge = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    instruct = "Given a web search query, retrieve relevant passages that answer the query"
    request = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": judge}, {"role": "user", "content": request}]


PAIRS = "--micro_batch_size 32 --global_batch_size 32"
PICTURES = "sft --freeze_vit false --freeze_aligner false --micro_batch_size 16 --global_batch_size 16 --lr 1e-3"
TASKS = {
    "dpo": Task(
        f"rlhf --rlhf_type dpo --beta {BETA} {PAIRS} --train_iters 60 --lr 2e-3",
        preferences, measure_dpo, {"rewards/accuracies": Bounds(0.5, 0.9), "rewards/margins": Bounds(0, 0.5)},
    ),
    "rm": Task(
        f"rlhf --rlhf_type rm {PAIRS} --train_iters 200 --lr 3e-3",
        preferences, measure_rm, {"rewards/accuracies": Bounds(0.5, 0.9), "rewards/margins": Bounds(0, 1.0)},
    ),
    "seq_cls": Task(
        f"sft --task_type seq_cls --num_labels 4 {PAIRS} --train_iters 100 --lr 3e-3",
        classes, measure_classes, {"accuracy": Bounds(0.25, 0.9)},
    ),
    "embedding": Task(
        f"sft --task_type embedding --pooling mean --micro_batch_size {HELD_OUT} --global_batch_size {HELD_OUT} "
        "--train_iters 80 --lr 3e-3",
        translations, measure_embedding, {"accuracy": Bounds(1 / HELD_OUT, 0.8)},
    ),
    "kto": Task(
        f"rlhf --rlhf_type kto --beta {BETA} {PAIRS} --train_iters 160 --lr 3e-3",
        answers, measure_kto, {"rewards/margins": Bounds(0, 0.5), "right signs": Bounds(0.5, 0.9)},
    ),
    "reranker": Task(
        "sft --task_type reranker --loss_type listwise_reranker --micro_batch_size 16 --global_batch_size 16 "
        "--train_iters 160 --lr 2e-3",
        rankings, measure_reranker, {"mrr": Bounds(0.52, 0.9)},
    ),
    "images": Task(
        f"{PICTURES} --train_iters 500", None, measure_images,
        {
            "exact answers before": Bounds(0, at_most=0.1), "exact answers": Bounds(0.05, 0.95),
            "loss": Bounds(5.7, at_most=0.2),
        },
    ),
    "control": Task(
        f"{PICTURES} --train_iters 200", None, measure_control,
        {"exact answers": Bounds(0.05, at_most=0.2), "loss": Bounds(1.1, 0.9)},
    ),
}  # fmt: skip


# --- the runs


def make_model(folder: Path, vocabulary: list[str], head_dim: int = 16) -> None:
    """Write a random Qwen3 whose tokens are the words of these texts and of the chat template."""
    words = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))  # pyright: ignore[reportCallIssue]
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"]
    words.train_from_iterator(
        ["say system user assistant", *vocabulary],
        trainers.WordLevelTrainer(special_tokens=special, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unknown|>",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=96 // head_dim,
        num_key_value_heads=96 // head_dim,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype="float32",
        eos_token_id=special.index("<|im_end|>"),
        pad_token_id=special.index("<|endoftext|>"),
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data(folder: Path, name: str, rows_of: Callable[[Pair], list[Row]]) -> None:
    """Write training rows, and validation rows of HELD_OUT untrained word pairs, the same in every task."""
    pairs = list(permutations(WORDS, 2))
    random.Random(0).shuffle(pairs)
    rows = [rows_of(pair) for pair in pairs]
    held_out = [rows_of_pair[number % len(rows_of_pair)] for number, rows_of_pair in enumerate(rows[:HELD_OUT])]
    for file, selected in ((f"{name}-val.jsonl", held_out), (f"{name}.jsonl", chain.from_iterable(rows[HELD_OUT:]))):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in selected))


def train(folder: Path, name: str, model: str, line: str) -> Path:
    """Run `megatron {line}` and return its checkpoint."""
    output = folder / f"run-{name}"
    words = f"{line} --model {model} --dataset {name}.jsonl --val_dataset {name}-val.jsonl --weight_decay 0.01"
    words += f" --lr_warmup_fraction 0.05 --dataloader_num_workers 0 --no_save_optim true --output_dir {output.name}"
    print(f"$ megatron {words}", flush=True)
    start_time = time.perf_counter()
    process = subprocess.run(
        [MEGATRON, *words.split(), "--add_version", "false", "--logging_steps", "10"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(process.stdout[-3000:] + process.stderr[-3000:])
    (output / "seconds").write_text(str(time.perf_counter() - start_time))
    (checkpoint,) = output.glob("checkpoint-*")
    return checkpoint


def last_evaluation(run: Path) -> dict[str, float]:
    """Return the metrics of the run's last evaluation."""
    lines = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_loss" in line][-1]
    return {name.removeprefix("eval_"): value for name, value in last.items() if name.startswith("eval_")}


def train_base(folder: Path, names: list[str]) -> Path:
    """Write the rows of tasks with words, and return the checkpoint that they start from."""
    judge_messages = question(" ".join(WORDS), " ".join(OTHERS))
    make_model(folder / "model", [" ".join(message["content"] for message in judge_messages)])
    write_data(folder, "base", both_orders)
    for name in names:
        if rows_of := TASKS[name].rows:
            write_data(folder, name, rows_of)
    return train(folder, "base", "model", f"sft {PAIRS} --train_iters 400 --lr 3e-3")


def main(folder: Path, names: list[str], figure: Path | None) -> int:
    start_time = time.perf_counter()
    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if "images" in names:
        names = [*(name for name in names if name != "control"), "control"]
    bases: dict[str, Path] = {}
    if with_words := [name for name in names if TASKS[name].rows]:
        bases |= dict.fromkeys(with_words, train_base(folder, with_words))
    if with_pictures := [name for name in names if name not in with_words]:
        mosaics.write_data(folder)
        mosaics.make_model(folder / "vision-model")
        bases |= dict.fromkeys(with_pictures, folder / "vision-model")

    def start(name: str) -> Path:
        return train(folder, name, str(bases[name].relative_to(folder)), TASKS[name].line)

    with ThreadPoolExecutor(2) as pool:
        checkpoints = dict(zip(names, pool.map(start, names), strict=True))
    is_good = report(folder, bases, checkpoints)
    if figure:
        mosaics.draw_answers(checkpoints["images"], checkpoints["control"], held_out_rows(folder, "images"), figure)
    print(f"\n{time.perf_counter() - start_time:.0f} s")
    return 0 if is_good else 1


def report(folder: Path, bases: dict[str, Path], checkpoints: dict[str, Path]) -> bool:
    """Print the table. Return whether all results are within bounds and equal the run's."""
    is_good = True
    print(f"\n{'task':<11}{'of held-out prompts':<22}{'chance':>8}{'bound':>10}{'measured':>10}{'by the run':>12}")
    for name, checkpoint in checkpoints.items():
        task, run = TASKS[name], last_evaluation(checkpoint.parent)
        for metric, value in task.measure(checkpoint, bases[name], held_out_rows(folder, name)).items():
            bounds, run_value = task.bounds[metric], run.get(metric)
            is_right = bounds.at_least <= value <= bounds.at_most
            is_right = is_right and (run_value is None or abs(run_value - value) <= 1e-3 * max(1, abs(value)))
            shown = "-" if run_value is None else f"{run_value:.4f}"
            mark = "" if is_right else "   WRONG"
            print(f"{name:<11}{metric:<22}{bounds.chance:>8.3f}{bounds!s:>10}{value:>10.4f}{shown:>12}{mark}")
            is_good = is_good and is_right
    return is_good


def held_out_rows(folder: Path, name: str) -> list[Row]:
    return [json.loads(line) for line in (folder / f"{name}-val.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--folder", type=Path, default=Path("megatron_output/learn"))
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    sys.exit(main(arguments.folder.absolute(), arguments.only, arguments.figure))
