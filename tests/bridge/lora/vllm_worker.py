"""What `swift infer --infer_backend vllm` says: run by .venv-vllm's Python, in which this project is not installed.

python tests/bridge/lora/vllm_worker.py jobs.json > answers.json

jobs.json: {"prompts": [[token, ...], ...], "new_tokens": n, "models": [{"model": folder, "adapters": [folder]}, ...]},
each with the options of `swift infer`. answers.json, the last line of the output: for each model, for each prompt
[token, ...].
"""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: one start of Python for all models
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
ROOT = Path(__file__).parents[3]


def main(jobs: dict) -> None:
    from megaswift.tasks import infer
    from megaswift.tasks.infer_media import EncodedPrompt
    from megaswift.tasks.options import InferOptions
    from vllm.distributed import cleanup_dist_env_and_memory

    answers = []
    for given in jobs["models"]:
        options = InferOptions(
            **{"torch_dtype": "float32"} | given, infer_backend="vllm", temperature=0.0, vllm_max_model_len=128,
            vllm_enforce_eager=True, max_new_tokens=jobs["new_tokens"],
        )  # fmt: skip
        engine = infer.VllmChat(Path(options.model), infer.checked_adapter(options), options)
        engine.settings.ignore_eos = True
        tokens, generate = [], engine.llm.generate

        def kept(*arguments, tokens=tokens, generate=generate, **more):
            outputs = generate(*arguments, **more)
            tokens += [list(output.outputs[0].token_ids) for output in outputs]
            return outputs

        engine.llm.generate = kept
        prompts = [EncodedPrompt(ids) for ids in jobs["prompts"]]
        texts = engine.generate(prompts)
        pieces: list[str] = []
        assert engine.generate(prompts[:1], pieces.append) == ["".join(pieces)] == texts[:1], (pieces, texts)
        answers.append(tokens)
        del engine, generate, kept
        cleanup_dist_env_and_memory()
    print(json.dumps(answers))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "megaswift"  # the project, as its own environment has it
        package.mkdir()
        for room in ("tasks", "bridge", "templates"):
            (package / room).symlink_to(ROOT / room)
        sys.path.insert(0, folder)
        missing = [name for name in ("pyarrow", "xxhash") if find_spec(name) is None]
        sys.modules |= dict.fromkeys(missing, mock.MagicMock())  # which nothing here asks for anything
        main(json.loads(Path(sys.argv[1]).read_text()))
