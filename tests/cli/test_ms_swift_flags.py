"""Each flag of ms-swift 4.6 is a flag here, is accepted with a note, or is refused by the name of a feature."""

from functools import cache
from pathlib import Path

import pytest
from megaswift.cli.commands import COMMANDS
from megaswift.cli.flags import Flag, UsageError, flags_of
from megaswift.cli.main import _hints_for_other_flags
from megaswift.cli.parse import from_argv
from megaswift.tasks import options

TABLE = (Path(__file__).parent / "ms_swift_flags.tsv").read_text().splitlines()[1:]
COMMANDS_OF = {flag: commands.split() for flag, commands in (line.split("\t") for line in TABLE)}
# Flags of ms-swift 3.x and of Megatron-LM's command line, from public scripts.
EARLIER = [
    "train_type",
    "load",
    "save",
    "save_interval",
    "max_epochs",
    "no_save_optim",
    "no_save_rng",
    "adapter_load",
    "mcore_adapters",
    "log_interval",
    "use_flash_attn",
    "attn_impl",
    "logging_level",
    "num_layers",
    "hidden_size",
    "pipeline_dtype",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "save_retain_interval",
    "no_data_sharding",
    "no_initialization",
    "model_type",
    "template",
    "agent_template",
    "gradient_checkpointing_kwargs",
    "moe_layer_recompute",
    "num_layers_per_virtual_pipeline_stage",
    "ckpt_format",
    "dataloader_type",
    "seq_length",
    "tensorboard_log_interval",
    "grad_reduce_in_bf16",
    "max_position_embeddings",
    "packing_cache",
]


@cache
def known_flags(command_line: str) -> tuple[dict[str, Flag], dict[str, str]]:
    """Return the flags of a command, and the hints for those of other commands."""
    program, _, command = command_line.partition(".")
    kind = next(iter(COMMANDS[program][command].kinds.values()))
    return flags_of(getattr(options, kind.options)), _hints_for_other_flags(program, command, kind)


def answer(command_line: str, flag: str) -> str:
    """Return the error message of a flag without a value, or ""."""
    try:
        from_argv([f"--{flag}"], *known_flags(command_line))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", sorted({command for commands in COMMANDS_OF.values() for command in commands}))
def test_every_flag_is_known(command: str) -> None:
    flags = [flag for flag, commands in COMMANDS_OF.items() if command in commands]
    assert len(flags) > 120
    unknown = [flag for flag in flags if "no such flag" in answer(command, flag)]
    assert unknown == ["dataset"] * (command == "swift.infer")  # its message names --val_dataset


def test_earlier_flags_are_known() -> None:
    assert [flag for flag in EARLIER if "no such flag" in answer("megatron.sft", flag)] == []
    assert "no such flag" in answer("megatron.sft", "xyzzyx")
