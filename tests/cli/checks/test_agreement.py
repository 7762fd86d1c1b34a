"""Flags that repeat what the model's folder says are compared with it."""

import json
from pathlib import Path

import pytest
from megaswift.cli.checks.agreement import AGENT_TEMPLATES, MODEL_TYPES, TEMPLATES, drop_second_model
from megaswift.cli.checks.common import check_training
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.run.planning import ProcessLayout

from tests.bridge.families.published import MODELS
from tests.bridge.omni.published import QWEN3_OMNI_30B_A3B
from tests.cli.checks.test_export import mcore
from tests.cli.conftest import CHATML, DENSE, write_model

TOOLS = "<tool_call>\n{{ tool_call | tojson }}\n</tool_call>"


def notes_of(model: Path | str, words: str, *command: str) -> list[str]:
    program, *name = command or ("megatron", "sft")
    return read_options(program, [*name, "--model", str(model), *words.split()])[2]


def refusal(model: Path, words: str) -> str:
    with pytest.raises(UsageError) as error:
        notes_of(model, words)
    return str(error.value)


@pytest.mark.parametrize("command", ["megatron sft", "megatron export", "swift infer", "swift rollout"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking"])
def test_a_model_type_that_agrees(dense: Path, name: str, command: str) -> None:
    (note,) = notes_of(dense, f"--model_type {name}", *command.split())
    assert note == f"--model_type {name} has no effect: config.json says it."


def test_a_model_type_that_differs(dense: Path) -> None:
    said = refusal(dense, "--model-type qwen3_moe")
    assert said == f"--model_type qwen3_moe: config.json of {dense} says qwen3. Remove it."
    # A value in a config file, and none of it.
    (dense / "run.yaml").write_text("model_type: llama\ntemplate: null\n")
    assert "--model_type llama: config.json" in refusal(dense, f"--config {dense / 'run.yaml'}")


def test_the_types_are_those_of_published_models() -> None:
    types = {part["model_type"] for entry in MODELS.values() for part in parts(entry.config) if "model_type" in part}
    assert set(MODEL_TYPES) <= types | {QWEN3_OMNI_30B_A3B["model_type"]}
    # Another family's type is no other name: these are of models around a text model, and of DeepSeek's classes.
    others = {name for names in MODEL_TYPES.values() for name in names.split()}
    assert others & types == {"qwen3_5", "qwen3_5_moe", "gemma3", "kimi_k2"}


def parts(config: dict) -> tuple[dict, dict]:
    return config, config.get("text_config") or {}


def test_a_model_of_a_hub_is_compared_nowhere() -> None:
    (note,) = notes_of("Qwen/Qwen3-8B", "--model_type llama")
    assert note == "--model_type llama has no effect: the model's own is used, which is not on this machine yet."


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_templates(dense: Path, file: str) -> None:
    text = CHATML + TOOLS
    (dense / file).write_text(text if file.endswith("jinja") else json.dumps({"chat_template": text}))
    assert notes_of(dense, "--template qwen3 --agent_template hermes") == [
        "--template qwen3 has no effect: the model's chat template is used, which has its turns.",
        "--agent_template hermes has no effect: the model's chat template is used, which has its tool calls.",
    ]
    said = refusal(dense, "--template llama3_2")
    assert f"--template llama3_2: the chat template of {dense} has no <|start_header_id|>, and it is the one" in said
    assert "has no Action Input:" in refusal(dense, "--agent_template react_en")
    assert "has another format of tool calls" in refusal(dense, "--agent_template unheard_of")


def test_hermes_is_not_the_format_of_qwen3_coder(dense: Path) -> None:
    (dense / "chat_template.jinja").write_text(CHATML + "<tool_call>\n<function={{ name }}>")
    assert "has another format of tool calls" in refusal(dense, "--agent_template hermes")
    assert len(notes_of(dense, "--agent_template qwen3_coder")) == 1


def test_no_chat_template(dense: Path) -> None:
    assert f"the chat template of {dense} is missing" in refusal(dense, "--template qwen3")
    assert all({**TEMPLATES, **AGENT_TEMPLATES}.values())


def test_the_same_model_twice(dense: Path, tmp_path: Path) -> None:
    there = mcore(tmp_path / "dense-mcore")
    for model in (str(dense), "Owner/dense"):
        words = ["sft", "--load", str(there), "--model", model, "--dataset", "d", "--train_iters", "1"]
        options, sources, _ = read_options("megatron", words)
        notes = check_training(options, ProcessLayout.of(options.build, 1), gpus=0, processes=1, sources=sources)
        assert f"--model {model} has no effect: --mcore_model {there} is the same model." in notes
        assert (options.model, options.mcore_model) == ("", str(there))


def test_a_missing_folder_beside_a_model(dense: Path) -> None:
    options = read_options("megatron", ["sft", "--load", "/nowhere", "--model", str(dense)])[0]
    with pytest.raises(UsageError, match=r"--mcore_model /nowhere: no such folder\. Set that of a megatron-core"):
        list(drop_second_model(options))


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"hidden_size": 32}, "its hidden_size is 32, that of"), ({"model_type": "llama"}, "its model_type is llama")],
)
def test_two_models(change: dict, problem: str, tmp_path: Path) -> None:
    there, other = mcore(tmp_path / "there"), write_model(tmp_path / "other", DENSE | change)
    for model, expected in ((str(other), problem), ("Owner/Name", "its name is not part of")):
        options = read_options("megatron", ["sft", "--mcore_model", str(there), "--model", model])[0]
        with pytest.raises(UsageError, match=expected):
            list(drop_second_model(options))
