"""Generator of docs/flags.md from the option classes and tables of names: `python -m megaswift.cli.flags_doc`."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..tasks.options import (
    CausalLmOptions,
    CompletionOptions,
    CpoOptions,
    DpoOptions,
    EmbeddingOptions,
    EngineOptions,
    ExportOptions,
    GenerativeRerankerOptions,
    GkdOptions,
    GrpoOptions,
    InferOptions,
    KtoOptions,
    MegatronExportOptions,
    OrpoOptions,
    PlanOptions,
    PpoOptions,
    PrecomputeOptions,
    PtOptions,
    RecipeOptions,
    ReferenceOptions,
    ReportOptions,
    RerankerOptions,
    RmOptions,
    RolloutOptions,
    SeqClsOptions,
    SftOptions,
    SimpoOptions,
    TuneOptions,
)
from .accepted_flags import ALWAYS_TRUE, COMPARED, NO_EFFECT
from .flags import Flag, flags_of, show
from .foreign_flags import FOREIGN_FLAGS
from .legacy_flags import INVERTED, OLD_VALUES, RENAMED, REWRITTEN
from .unsupported_flags import UNSUPPORTED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

# flag -> (default in ms-swift's Megatron guide and 4.6 release, reason for a different one here)
DIFFERENT_DEFAULTS = {
    "accumulate_allreduce_grads_in_fp32": (
        "false",
        "sums of many bf16 gradients lose precision; false halves their memory",
    ),
    "add_non_thinking_prefix": ("true", "rows are trained as they are written"),
    "apply_rope_fusion": ("false", "the same numbers, faster; falls back without a kernel"),
    "attention_backend": ("flash", "the fastest available; flash needs a package that takes long to build"),
    "ddp_backend": ("nccl", "unset: nccl on GPUs, gloo on a CPU"),
    "load_from_cache_file": ("false", "the cache is keyed by content, so it cannot be stale"),
    "lora_dropout": ("0.05", "0.05 where PEFT supports it: not for experts, routers, or DoRA"),
    "micro_batch_size": (
        "1",
        "pt and sft on GPUs: as few as are about as fast, where the plan is measured",
    ),
    "moe_permute_fusion": ("false", "the same numbers, faster; falls back without a kernel"),
    "muon_tp_mode": ("blockwise", "every layout gives the numbers of one process"),
    "num_train_epochs": (
        "unset",
        "grpo: 1 if --train_iters is unset too, as in the guide's server example",
    ),
    "overlap_grad_reduce": ("false", "the same numbers, faster; on if processes share gradients"),
    "overlap_param_gather": ("false", "the same numbers, faster; on with it and --use_distributed_optimizer"),
    "offload_model": ("false", "unset: if vLLM in the training processes would lack memory"),
    "offload_optimizer": ("false", "unset: if vLLM in the training processes would lack memory"),
    "sleep_level": ("0", "unset: if vLLM may not fit beside training: 2, or 1 with --vllm_enable_lora true"),
    "swanlab_project": ("megatron-swift", "the project's name"),
    "vllm_gpu_memory_utilization": ("0.9", "unset: the memory that the trainer leaves; a server's: 0.9"),
    "wandb_project": ("megatron-swift", "the project's name"),
}

HEADINGS = ("flag", "type", "default", "")

HEAD = """\
# Flags

Made by `python -m megaswift.cli.flags_doc` from `bridge/options.py`, `templates/options.py` and `tasks/options`.

- `--flag value`, or `--flag=value`. Lists take spaces: `--dataset a.jsonl b.jsonl`. Booleans take `true`, `false`, or
  nothing for true. Tables take JSON: `--columns '{"question": "query"}'`.
- Flags from a file: `megatron sft config.yaml --lr 2e-5`, or `--config FILE` (YAML or JSON; the command line wins). An
  `ENV:` table in it sets unset environment variables.
- A run saves all flags with the source of each value in `args.json`, which is a config file too.
- Processes: `NPROC_PER_NODE` (default: the visible GPUs, or 1 on a CPU), `NNODES`, `NODE_RANK`, `MASTER_ADDR`,
  `MASTER_PORT`.
- `--task_type` and `--rlhf_type` are read first, and select the flags: those of other types are errors.
  `megatron rlhf --rlhf_type kto --help` shows those of one.
- `--dry_run true` checks and prints everything, and trains nothing.
- `MEGASWIFT_TRACEBACK=1` prints the traceback of an error.
- `NO_COLOR=1` prints no colours on a terminal.
"""


def page() -> str:
    """Return the page in Markdown."""
    return (
        "\n".join(
            [
                HEAD,
                *_training(),
                *_tasks(),
                *_preferences(),
                *_infer(),
                *_rollout(),
                *_export(),
                *_prepare(),
                *_plan(),
                *_tune(),
                *_report(),
                *_different_defaults(),
                *_legacy(),
                *_foreign(),
                *_unsupported(),
                *_no_effect(),
            ]
        )
        + "\n"
    )


def _training() -> Iterator[str]:
    pt, sft = flags_of(PtOptions), flags_of(CausalLmOptions)
    changed = [f"`--{name} {show(flag.default)}`" for name, flag in pt.items() if flag.default != sft[name].default]
    yield f"## megatron sft, megatron pt\n\npt has other defaults: {', '.join(changed)}; and no `--task_type`.\n"
    yield from _groups(sft.values())


def _tasks() -> Iterator[str]:
    yield "## megatron sft --task_type\n\nEach has the flags above, and its own.\n"
    yield from _added_flags("seq_cls", SeqClsOptions, CausalLmOptions)
    yield from _added_flags("embedding", EmbeddingOptions, CausalLmOptions)
    yield from _added_flags("reranker, generative_reranker", RerankerOptions, CausalLmOptions)
    yield from _added_flags("generative_reranker alone", GenerativeRerankerOptions, RerankerOptions)


def _preferences() -> Iterator[str]:
    kinds = flags_of(DpoOptions)["rlhf_type"].metavar
    yield f"## megatron rlhf --rlhf_type {kinds}\n\nDefault: dpo. Each has the flags of sft, and its own.\n"
    yield from _added_flags("dpo, kto, grpo, ppo: the reference model", ReferenceOptions)
    yield from _added_flags("dpo, kto: the reference model", PrecomputeOptions, ReferenceOptions)
    yield from _added_flags("dpo", DpoOptions, SftOptions, PrecomputeOptions)
    yield from _added_flags("orpo", OrpoOptions, SftOptions)
    yield from _added_flags("cpo, simpo", CpoOptions, SftOptions)
    yield from _added_flags("simpo alone", SimpoOptions, CpoOptions)
    yield from _added_flags("kto", KtoOptions, SftOptions, PrecomputeOptions)
    yield from _added_flags("rm", RmOptions, SftOptions)
    yield from _added_flags("grpo, ppo, gkd: completions", CompletionOptions, SftOptions)
    yield from _added_flags("grpo, ppo, gkd: engines", EngineOptions, SftOptions)
    yield from _added_flags("grpo, ppo", GrpoOptions, SftOptions, ReferenceOptions, CompletionOptions, EngineOptions)
    yield from _added_flags("ppo", PpoOptions, GrpoOptions)
    yield from _added_flags("gkd", GkdOptions, SftOptions, CompletionOptions, EngineOptions)


def _added_flags(title: str, options: type, *bases: type) -> Iterator[str]:
    """Yield a table of the flags that `bases` lack, and a line of those with a different default."""
    inherited = {name: flag for base in bases for name, flag in flags_of(base).items()}
    flags = {name: flag for name, flag in flags_of(options).items() if name not in ("task_type", "rlhf_type")}
    changed = [
        f"`--{name} {show(flag.default)}`"
        for name, flag in flags.items()
        if name in inherited and flag.default != inherited[name].default
    ]
    yield f"### {title}\n"
    if changed:
        yield f"Other defaults: {', '.join(changed)}.\n"
    yield from markdown_table(HEADINGS, (_row(flag) for name, flag in flags.items() if name not in inherited))


def _infer() -> Iterator[str]:
    yield "## swift infer\n"
    yield from _groups(flags_of(InferOptions).values())


def _rollout() -> Iterator[str]:
    yield "## swift rollout\n"
    yield from _groups(flags_of(RolloutOptions).values())


def _export() -> Iterator[str]:
    names = ", ".join(f"`--{name}`" for name in flags_of(MegatronExportOptions) if name not in flags_of(ExportOptions))
    yield "## swift export, megatron export\n"
    yield f"`megatron export` also has {names}, as above.\n"
    yield from _groups(flags_of(ExportOptions).values())


def _prepare() -> Iterator[str]:
    yield "## swift prepare\n"
    yield from markdown_table(HEADINGS, map(_row, flags_of(RecipeOptions).values()))


def _plan() -> Iterator[str]:
    yield "## megatron plan\n"
    yield from markdown_table(HEADINGS, map(_row, flags_of(PlanOptions).values()))


def _tune() -> Iterator[str]:
    yield "## megatron tune\n\nIts own flags; the others are those of the run ([plan.md](plan.md#trials)).\n"
    yield from markdown_table(HEADINGS, map(_row, flags_of(TuneOptions).values()))


def _report() -> Iterator[str]:
    yield "## megatron report\n"
    yield from markdown_table(HEADINGS, map(_row, flags_of(ReportOptions).values()))


def _groups(flags: Iterable[Flag]) -> Iterator[str]:
    for group, members in itertools.groupby(flags, key=lambda flag: flag.group):
        yield f"### {group}\n"
        yield from markdown_table(HEADINGS, map(_row, members))


def _row(flag: Flag) -> tuple[str, ...]:
    return f"`--{flag.name}`", f"`{flag.metavar}`", f"`{flag.shown_default}`" if flag.shown_default else "", flag.help


def _different_defaults() -> Iterator[str]:
    yield "## Defaults that differ from ms-swift's\n"
    defaults = {name: flag.shown_default for name, flag in (flags_of(EngineOptions) | flags_of(SftOptions)).items()}
    rows = (
        (f"`--{n}`", f"`{old}`", f"`{defaults[n]}`" if defaults[n] else "", reason)
        for n, (old, reason) in DIFFERENT_DEFAULTS.items()
    )
    yield from markdown_table(("flag", "ms-swift", "here", "reason"), rows)


def _legacy() -> Iterator[str]:
    yield "## Older names\n\nAccepted, with a note.\n"
    rows = [(f"`--{old}`", f"`--{new}`") for old, new in RENAMED.items()]
    rows += [(f"`--{old} true`", f"`--{new} false`") for old, new in INVERTED.items()]
    for old, (new, rewrite) in REWRITTEN.items():
        sample = {"distributed_timeout_minutes": "10", "attn_impl": "flash_attn"}.get(old, "true")
        rows.append((f"`--{old} {sample}`", f"`--{new} {rewrite(sample)}`"))
    rows.append(("`--rope_scaling yarn`", '`--rope_scaling {"rope_type": "yarn"}`'))
    rows += [
        (f"`--{name} {old}`", f"`--{name} {new}`") for name, pairs in OLD_VALUES.items() for old, new in pairs.items()
    ]
    yield from markdown_table(("older", "canonical"), rows)


def _foreign() -> Iterator[str]:
    yield "## Flags of LLaMA-Factory, TRL and transformers\n\nNot accepted; the error names the flag here.\n"
    rows = [(f"`--{name}`", f"`--{flag}`" if flag else "", note) for name, (flag, note) in FOREIGN_FLAGS.items()]
    yield from markdown_table(("their flag", "flag here", ""), [row for row in rows if row[0] != "`--dataset`"])


def _unsupported() -> Iterator[str]:
    yield "## Not supported\n\nAn error, unless the value has no effect.\n"
    for (feature, fix), names in itertools.groupby(UNSUPPORTED, key=lambda name: UNSUPPORTED[name][:2]):
        written = [f"`--{name}`" + _accepted_values(UNSUPPORTED[name].neutral) for name in names]
        yield f"- {feature[0].upper() + feature[1:]}: {', '.join(written)}. {fix}"
    yield ""


def _accepted_values(values: tuple[str, ...]) -> str:
    return f" (accepted: {', '.join(f'`{value}`' for value in values)})" if values else ""


def _no_effect() -> Iterator[str]:
    yield "## Accepted without effect\n"
    yield "Compared with the model's folder, whose own is used; an error if that differs:\n"
    yield from (f"- `--{name}`: {reason}." for name, reason in COMPARED.items())
    yield "\nOthers:\n"
    for reason, rows in itertools.groupby({**ALWAYS_TRUE, **NO_EFFECT}.items(), key=lambda row: row[1]):
        yield f"- {', '.join(f'`--{name}`' for name, _ in rows)}: {reason}."


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    head = list(head)
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
