"""`--load_args true`: options of a checkpoint's args.json."""

from pathlib import Path

import pytest
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.run.args_json import save_args


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint's folder with the args.json of a GRPO run."""
    words = "rlhf --rlhf_type grpo --model m --dataset a b --lr 3e-6 --num_generations 4 --train_iters 9"
    options, sources, _ = read_options("megatron", words.split())
    save_args(tmp_path / "args.json", options, sources)
    return tmp_path


@pytest.mark.parametrize("flag", ["resume_from_checkpoint", "load", "adapters"])
def test_flags_win_over_saved_options(flag: str, checkpoint: Path) -> None:
    words = ["rlhf", f"--{flag}", str(checkpoint), "--load_args", "true", "--lr", "1e-6"]
    options, sources, _ = read_options("megatron", words)
    assert (options.rlhf_type, options.model, options.data.dataset) == ("grpo", "m", ["a", "b"])
    assert (options.schedule.lr, options.sampling.num_generations, options.training.train_iters) == (1e-6, 4, 9)
    assert (sources["lr"], sources["num_generations"]) == ("command line", str(checkpoint / "args.json"))


def test_saved_options_are_not_read_unasked(checkpoint: Path) -> None:
    words = f"sft --resume_from_checkpoint {checkpoint} --dataset d --load_args false".split()
    assert read_options("megatron", words)[0].model == ""


def test_swift_infer_has_other_options() -> None:
    with pytest.raises(UsageError, match="--load_args true: no support for options of a training run in other comm"):
        read_options("swift", ["infer", "--model", "m", "--load_args", "true"])
    assert read_options("swift", ["infer", "--model", "m", "--load_args", "false"])[2] == []


def test_a_checkpoint_without_saved_options_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--load_args true: no checkpoint that has an args\.json is set\. Set"):
        read_options("megatron", ["sft", "--load_args", "--model", str(tmp_path)])
    with pytest.raises(UsageError, match=r"--load_args maybe: true or false is needed\."):
        read_options("megatron", ["sft", "--load_args", "maybe", "--model", str(tmp_path)])
    with pytest.raises(UsageError, match=r"--load_args true cannot be used with --config c\.json\. Remove one"):
        read_options("megatron", ["sft", "--load_args", "--config", "c.json"])
