"""`megatron sft` and `pt` with images as a user runs them, and the same steps by transformers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import prepared, tiny_vision

pytestmark = pytest.mark.slow
RATE, EPSILON, STEPS, BATCH = 1e-3, 1e-6, 3, 4
COMMON = (
    f"--lr {RATE} --lr_decay_style constant --weight_decay 0 --adam_eps {EPSILON} --train_iters {STEPS} "
    f"--micro_batch_size 1 --global_batch_size {BATCH} --dataset_shuffle false --train_dataloader_shuffle false "
    "--logging_steps 1 --dataloader_num_workers 1 --no_save_optim true --no_save_rng true --clip_grad 1e9"
)
ALL = "--freeze_vit false --freeze_aligner false"
LAYOUTS = {
    "TP2 SP": ("--tensor_model_parallel_size 2 --sequence_parallel true", 2),
    "CP2": ("--context_parallel_size 2", 2),
    "PP2 VPP2": ("--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2", 2),
    "DP2": ("", 2),
    "TP2": ("--tensor_model_parallel_size 2 --recompute_granularity full --recompute_method uniform "
            "--recompute_num_layers 1", 2),
    "padded": ("--padding_free false --micro_batch_size 2", 1),
    "packed": ("--packing true --max_length 512 --global_batch_size 1 --train_iters 1", 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("images")
    tiny_vision.qwen3_vl(place / "qwen3")
    tiny_vision.qwen2_5_vl(place / "qwen2_5")
    tiny_vision.qwen3_vl(place / "moe", moe=True)
    tiny_vision.qwen3_5(place / "qwen3_5")
    tiny_vision.glm4v(place / "glm4v")
    tiny_vision.mistral3(place / "mistral3")
    tiny_vision.internvl(place / "internvl")
    tiny_vision.kimi_vl(place / "kimi_vl")
    tiny_vision.gemma3(place / "gemma3")
    tiny_vision.gemma4(place / "gemma4")
    tiny_vision.gemma4_elastic(place / "gemma4_elastic")
    tiny_vision.llava(place / "llava")
    tiny_vision.llama4(place / "llama4")
    tiny_vision.kimi_k25(place / "kimi_k25")
    tiny_vision.llava_onevision(place / "llava_onevision")
    tiny_vision.ovis2(place / "ovis2")
    for number in range(9):
        tiny_vision.picture(30 + 17 * number, 120 - 9 * number, number).save(place / f"{number}.png")
    write(place / "train.jsonl", [row(number) for number in range(STEPS * BATCH)])
    return place


def row(number: int) -> dict[str, Any]:
    count = number * 7 % 4
    question = {"role": "user", "content": "<image>" * count + "what colour?"}
    answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
    return {"messages": [question, answer], "images": [f"{(number + i) % 9}.png" for i in range(count)]}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def megatron(place: Path, words: str, processes: int = 1, *, code: int = 0) -> str:
    """What `megatron {words}` printed in `place`."""
    done = prepared.run(
        ["-m", "megaswift.cli.main", "megatron", *words.split()],
        processes=processes,
        cwd=place,
        environment=os.environ | {"HF_HOME": str(place / "cache"), "COLUMNS": "200"},
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def train(place: Path, flags: str, processes: int = 1, *, command: str = "sft", data: str = "train.jsonl") -> Path:
    """The folder of a run."""
    output = f"run-{len(list(place.glob('run-*')))}"
    megatron(place, f"{command} --dataset {data} --output_dir {output} --add_version false {COMMON} {flags}", processes)
    return place / output


def log(run: Path, *names: str) -> list[list[float]]:
    rows = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    return [[row[name] for name in names] for row in rows if "loss" in row]


def steps_of_transformers(place: Path, model_folder: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of the same steps by transformers, its processor and torch's AdamW."""
    from PIL import Image

    processor, model = tiny_vision.processor_of(place / model_folder), tiny_vision.model_of(place / model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0)
    # A turn of GLM ends where the next one begins, with a token that its template does not write behind the last.
    turn, end_token, added = ("<|im_start|>assistant\n", "<|im_end|>", "")
    if model_folder == "glm4v":
        turn, end_token, added = ("<|assistant|>\n", "<|user|>", "<|user|>")
    elif model_folder == "mistral3":
        turn, end_token = "[/INST]", "</s>"
    elif model_folder in ("kimi_vl", "kimi_k25"):
        turn = "<|im_assistant|>assistant<|im_middle|>"
    elif model_folder == "gemma3":
        turn, end_token = "<start_of_turn>model\n", "<end_of_turn>"
    elif model_folder.startswith("gemma4"):
        turn, end_token = "<|turn>model\n", "<turn|>"
    elif model_folder == "llama4":
        turn, end_token = "<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"
    elif model_folder == "llava_onevision":
        turn, end_token = "<|im_start|>assistant ", None
    elif model_folder == "llava":  # its turns end without a token
        turn, end_token = "ASSISTANT:", None
    header = processor.tokenizer(turn, add_special_tokens=False)["input_ids"]
    end_id = end_token and processor.tokenizer.convert_tokens_to_ids(end_token)
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    found = []
    for step in range(STEPS):
        losses, count = [], 0
        for example in rows[step * BATCH : (step + 1) * BATCH]:
            question, answer = (message["content"] for message in example["messages"])
            blocks = [{"type": "image"}] * question.count("<image>")
            blocks.append({"type": "text", "text": question.replace("<image>", "")})
            answer = answer if end_token else [{"type": "text", "text": answer}]
            messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": answer}]
            text = processor.apply_chat_template(messages, tokenize=False) + added
            pictures = [Image.open(place / name).convert("RGB") for name in example["images"]]
            inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
            if pictures:  # Llama 4's are in bfloat16
                inputs["pixel_values"] = inputs["pixel_values"].float()
            ids = inputs["input_ids"][0].tolist()
            start = max(i for i in range(len(ids)) if ids[i : i + len(header)] == header) + len(header)
            end = max(i for i, token in enumerate(ids) if token == end_id) + 1 if end_token else len(ids)
            if model_folder == "llava_onevision":  # whose template marks an answer without the token behind it
                end -= 1
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


FURTHER = (
    "qwen2_5",
    "qwen3_5",
    "glm4v",
    "mistral3",
    "internvl",
    "kimi_vl",
    "gemma3",
    "gemma4",
    "gemma4_elastic",
    "llava",
    "llama4",
    "kimi_k25",
    "llava_onevision",
    "ovis2",
)


@pytest.mark.parametrize("model", ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)])
def test_steps_are_those_of_transformers(model, place):
    """Of all parameters: the data, the tower and its optimizer."""
    expected, weights = steps_of_transformers(place, model)
    run = train(place, f"--model {model} {ALL}")
    torch.testing.assert_close(log(run, "loss", "grad_norm"), expected, rtol=1e-4, atol=0)
    trained = tiny_vision.model_of(run / f"checkpoint-{STEPS}")
    start = dict(tiny_vision.model_of(place / model).named_parameters())
    for name, tensor in trained.named_parameters():
        if "vision_tower" in name and name.endswith("k_proj.bias"):
            continue  # without a rope it shifts all scores of a query alike: its gradient is rounding
        moved = (weights[name] - start[name]).abs().max()
        assert (tensor - weights[name]).abs().max() < 0.1 * moved + 1e-6, name
    file = "preprocessor_config.json" if model == "kimi_vl" else "processor_config.json"
    for name in (file, "tokenizer.json", "chat_template.jinja"):
        assert (run / f"checkpoint-{STEPS}" / name).read_bytes() == (place / model / name).read_bytes()


USUAL = "TP2 SP", "PP2 VPP2", "padded"


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n in USUAL else pytest.mark.long) for n in LAYOUTS])
def test_a_layout_gives_the_numbers_of_one_process(layout, place):
    check_layout(place, layout, "moe" if layout == "DP2" else "qwen3")


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n == "padded" else pytest.mark.long) for n in LAYOUTS])
def test_images_attend_in_both_directions_in_each_layout(layout, place):
    check_layout(place, layout, "gemma3")


@pytest.mark.long
@pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {"packed"}))  # packs are too short for these images
def test_images_attend_so_in_some_layers_in_each_layout(layout, place):
    check_layout(place, layout, "gemma4")


def check_layout(place: Path, layout: str, model: str) -> None:
    flags, processes = LAYOUTS[layout]
    run = train(place, f"--model {model} {ALL} {flags}", processes)
    same_data = "--global_batch_size 12 --train_iters 1" if layout == "packed" else ""
    alone = train(place, f"--model {model} {ALL} {same_data}")
    names = "loss", "grad_norm", "images", "visual_tokens"
    torch.testing.assert_close(log(run, *names), log(alone, *names), rtol=1e-4, atol=0)


def changed(run: Path, source: Path) -> set[str]:
    """The modules of which a tensor has changed: `tower`, `merger`, `language`."""
    before = load_file(source / "model.safetensors")
    after = {k: v for file in (run / f"checkpoint-{STEPS}").glob("*.safetensors") for k, v in load_file(file).items()}
    assert before.keys() == after.keys()
    kinds = set()
    for name, tensor in before.items():
        if not torch.equal(tensor, after[name]):
            is_merger = "merger" in name
            kinds.add("language" if "visual" not in name else "merger" if is_merger else "tower")
    return kinds


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"language"}),
        ("--freeze_aligner false", {"language", "merger"}),
        ("--freeze_llm true --freeze_vit false", {"tower"}),
        ("--freeze_llm true --freeze_aligner false --vit_lr 1", {"merger"}),
        (f"{ALL} --vit_lr 0", {"language", "merger"}),
        (f"{ALL} --aligner_lr 0 --optimizer muon", {"language", "tower"}),
    ],
)
def test_freezing_and_rates(flags, expected, place):
    assert changed(train(place, f"--model qwen3 {flags}"), place / "qwen3") == expected


def test_text_alone_and_language_model_only_build_no_tower(place):
    write(place / "text.jsonl", [row(number) | {"images": []} | _text() for number in range(STEPS * BATCH)])
    run = train(place, f"--model qwen3 {ALL}", data="text.jsonl")
    assert changed(run, place / "qwen3") == {"language"}
    assert '"images":' not in (run / "logging.jsonl").read_text()
    flags = "--language_model_only true --strict true"
    assert "no vision tower" in megatron(place, f"sft --model qwen3 --dataset train.jsonl {flags} {COMMON}", code=1)


def _text() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a blue square"}]}


def test_lora_beside_whole_mergers_is_saved_and_merged(place):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    run = train(place, "--model qwen3 --tuner_type lora_llm --freeze_aligner false --lora_rank 4")
    base = AutoModelForImageTextToText.from_pretrained(place / "qwen3", dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, run / f"checkpoint-{STEPS}").merge_and_unload()
    merged = AutoModelForImageTextToText.from_pretrained(run / f"checkpoint-{STEPS}-merged", dtype=torch.float32)
    other = dict(adapted.named_parameters())
    kinds = set()
    for name, tensor in merged.named_parameters():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=1e-6)
        kinds.add("merger" if "merger" in name else "visual" if "visual" in name else "language")
    assert kinds == {"merger", "visual", "language"}


def test_pre_training_reads_images(place):
    texts = [[{"role": "assistant", "content": f"<image>number {n} <image>"}] for n in range(8)]
    write(place / "pt.jsonl", [{"messages": text, "images": [f"{n}.png"] * 2} for n, text in enumerate(texts)])
    run = train(place, f"--model qwen3 {ALL}", command="pt", data="pt.jsonl")
    assert all(images == 2 * BATCH for (images,) in log(run, "images"))
