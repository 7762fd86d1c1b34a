"""`swift infer` with images and videos, beside transformers' own processor and generate."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
from megaswift.tasks import infer
from megaswift.tasks.options import InferOptions

from tests import tiny, tiny_vision
from tests.tiny_vision import picture

pytestmark = pytest.mark.slow
FAMILIES = "qwen2_5_vl", "qwen3_vl"
FURTHER = "qwen3_5", "glm4v", "glm46v", "mistral3", "internvl", "llama4", "kimi_k25", "llava_onevision", "ovis2"
FURTHER += "gemma4", "gemma4_elastic", "gemma4_unified"
IMAGES_ONLY = "mistral3", "internvl", "llama4", "kimi_k25", "ovis2", "gemma4", "gemma4_elastic", "gemma4_unified"
VIDEOS_ALONE = "glm4", "llava_onevision"  # transformers takes no image beside a video, or has another order
SEEDS = {"gemma4": 4, "gemma4_elastic": 1, "gemma4_unified": 3}  # answers differ with these
NEW_TOKENS = 10


@pytest.fixture(scope="module", params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)])
def model(request, tmp_path_factory):
    name = request.param
    return tiny_vision.FAMILIES[name](tmp_path_factory.mktemp(name), seed=SEEDS.get(name, 0))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    sizes = [(70, 90), (200, 60), (130, 130), (64, 64)]
    paths = []
    for number, size in enumerate(sizes):
        paths.append(str(folder / f"{number}.png"))
        picture(*size, seed=number).save(paths[-1])
    for number in range(5):
        picture(80, 70, seed=9 + number).save(folder / f"frame{number}.png")
    return paths, [str(folder / f"frame{number}.png") for number in range(5)]


def rows_of(model, pictures):
    """Rows with 0, 1 and 3 images, of different lengths, and two with videos of 5 and 2 frames, where there are any."""
    images, frames = pictures
    block = {"type": "image_url", "image_url": {"url": images[0]}}
    rows: list[dict] = [
        {"query": "what is the sky?"},
        {"query": "<image>what colour is it?", "response": "blue", "images": images[:1]},
        {"query": "a<image>b<image> c <image>", "images": images[1:]},
        {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "what colour is it?"}]}]},
    ]
    if not model.name.startswith(IMAGES_ONLY):
        beside = {} if model.name.startswith(VIDEOS_ALONE) else {"images": images[3:]}
        rows.append({"query": f"<video>what is {'<image>' * len(beside)}?", **beside, "videos": [frames]})
        rows.append({"query": "<video>what is it?", "videos": [frames[:2]]})
    return rows


def expected(folder, row, adapter=None, max_pixels=None):
    """The answer of transformers, one prompt at a time, and the blocks that it is given."""
    import numpy as np
    from peft import PeftModel
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    if max_pixels:
        frames = 2 if folder.name.startswith("glm") else 1  # GLM counts each pixel once for each frame
        edge = math.isqrt(max_pixels) if folder.name.startswith("mistral3") else max_pixels * frames
        if folder.name.startswith(("internvl", "llama4", "ovis2")):
            processor.image_processor.max_patches = max_pixels // 56**2
        elif folder.name.startswith("kimi_k25"):
            processor.image_processor.max_patches = max_pixels // 14**2
        else:
            processor.image_processor.size["longest_edge"] = edge
    network = AutoModelForImageTextToText.from_pretrained(folder).eval()
    network = PeftModel.from_pretrained(network, adapter) if adapter else network
    text = row.get("query") or "<image>what colour is it?"
    pieces = text.replace("<image>", "\0image\0").replace("<video>", "\0video\0").split("\0")
    blocks = [{"type": p} if p in ("image", "video") else {"type": "text", "text": p} for p in pieces if p]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": blocks}], tokenize=False, add_generation_prompt=True
    )
    paths = row.get("images") or [
        part["image_url"]["url"] for part in row.get("messages", [{}])[0].get("content", [])[:1]
    ]
    images = [Image.open(path).convert("RGB") for path in paths]
    videos = [np.stack([np.array(Image.open(path)) for path in frames]) for frames in row.get("videos", [])]
    metadata = [
        {"fps": 2.0, "total_num_frames": len(video), "frames_indices": list(range(len(video)))} for video in videos
    ]
    options = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
    inputs = processor(text=[prompt], images=images or None, **options, return_tensors="pt")
    end = processor.tokenizer.eos_token_id
    if images:  # Llama 4's are in bfloat16
        inputs["pixel_values"] = inputs["pixel_values"].float()
    output = network.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=end, pad_token_id=end)
    return processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def write(tmp_path, rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(folder, rows, tmp_path, **options):
    path = tmp_path / "result.jsonl"
    path.unlink(missing_ok=True)
    settings = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "max_batch_size": 4, "result_path": str(path)}
    data = [str(write(tmp_path, rows))]
    infer.run(InferOptions(**{"model": str(folder), "val_dataset": data, **settings, **options}))
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def test_a_batch_answers_as_transformers_does_one_by_one(model, pictures, tmp_path):
    """Rows with 0, 1 and 3 images and with videos in one batch, padded on the left."""
    rows = rows_of(model, pictures)
    results = ask(model, rows, tmp_path, max_batch_size=6)
    wanted = [expected(model, row) for row in rows]
    assert [result["response"] for result in results] == wanted
    assert len(set(wanted)) == len(rows) - 1
    images = [None, pictures[0][:1], pictures[0][1:], pictures[0][:1], *(row.get("images") for row in rows[4:])]
    assert [result.get("images") for result in results] == images
    assert results[2]["messages"][0]["content"] == "a<image>b<image> c <image>"
    assert [result["videos"] for result in results[4:]] == [row["videos"] for row in rows[4:]]
    again = ask(model, [{"messages": row["messages"][:-1]} | row_media(row) for row in results], tmp_path)
    assert [result["response"] for result in again] == wanted


def row_media(row):
    return {name: row[name] for name in ("images", "videos") if name in row}


def test_limits_and_objects_are_those_of_training(model, pictures, tmp_path):
    if model.name.startswith(("llava_onevision", "gemma4")):
        pytest.skip("its images have no lower limits than the model's")
    row = {"query": "<image>what?", "images": [pictures[0][1]]}
    most = 4 * 32 * 32 if "qwen3" in model.name else 4 * 28 * 28
    wanted = expected(model, row, max_pixels=most)
    assert wanted != expected(model, row)
    assert ask(model, [row], tmp_path, max_pixels=most)[0]["response"] == wanted
    assert ask(model, [row], tmp_path, model_kwargs={"max_pixels": most})[0]["response"] == wanted
    named = row | {"query": "<image>what is <bbox>?", "objects": {"bbox": [[1, 2, 30, 40]]}}
    (result,) = ask(model, [named], tmp_path)
    assert "<|box_start|>(" in result["messages"][0]["content"]


def test_an_adapter_of_the_tower_answers_as_with_peft(model, pictures, tmp_path):
    from transformers import AutoModelForImageTextToText

    network = AutoModelForImageTextToText.from_pretrained(model)
    targets: str | list[str] = ["qkv", "q_proj"]
    if model.name.startswith("gemma4"):  # its tower has linear layers within modules with these names
        targets = r".*(language_model.*\.q_proj|vision_tower.*\.q_proj\.linear)"
    tiny.save_random_adapter(network, tmp_path / "adapter", target_modules=targets, task_type="CAUSAL_LM")
    rows, adapter = rows_of(model, pictures)[:3], str(tmp_path / "adapter")
    wanted = [expected(model, row, adapter) for row in rows]
    assert wanted[1] != expected(model, rows[1])
    for merge in (False, True):
        results = ask(model, rows, tmp_path, model="", adapters=[adapter], merge_lora=merge)
        assert [result["response"] for result in results] == wanted


def test_chat_asks_for_paths(model, pictures, monkeypatch, capsys):
    """A tag asks for its path, `<img>` has it; what cannot be read is said, and forgotten."""
    image = pictures[0][0]
    typed = f"<image>what colour is it?\n{image}\nclear\n<image>what?\n/gone.png\n"
    typed += f"<img>{image}</img>what colour is it?\nand <image>?\n{pictures[0][1]}\nexit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    infer.run(InferOptions(model=str(model), temperature=0.0, max_new_tokens=NEW_TOKENS))
    printed = capsys.readouterr().out
    answer = expected(model, {"query": "<image>what colour is it?", "images": [image]})
    assert printed.count("image, path or URL <<< ") == 3
    assert printed.count(f"<<< {answer}\n") == 2
    assert "error: /gone.png: an image cannot be read (no such file or directory)" in printed


def test_bad_media_name_row_and_file(model, pictures, tmp_path):
    good = {"query": "<image>what?", "images": [pictures[0][0]]}
    with pytest.raises(ValueError, match=r"--val_dataset: .*data\.jsonl line 2: /gone\.png: an image cannot be read"):
        ask(model, [good, good | {"images": ["/gone.png"]}], tmp_path)
    with pytest.raises(ValueError, match=r"data\.jsonl line 1: it has more <image> tags than images"):
        ask(model, [good | {"query": "<image><image>"}], tmp_path)
    broken = tmp_path / "broken.png"
    data = bytearray(Path(pictures[0][2]).read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    broken.write_bytes(data)
    with pytest.raises(ValueError, match=r"data\.jsonl line 2: .*broken\.png: an image is damaged"):
        ask(model, [good, good | {"images": [str(broken)]}], tmp_path)
    video = {"query": "<video>what?", "videos": [pictures[1]]}
    if "qwen2_5" in (model / "config.json").read_text():
        with pytest.raises(ValueError, match=r"takes videos of Qwen3-VL and Qwen3\.5 alone"):
            ask(model, [video], tmp_path, infer_backend="vllm")


def test_text_needs_no_files_of_a_processor(model, tmp_path):
    row = {"query": "what is the sky?"}
    with_files = ask(model, [row], tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if "processor" not in file.name:
            (bare / file.name).symlink_to(file)
    without = ask(bare, [row], tmp_path)
    assert [answer["response"] for answer in without] == [answer["response"] for answer in with_files]


def test_images_that_vllm_does_not_take(pictures, tmp_path):
    """Those of Gemma 3, before vLLM is looked for."""
    gemma = tiny_vision.FAMILIES["gemma3"](tmp_path / "gemma3")
    row = {"query": "<image>what?", "images": pictures[0][:1]}
    with pytest.raises(ValueError, match="--infer_backend vllm: vLLM does not take the images of gemma3"):
        ask(gemma, [row], tmp_path, infer_backend="vllm")
