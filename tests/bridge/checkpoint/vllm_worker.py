"""Greedy tokens of vLLM: run by .venv-vllm's Python, which knows nothing of this project.

python tests/bridge/checkpoint/vllm_worker.py NEW_TOKENS FOLDER [FOLDER ...] < prompts.json > answers.json

prompts.json: [[token, ...], ...]; answers.json, the last line of the output: {folder: [[token, ...], ...]}.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: one start of Python for all models


def main(new_tokens: int, folders: list[str]) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.load(sys.stdin)]
    settings = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    answers = {}
    for folder in folders:
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=8,
            kv_cache_memory_bytes=2**26,
        )
        answers[folder] = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, settings)]
        del llm
        cleanup_dist_env_and_memory()  # a mixture of experts needs process groups that a dense model has not made
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
