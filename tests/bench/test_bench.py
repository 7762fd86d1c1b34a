"""scripts/bench without its trainings: shapes, what is read of logs, figures by hand, runs that end or fail."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
import make
import measure
import pictures
import report
import run
import systems
from hybrids import HYBRIDS
from rows import PEERS, ROWS, VARIANTS

# Lines as both systems write them (ms-swift 4.6: swift/megatron/callbacks/print.py).
OURS = {
    "step": 2, "max_steps": 9, "loss": 12.0005, "grad_norm": 8.209, "learning_rate": 1e-5, "tokens": 130_652,
    "tokens_per_second_per_gpu": 65_583.0, "tflops_per_gpu": 261.0, "mfu": 0.264, "data_wait": 0.001,
    "seconds_per_step": 0.996, "memory_gib": 37.21, "elapsed": 8.2, "eta": 7.0,
}  # fmt: skip
PEER = {
    "loss": 11.98, "grad_norm": 8.25, "learning_rate": 1e-5, "iteration": "2/13", "elapsed_time": "8s",
    "remaining_time": "44s", "memory(GiB)": 56.01, "train_speed(s/it)": 4.02,
}  # fmt: skip
# A training: a log line each 20 ms (to the file that --output_dir names), and a process of its own beside.
STAND_IN = """
import json, pathlib, subprocess, sys, time
log = pathlib.Path(sys.argv[1])
log.parent.mkdir(parents=True, exist_ok=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(log.parent / "child").write_text(str(child.pid))
for step in range(1, int(sys.argv[2]) + 1):
    time.sleep(0.02)
    line = json.dumps({"step": step, "loss": 12 - step / 10, "grad_norm": 1.0, "memory_gib": 2.0, "tokens": 60 * step,
                       "tflops_per_gpu": 1e-3, "seconds_per_step": 0.02})
    with log.open("a") as file:
        file.write(line[:20])
        file.flush()
        file.write(line[20:] + "\\n")
print("ValueError: that was all")
sys.exit(3)
"""


MODELS = {make.paths(name, Path())[0].name for name in ROWS.keys() - HYBRIDS.keys()}  # rows with a model of their own


@pytest.mark.parametrize("name", sorted(MODELS))
def test_shapes_are_those_of_transformers(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = ROWS[name].config
    auto_model = AutoModelForImageTextToText if ROWS[name].pictures else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_model.from_config(AutoConfig.for_model(**config))
    theirs = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    ours = make.shapes(config)
    stacked = {key for key in theirs if ".experts." in key}  # transformers has all experts of a layer in one tensor
    assert {key: ours[key] for key in theirs.keys() - stacked} == {key: theirs[key] for key in theirs.keys() - stacked}
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == sum(p.numel() for p in model.parameters())


TINY = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4, "head_dim": 16, "vocab_size": 1024, "dtype": "float32", "num_experts": 8,
    "n_routed_experts": 8, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 10, "num_key_value_heads": 4, "global_head_dim": 24, "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": 1024,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_checkpoints_of_hybrids_are_whole(name, tmp_path):
    """Theirs, smaller: megaswift has a row of its table for each tensor, and transformers for each of its weights."""
    from megaswift.bridge.families import family_of
    from transformers import AutoModelForCausalLM

    config = HYBRIDS[name].config
    small = config | {key: value for key, value in TINY.items() if config.get(key) is not None} | {"pad_token_id": 0}
    if "linear_attn_config" in small:
        small["linear_attn_config"] = config["linear_attn_config"] | {"head_dim": 10, "num_heads": 4}
    make.write_weights(tmp_path, small)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    published = json.loads((tmp_path / "config.json").read_text())
    layers = family_of(published).describe(published).layers
    is_linear = "linear_attention" in config.get("layer_types", ()) or "linear_attn_config" in config
    mixes = [is_linear and at < 3 for at in range(config["num_hidden_layers"])]
    assert [layer.mixer != "attention" for layer in layers] == mixes


def test_a_checkpoint_and_its_text_are_made_once(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, data = tmp_path / "tiny", tmp_path / "text.jsonl"
    messages = [{"role": "user", "content": "Sort a list."}, {"role": "assistant", "content": "```python\nsorted(x)"}]
    data.write_text((json.dumps({"messages": messages}) + "\n") * 5)  # for the library takes seconds to read
    make.make(ROWS["tiny"], folder, data)
    _, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids).endswith("assistant\n```python\nsorted(x)<|im_end|>\n")
    assert tokenizer.eos_token_id in ids
    (folder / "model-00001-of-00001.safetensors").unlink()
    make.make(ROWS["tiny"], folder, data)
    assert not (folder / "model-00001-of-00001.safetensors").exists()


def test_published_sizes():
    from torch import Size

    counts = {name: sum(Size(shape).numel() for shape in make.shapes(ROWS[name].config).values()) for name in ROWS}
    assert counts["vl-4b"] == 4_437_815_808  # Qwen/Qwen3-VL-4B-Instruct on the hub
    a_layer = 128 * 3 * 2048 * 768 + 128 * 2048 + 2 * 2048 * 128 * (32 + 4) + 2 * 128 + 2 * 2048
    assert counts["vl-moe"] == 31_070_754_032 - 40 * a_layer  # Qwen/Qwen3-VL-30B-A3B-Instruct has 48 layers
    assert ROWS["vl-moe"].config["text_config"]["rope_scaling"]["mrope_section"] == [24, 20, 20]


def test_a_checkpoint_with_a_processor_sees_the_pictures(tmp_path, monkeypatch):
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    monkeypatch.setattr(pictures, "COUNT", 4)
    row, folder, data = ROWS["vl-tiny"], tmp_path / "vl-tiny", tmp_path / "pictures.jsonl"
    messages = [{"role": "user", "content": "Sort a list."}, {"role": "assistant", "content": "sorted(x) " * 20}]
    chats = [{"messages": [dict(turn) for turn in messages]} for _ in range(8)]
    assert row.pictures
    make.add_pictures(chats, tmp_path / "pictures", row.pictures, row.length)
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    make.make(row, folder, data)
    model, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    processor = AutoProcessor.from_pretrained(folder)
    seen = next(chat for chat in chats if len(chat["images"]) == 1)
    assert seen["messages"][0]["content"] == "<image>Sort a list."
    assert not all(chat["images"] for chat in chats)
    content = [{"type": "image"}, {"type": "text", "text": "Sort a list."}]
    text = processor.apply_chat_template([{"role": "user", "content": content}, messages[1]])
    (picture,) = (Image.open(path) for path in seen["images"])
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    assert inputs["image_grid_thw"].tolist() == [list(pictures.grid(picture.size))]
    is_visual = inputs["input_ids"] == row.config["image_token_id"]
    assert is_visual.sum() == pictures.visual_tokens(picture.size)
    assert inputs["input_ids"][0, 0] == model.config.text_config.pad_token_id + 1
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


def test_tokens_that_ms_swift_has_in_its_code():
    config = ROWS["vl-moe"].config
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    assert [config[name] for name in names] == [151_652, 151_653, 151_655, 151_656]


def test_sizes_of_pictures_are_spread_evenly():
    low, high = 256, 1024
    tokens = sorted(map(pictures.visual_tokens, pictures.sizes((low, high))))
    assert tokens[0] == pytest.approx(low, rel=0.1)
    assert tokens[-1] == pytest.approx(high, rel=0.1)
    assert tokens[len(tokens) // 2] == pytest.approx((low * high) ** 0.5, rel=0.05)


def test_text_is_documented_code(tmp_path):
    body = "    x = 1\n" * 30
    (tmp_path / "one.py").write_text(
        f'def documented():\n    """{"What it is for. " * 4}"""\n{body}\n\ndef bare():\n{body}'
    )
    (tmp_path / "test_two.py").write_text((tmp_path / "one.py").read_text())
    (tmp_path / "three.py").write_text("not python")
    (chat,) = make.conversations(tmp_path)
    question, answer = (turn["content"] for turn in chat["messages"])
    assert question.startswith("Write Python code for `documented` from the module `one`. What it is for.")
    assert answer.startswith("```python\ndef documented():")


def test_both_systems_get_the_same_work(tmp_path):
    site = tmp_path / "site"
    script = site / "swift" / "cli" / "_megatron" / "sft.py"
    script.parent.mkdir(parents=True)
    script.touch()
    place = (Path("model"), Path("data"), Path("out"))
    both = [
        systems.command(name, ROWS["30b"], *place, gpus=8, steps=9, site=site, flags="--mine 1")
        for name in ("fp8-blockwise", "peer")
    ]
    assert str(script) in both[1]
    flags = [dict(zip(words[words.index("--model") :: 2], words[words.index("--model") + 1 :: 2])) for words in both]  # noqa: B905
    ours, theirs = flags
    assert ours.pop("--mine") == "1"
    assert (ours.pop("--fp8_format"), ours.pop("--fp8_recipe")) == ("e4m3", "blockwise")
    assert ours.items() <= theirs.items()
    assert theirs["--moe_permute_fusion"] == "true"
    assert (ours["--global_batch_size"], ours["--expert_model_parallel_size"]) == ("32", "8")
    with pytest.raises(FileNotFoundError, match="pip install ms-swift"):
        systems.peer_script(tmp_path, "sft")
    for name in ("peer", "ours"):
        path = systems.environment(name, tmp_path, gpus=2, site=site).get("PYTHONPATH", "").split(":")
        assert (str(site) in path) == (name == "peer")
    assert systems.environment("ours", tmp_path, gpus=2, site=None)["NPROC_PER_NODE"] == "2"


def test_the_peer_gets_its_template_and_attention(tmp_path):
    site = tmp_path / "site"
    script = site / "swift" / "cli" / "_megatron" / "sft.py"
    script.parent.mkdir(parents=True)
    script.touch()
    for system, attention in (("peer", "fused"), ("peer-flash", "flash")):
        for name, template in (("4b", "chatml"), ("vl-4b-trained", "qwen3_vl")):
            words = systems.command(
                system, ROWS[name], tmp_path, tmp_path, tmp_path, gpus=1, steps=9, site=site, flags="--mine 1"
            )
            assert "--mine" not in words
            assert words.count("--attention_backend") == 1
            assert words[words.index("--attention_backend") + 1] == attention
            assert words[words.index("--template") + 1] == template
            assert ("--freeze_vit" in words) == ROWS[name].config["model_type"].endswith("vl")
    assert words[words.index("--freeze_vit") + 1] == words[words.index("--freeze_aligner") + 1] == "false"


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_flags_are_known(variant, tmp_path):
    from megaswift.cli.main import read_options

    for row in ROWS.values():
        words = systems.command(variant, row, tmp_path, tmp_path, tmp_path, gpus=8, steps=9, site=None, flags="")
        options, *_ = read_options("megatron", words[words.index("megatron") + 1 :])
        length = row.length * 5 // 4 if row.rlhf else row.length
        data, is_packed = options.data, not row.rlhf or row.rlhf.kind != "dpo"
        assert (data.packing, data.max_length, options.logging.logging_steps) == (is_packed, length, 1)


def test_lines_of_both_logs():
    ours, theirs = systems.step_of("ours", OURS, gpus=2), systems.step_of("peer", PEER, gpus=2)
    assert ours == {name: OURS[name] for name in ("step", "loss", "grad_norm", "memory_gib", "tokens")} | {
        "flops": pytest.approx(261e12 * 0.996 * 2)
    }
    assert theirs == {"step": 2, "loss": 11.98, "grad_norm": 8.25, "memory_gib": 56.01, "own_clock": 8.04}
    assert systems.step_of("ours", {"step": 9, "eval_loss": 1.0}, gpus=1) is None
    visual = {"images": 12.0, "visual_tokens": 6000.0, "vision_share": 0.25}
    assert visual.items() <= (systems.step_of("ours", OURS | visual, gpus=1) or {}).items()
    assert all(systems.step_of(name, PEER, gpus=1) == theirs for name in PEERS)
    assert systems.step_of("peer", {"last_model_checkpoint": "x"}, gpus=1) is None


def test_a_run_ends_behind_its_last_step_with_all_it_started(tmp_path):
    log = tmp_path / "out" / "logging.jsonl"
    words = [sys.executable, "-c", STAND_IN, str(log), "1000"]
    found, error = measure.measure(
        words, {}, log, tmp_path / "printed", steps=5, timeout=300, read=lambda line: systems.step_of("ours", line, 1)
    )
    assert error is None
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5]
    assert 0.04 <= found[4]["at"] - found[0]["at"] < 50
    child = int((log.parent / "child").read_text())
    deadline = time.monotonic() + 60
    while measure._alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_that_fails_says_why(tmp_path):
    log = tmp_path / "out" / "logging.jsonl"
    for steps, timeout, why in (
        (5, 300, "ended with code 3 after 2 of 5 steps: ValueError: that"),
        (2, 0.0, "took more"),
    ):
        log.unlink(missing_ok=True)
        words = [sys.executable, "-c", STAND_IN, str(log), "2"]
        _, error = measure.measure(words, {}, log, tmp_path / "printed", steps=steps, timeout=timeout, read=lambda x: x)
        assert error
        assert error.startswith(why)


def test_steps_of_a_run_whose_time_is_up(tmp_path):
    log = tmp_path / "out" / "logging.jsonl"
    words = [sys.executable, "-c", STAND_IN, str(log), "1000"]
    for enough, is_error in ((1, False), (10**6, True)):
        log.unlink(missing_ok=True)
        steps, error = measure.measure(
            words, {}, log, tmp_path / "printed", steps=10**6, timeout=15, read=lambda line: line, enough=enough
        )
        assert steps
        assert (error is not None) == is_error
    log.unlink()
    words[-1] = "2"  # steps, after which it fails
    steps, error = measure.measure(
        words, {}, log, tmp_path / "printed", steps=5, timeout=300, read=lambda line: line, enough=1
    )
    assert len(steps) == 2
    assert error


def test_a_command_that_fails_or_hangs_says_so(tmp_path):
    log = tmp_path / "log"
    assert 0 < measure.run_command([sys.executable, "-c", "print(1)"], {}, log, timeout=300) < 60
    with pytest.raises(RuntimeError, match="ended with code 1: ValueError: that was it"):
        measure.run_command([sys.executable, "-c", "raise ValueError('that was it')"], {}, log, timeout=300)
    with pytest.raises(RuntimeError, match="took more than 0 s"):
        measure.run_command([sys.executable, "-c", "import time; time.sleep(600)"], {}, log, timeout=0.1)


def a_run(system: str, seconds: float, **changes) -> dict:
    """Six steps: a slow one, then each the given seconds, but for one hiccup."""
    at = 30.0
    steps = []
    for step in range(1, 7):
        ours = {} if system == "peer" else {"tokens": 65_000 * step, "flops": 2.5e14 if step > 2 else 0.0}
        steps.append({"step": step, "loss": 12.0 - step, "grad_norm": 1.0, "memory_gib": 10.0 + step, "at": at} | ours)
        at += 5.0 if step in (1, 4) else seconds
    about = {"row": "0.6b", "system": system, "flags": "", "gpus": 1, "call": "2026-01-02 03:04", "called": "run"}
    about |= {"device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "global_batch": 16, "length": 4096}
    return about | {"warmup": 2, "last_step": 6, "steps": steps, "caches": "cold", "error": None} | changes


def test_figures_by_hand():
    runs = [a_run("ours", 0.5), a_run("local", 0.625), a_run("peer", 1.0)]
    ours, local, peer = (report.summary(run, runs) for run in runs)
    assert ours["seconds_per_step"] == pytest.approx(0.5)  # the median of 0.5, 0.5, 5, 0.5
    assert ours["tokens_per_second_per_gpu"] == pytest.approx(65_536 / 0.5)
    assert ours["real_tokens_per_second_per_gpu"] == pytest.approx(65_000 / 0.5)
    assert ours["tflops_per_gpu"] == pytest.approx(500)
    assert ours["mfu"] == pytest.approx(500 / 989)
    assert (ours["memory_gib"], ours["first_step"]) == (16.0, 30.0)
    assert (ours["ratio"], ours["against"], ours["least"]) == (pytest.approx(2.0), "ms-swift", 1.4)
    assert (local["ratio"], local["against"], local["least"]) == (pytest.approx(0.8), "megaswift", 0.95)
    assert peer["tflops_per_gpu"] == pytest.approx(250)  # of our FLOPs
    assert "ratio" not in peer
    two = [a_run("ours", 0.5, gpus=2), runs[2]]
    assert report.summary(two[0], two)["tokens_per_second_per_gpu"] == pytest.approx(65_536)
    assert "ratio" not in report.summary(two[0], two)  # the peer's is on one GPU
    flash = a_run("peer-flash", 0.75)
    assert report.summary(runs[0], [*runs, flash])["ratio"] == ours["ratio"]
    failed = report.summary(runs[0], [runs[0], a_run("peer", 1.0, error="NaN"), flash])
    assert (failed["ratio"], failed["against"]) == (pytest.approx(1.5), "ms-swift, flash")


def test_figures_of_pictures_by_hand():
    visual = {"images": 48.0, "visual_tokens": 26_000.0, "vision_share": 0.2}
    ours, peer = (a_run(system, seconds, row="vl-4b") for system, seconds in (("ours", 0.5), ("peer", 1.0)))
    ours["steps"] = [step | visual for step in ours["steps"]]
    figures, theirs = (report.summary(run, [ours, peer]) for run in (ours, peer))
    assert figures["visual_share"] == pytest.approx(0.4)
    assert (figures["images_per_second_per_gpu"], theirs["images_per_second_per_gpu"]) == (96.0, 48.0)
    # Of an image of p patches, 24 layers of 1,024 with an MLP of 4,096, and mergers of 4 patches of which 3 are deep.
    grids = [pictures.grid(size) for size in pictures.sizes((256, 1024))]
    patches = [height * width for _, height, width in grids]
    layers = sum(2 * p * (1536 * 1024 + 24 * 12 * 1024**2) + 24 * 4 * 1024 * p**2 for p in patches)
    mergers = sum(2 * p // 4 * 4 * (4096 * 4096 + 4096 * 2560) for p in patches)
    flops = 48 * (layers + mergers) / len(grids)
    assert figures["tower_mfu"] == pytest.approx(flops / (0.2 * 0.5) / 989e12, rel=1e-6)
    trained = report.tower_flops(ROWS["vl-4b-trained"], 48)
    assert trained == pytest.approx(3 * flops, rel=1e-6)
    cells = report.cells(ours, figures)
    assert len(cells) == len(report.VISUAL_COLUMNS) - 3 == len(report.cells(peer, {"error": "E"}))
    assert cells[3:6] == ["40.0%", "96.0", f"20.0% at {figures['tower_mfu']:.1%} MFU"]


def test_pictures_have_a_table_of_their_own():
    runs = [a_run("ours", 0.5), a_run("ours", 0.5, row="vl-4b")]
    heads = [line for line in report.markdown(runs).splitlines() if line.startswith("| model |")]
    assert ["images/s" in head for head in heads] == [False, True]


def test_the_page(tmp_path):
    other = {"call": "2026-01-03 03:04"}
    first = [a_run("ours", 0.5), a_run("peer", 1.0), a_run("peer", 0.1, error="took | more", **other)]
    later = [
        a_run("ours", 0.25, **other),
        a_run("ours", 0.2, flags="--x 1", **other),
        a_run("ours", 1, row="moe", error="E"),
    ]
    (tmp_path / "1.json").write_text(json.dumps(first))
    (tmp_path / "2.json").write_text(json.dumps(later))
    page = tmp_path / "page.md"
    page.write_text(f"# Head\n{report.BEGIN}\nWHAT WAS\n{report.END}\ntail\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", str(tmp_path / "1.json"), str(tmp_path / "2.json"), "--into", str(page)])
        report.main()
    text = page.read_text()
    assert text.startswith(f"# Head\n{report.BEGIN}\n| model |")
    assert text.endswith(f"{report.END}\ntail\n")
    assert "WHAT WAS" not in text
    kept = json.loads((tmp_path / "page.json").read_text())
    assert [(run["row"], run["system"], run["flags"], run["error"]) for run in kept] == [
        ("0.6b", "ours", "", None), ("0.6b", "ours", "--x 1", None), ("0.6b", "peer", "", None),
        ("moe", "ours", "", "E"),
    ]  # fmt: skip
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert lines[4][:6] == ["Qwen3-0.6B", "1", "megaswift", "0.250", "262,144", "260,000"]
    assert lines[4][-1] == "4.00 x ms-swift, another call (1.4)"
    assert lines[5][-1] == "1.25 x megaswift"
    assert lines[6][-4:] == ["25.3%", "16.0 GiB", "30 s, cold", ""]
    assert lines[7][2:4] == ["megaswift", "E"]
    assert ["ms-swift", *[f"{12 - step:.3f}" for step in range(1, 7)]] in lines
    assert "- 2026-01-03 03:04, NVIDIA H200: `run`; torch 2.11.0" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match=r"page\.md has no <!-- bench -->"):
        report.insert(page, "x")


def test_the_command_goes_on_behind_what_fails(tmp_path, monkeypatch, capsys):
    def command(system, row, model, data, out, *, steps, flags, **_):
        if system == "peer":
            raise FileNotFoundError("ms-swift is not installed")
        assert (system, flags) == ("local", "--f 1") or steps == 5 + 4
        return [sys.executable, "-c", STAND_IN, str(out / "logging.jsonl"), "2" if system == "local" else str(steps)]

    monkeypatch.setattr(run, "command", command)
    monkeypatch.setattr(run, "prepare", lambda *_: None)
    monkeypatch.setattr(run, "visible_gpus", lambda: 0)
    words = ["run.py", "tiny", "30b", "--systems", "ours", "peer", "local", "--warmup", "1", "--flags=--f 1"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 1
    runs = json.loads((tmp_path / "results.json").read_text())
    assert [(each["row"], each["error"] and each["error"][:20]) for each in runs] == [
        ("tiny", None), ("tiny", "ms-swift is not inst"), ("tiny", "ended with code 3 af"),
        *[("30b", "needs 8 GPUs")] * 3,
    ]  # fmt: skip
    assert len(runs[0]["steps"]) == 4
    assert (tmp_path / "results.md").read_text() in capsys.readouterr().out
