"""The commands, their types, option classes and tasks."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """Command, or one of its types."""

    summary: str
    options: str = ""  # class in tasks/options
    task: str = ""  # module in tasks/ whose `run(options, sources)` is the command
    by: str = ""  # flag that selects one of `types`; read before other flags
    types: Mapping[str, "Command"] = field(default_factory=dict)  # the first is the default
    positional: str = ""  # flag that the first word sets, if it is no flag

    @property
    def kinds(self) -> "Mapping[str, Command]":
        """Types of the command, or the command itself."""
        return {"": self} if self.options else self.types

    @property
    def option_class(self) -> type:
        """Option class of a command without types."""
        return getattr(importlib.import_module("..tasks.options", __package__), self.options)


TASKS = {
    "causal_lm": Command("Supervised fine-tuning on conversations.", "CausalLmOptions", "supervised.sft"),
    "seq_cls": Command("Train a classifier or regressor with a score head.", "SeqClsOptions", "supervised.heads"),
    "embedding": Command("Train a text-embedding model.", "EmbeddingOptions", "supervised.heads"),
    "reranker": Command("Train a reranker with a score head.", "RerankerOptions", "supervised.heads"),
    "generative_reranker": Command(
        "Train a reranker that scores by the odds of a yes and a no token.",
        "GenerativeRerankerOptions",
        "supervised.heads",
    ),
}
PREFERENCES = {
    "dpo": Command(
        "Direct preference optimization and variants, on chosen/rejected pairs.",
        "DpoOptions",
        "preference.preference",
    ),
    "orpo": Command("ORPO, on chosen/rejected pairs without a reference.", "OrpoOptions", "preference.preference"),
    "simpo": Command("SimPO, on chosen/rejected pairs without a reference.", "SimpoOptions", "preference.preference"),
    "cpo": Command("CPO, on chosen/rejected pairs without a reference.", "CpoOptions", "preference.preference"),
    "kto": Command("KTO, on unpaired desirable or undesirable responses.", "KtoOptions", "preference.preference"),
    "rm": Command("Train a reward model on chosen/rejected pairs.", "RmOptions", "preference.preference"),
    "grpo": Command("GRPO: reinforcement learning with rewards of generated completions.", "GrpoOptions", "rl.grpo"),
    "ppo": Command("PPO: the same with a critic, a model of the values of tokens.", "PpoOptions", "rl.ppo"),
    "gkd": Command(
        "GKD: distillation of a teacher, also on the student's own completions.", "GkdOptions", "distillation.gkd"
    ),
}
COMMANDS = {
    "megatron": {
        "pt": Command("Continued pre-training on plain text.", "PtOptions", "supervised.sft"),
        "sft": Command("Supervised fine-tuning; classifiers, embeddings, rerankers.", by="task_type", types=TASKS),
        "rlhf": Command(
            "Preferences, reward models, reinforcement learning, distillation.",
            by="rlhf_type",
            types=PREFERENCES,
        ),
        "export": Command("Convert checkpoints in any parallel layout.", "MegatronExportOptions", "convert.export"),
        "plan": Command(
            "Print the layouts that fit on some GPUs, with memory and speed.", "PlanOptions", "plan.command"
        ),
        "tune": Command(
            "Try the first layouts of the plan for a few steps, and write a config file of the fastest.",
            "TuneOptions",
            positional="command",
        ),
        "report": Command(
            "Write a run, or a comparison of runs, as one HTML page.",
            "ReportOptions",
            "report.command",
            positional="runs",
        ),
        "run": Command("Train as a config file of verl, siiRL, Trinity-RFT, ROLL or Oumi says."),
        "convert": Command("Print such a config as a config file of this command."),
    },
    "swift": {
        "infer": Command("Chat with a model, or run it on a dataset.", "InferOptions", "infer"),
        "export": Command("Convert checkpoints to megatron-core's format and back.", "ExportOptions", "convert.export"),
        "rollout": Command("Serve a model for the rollouts of a training run.", "RolloutOptions", "rollout.serve"),
        "prepare": Command(
            "Write a public dataset as Parquet files for rewards by source: gsm8k, math or deepscaler.",
            "RecipeOptions",
            "prepare",
            positional="recipe",
        ),
    },
}
ALSO = "--version prints the version, `doctor` checks this machine, --install-completion has the shell complete flags."
ABOUT = {
    "megatron": f"Train Hugging Face checkpoints with megatron-core, on a laptop's CPU or many GPUs. {ALSO}",
    "swift": f"Run and convert trained models. {ALSO}",
}
USAGE = "[CONFIG.yaml] [--flag value ...]"
# Options that help shows first.
FIRST = (
    "rlhf_type", "task_type", "model", "adapters", "dataset", "val_dataset", "output_dir", "max_length", "packing",
    "tuner_type", "lora_rank", "lr", "num_train_epochs", "train_iters", "global_batch_size", "micro_batch_size",
    "tensor_model_parallel_size", "resume_from_checkpoint", "reward_funcs", "teacher_model", "to_mcore", "to_hf",
    "stream", "dry_run",
)  # fmt: skip
