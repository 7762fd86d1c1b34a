"""Greedy tokens of vLLM: run by .venv-vllm's Python, which knows nothing of this project.

python tests/bridge/checkpoint/vllm_worker.py NEW_TOKENS SETTINGS FOLDER [FOLDER ...] < prompts.json > answers.json

SETTINGS: {argument of LLM: value}; prompts.json: [[token, ...], ...]; answers.json, the last line of the output:
{folder: [[token, ...], ...]}, or the reason why vLLM does not take a folder. Each folder has a process of its own,
forked from one that has imported vLLM: a model that fails would change the answers of the next.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: one start of Python for all models


def main(new_tokens: int, settings: dict[str, Any], folders: list[str]) -> None:
    import vllm.v1.worker.cpu_worker  # noqa: F401  (for all processes at once)

    prompts = json.load(sys.stdin)
    answers = {folder: in_child(new_tokens, settings, folder, prompts) for folder in folders}
    print(json.dumps(answers))


def in_child(new_tokens: int, settings: dict[str, Any], folder: str, prompts: list[list[int]]) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = generate(new_tokens, settings, folder, prompts)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else "the process died"


def generate(new_tokens: int, settings: dict[str, Any], folder: str, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=2**26,
        **settings,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
