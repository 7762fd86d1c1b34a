"""What transformers loads from a folder: never code of the folder's own, never a model that is not all there."""

import ast
import json
import sys
from itertools import product
from pathlib import Path

import pytest
from megaswift.bridge.checkpoint import pretrained
from megaswift.bridge.families import family_of

from tests import tiny, tiny_vision

ROOT = Path(__file__).parents[3]
TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 2, "num_local_experts": 2,
    "intermediate_size_mlp": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
}  # fmt: skip
SEEING = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Llama4ForConditionalGeneration": "llama4",
}


@pytest.fixture
def folder(tmp_path):
    path = tiny.save(tmp_path / "model", "qwen3")
    tiny.save_tokenizer(path)
    return path


def change(folder, file="config.json", **changes):
    settings = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(settings))


def test_code_of_a_folder_never_runs(folder, capfd):
    """As code, the model could be loaded: without the flag transformers asks on the terminal."""
    witness = folder / "ran"
    (folder / "evil.py").write_text(
        f"open({str(witness)!r}, 'w')\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM as EvilModel\n"
        "from transformers import PreTrainedTokenizerFast as EvilTokenizer\n"
        "class EvilConfig(Qwen3Config): model_type = 'evil'\n"
    )
    change(folder, model_type="evil", architectures=["EvilModel"],
           auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"})  # fmt: skip
    with pytest.raises(ValueError, match=r"^--teacher .*model: its architecture is only available as Python code"):
        pretrained.load_model(folder, flag="--teacher")
    with pytest.raises(ValueError, match=r"^--model .*model: its architecture is only available as Python code"):
        pretrained.load_config(folder)
    assert pretrained.load_tokenizer(folder)("a")["input_ids"]
    change(folder, "tokenizer_config.json", tokenizer_class="EvilTokenizer",
           auto_map={"AutoTokenizer": ["evil.EvilTokenizer", None]})  # fmt: skip
    with pytest.raises(ValueError, match=r"its tokenizer is only available as Python code .* never run\. Use"):
        pretrained.load_tokenizer(folder)
    with pytest.raises(ValueError, match=r"names the architecture EvilModel, which this version does not support"):
        family_of(json.loads((folder / "config.json").read_text()))
    assert not witness.exists()
    assert "evil" not in sys.modules
    assert "Do you wish" not in capfd.readouterr().out


# Processors of media have no weights, and `templates` does not import `bridge`.
PROCESSORS = (
    "templates/media/processor_files.py",
    "templates/media/audio_processor.py",
    "tasks/rollout/media_inputs.py",
)
LOADERS = {ROOT / name for name in ("bridge/checkpoint/pretrained.py", *PROCESSORS)}


def test_all_of_transformers_loading_is_in_one_place():
    """Every other `from_pretrained` and `from_config` of an Auto class would have to forbid code and check weights."""
    others = []
    for room in ("bridge", "cli", "tasks", "templates"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                loads = isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config")
                if loads and file not in LOADERS and ast.unparse(node.value) != "PeftModel":
                    others.append(f"{file}: {ast.unparse(node)}")
    assert not others


def test_what_fits_is_loaded(folder):
    from transformers import AutoModelForCausalLM

    mine = pretrained.load_model(folder).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 6}, r"lacks 22 tensors \(model\.layers\.4\.input_layernorm\.weight, "),
        ({"num_hidden_layers": 2}, r"has 22 tensors \(.*\), which a qwen3 model of this config\.json has no place for"),
        (
            {"intermediate_size": 112},
            r"down_proj\.weight has shape \[\d+, \d+\], and by config\.json it has ",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, r"lacks \d+ tensors .*GPT2LMHeadModel of this"),
    ],
)
def test_a_model_that_is_not_all_there_is_refused(changes, message, folder, capfd):
    change(folder, layer_types=None, **changes)
    with pytest.raises(ValueError, match=message):
        pretrained.load_model(folder)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_a_folder_of_pickles_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"^--model .* has no weights: .* Its \.bin files are not read: convert them"):
        pretrained.load_model(folder)


@pytest.mark.parametrize("name", SEEING)
def test_the_output_layer_is_tied_as_in_transformers(name, tmp_path):
    """By the outer value, the inner one, or a default, whichever the class that config.json names goes by."""
    import torch
    import transformers

    tied = {}
    for outer, inner in product((True, False, None), repeat=2):
        text = TEXT if inner is None else TEXT | {"tie_word_embeddings": inner}
        config = {"model_type": SEEING[name], "architectures": [name], "text_config": text}
        if outer is not None:
            config["tie_word_embeddings"] = outer
        (tmp_path / "config.json").write_text(json.dumps(config))
        with torch.device("meta"):
            config_here = transformers.AutoConfig.from_pretrained(tmp_path)
            theirs = getattr(transformers, name)(config_here)
            causal = pretrained.empty_model(pretrained.load_config(tmp_path))
        by_name = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
        assert family_of(config).describe(config).tied == by_name, (outer, inner)
        assert (causal.get_output_embeddings().weight is causal.get_input_embeddings().weight) == by_name
        tied[outer, inner] = by_name
    assert set(tied.values()) == {True, False}


def test_experts_that_transformers_transposes_have_the_shape_of_the_hub(tmp_path):
    folder = tiny_vision.qwen3_vl(tmp_path, moe=True)
    pretrained.check_weights(folder)
    config = json.loads((folder / "config.json").read_text())
    change(folder, text_config=config["text_config"] | {"moe_intermediate_size": 28})
    with pytest.raises(ValueError, match=r"experts.* has shape .*, and by config\.json it has"):
        pretrained.check_weights(folder)
