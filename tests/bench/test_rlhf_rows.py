"""Rows of `megatron rlhf`: lengths of their data, and the commands of both systems."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
import make
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


def test_both_systems_get_the_same_pairs(tmp_path):
    script = tmp_path / "swift" / "cli" / "_megatron" / "rlhf.py"
    script.parent.mkdir(parents=True)
    script.touch()
    flags = []
    for name in ("ours", "peer"):
        words = systems.command(
            name, ROWS["8b-dpo"], Path("m"), Path("d"), Path("o"), gpus=4, steps=9, site=tmp_path, flags=""
        )
        assert (str(script) in words) == (name == "peer")
        first = words.index("--model")
        flags.append(dict(zip(words[first::2], words[first + 1 :: 2], strict=True)))
    ours, peer = flags
    assert ours.items() <= peer.items()
    assert [ours[f"--{name}"] for name in ("rlhf_type", "packing", "micro_batch_size", "global_batch_size")] == [
        "dpo", "false", "2", "32",
    ]  # fmt: skip
