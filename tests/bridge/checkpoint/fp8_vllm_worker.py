"""Log-probabilities of prompts by vLLM on a GPU, of the test beside this file.

python tests/bridge/checkpoint/fp8_vllm_worker.py FOLDER ... < prompts.json > log_probs.json

prompts.json: [[token, ...], ...]; log_probs.json, the last line of the output: {folder: [log-probability, ...]}, of
each prompt's tokens but the first, one prompt after the other.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: one start of Python for all models


def main(folders: list[str]) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed import cleanup_dist_env_and_memory

    prompts = json.load(sys.stdin)
    settings = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    log_probs = {}
    for folder in folders:
        llm = LLM(
            folder,
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=8,
            kv_cache_memory_bytes=2**28,
            gpu_memory_utilization=0.2,
        )
        outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], settings, use_tqdm=False)
        log_probs[folder] = [
            entry[token].logprob
            for ids, output in zip(prompts, outputs, strict=True)
            for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        del llm
        cleanup_dist_env_and_memory()
    print(json.dumps(log_probs))


if __name__ == "__main__":
    main(sys.argv[1:])
