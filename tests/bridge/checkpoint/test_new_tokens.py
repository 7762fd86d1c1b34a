"""Models with further special tokens, against transformers' `resize_token_embeddings`."""

import json

import pytest
import torch
from megaswift.bridge.checkpoint.new_tokens import read_tokens, with_tokens
from megaswift.bridge.checkpoint.pretrained import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny, tiny_vision
from tests.bridge.families import VOCAB

NEW = ["<call>", "<result>", "<im_new>"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("source")
    tiny.save_tokenizer(tiny.save(folder, "qwen3", tie_word_embeddings=request.param))
    return folder


def test_the_grown_model_is_that_of_transformers(source, tmp_path):
    folder = with_tokens(source, NEW, tmp_path)
    tokenizer, known = AutoTokenizer.from_pretrained(folder), len(AutoTokenizer.from_pretrained(source))
    assert tokenizer.encode("a<result>b<call>", add_special_tokens=False)[1::2] == [known + 1, known]
    assert tokenizer.decode([known, known + 2], skip_special_tokens=True) == ""
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    size = -(-len(tokenizer) // 128) * 128
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == size > VOCAB
    expected = AutoModelForCausalLM.from_pretrained(source)
    expected.resize_token_embeddings(size)  # new rows: the mean, with noise of a billionth of the covariance
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=0, atol=1e-3, msg=name)
        assert torch.equal(tensor[:VOCAB], expected.state_dict()[name][:VOCAB]), name
    assert with_tokens(source, NEW, tmp_path) == folder  # from the cache
    assert with_tokens(folder, NEW, tmp_path) == folder  # it has them all


def test_free_rows_are_taken_first(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    roomy = tmp_path / "roomy"
    tiny.save_tokenizer(
        tiny.save(roomy, "qwen3", tie_word_embeddings=config["tie_word_embeddings"], vocab_size=VOCAB + 3)
    )
    folder = with_tokens(roomy, NEW, tmp_path)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB + 3
    assert (folder / "model.safetensors").is_symlink()
    assert len(AutoTokenizer.from_pretrained(folder)) == VOCAB + 3


def test_the_vocabulary_of_internvl_chat_model_grows(tmp_path):
    """config.json has its size in llm_config."""
    source = tiny_vision.FAMILIES["internvl_chat"](tmp_path / "source")
    folder = with_tokens(source, [f"<new {number}>" for number in range(99)], tmp_path)
    size = json.loads((folder / "config.json").read_text())["llm_config"]["vocab_size"]
    assert size % 128 == 0
    model = load_model(folder)
    assert model.get_input_embeddings().weight.shape[0] == model.lm_head.weight.shape[0] == size
    old = load_model(source).lm_head.weight
    assert torch.equal(model.lm_head.weight[: len(old)], old)


def test_tokens_and_files_of_tokens(tmp_path):
    (tmp_path / "tokens.txt").write_text("<a>\n\n<b> \n<a>\n")
    assert read_tokens(["<c>", str(tmp_path / "tokens.txt")]) == ["<c>", "<a>", "<b>"]
    (tmp_path / "tokens.txt").write_text("\n")
    for wrong, problem in {str(tmp_path / "tokens.txt"): "holds no token", "nope.txt": "cannot be read"}.items():
        with pytest.raises(ValueError, match=problem):
            read_tokens([wrong])
