"""`megatron sft` with weights of answers' parts, and with tokens added to the model."""

import json

import pytest
import torch

from tests import tiny
from tests.tasks.supervised.test_sft import COMMON, log_of, losses, megatron, run_folder

pytestmark = pytest.mark.slow
CALL = "<tool_call>\n{}\n</tool_call>"
ROWS = [{"query": f"{n} + 1?", "response": f"<a>{n + 1}<b> so {CALL.format(n)}"} for n in range(8)]
FLAGS = f"{COMMON} --dataset rows.jsonl --train_dataloader_shuffle false --dataset_shuffle false"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny.save_tokenizer(tiny.save(folder / "qwen3", "qwen3"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def mean_loss(folder, weigh) -> float:
    """Return the weighted mean loss of the rows by transformers' model.

    weigh: (text before a token, whole answer) -> weight
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = weights = 0.0
    for row in ROWS:
        prompt = [{"role": "user", "content": row["query"]}]
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(row["response"] + "<|im_end|>", add_special_tokens=False)
        with torch.no_grad():
            log_probs = model(torch.tensor([start + answer])).logits[0].log_softmax(-1)
        for position, token in enumerate(answer):
            weight = weigh(tokenizer.decode(answer[:position]), tokenizer.decode(answer))
            total -= weight * float(log_probs[len(start) + position - 1, token])
            weights += weight
    return total / weights


def test_weights_reach_the_loss(place):
    """A tool call counts twice: the loss is the weighted mean of transformers' losses per token."""
    flags = f"{FLAGS} --val_dataset rows.jsonl --train_iters 1 --lr 0 --weight_decay 0 --loss_scale hermes"
    megatron(place, f"sft --model qwen3 {flags} --output_dir weighted")
    (found,) = [row["eval_loss"] for row in log_of(run_folder(place / "weighted")) if "eval_loss" in row]

    def weigh(before: str, answer: str) -> float:
        return 2.0 if answer.index("<tool_call>") <= len(before) < answer.index("</tool_call>") + 12 else 1.0

    assert found == pytest.approx(mean_loss(place / "qwen3", weigh), rel=1e-5)
    assert found != pytest.approx(mean_loss(place / "qwen3", lambda *_: 1.0), rel=1e-4)


def test_new_tokens_are_trained_resumed_and_saved(place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = f"sft --model qwen3 {FLAGS} --new_special_tokens <a> <b> --save_steps 2 --train_iters"
    megatron(place, f"{flags} 4 --output_dir whole")
    whole = run_folder(place / "whole")
    folder = whole / "checkpoint-4"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.encode("<a><b>", add_special_tokens=False)) == 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size % 128 == 0
    known = len(AutoTokenizer.from_pretrained(place / "qwen3"))
    first, second, unused = model.get_input_embeddings().weight[known : known + 3]
    assert not torch.allclose(first, second, atol=1e-4)
    assert not torch.allclose(first, unused, atol=1e-4)
    megatron(place, f"{flags} 4 --output_dir again --resume_from_checkpoint {whole / 'checkpoint-2'}")
    again = run_folder(place / "again")
    assert losses(again) == losses(whole)[2:]
    saved, expected = (
        AutoModelForCausalLM.from_pretrained(run / "checkpoint-4").state_dict() for run in (again, whole)
    )
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_an_adapter_without_the_embedding_is_refused(place):
    line = f"sft --model qwen3 {FLAGS} --new_special_tokens <a> --train_iters 1 --output_dir refused --tuner_type lora"
    assert "Set --modules_to_save embed_tokens" in megatron(place, line, fails=True)
    merged = f"{line} --modules_to_save embed_tokens lm_head --merge_lora"
    assert "Set --merge_lora true" in megatron(place, f"{merged} false", fails=True)


def test_a_merged_adapter_has_the_tokens(place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora = "--tuner_type lora --modules_to_save embed_tokens lm_head --merge_lora true --output_dir merged"
    megatron(place, f"sft --model qwen3 {FLAGS} --new_special_tokens <a> <b> --train_iters 2 {lora}")
    [folder] = [path.parent for path in run_folder(place / "merged").rglob("model*.safetensors")]
    assert len(AutoTokenizer.from_pretrained(folder).encode("<a><b>", add_special_tokens=False)) == 2
    known = len(AutoTokenizer.from_pretrained(place / "qwen3"))
    first, unused = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight[[known, known + 2]]
    assert not torch.allclose(first, unused, atol=1e-4)
