"""`swift infer` against transformers' own generate, on a tiny model of random weights."""

import builtins
import io
import json
import os
import sys

import pytest
from megaswift.tasks import infer, infer_vllm
from megaswift.tasks.options import InferOptions

from tests import tiny

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


def make_adapter(model, folder, seed=1, **settings):
    """An adapter of random values that PEFT saves; its folder."""
    from transformers import AutoModelForCausalLM

    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"} | settings
    return tiny.save_random_adapter(AutoModelForCausalLM.from_pretrained(model), folder, seed, **settings)


def expected(folder, question, system=None, adapter=None, **settings):
    """One prompt at a time, no padding: transformers (and PEFT) as their documentation has it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    network = PeftModel.from_pretrained(network, adapter) if adapter else network
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    set_seed(42)
    output = network.generate(**inputs, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **settings)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def ask(folder, dataset, tmp_path, **options):
    path = tmp_path / "result.jsonl"
    settings = {"model": str(folder), "temperature": 0.0, "max_new_tokens": 12, "result_path": str(path)} | options
    infer.run(InferOptions(val_dataset=[str(dataset)], **settings))
    return [json.loads(line) for line in path.open(encoding="utf-8")]


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
    sampling = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "max_new_tokens": 12,
    }
    (row,) = ask(model, data, tmp_path, **sampling)
    assert row["response"] == expected(model, QUESTIONS[0], do_sample=True, **sampling)


@pytest.mark.parametrize("share", [{"top_p": 0.9}, {"min_p": 0.2}])
def test_a_share_of_the_probability_is_to_be_sampled_from(model, tmp_path, share):
    data = dataset_of(tmp_path, [{"query": QUESTIONS[0]}])
    (row,) = ask(model, data, tmp_path, temperature=None, **share)
    assert row["response"] == expected(model, QUESTIONS[0], do_sample=True, **share, max_new_tokens=12)


ADAPTERS = {
    "plain": {},
    "dora": {"use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens"], "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "gate_proj"], "rank_pattern": {"gate_proj": 3}},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_answers_as_with_peft(model, tmp_path, kind):
    """Without --model it is of the one that it names; merged it says the same."""
    adapter = make_adapter(model, tmp_path / "adapter", **ADAPTERS[kind])
    data = dataset_of(tmp_path, [{"query": question} for question in QUESTIONS])
    given = {"model": "", "adapters": [str(adapter)], "max_batch_size": 3}
    rows = ask(model, data, tmp_path, **given)
    (tmp_path / "result.jsonl").unlink()
    merged = ask(model, data, tmp_path, **given, merge_lora=True)
    wanted = [expected(model, question, adapter=adapter, do_sample=False, max_new_tokens=12) for question in QUESTIONS]
    assert [row["response"] for row in rows] == wanted
    assert [row["response"] for row in merged] == wanted
    assert wanted != [expected(model, question, do_sample=False, max_new_tokens=12) for question in QUESTIONS]


def test_answers_lie_beside_the_adapter(model, tmp_path):
    adapter = make_adapter(model, tmp_path / "adapter")
    data = dataset_of(tmp_path, [{"query": "a"}])
    infer.run(InferOptions(adapters=[str(adapter)], val_dataset=[str(data)], max_new_tokens=1))
    assert len(list((adapter / "infer_result").glob("*.jsonl"))) == 1
    assert not (model / "infer_result").exists()


def test_merged_weights_are_rounded_once(model, tmp_path):
    """Each bf16 weight is the rounded fp32 sum with the adapter's product, which two roundings would miss."""
    import torch
    from safetensors.torch import load_file

    adapter = make_adapter(model, tmp_path / "adapter", use_rslora=True)
    options = InferOptions(adapters=[str(adapter)], torch_dtype="bfloat16", merge_lora=True)
    engine = infer.TransformersChat(model, infer.checked_adapter(options), options)
    base, low = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    weights = dict(engine.model.named_parameters())
    assert weights.keys() == base.keys()
    twice = 0
    for name, weight in weights.items():
        wanted, module = base[name].bfloat16(), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in low:
            product = low[f"{module}.lora_B.weight"] @ low[f"{module}.lora_A.weight"] * 8 / 4**0.5
            twice += not torch.equal(wanted + product.bfloat16(), (wanted.float() + product).bfloat16())
            wanted = (wanted.float() + product).bfloat16()
        assert torch.equal(weight, wanted), name
    assert twice


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
    assert "equal to the dataset's response: 1 of 2 (50.0%)" in capsys.readouterr().out


def test_a_row_of_an_odd_form_is_named(tmp_path):
    dataset = dataset_of(tmp_path, [{"query": "q", "answer": "a", "solution": "b"}, {"messages": [{"role": ["user"]}]}])
    rows = infer.read_prompts(InferOptions(val_dataset=[str(dataset)]))
    assert next(rows).label == "a"
    with pytest.raises(ValueError, match=r"--val_dataset: .* line 2: a message has a list as its role; known"):
        next(rows)


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
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        failing(model=str(tmp_path))
    with pytest.raises(ValueError, match=r"absent\.jsonl: no such file"):
        failing(val_dataset=[f"{tmp_path}/absent.jsonl"])
    (tmp_path / "broken.jsonl").write_text('{"query": "a"}\n{"query"\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl line 2 is not JSON"):
        failing(val_dataset=[f"{tmp_path}/broken.jsonl"])
    (tmp_path / "strange.jsonl").write_text('{"colour": "red"}\n')
    with pytest.raises(ValueError, match=r"strange\.jsonl line 1: no known format"):
        failing(val_dataset=[f"{tmp_path}/strange.jsonl"])
    (prompt,) = infer.read_prompts(InferOptions(val_dataset=[f"{tmp_path}/strange.jsonl"], columns={"colour": "query"}))
    assert prompt.conversation.messages == [{"role": "user", "content": "red"}]
    with pytest.raises(FileExistsError, match=r"--result_path .* exists"):
        failing(result_path=str(data))
    with pytest.raises(ValueError, match=r"--result_path .*: Not a directory\. Set another path"):
        failing(result_path=str(data / "below-a-file" / "answers.jsonl"))
    with pytest.raises(ValueError, match=r"--result_path .*: File name too long\. Set another path"):
        failing(result_path=str(tmp_path / ("a" * 300)))
    monkeypatch.setattr(infer_vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"vLLM is not installed.*megaswift\[vllm\]"):
        failing(infer_backend="vllm")


def test_damaged_and_templateless_checkpoints(model, tmp_path):
    import shutil

    from megaswift.tasks.system import atomic_dir

    copy = tmp_path / "checkpoint-1"
    atomic_dir.commit(shutil.copytree(model, atomic_dir.stage(copy), dirs_exist_ok=True), copy)
    data = dataset_of(tmp_path, [{"query": "a"}])
    os.truncate(copy / "model.safetensors", 100)
    with pytest.raises(ValueError, match=r"damaged \(model\.safetensors has 100 bytes instead of"):
        ask(copy, data, tmp_path)
    (copy / atomic_dir.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        ask(copy, data, tmp_path)
    plain = shutil.copytree(model, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"no chat template"):
        ask(plain, data, tmp_path)


def test_adapters_that_cannot_be(model, tmp_path, monkeypatch):
    import shutil

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    data = dataset_of(tmp_path, [{"query": "a"}])
    whole = make_adapter(model, tmp_path / "checkpoint-2")

    def failing(adapter, **options):
        ask(model, data, tmp_path, adapters=[str(adapter)], **options)

    def changed(name, **changes):
        folder = shutil.copytree(whole, tmp_path / name)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        return folder

    with pytest.raises(FileNotFoundError, match=r"--adapters .*nowhere: no such folder"):
        failing(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"no adapter_config\.json in it\. It is a full model\. Set it as --model"
    ):
        failing(model)
    with pytest.raises(FileNotFoundError, match=r"config\.json in it\. Is it .*checkpoint-2 that you mean\?"):
        failing(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"orphan.adapter_config.json: its base model, /gone, does not exist. Set --model"
    ):
        failing(changed("orphan", base_model_name_or_path="/gone"), model="")
    with pytest.raises(ValueError, match=r"does not name its base model. Set --model"):
        failing(changed("nameless", base_model_name_or_path=None), model="")
    mcore = tmp_path / "mcore"
    mcore.mkdir()
    (mcore / "latest_checkpointed_iteration.txt").touch()
    with pytest.raises(ValueError, match=r"its base model, .*mcore, is in megatron-core's format.* as --model"):
        failing(changed("of mcore", base_model_name_or_path=str(mcore)), model="")
    with pytest.raises(FileNotFoundError, match=r"It is in megatron-core's format. Set it as --mcore_adapter"):
        failing(mcore)
    broken = changed("broken")
    (broken / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is not valid JSON .* copy the adapter again"):
        failing(broken)
    short = changed("short")
    os.truncate(short / "adapter_model.safetensors", 100)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not a whole safetensors file"):
        failing(short)
    (short / "adapter_model.safetensors").rename(short / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin is not supported. Load it with PEFT and save it"):
        failing(short)

    lacking, more = changed("lacking"), changed("more")
    tensors = load_file(whole / "adapter_model.safetensors")
    first = next(iter(tensors))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != first}, lacking / "adapter_model.safetensors"
    )
    save_file(tensors | {first.replace("layers.0", "layers.7"): torch.zeros(1)}, more / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"does not fit --model .* \(it lacks .*layers\.0\..*Set the model that"):
        failing(lacking)
    with pytest.raises(ValueError, match=r"does not fit --model .* \(the model has no module for its .*layers\.7"):
        failing(more)
    wide = shutil.copytree(model, tmp_path / "wide")
    network = AutoModelForCausalLM.from_pretrained(model)
    config = network.config
    config.intermediate_size = 56
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    with pytest.raises(ValueError, match=r"does not fit --model .*wide \(.*size mismatch .*Set the model that"):
        failing(whole, model=str(wide))
    tied = shutil.copytree(model, tmp_path / "tied")
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    of_embedding = make_adapter(tied, tmp_path / "of embedding", target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match=r"--merge_lora true: the adapter changes the embedding"):
        failing(of_embedding, model=str(tied), merge_lora=True)

    monkeypatch.setattr(infer_vllm.importlib.util, "find_spec", lambda name: name)
    for changes, options, what in (
        ({"use_dora": True}, {}, r"DoRA \(use_dora\)"),
        ({"modules_to_save": ["lm_head"], "bias": "all"}, {}, r"\(modules_to_save\), biases \(bias\)"),
        ({"alpha_pattern": {"q_proj": 3}}, {}, r"\(alpha_pattern\)"),
        ({"r": 600}, {}, r"a rank of 600"),
        ({}, {"merge_lora": True}, r"merging in memory \(--merge_lora true\)"),
    ):
        name = f"for vllm {len(list(tmp_path.iterdir()))}"
        cure = rf"swift export --adapters .*{name} --merge_lora true"
        with pytest.raises(ValueError, match=rf"vLLM does not support .*{what}\. Export a merged folder \({cure}\)"):
            failing(changed(name, **changes), infer_backend="vllm", **options)
    save_file({"base_model.model.x.kv_b_proj.lora_A.weight": torch.zeros(1)}, lacking / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="vLLM does not support adapters of kv_b_proj"):
        failing(lacking, infer_backend="vllm")
    folder = changed("tower")
    save_file({"base_model.model.visual.x.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="vLLM does not support adapters of a vision or audio tower"):
        failing(folder, infer_backend="vllm")
    for module, rank, what in (
        ("layers.0.mixer.experts.base_layer", 8, "this model's experts, which it does not read in PEFT's form"),
        ("layers.0.mlp.experts.3.up_proj", 12, "experts of rank 12: its kernel takes 1, 8, 16"),
    ):
        folder = changed(f"experts of rank {rank}", r=rank)
        save_file({f"base_model.model.{module}.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=f"vLLM does not support adapters of {what}"):
            failing(folder, infer_backend="vllm")
    one_by_one = {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16}}
    adapter = infer.checked_adapter(InferOptions(adapters=[str(changed("experts", **one_by_one))]))
    infer_vllm.check_for_vllm(adapter, InferOptions())  # our own experts are taken
