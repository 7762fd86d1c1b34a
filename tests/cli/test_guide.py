"""Names and defaults are those of the guide, except where docs/flags.md says otherwise."""

import re
from pathlib import Path

from megaswift.bridge.option_groups import flag_value
from megaswift.cli.accepted_flags import ALWAYS_TRUE, COMPARED, NO_EFFECT
from megaswift.cli.commands import COMMANDS
from megaswift.cli.flags import flags_of
from megaswift.cli.flags_doc import DIFFERENT_DEFAULTS, PAGE, page
from megaswift.cli.legacy_flags import INVERTED, OLD_VALUES, RENAMED, REWRITTEN
from megaswift.cli.unsupported_flags import UNSUPPORTED
from megaswift.tasks import options as option_sets
from megaswift.tasks.options import SftOptions

HERE = Path(__file__).parent
SFT = flags_of(SftOptions)
FLAGS = {
    flag
    for commands in COMMANDS.values()
    for command in commands.values()
    for kind in command.kinds.values()
    for flag in flags_of(getattr(option_sets, kind.options))
}
# Flags of training and the rollout server that have no effect in `swift infer`, or are refused there.
NOT_FOR_INFER = {"vllm_enable_lora", "vllm_max_lora_rank", "attention_backend", "use_ray"}
KNOWN = {*FLAGS, *UNSUPPORTED, *ALWAYS_TRUE, *COMPARED, *NO_EFFECT}


def guide() -> dict[str, str]:
    """Return the default of each flag in the guide's tables, as written there."""
    rows = re.findall(r"^\| `--(\w+)` \| .* \| (.+) \|$", (HERE / "guide.md").read_text(), re.MULTILINE)
    return {name: default.strip("`") for name, default in rows}


def test_every_flag_of_the_tables_and_examples_is_known() -> None:
    examples = set(re.findall(r"--(\w+)", (HERE / "examples.sh").read_text()))
    assert len(guide()) == 39
    assert {*guide(), *examples} <= KNOWN


def test_defaults_are_the_guides() -> None:
    different = set()
    for name, default in guide().items():
        if name in SFT:
            ours = flag_value(SftOptions(), name)  # as it is where it is left out
            theirs = {"None": None, "None (all)": None, "auto": None, "true": True, "false": False}
            theirs |= {"[]": [], '["core_attn"]': ["core_attn"], "all-linear": ["all-linear"]}
            wanted = theirs.get(default, default.split(" ")[0])
            if (type(ours)(wanted) if isinstance(ours, int | float) else wanted) != ours:
                different.add(name)
    assert different == {"moe_permute_fusion"}
    assert different <= set(DIFFERENT_DEFAULTS) <= FLAGS


def test_what_is_known_by_another_name_is_known_once() -> None:
    """No name is in two tables, and what older names stand for is there."""
    tables = [*map(set, (RENAMED, INVERTED, REWRITTEN, ALWAYS_TRUE, COMPARED, NO_EFFECT, UNSUPPORTED))]
    assert len(set().union(*tables)) == sum(map(len, tables))
    assert FLAGS & set().union(*tables) == NOT_FOR_INFER
    assert {*RENAMED.values(), *INVERTED.values(), *(new for new, _ in REWRITTEN.values())} <= KNOWN
    assert set(OLD_VALUES) <= FLAGS


def test_the_page_of_flags_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m megaswift.cli.flags_doc"
