"""TRL's trainers on the same folders, rows and settings, in this process. TRL takes ten seconds to import."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.tasks.preference.runs import BETAS, CLIP, EPSILON, RATE, Tensors

Log = list[dict[str, float]]
SETTINGS = {
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "adam_epsilon": EPSILON,
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "max_grad_norm": CLIP,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
    "disable_tqdm": True,
}


def causal(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def scoring(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def adapter_of(model: Any) -> Tensors:
    """By the names of PEFT's files."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def adapted(base: Path, adapter: Path) -> Any:
    """PEFT's model, whose adapter is trained."""
    from peft import PeftModel

    return PeftModel.from_pretrained(causal(base), adapter, is_trainable=True)


def dpo(folder: Path, model: Any, rows: list[dict], ref_model: Any = None, **settings: Any) -> tuple[Log, Any]:
    """The log of three steps, and the model after them."""
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    return _trained(DPOTrainer, DPOConfig, folder, model, rows, settings, more={"ref_model": ref_model})


def kto(folder: Path, model: Any, rows: list[dict], ref_model: Any = None, **settings: Any) -> tuple[Log, Any]:
    """Likewise. Each prompt's other answer is that of the row before among all rows, not among those of a batch."""
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    def rotate(trainer: Any) -> None:
        if not trainer.calculate_KL:
            return
        answers = list(trainer.train_dataset["completion_ids"])
        others = trainer.train_dataset.remove_columns("KL_completion_ids")
        trainer.train_dataset = others.add_column("KL_completion_ids", [answers[-1], *answers[:-1]])

    return _trained(KTOTrainer, KTOConfig, folder, model, rows, settings, rotate, more={"ref_model": ref_model})


def unreferenced(folder: Path, model: Any, rows: list[dict], kind: str, **settings: Any) -> tuple[Log, Any]:
    """Likewise, of `kind` orpo or cpo. ORPO's cross-entropy is that of answers, as CPO's is, not of prompts too."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    def train_on_answers(trainer: Any) -> None:
        """The attention mask chooses these tokens. Rows are padded on the right, so that attention does without it."""
        inputs, forward = trainer.concatenated_inputs, trainer.model.forward

        def masked(*arguments: Any, **named: Any) -> dict[str, torch.Tensor]:
            made = inputs(*arguments, **named)
            return made | {"concatenated_attention_mask": (made["concatenated_labels"] != -100).long()}

        trainer.concatenated_inputs = masked
        trainer.model.forward = lambda *arguments, attention_mask=None, **named: forward(*arguments, **named)

    classes, change = (CPOTrainer, CPOConfig), lambda trainer: None
    if kind == "orpo":
        classes, change = (ORPOTrainer, ORPOConfig), train_on_answers
    return _trained(*classes, folder, model, rows, {"max_length": 512} | settings, change, more={})


def reward(folder: Path, model: Any, rows: list[dict], **settings: Any) -> tuple[Log, Any]:
    """Likewise."""
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    return _trained(RewardTrainer, RewardConfig, folder, model, rows, settings, more={})


def _trained(
    trainer_class: type,
    config_class: type,
    folder: Path,
    model: Any,
    rows: list[dict],
    settings: dict[str, Any],
    change: Callable[[Any], None] = lambda trainer: None,
    *,
    more: dict[str, Any],
) -> tuple[Log, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer

    trainer = trainer_class(
        model=model,
        args=config_class(output_dir=str(folder / "trl"), **SETTINGS | settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "qwen3"),
        **more,
    )
    change(trainer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer.train()
    finally:
        torch.set_num_threads(threads)
    return [row for row in trainer.state.log_history if "loss" in row], trainer.model
