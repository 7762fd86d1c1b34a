"""Loss of each channel of the rows (--enable_channel_loss), beside transformers' losses of these rows."""

import json

import pytest
import torch

from tests import tiny
from tests.tasks.supervised.test_sft import log_of, megatron, run_folder

pytestmark = pytest.mark.slow
TEXTS = {"sums": [f"{n} + {n} = {2 * n}" for n in range(9)], "words": ["a b c d", "a longer text " * 4]}
LINE = "pt --model qwen3 --dataset train.jsonl --val_dataset val.jsonl --micro_batch_size 2 --global_batch_size 12 "
LINE += "--train_iters 1 --lr 1e-3 --max_length 96 --enable_channel_loss true --dataloader_num_workers 0"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, and rows of two channels and of none."""
    folder = tmp_path_factory.mktemp("channels")
    tiny.save_tokenizer(tiny.save(folder / "qwen3", "qwen3"))
    rows = [{"text": text, "channel": channel} for channel, texts in TEXTS.items() for text in texts]
    rows.append({"text": "of no channel"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[-3:]))
    return folder


@pytest.fixture(scope="module")
def expected(place):
    """Mean cross entropy per channel, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "qwen3")
    model = AutoModelForCausalLM.from_pretrained(place / "qwen3", dtype=torch.float32)
    means = {}
    for channel, texts in TEXTS.items():
        losses = []
        for text in texts:
            ids = torch.tensor([[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]])
            with torch.no_grad():
                log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            losses.append(-log_probs.gather(1, ids[0, 1:, None])[:, 0])
        means[f"loss_{channel}"] = torch.cat(losses).mean().item()
    return means


def logged(folder):
    """The channels' losses of the step and of the evaluation."""
    rows = log_of(run_folder(folder))
    (trained,) = [row for row in rows if "loss" in row]
    (evaluated,) = [row for row in rows if "eval_loss" in row]
    assert not [name for row in rows for name in row if name.startswith(("channel_", "eval_channel_"))]
    return {name: trained[name] for name in trained if name.startswith("loss_")}, evaluated


@pytest.mark.parametrize(
    ("name", "flags", "processes"),
    [
        ("packed", "--packing true", 1),
        pytest.param("padded", "--padding_free false", 1, marks=pytest.mark.long),
        pytest.param("cp", "--packing true --context_parallel_size 2", 2, marks=pytest.mark.long),
        pytest.param("tp", "--tensor_model_parallel_size 2 --sequence_parallel true", 2, marks=pytest.mark.long),
        pytest.param("dp", "", 2, marks=pytest.mark.long),
        pytest.param("pp", "--pipeline_model_parallel_size 2 --packing true", 2, marks=pytest.mark.long),
    ],
)
def test_channels_have_the_losses_of_their_rows(name, flags, processes, place, expected):
    # All rows are in one pack, which is a sample.
    size = "--max_length 512 --global_batch_size 1 --micro_batch_size 1" if "packing" in flags else ""
    megatron(place, f"{LINE} {flags} {size} --output_dir {name}", processes=processes if processes > 1 else None)
    losses, evaluated = logged(place / name)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert evaluated.keys() >= {"eval_loss_words"}
    assert "eval_loss_sums" not in evaluated


def test_what_has_no_channels_is_refused(place):
    assert "no row has a column `channel`" in megatron(place, f'{LINE} --columns \'{{"channel": "kind"}}\'', fails=True)
    printed = megatron(place, f"{LINE} --streaming true", fails=True)
    assert "--enable_channel_loss true cannot be used with --streaming true" in printed
