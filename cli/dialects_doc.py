"""Generator of docs/dialects.md from the tables of dialects: `python -m megaswift.cli.dialects_doc`."""

import itertools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from .dialects.run import DIALECTS, load_dialect
from .dialects.table import Row
from .flags import OptionValue, show
from .flags_doc import markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dialects.md"
HEADINGS = ("key", "becomes", "")
# Sections.
TITLES = {
    "verl": "verl and siiRL",
    "trinity": "Trinity-RFT",
    "roll": "ROLL",
    "oumi": "Oumi",
}

SAME_ROWS = {"verl": ("siirl",)}
# system, its command, and ours
COMMANDS = (
    ("verl", "python3 -m verl.trainer.main_ppo a.b=c ...", "megatron run verl.trainer.main_ppo a.b=c ..."),
    ("siiRL", "python3 -m siirl.main_dag a.b=c ...", "megatron run siirl.main_dag a.b=c ..."),
    ("Trinity-RFT", "trinity run --config countdown.yaml", "megatron run countdown.yaml"),
    ("ROLL", "python examples/start_rlvr_pipeline.py --config_path D --config_name N", "megatron run D/N.yaml"),
    ("Oumi", "oumi distributed torchrun -m oumi train -c a.yaml --training.max_steps 5",
     "megatron run a.yaml --training.max_steps 5"),
)  # fmt: skip
HEAD = """\
# Configs of verl, siiRL, Trinity-RFT, ROLL and Oumi

Made by `python -m megaswift.cli.dialects_doc` from the tables in `cli/dialects`.

`megatron run` trains as a config of another system says, as it is written:

{commands}
A shell script of verl or siiRL runs as it is, with `megatron run` in the place of `python3 -m`.

```bash
megatron convert countdown.yaml > ours.yaml      # prints it as a config of this project, with the source of each flag
megatron run countdown.yaml --dry_run true       # prints the options and checks model and data; trains nothing
megatron run countdown.yaml buffer.batch_size=32 model.model_path=Qwen/Qwen3-8B --lr 2e-6
```

- `KEY=VALUE` sets a key of the config, `+KEY=VALUE` too, `~KEY` takes one away, and `--flag value` is a flag of this
  project ([flags.md](flags.md)), which wins. `${{a.b}}` and `${{oc.env:NAME,default}}` are resolved.
- The system is recognised by its root keys. A YAML file of verl's tree is verl's or siiRL's by keys that only one has;
  where a default that differs decides, name the system: `megatron run siirl.main_dag FILE.yaml`.
- verl's modules are `verl.trainer.main_ppo` and `recipe.dapo.main_dapo`. `--config-path P --config-name N` is the file
  `P/N.yaml`; where there is none, `ppo_megatron_trainer`, `dapo_megatron_trainer` and their siblings without megatron
  are verl's own configs, so its defaults hold.
- Each key is followed, or noted, or refused by name, all at once: nothing is dropped silently. Noted are keys of
  placement (offload, engines, layouts of models that are not trained), which change no number. A key that changes a
  formula, a batch or a schedule is followed or refused.
- Defaults of a system that differ from those of this project are written out; below, under each system.
- The number of processes is the config's: `megatron run` starts them. On several nodes, run the same line on each, with
  NNODES, NODE_RANK and MASTER_ADDR.
- Weights are read from and written as Hugging Face folders, in the checkpoint's type unless the config has another.

`python scripts/learn_dialects.py` trains a small model by configs and by the flags that they stand for: the numbers of
each step are equal.
"""


def page() -> str:
    """Return the page in Markdown."""
    rows = ((system, f"`{there}`", f"`{here}`") for system, there, here in COMMANDS)
    head = HEAD.format(commands="\n".join(markdown_table(("system", "there", "here"), rows)).rstrip("\n") + "\n")
    sections = (_section(name) for name in TITLES if _is_written(name))
    return "\n".join([head, *itertools.chain.from_iterable(sections)]) + "\n"


def _is_written(name: str) -> bool:
    return find_spec(f".dialects.{DIALECTS[name][0]}", __package__) is not None


def _section(name: str) -> Iterator[str]:
    dialect = load_dialect(name)
    yield f"## {TITLES[name]}\n"
    if dialect.defaults:
        yield from _defaults((name, *SAME_ROWS.get(name, ())))
    if dialect.tree:
        yield f"`{dialect.tree}` has the keys of verl's config, which is above.\n"
    dialect_rows = [row for row in dialect.rows if not dialect.tree or not row.key.startswith(f"{dialect.tree}.")]
    tables: dict[tuple[tuple[str, str, str], ...], list[str]] = {}  # several roles may have the same keys
    for root, rows in itertools.groupby(sorted(dialect_rows, key=_order), key=_root):
        tables.setdefault(tuple(_cells(root, list(rows))), []).append(root or "Others")
    for cells, roots in tables.items():
        yield f"### {', '.join(roots)}\n"
        yield from markdown_table(HEADINGS, cells)


def _root(row: Row) -> str:
    """Return the table of a row: its first name, or two below `actor_rollout_ref`."""
    names = row.key.split(".")
    depth = 2 if names[0] == "actor_rollout_ref" and len(names) > 2 else 1
    return ".".join(names[:depth]) if len(names) > 1 else ""


def _order(row: Row) -> tuple[bool, str]:
    """Return the place of a row: keys without a table last."""
    return not _root(row), _root(row)


def _defaults(names: tuple[str, ...]) -> Iterator[str]:
    """Yield a table of the defaults of systems with the same rows."""
    dialects = [load_dialect(name) for name in names]
    yield "Defaults that are written out:\n"
    rows = []
    for flag, default in dialects[0].defaults.items():
        values = [f"`{show(default.value)}`"] + [
            f"{other.name} `{show(other.defaults[flag].value)}`"
            for other in dialects[1:]
            if other.defaults[flag].value != default.value
        ]
        rows.append((f"`--{flag}`", ", ".join(values), f"`{default.key}`"))
    yield from markdown_table(("flag", "value", "default of"), rows)


def _cells(root: str, rows: list[Row]) -> Iterator[tuple[str, str, str]]:
    """Yield a table's cells. Consecutive keys of the same meaning share a line, without the name of their table."""
    for (becomes, text), members in itertools.groupby(rows, key=lambda row: (_meaning(row), row.text)):
        keys = [row.key.removeprefix(f"{root}.") for row in members]
        yield ", ".join(f"`{key}`" for key in keys), becomes, text


def _meaning(row: Row) -> str:
    flags = ", ".join(f"`--{flag}`" for flag in row.flags)
    accepted = " or ".join(f"`{show(value)}`" for value in row.accepted)
    match row.kind:
        case "flag" | "computed":
            values = ", ".join(_pair(theirs, ours) for theirs, ours in (row.values or {}).items())
            return (flags or "part of others") + (f": {values}" if values else "")
        case "needless":
            return "no effect"
        case "noted":
            return "noted" + (f", but for {accepted}" if accepted else "")
        case "only":
            return f"only {accepted or 'null'}"
        case "refused":
            return "refused" + (f", but for {accepted}" if accepted else "")


def _pair(theirs: str, ours: OptionValue) -> str:
    return f"`{theirs}`" if show(ours) == theirs else f"`{theirs}` is `{show(ours)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
