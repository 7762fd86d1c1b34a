"""vLLM in the processes of a trainer: run by .venv-vllm's Python, under its torchrun.

    torchrun --nproc-per-node 2 -m tests.tasks.rollout.vllm_worker job.json results.json

job.json: {"models": two folders, "options": {flag: value}, "ranks": of an engine, "settings": of vLLM}. results.json:
{what: what each rank found}.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.checkpoint.stream import stream_weights
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from megaswift.bridge.parallel import barrier, initialize
from megaswift.tasks.options.rollout import EngineOptions
from megaswift.tasks.rollout.engine import Request, Sampling
from megaswift.tasks.rollout.vllm_engine import VllmEngine
from megaswift.tasks.rollout.vllm_requests import LOG_PROBS, sampling_params
from megaswift.tasks.rollout.weight_sync import sync

from tests import tiny

NEW = 16
FILTERED = Sampling(temperature=0.7, top_p=0.8, top_k=30, repetition_penalty=1.2, max_new_tokens=NEW)


def run(job: dict[str, Any]) -> dict[str, Any]:
    options = BuildOptions(**job["options"])
    initialize(options, seed=3)
    folders = [Path(folder) for folder in job["models"]]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    settings = EngineOptions(
        vllm_max_model_len=128,
        vllm_max_num_seqs=8,
        vllm_tensor_parallel_size=job["ranks"],
        vllm_engine_kwargs=job["settings"],
    )
    engine = VllmEngine(folders[0], settings, dtype=torch.float32)
    engine.eos_ids = set()  # by chance any token would come
    asked = requests(dist.get_rank() // job["ranks"])
    found: dict[str, Any] = {"undisturbed": torch.equal(torch.get_rng_state(), state)}
    found["threads"] = torch.get_num_threads() == threads
    found["greedy"], found["log_probs"], found["compared"] = [], [], []
    for folder in folders:
        config = read_config(folder)
        model = build_model(config, options, torch.float32)
        load_weights(model.chunks, config, folder)
        done = sync(
            engine,
            stream_weights(model.chunks, config, folder, dtype=torch.float32),
            dtype=torch.float32,
            compare=10_000,
        )
        found["compared"].append(done.compared)
        found["gigabytes_per_second"] = done.gigabytes_per_second
        found["greedy"].append(greedy_is_transformers(engine, asked, folder))
        found["log_probs"].append(
            max(distance(engine, asked, folder, FILTERED), distance(engine, asked, folder, Sampling()))
        )
    found |= {"alone": alone_and_beside(engine, asked), "stops": stops(engine, asked), "limits": limits(engine, asked)}
    found["in_one_piece"] = in_one_piece(engine, asked)
    engine.sleep()
    engine.wake()
    found["asleep"] = len(engine.generate(asked, Sampling(max_new_tokens=2)))
    engine.close()
    barrier()  # the trainer's groups are as they were
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: [one[name] for one in everyone] for name in found}


def in_one_piece(engine: VllmEngine, asked: list[Request]) -> bool:
    """Return whether vllm_scheduler.py hands over the completions."""
    settings = [sampling_params(request, Sampling(max_new_tokens=NEW), ()) for request in asked]
    outputs = engine.llm.generate([{"prompt_token_ids": r.tokens} for r in asked], settings, use_tqdm=False)
    return all(len(output.kv_transfer_params[LOG_PROBS]) == NEW for output in outputs)


def requests(number: int) -> list[Request]:
    """Return requests that differ between engines."""
    generator = torch.Generator().manual_seed(number)
    lengths = (3, 17, 40)[number:]
    prompts = [torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(prompt, seed=10 * number + at) for at, prompt in enumerate(prompts)]


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy_is_transformers(engine: VllmEngine, asked: list[Request], folder: Path) -> bool:
    model, equal = reference(folder), True
    answers = engine.generate(asked, Sampling(temperature=0, max_new_tokens=NEW))
    for request, found in zip(asked, answers, strict=True):
        prompt = torch.tensor([request.tokens])
        model.generation_config.eos_token_id = None
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
        equal &= found.tokens == output[0, len(request.tokens) :].tolist()
    return equal


@torch.no_grad()
def distance(engine: VllmEngine, asked: list[Request], folder: Path, sampling: Sampling) -> float:
    """Return the distance of log-probabilities from the model's at the temperature, before filters and penalties."""
    model, worst = reference(folder), 0.0
    answers = engine.generate(asked, replace(sampling, max_new_tokens=NEW))
    for request, found in zip(asked, answers, strict=True):
        logits = model(torch.tensor([request.tokens + found.tokens])).logits[0, len(request.tokens) - 1 : -1]
        every = (logits / sampling.temperature).log_softmax(-1)
        expected = every.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(found.log_probs)).abs().max().item())
    return worst


def alone_and_beside(engine: VllmEngine, asked: list[Request]) -> bool:
    sampling = Sampling(max_new_tokens=NEW, temperature=0.9)
    together = engine.generate(asked, sampling)
    again = engine.generate(asked[:1], sampling)
    other = engine.generate([replace(request, seed=request.seed + 500) for request in asked], sampling)
    return again[0].tokens == together[0].tokens and all(
        a.tokens != b.tokens for a, b in zip(together, other, strict=True)
    )


def stops(engine: VllmEngine, asked: list[Request]) -> bool:
    """An end token and a stop text, of rank 0's completions, stay in all those that have them."""
    sampling, decode = Sampling(max_new_tokens=NEW), engine.llm.get_tokenizer().decode
    whole = [one.tokens for one in engine.generate(asked, sampling)]
    pairs = [decode(tokens[at : at + 2]) for tokens in whole for at in range(2, NEW - 3)]
    chosen = [whole[0][5], next(pair for pair in pairs if "\ufffd" not in pair)]
    dist.broadcast_object_list(chosen)
    end, text = chosen
    engine.eos_ids = {end}
    ended = engine.generate(asked, sampling)
    engine.eos_ids = {whole[0][3]}
    right = engine.generate(asked, replace(sampling, ends=(end,))) == ended  # by who asks, whatever the folder says
    engine.eos_ids = set()
    stopped = engine.generate(asked, replace(sampling, stop=(text,)))
    for tokens, by_token, by_text in zip(whole, ended, stopped, strict=True):
        at = tokens.index(end) + 1 if end in tokens else NEW
        right &= (by_token.tokens, by_token.finish) == (tokens[:at], "stop" if end in tokens else "length")
        right &= by_text.tokens == tokens[: len(by_text.tokens)]
        right &= (by_text.finish == "stop") == (text in decode(tokens)) == (text in decode(by_text.tokens))
        right &= text not in decode(by_text.tokens[:-1])
    return right


def limits(engine: VllmEngine, asked: list[Request]) -> bool:
    found = engine.generate([replace(request, max_new_tokens=3) for request in asked], Sampling(max_new_tokens=9))
    return all(len(one.tokens) == len(one.log_probs) == 3 and one.finish == "length" for one in found)


def main(job: Path, results: Path) -> None:
    found = run(json.loads(job.read_text()))
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
