"""`megatron sft` with audios as a user runs it, and the same steps by transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny_audio
from tests.tasks.audio_oracle import AudioOracle
from tests.tasks.supervised.test_images import ALL, BATCH, EPSILON, LAYOUTS, RATE, STEPS, log, train, write
from tests.tasks.vision_oracle import save_with_head

pytestmark = pytest.mark.slow
USUAL = "TP2 SP", "PP2 VPP2"
NAMES = "loss", "grad_norm", "audios", "audio_tokens"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("audios")
    tiny_audio.qwen3_asr(place / "qwen3_asr")
    for number in range(9):
        (place / f"{number}.wav").write_bytes(tiny_audio.wav(tiny_audio.sound(4000 + 5000 * number, number)))
    rows = []
    for number in range(STEPS * BATCH):
        count = number % 4 > 0
        question = {"role": "user", "content": "<audio>" * count + "what colour?"}
        answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
        rows.append({"messages": [question, answer], "audios": [f"{number % 9}.wav"] * count})
    write(place / "train.jsonl", rows)
    return place


def steps_of_transformers(place: Path) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of the same steps by transformers, its processor and torch's AdamW."""
    import wave

    import numpy as np
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor = AutoProcessor.from_pretrained(place / "qwen3_asr")
    model = AutoModelForMultimodalLM.from_pretrained(place / "qwen3_asr", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
    header = processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    end_id = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    found = []
    for step in range(STEPS):
        losses, count = [], 0
        for row in rows[step * BATCH : (step + 1) * BATCH]:
            blocks = [{"type": "audio"}] * len(row["audios"]) + [{"type": "text", "text": "what colour?"}]
            answer = [{"type": "text", "text": row["messages"][1]["content"]}]
            messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": answer}]
            text = processor.apply_chat_template(messages, tokenize=False)
            inputs = processor.tokenizer([text], return_tensors="pt")
            for name in row["audios"]:
                with wave.open(str(place / name)) as file:
                    samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
                inputs = processor(text=[text], audio=[samples])
            ids = inputs["input_ids"][0].tolist()
            start = max(i for i in range(len(ids)) if ids[i : i + len(header)] == header) + len(header)
            end = max(i for i, token in enumerate(ids) if token == end_id) + 1
            log_probs = model(**inputs).logits[0].log_softmax(-1)
            losses.append(-log_probs[start - 1 : end - 1].gather(1, torch.tensor(ids[start:end])[:, None]).sum())
            count += end - start
        optimizer.zero_grad()
        loss = torch.stack(losses).sum() / count
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found.append([loss.item(), norm.item()])
    return found, dict(model.named_parameters())


def test_steps_are_those_of_transformers(place):
    """Of all parameters: the data, the tower and its optimizer."""
    expected, weights = steps_of_transformers(place)
    run = train(place, f"--model qwen3_asr {ALL}")
    torch.testing.assert_close(log(run, "loss", "grad_norm"), expected, rtol=1e-4, atol=0)
    trained, start = (
        load_file(run / f"checkpoint-{STEPS}/model.safetensors"),
        load_file(place / "qwen3_asr/model.safetensors"),
    )
    assert trained.keys() == start.keys() == weights.keys()
    for name, tensor in trained.items():
        moved = (weights[name] - start[name]).abs().max()
        rounding = 0.1 * RATE if name.endswith("k_proj.bias") else 1e-6  # its exact gradient is 0
        assert (tensor - weights[name]).abs().max() < 0.1 * moved + rounding, name


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in USUAL else pytest.mark.long) for n in LAYOUTS])
def test_a_layout_gives_the_numbers_of_one_process(layout, place):
    flags, processes = LAYOUTS[layout]
    run = train(place, f"--model qwen3_asr {ALL} {flags}", processes)
    same_data = "--global_batch_size 12 --train_iters 1" if layout == "packed" else ""
    alone = train(place, f"--model qwen3_asr {ALL} {same_data}")
    torch.testing.assert_close(log(run, *NAMES), log(alone, *NAMES), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", {"language"}), ("--freeze_llm true --freeze_aligner false --freeze_vit false --vit_lr 0", {"projector"})],
)
@pytest.mark.long
def test_freezing_and_rates(flags, expected, place):
    run = train(place, f"--model qwen3_asr {flags}")
    before, after = (load_file(f / "model.safetensors") for f in (place / "qwen3_asr", run / f"checkpoint-{STEPS}"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    kinds = ("audio_tower", "tower"), ("projector", "projector"), ("", "language")
    assert {next(kind for part, kind in kinds if part in name) for name in changed} == expected


@pytest.mark.long
def test_adapters_of_the_tower_and_features_from_disk(place):
    from peft import PeftModel
    from transformers import AutoModelForMultimodalLM

    run = train(place, f"--model qwen3_asr --tuner_type lora {ALL} --lora_rank 4 --merge_lora true")
    base = AutoModelForMultimodalLM.from_pretrained(place / "qwen3_asr", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run / f"checkpoint-{STEPS}").merge_and_unload()
    merged = load_file(run / f"checkpoint-{STEPS}-merged/model.safetensors")
    for name, tensor in adapted.named_parameters():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
    plain, cached = (train(place, f"--model qwen3_asr {flags}") for flags in ("", "--precompute_features true"))
    again = train(place, "--model qwen3_asr --precompute_features true")
    assert log(plain, "loss") == log(cached, "loss") == log(again, "loss")
    assert all(
        row["cached_images"]
        for row in map(json.loads, (again / "logging.jsonl").read_text().splitlines())
        if "loss" in row
    )


@pytest.mark.long
def test_steps_of_a_classifier_are_those_of_transformers(place):
    messages = [{"role": "user", "content": "<audio>what?"}]
    rows = [
        {"messages": messages, "audios": [f"{number % 9}.wav"], "label": number % 3} for number in range(STEPS * BATCH)
    ]
    write(place / "labelled.jsonl", rows)
    save_with_head(place / "qwen3_asr", place / "classifier", 3, "single_label_classification")
    oracle = AudioOracle(place / "classifier", place, has_head=True)

    def cross_entropy(rows):
        logits = [oracle.scores(oracle.conversation(row["messages"], row["audios"])) for row in rows]
        return torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor([row["label"] for row in rows])), []

    head = "--task_type seq_cls --model classifier --num_labels 3 --problem_type single_label_classification"
    run = train(place, f"{head} {ALL}", data="labelled.jsonl")
    expected = oracle.steps(rows, cross_entropy)
    assert len(expected) == 2
    torch.testing.assert_close(log(run, "loss", "grad_norm")[:2], expected, rtol=5e-4, atol=1e-6)
