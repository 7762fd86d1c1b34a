"""Pictures of coloured squares, questions about them, and a tiny Qwen3-VL that has to learn to answer.

The answer is the colours of the squares in the order of reading: it needs the pixels, the order of the patches and
positions in two dimensions. A quarter of the arrangements of colours is never trained on.
"""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 50), "blue": (40, 60, 220), "black": (10, 10, 10)}
GRIDS = [(1, 2), (2, 1), (2, 2)]  # rows and columns of squares
SQUARE, NOISE = 32, 30  # pixels of a side, greatest change of a channel
QUESTION = "name the colours"
PICTURES = 3200  # to train on
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for block in message.content -%}
{%- if block.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif block.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}
{{ block.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""
IGNORED = -100  # label of a token that has no loss
Row = dict[str, Any]


class Mosaic(NamedTuple):
    """Arrangement of colours: `rows` x `columns` squares, in the order of reading."""

    rows: int
    columns: int
    colours: tuple[str, ...]

    @property
    def answer(self) -> str:
        return " ".join(self.colours)

    def draw(self, rng: np.random.Generator) -> Image.Image:
        colours = np.array([COLOURS[name] for name in self.colours]).reshape(self.rows, self.columns, 3)
        pixels = colours.repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
        noise = rng.integers(-NOISE, NOISE + 1, pixels.shape)
        return Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))


# --- the data


def arrangements() -> tuple[list[list[Mosaic]], list[Mosaic]]:
    """Return the arrangements to train on, by grid, and the held-out ones, every fourth of each grid."""
    rng = random.Random(0)
    trained, held_out = [], []
    for rows, columns in GRIDS:
        mosaics = [Mosaic(rows, columns, colours) for colours in product(COLOURS, repeat=rows * columns)]
        rng.shuffle(mosaics)
        held_out += mosaics[::4]
        trained.append([mosaic for number, mosaic in enumerate(mosaics) if number % 4])
    return trained, held_out


def write_data(folder: Path) -> None:
    """Write pictures as PNG files, and rows with their questions and answers.

    images.jsonl: pictures of arrangements to train on. control.jsonl: the same, each with the answer of another picture
    of as many squares. images-val.jsonl, control-val.jsonl: pictures of held-out arrangements, with right answers.
    """
    trained, held_out = arrangements()
    rng, noise = random.Random(1), np.random.default_rng(1)
    mosaics = [rng.choice(rng.choice(trained)) for _ in range(PICTURES)]
    files: dict[str, list[Path]] = {}
    for name, drawn in (("trained", mosaics), ("held-out", held_out)):
        (folder / name).mkdir()
        files[name] = [folder / name / f"{number}.png" for number in range(len(drawn))]
        for file, mosaic in zip(files[name], drawn, strict=True):
            mosaic.draw(noise).save(file)
    others = exchange(mosaics, rng)
    for name, file, answered in (
        ("images", "trained", mosaics),
        ("images-val", "held-out", held_out),
        ("control", "trained", others),
        ("control-val", "held-out", held_out),
    ):
        rows = [row(picture, mosaic.answer) for picture, mosaic in zip(files[file], answered, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def exchange(mosaics: list[Mosaic], rng: random.Random) -> list[Mosaic]:
    """Return the mosaics in another order, in which each has as many squares as the one that was in its place."""
    exchanged = list(mosaics)
    for count in {len(mosaic.colours) for mosaic in mosaics}:
        places = [place for place, mosaic in enumerate(mosaics) if len(mosaic.colours) == count]
        for place, other in zip(places, rng.sample(places, len(places)), strict=True):
            exchanged[place] = mosaics[other]
    return exchanged


def row(picture: Path, answer: str) -> Row:
    turns = [{"role": "user", "content": "<image>" + QUESTION}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [str(picture)]}


# --- the model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of the questions and answers, with the special tokens of Qwen3-VL."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL + VISION,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    colours = [f"{first} {second}" for first, second in product(COLOURS, repeat=2)]
    bpe.train_from_iterator([QUESTION, *colours, "system user assistant"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def make_model(folder: Path) -> None:
    """Write a random Qwen3-VL of 1.5 million parameters with its processor."""
    tokenizer = make_tokenizer()
    size = {"shortest_edge": SQUARE**2, "longest_edge": (3 * SQUARE) ** 2}
    merge = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    half = [0.5, 0.5, 0.5]
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(**merge, image_mean=half, image_std=half),
        tokenizer,
        Qwen3VLVideoProcessor(**merge),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    ids: Any = tokenizer.convert_tokens_to_ids(list(VISION))
    start, end, image, video = ids
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rope_parameters": rope,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "num_heads": 4,
            "intermediate_size": 192,
            "out_hidden_size": 128,
            "patch_size": 16,
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)


# --- the measurement, with transformers


def measure(folder: Path, rows: list[Row]) -> dict[str, float]:
    """Return a checkpoint's share of exact answers, and its loss.

    An answer is exact if each of its tokens is the most probable one after the right tokens before it, so that greedy
    generation gives it.
    """
    processor, model = load(folder)
    inputs, labels = batch(processor, rows)
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1].transpose(1, 2)
    labels = labels[:, 1:]
    is_right = (logits.argmax(1) == labels) | (labels == IGNORED)
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
    return {"exact answers": float(is_right.all(1).float().mean()), "loss": float(loss)}


def load(folder: Path) -> tuple[Any, Any]:
    """Return the processor and the model of a checkpoint."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return AutoProcessor.from_pretrained(folder), model


def batch(processor: Any, rows: list[Row]) -> tuple[Any, torch.Tensor]:
    """Return the inputs of rows, and labels, which are IGNORED except in answers and their ends."""
    texts = [processor.apply_chat_template(blocks(row)) for row in rows]
    prompts = [prompt_of(processor, row) for row in rows]
    inputs = encode(processor, texts, rows)
    labels = torch.full_like(inputs["input_ids"], IGNORED)
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        end = int(inputs["attention_mask"][number].sum())
        start = end - len(processor.tokenizer.encode(text.removeprefix(prompt)))
        answer = slice(start, end - 1)  # the last token is the newline behind the answer's end
        labels[number, answer] = inputs["input_ids"][number, answer]
    return inputs, labels


def encode(processor: Any, texts: list[str], rows: list[Row], side: str = "right") -> Any:
    pictures = [Image.open(picture) for row in rows for picture in row["images"]]
    return processor(text=texts, images=pictures, padding=True, padding_side=side, return_tensors="pt")


def prompt_of(processor: Any, row: Row) -> str:
    return processor.apply_chat_template(blocks(row)[:-1], add_generation_prompt=True)


def blocks(row: Row) -> list[Row]:
    """Return the messages of a row as transformers takes them."""
    asked, answered = row["messages"]
    text = {"type": "text", "text": asked["content"].removeprefix("<image>")}
    return [asked | {"content": [{"type": "image"}, text]}, answered]


# --- the figure


def answers(folder: Path, rows: list[Row]) -> list[str]:
    """Return what a checkpoint generates greedily."""
    processor, model = load(folder)
    inputs = encode(processor, [prompt_of(processor, row) for row in rows], rows, side="left")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(tokens, skip_special_tokens=True)]


def draw_answers(checkpoint: Path, control: Path, rows: list[Row], file: Path) -> None:
    """Draw some pictures with the answers of a checkpoint and of the control's, as a PNG file."""
    from matplotlib import pyplot

    colourful: dict[int, list[Row]] = {2: [], 4: []}
    for row in rows:
        colours = row["messages"][1]["content"].split()
        if len(set(colours)) > len(colours) // 2:
            colourful[len(colours)].append(row)
    rows = [colourful[2][0], colourful[2][-1], *colourful[4][:4]]
    side = 2 * SQUARE
    figure, axes = pyplot.subplots(1, len(rows), figsize=(9, 2.2), layout="constrained")
    figure.suptitle(f"“{QUESTION}”", fontsize=9)
    for axis, row, answer, other in zip(axes, rows, answers(checkpoint, rows), answers(control, rows), strict=True):
        picture = Image.open(row["images"][0])
        left, top = (side - picture.width) / 2, (side - picture.height) / 2
        axis.imshow(picture, extent=(left, left + picture.width, top + picture.height, top), interpolation="nearest")
        axis.set(xlim=(0, side), ylim=(side + 18, 0))
        axis.set_axis_off()
        axis.text(side / 2, side + 8, answer, fontsize=8, ha="center")
        axis.text(side / 2, side + 17, f"({other})", fontsize=7, ha="center", color="gray")
    figure.savefig(file, dpi=100)
    Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)  # noise is hard to compress
