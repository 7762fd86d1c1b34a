"""Rows of `megatron rlhf`: lengths of their data, and the commands of both systems."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
import make
import report
import systems
from rows import ROWS


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder with a short text, since that of the library takes seconds to read."""
    folder = tmp_path_factory.mktemp("work")
    answer = "".join(f"value_{number} = {number} * {number % 7}\n" for number in range(400))
    messages = [{"role": "user", "content": "Write."}, {"role": "assistant", "content": answer}]
    make.text_file(ROWS["tiny-dpo"], folder).write_text((json.dumps({"messages": messages}) + "\n") * 5)
    return folder


def test_pairs_have_even_lengths(work):
    from transformers import AutoTokenizer

    make.main("tiny-dpo", work)
    folder, data = make.paths("tiny-dpo", work)
    assert folder == make.paths("tiny", work)[0]  # one checkpoint of all rows of a model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = ROWS["tiny-dpo"].rlhf
    assert task
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) == 512
    for row in rows[::50]:
        question, answer = row["messages"]
        lengths = [len(tokenizer(text)["input_ids"]) for text in (question["content"], answer["content"])]
        assert lengths == [pytest.approx(task.prompt, rel=0.1), pytest.approx(task.answer, rel=0.1)]
        assert len(tokenizer(row["rejected_response"])["input_ids"]) == pytest.approx(task.answer, rel=0.1)
        assert row["rejected_response"] != answer["content"]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "swift" / "cli" / "_megatron" / "rlhf.py"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def flags_of(system: str, row: str, script: Path, *, gpus: int, teacher: Path | None = None) -> dict[str, str]:
    """Return the flags of a row's command; ms-swift's starts `script`."""
    paths, site = (Path("m"), Path("d"), Path("o")), script.parents[3]
    words = systems.command(system, ROWS[row], *paths, gpus=gpus, steps=9, site=site, flags="", teacher=teacher)
    assert (str(script) in words) == (system == "peer")
    first = words.index("--model")
    return dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


def test_both_systems_get_the_same_pairs(script):
    ours, peer = (flags_of(name, "8b-dpo", script, gpus=4) for name in ("ours", "peer"))
    assert ours.items() <= peer.items()
    assert [ours[f"--{name}"] for name in ("rlhf_type", "packing", "micro_batch_size", "global_batch_size")] == [
        "dpo", "false", "2", "32",
    ]  # fmt: skip


def test_both_systems_learn_from_the_same_teacher(script):
    ours, peer = (flags_of(name, "1.7b-gkd", script, gpus=1, teacher=Path("t")) for name in ("ours", "peer"))
    names = "rlhf_type", "teacher_model", "beta", "lmbda", "global_batch_size", "max_length", "dataset", "lr"
    assert [ours[f"--{name}"] for name in names] == [peer[f"--{name}"] for name in names]
    assert [ours[f"--{name}"] for name in names[:4]] == ["gkd", "t", "0.5", "0"]


def test_answers_have_even_lengths(work):
    from transformers import AutoTokenizer

    make.main("tiny-gkd", work)
    folder, data = make.paths("tiny-gkd", work)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    lengths = [len(tokenizer(turn["content"])["input_ids"]) for turn in rows[0]["messages"]]
    assert lengths == [pytest.approx(100, rel=0.1)] * 2
    assert set(rows[0]) == {"messages"}


def test_prompts_are_as_long_as_said(work):
    from transformers import AutoTokenizer

    make.main("tiny-grpo", work)
    folder, data = make.paths("tiny-grpo", work)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    lengths = {len(tokenizer(turn["content"])["input_ids"]) for (turn,) in rows}
    assert 28 <= min(lengths) <= max(lengths) <= 36
    with pytest.raises(RuntimeError, match="rows with servers have no command of ms-swift"):
        systems.command("peer", ROWS["30b-grpo-server"], folder, data, folder, gpus=4, steps=1, site=None, flags="")


def test_both_systems_answer_the_same_prompts(script):
    ours, peer = (flags_of(name, "4b-grpo", script, gpus=2) for name in ("ours", "peer"))
    names = ("num_generations", "max_completion_length", "beta", "temperature", "vllm_max_model_len", "vllm_mode")
    names += ("global_batch_size", "max_length", "dataset", "reward_funcs", "lr", "rlhf_type")
    assert [ours[f"--{name}"] for name in names] == [peer[f"--{name}"] for name in names]
    assert ours["--packing"] == "true"
    assert "--packing" not in peer  # ms-swift has none in GRPO
    plugins = [Path(system["--external_plugins"]) for system in (ours, peer)]
    assert [path.name for path in plugins] == ["coin_reward.py", "coin_reward_peer.py"]
    assert all(path.exists() for path in plugins)


def test_vllms_packages_are_behind_those_of_training(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/training")
    for system, expected in (("ours", f"/training:{tmp_path}"), ("peer", f"/training:{tmp_path}")):
        environment = systems.environment(system, tmp_path, gpus=1, site=None, engine_site=tmp_path)
        assert environment["PYTHONPATH"] == expected


def test_the_phases_of_a_step_by_hand():
    line = {"loss": 0.1, "grad_norm": 1.0, "memory_gib": 110.5, "tflops_per_gpu": 1.0, "seconds_per_step": 20.0}
    line |= {
        "timing_s/gen": 9.0,
        "timing_s/update_weights": 1.5,
        "timing_s/reward": 0.25,
        "timing_s/old_log_prob": 0.001,
    }
    line |= {"weight_sync/gb": 61.06, "weight_sync/gb_per_s": 40.7, "completions/mean_length": 500.0}
    line |= {"memory/train_gib": 120.2, "memory/generate_gib": 131.0, "sampling/sampling_logp_difference/mean": 0.02}
    steps = []
    for step in range(1, 5):
        parsed = systems.step_of("ours", line | {"step": step, "tokens": 400_000 * step, "reward": 0.5}, gpus=4)
        assert parsed
        assert "reward" not in parsed
        steps.append(parsed | {"at": 60.0 + 20 * step})
    steps[0] |= {"at": 75.0, "timing_s/gen": 30.0}
    run = {"row": "30b-grpo", "system": "ours", "flags": "", "gpus": 4, "call": "2026-01-02 03:04", "called": "run"}
    run |= {"device": "NVIDIA H200", "versions": {}, "global_batch": 512, "length": 768, "warmup": 1, "last_step": 4}
    run |= {"steps": steps, "caches": "cold", "error": None}
    text = report.markdown([run])
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert len(cells) == len(report.TABLES["rollouts"])
    assert cells[1:] == [
        "4", "megaswift", "20.00", "9.00 s", "1.50 s: 61.1 GB, 40.7 GB/s", "reward 0.25", "9.25 s", "5,000", "3,200",
        "120, 131, 110.5 GiB", "0.02 apart", "75 s", "",
    ]  # fmt: skip
    peer_steps = [{"step": step, "loss": 0.1, "memory_gib": 100.0, "at": 60.0 + 30 * step} for step in range(1, 5)]
    peer = report.markdown([run, run | {"system": "peer", "steps": peer_steps}]).splitlines()
    assert peer[2].strip("| ").endswith("1.50 x ms-swift")
    assert [cell.strip() for cell in peer[3].strip("|").split("|")][1:] == [
        "4", "ms-swift", "30.00", *[""] * 6, "100.0 GiB", "", "90 s", "",
    ]  # fmt: skip
    failed = report.markdown([run | {"error": "out of memory"}]).splitlines()[2]
    assert failed.count("|") == text.splitlines()[2].count("|")


def test_gpus_of_servers_do_not_train(tmp_path):
    row = ROWS["30b-grpo-server"]
    words = systems.command("ours", row, tmp_path, tmp_path, tmp_path, gpus=4, steps=1, site=None, flags="")
    assert words[words.index("--rollout_num_gpus") + 1] == "1"
    assert row.rlhf
    environment = systems.environment("ours", tmp_path, gpus=4, site=None, servers=row.rlhf.servers)
    assert (environment["CUDA_VISIBLE_DEVICES"].count(","), environment["NPROC_PER_NODE"]) == (3, "3")
