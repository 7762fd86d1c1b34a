"""Benchmark of tokenization against the bare tokenizer, and of packing: speed, and fill of the packs.

    python scripts/bench_data.py [--rows 100000] [--processes 2]

The rows are passages of Python's standard library, a few hundred tokens each; the tokenizer is a byte-level BPE trained
on it. "The tokenizer alone" gets the rendered conversations in batches of the same size and in as many processes, and
discards its results.
"""

# pyright: reportMissingImports=false

import argparse
import json
import logging
import os
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from megaswift.templates.chat_template.chat import ChatTemplate
from megaswift.templates.dataset.packing import pack
from megaswift.templates.formats.schemas import to_conversation
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import CHUNK, prepare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def make_rows(count: int) -> list[dict]:
    """Return rows of 600 to 1,800 characters: the first third is the query, the rest the response."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(library.glob("**/*.py")) if "site-packages" not in str(file)]
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    random = np.random.default_rng(0)
    sizes, starts = random.integers(600, 1800, count), random.integers(0, len(text) - 2000, count)
    return [
        {"query": text[start : start + size // 3], "response": text[start + size // 3 : start + size]}
        for size, start in zip(sizes.tolist(), starts.tolist(), strict=True)
    ]


def make_tokenizer(rows: list[dict]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["response"] for row in rows[:10_000]), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


def tokenize_alone(tokenize, texts: list[str], processes: int) -> float:
    """Return the seconds in which `tokenize` processes the texts."""
    chunks = [texts[i : i + CHUNK] for i in range(0, len(texts), CHUNK)]
    _worker_state[:] = tokenize, chunks
    start = time.perf_counter()
    if processes == 1:
        for number in range(len(chunks)):
            _tokenize(number)
    else:
        with ProcessPoolExecutor(processes, get_context("fork")) as pool:
            for _ in pool.map(_tokenize, range(len(chunks))):
                pass
    return time.perf_counter() - start


_worker_state: list = []


def _tokenize(number: int) -> None:
    tokenize, chunks = _worker_state
    tokenize(chunks[number])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    logging.disable()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would distort the comparison of processes

    rows = make_rows(arguments.rows)
    tokenizer = make_tokenizer(rows)
    template = ChatTemplate(tokenizer)
    texts = [template.render(to_conversation(row)) for row in rows]

    def report(label: str, seconds: float) -> None:
        print(f"{label:<48} {len(rows) / seconds:>10,.0f} rows/s   {seconds:6.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MODELSCOPE_CACHE"] = folder
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = PrepareOptions(dataset=[str(data)], dataset_num_proc=arguments.processes)
        start = time.perf_counter()
        store = prepare(options, tokenizer, stage="sft").train
        seconds = time.perf_counter() - start
        mean_length = store.lengths.mean()
        print(f"{len(rows):,} rows of {mean_length:.0f} tokens on average, {arguments.processes} processes")
        report("rows to the token store (prepare)", seconds)
        start = time.perf_counter()
        prepare(options, tokenizer, stage="sft")
        report("found in the cache", time.perf_counter() - start)
    backend = tokenizer.backend_tokenizer

    def call(batch: list[str]) -> list:
        return tokenizer(batch, add_special_tokens=False)["input_ids"]

    def encode_batch(batch: list[str]) -> list:
        return [encoding.ids for encoding in backend.encode_batch(batch, add_special_tokens=False)]

    for name, tokenize in (("tokenizer(texts)", call), ("its Rust encode_batch", encode_batch)):
        tokenizer_seconds = tokenize_alone(tokenize, texts, arguments.processes)
        report(f"the tokenizer alone: {name}", tokenizer_seconds)
        print(f"    the store takes {seconds / tokenizer_seconds:.0%} of its time")

    print("\npacking:  lengths            pack       full   seconds")
    random = np.random.default_rng(0)
    for count, longest, capacity in (
        (10**3, 1024, 4096),
        (10**3, 8192, 8192),
        (10**6, 1024, 4096),
        (10**6, 32768, 32768),
    ):
        lengths = random.integers(1, longest + 1, count)
        start = time.perf_counter()
        packs = pack(lengths, capacity)
        seconds = time.perf_counter() - start
        fill = lengths.sum() / len(packs) / capacity
        print(f"{count:>9,} of up to {longest:>6,}   {capacity:>6,}   {fill:8.2%}   {seconds:7.2f}")


if __name__ == "__main__":
    main()
