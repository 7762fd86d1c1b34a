"""`swift infer` against transformers' own generate, on a tiny model of random weights."""

import builtins
import io
import json
import os
import sys

import pytest
from megaswift.tasks import infer
from megaswift.tasks.options import InferOptions

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = ["What is up?", "Why?", "How do you say a longer thing in fewer words than before?", "Who is there?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a Qwen2 of random weights, and a byte-level tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    network = Qwen2ForCausalLM(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    network.save_pretrained(folder)
    return folder


def expected(folder, question, system=None, **settings):
    """One prompt at a time, no padding: transformers as its documentation has it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    set_seed(42)
    output = network.generate(**inputs, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **settings)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def ask(folder, dataset, tmp_path, **options):
    path = tmp_path / "result.jsonl"
    settings = {"temperature": 0.0, "max_new_tokens": 12, "result_path": str(path)} | options
    infer.run(InferOptions(model=str(folder), val_dataset=[str(dataset)], **settings))
    return [json.loads(line) for line in path.read_text().splitlines()]


def dataset_of(tmp_path, rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("batch", [1, 3])
def test_batch_answers_as_transformers_does_one_by_one(model, tmp_path, batch):
    """Rows of different lengths in a batch: padding must change nothing, and rows keep their order."""
    data = dataset_of(tmp_path, [{"query": question, "response": "label"} for question in QUESTIONS])
    rows = ask(model, data, tmp_path, max_batch_size=batch, system="Be brief.")
    assert [row["response"] for row in rows] == [
        expected(model, question, system="Be brief.", do_sample=False, max_new_tokens=12) for question in QUESTIONS
    ]
    assert len({row["response"] for row in rows}) > 1


def test_sampling_options_are_transformers(model, tmp_path):
    data = dataset_of(tmp_path, [{"query": QUESTIONS[0]}])
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.3, "max_new_tokens": 12}
    (row,) = ask(model, data, tmp_path, **sampling)
    assert row["response"] == expected(model, QUESTIONS[0], do_sample=True, **sampling)


def test_labels_are_kept_out_of_the_prompt_and_counted(model, tmp_path, capsys):
    answer = expected(model, QUESTIONS[1], do_sample=False, max_new_tokens=12)
    turns = [{"role": "user", "content": QUESTIONS[1]}]
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": answer}]},
        {"messages": [*turns, {"role": "assistant", "content": "something else"}]},
        {"messages": turns},
    ]
    results = ask(model, dataset_of(tmp_path, rows), tmp_path)
    assert [row["labels"] for row in results] == [answer, "something else", None]
    assert [row["response"] for row in results] == [answer] * 3
    assert results[0]["messages"] == [*turns, {"role": "assistant", "content": answer}]
    assert "equal to the dataset's answer: 1 of 2 (50.0%)" in capsys.readouterr().out


def test_tools_reach_the_template(model, tmp_path):
    tool = {"type": "function", "function": {"name": "look"}}
    rows = [{"query": QUESTIONS[0], "response": "x"} | extra for extra in ({}, {"tools": [tool]})]
    plain, tooled = ask(model, dataset_of(tmp_path, rows), tmp_path)
    assert plain["response"] != tooled["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_remembers_clears_and_ends(model, monkeypatch, capsys, stream):
    """The last answer equals the first: `clear` forgot what was between, and the middle one saw the history."""
    typed = io.StringIO(f"{QUESTIONS[0]}\n\n{QUESTIONS[0]}\nclear\n{QUESTIONS[0]}\nquit\nnever asked\n")
    monkeypatch.setattr(sys, "stdin", typed)
    infer.run(InferOptions(model=str(model), temperature=0.0, max_new_tokens=12, stream=stream))
    answer = expected(model, QUESTIONS[0], do_sample=False, max_new_tokens=12)
    first, empty, second, cleared, third = capsys.readouterr().out.split("<<< ")[1:6]
    assert (first, third) == (f"{answer}\n", f"{answer}\n")
    assert (empty, cleared) == ("", "")
    assert second != first
    assert typed.read() == "never asked\n"


def test_chat_ends_cleanly_at_the_end_of_input_and_on_ctrl_c(model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    infer.run(InferOptions(model=str(model)))

    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupted)
    infer.run(InferOptions(model=str(model)))


def test_errors_name_the_cure(model, tmp_path, monkeypatch):
    data = dataset_of(tmp_path, [{"query": "a"}])

    def failing(**options):
        infer.run(InferOptions(**{"model": str(model), "val_dataset": [str(data)]} | options))

    with pytest.raises(FileNotFoundError, match=r"--model .*nowhere: no such folder"):
        failing(model=f"{tmp_path}/nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json in it"):
        failing(model=str(tmp_path))
    with pytest.raises(ValueError, match=r"absent\.jsonl: there is no such file"):
        failing(val_dataset=[f"{tmp_path}/absent.jsonl"])
    (tmp_path / "broken.jsonl").write_text('{"query": "a"}\n{"query"\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl line 2 is not JSON"):
        failing(val_dataset=[f"{tmp_path}/broken.jsonl"])
    (tmp_path / "strange.jsonl").write_text('{"colour": "red"}\n')
    with pytest.raises(ValueError, match=r"strange\.jsonl line 1: no known format"):
        failing(val_dataset=[f"{tmp_path}/strange.jsonl"])
    with pytest.raises(FileExistsError, match=r"--result_path .* exists"):
        failing(result_path=str(data))
    with pytest.raises(ValueError, match=r"--result_path .* cannot be written .* another path"):
        failing(result_path=str(data / "below-a-file" / "answers.jsonl"))
    monkeypatch.setattr(infer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"vLLM is not installed.*megaswift\[vllm\]"):
        failing(infer_backend="vllm")


def test_damaged_and_templateless_checkpoints(model, tmp_path):
    import shutil

    from megaswift.tasks import folders

    copy = tmp_path / "checkpoint-1"
    folders.commit(shutil.copytree(model, folders.begin(copy), dirs_exist_ok=True), copy)
    data = dataset_of(tmp_path, [{"query": "a"}])
    os.truncate(copy / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"not whole \(model\.safetensors has 100 bytes instead of"):
        ask(copy, data, tmp_path)
    (copy / folders.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        ask(copy, data, tmp_path)
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"no chat template"):
        ask(plain, data, tmp_path)
