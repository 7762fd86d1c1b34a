"""TRL's trainers' losses, on numbers that no model has computed.

A trainer computes its loss from a model's outputs in one method. It runs here on a trainer that has nothing but what
this method reads, and on a "model" that answers with given log-probabilities. TRL takes ten seconds to import: it is
imported where it is used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megaswift.tasks.losses.preference import Dpo, Pairs
from torch import Tensor


class _Accelerator:
    """Of one process."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    @staticmethod
    def gather_for_metrics(values: Tensor) -> Tensor:
        return values

    gather = gather_for_metrics

    @staticmethod
    def reduce(values: Tensor, reduction: str) -> Tensor:
        return values

    @staticmethod
    def pad_across_processes(values: Tensor, **_: Any) -> Tensor:
        return values


def _trainer(kind: type, **settings: Any) -> Any:
    trainer = object.__new__(kind)
    vars(trainer).update(
        accelerator=_Accelerator(),
        model=torch.nn.Identity(),
        aux_loss_enabled=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list)},
        **settings,
    )
    return trainer


def _model(answers: Iterator[Tensor]) -> Callable[..., SimpleNamespace]:
    """A causal language model: the log-probabilities [rows, tokens] of its labels, one answer a call."""

    def outputs(**_: Any) -> SimpleNamespace:
        log_probs = next(answers)
        unused = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=unused, mean_logits=unused, is_top1=unused.bool())

    return outputs


def _rows(sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [rows, width] of answers of so many tokens that add up to `sums`, exactly: all on the last
    token; and the mask of completions [rows, width + 1]."""
    width = int(tokens.max()) + 2
    mask = torch.arange(width + 1).flip(0) < tokens[:, None]
    return torch.cat([torch.zeros(len(sums), width - 1), sums[:, None]], dim=1), mask.long()


def _metrics(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def dpo(pairs: Pairs, options: Dpo) -> tuple[Tensor, dict[str, float]]:
    """DPOTrainer's loss, the mean over pairs, and its metrics."""
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = _trainer(
        DPOTrainer,
        args=SimpleNamespace(discopop_tau=options.discopop_tau),
        beta=options.beta,
        loss_types=list(options.loss_type),
        loss_weights=[weight for _, weight in options.terms],
        label_smoothing=options.label_smoothing,
        f_divergence_type=options.f_divergence_type,
        f_alpha_divergence_coef=options.f_alpha_divergence_coef,
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=True,
    )
    sums = torch.cat([pairs.chosen, pairs.rejected])
    log_probs, mask = _rows(sums, torch.cat([pairs.chosen_tokens, pairs.rejected_tokens]))
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": pairs.ref_chosen,
        "ref_rejected_logps": pairs.ref_rejected,
    }
    loss = trainer._compute_loss(_model(iter([log_probs])), inputs, return_outputs=False)
    return loss, _metrics(trainer)


def unreferenced(
    kind: str, chosen: Tensor, rejected: Tensor, nll: Tensor, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """ORPOTrainer's or CPOTrainer's loss with the chosen answers' own, the mean over pairs, and its metrics."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    trainer = _trainer({"orpo": ORPOTrainer, "cpo": CPOTrainer}[kind], alpha=0.0, **settings)
    trainer.concatenated_forward = lambda *_: (chosen, rejected, chosen, rejected, nll)
    return trainer.get_batch_loss_metrics(None, {})


def kto(
    log_probs: Tensor, ref: Tensor, desirable: Tensor, mismatched: tuple[Tensor, Tensor], **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """KTOTrainer's loss, the mean over samples, and its metrics; mismatched: policy's and reference's sums."""
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = _trainer(KTOTrainer, calculate_KL=settings["loss_type"] == "kto", precompute_ref_logps=True, **settings)
    tokens = torch.full(log_probs.shape, 3)
    answers, mask = _rows(log_probs, tokens)
    kl_answers, kl_mask = _rows(mismatched[0], tokens)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "KL_input_ids": torch.zeros_like(kl_mask),
        "KL_attention_mask": torch.ones_like(kl_mask),
        "KL_completion_mask": kl_mask,
        "label": desirable,
        "ref_logps": ref,
        "ref_KL_logps": mismatched[1],
    }
    calls = [kl_answers, answers] if trainer.calculate_KL else [answers]
    loss = trainer._compute_loss(_model(iter(calls)), inputs, return_outputs=False)
    return loss, _metrics(trainer)


def reward(chosen: Tensor, rejected: Tensor, margins: Tensor | None, coefficient: float | None) -> Tensor:
    """RewardTrainer's loss, the mean over pairs."""
    from trl.trainer.reward_trainer import RewardTrainer

    trainer = _trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=coefficient))
    inputs = {"attention_mask": torch.ones(2 * len(chosen), 1)} | ({} if margins is None else {"margin": margins})
    logits = torch.cat([chosen, rejected])[:, None]
    return trainer.compute_loss(lambda **_: SimpleNamespace(logits=logits), inputs)


def grpo(
    log_probs: Tensor, entropies: Tensor, inputs: dict[str, Tensor], **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """GRPOTrainer's loss and metrics, of a step of one micro batch: log_probs, entropies [samples, width].

    inputs: advantages [samples], completion_mask [samples, width], and what else the trainer has found before.
    settings: the trainer's own, and in `args` those of its config.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    defaults = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "current_gradient_accumulation_steps": 1,
        "use_vllm": "importance_sampling_ratio" in inputs,
        "vllm_importance_sampling_correction": True,
        "_entropy_bonus_enabled": False,
    }
    settings["args"] = SimpleNamespace(**config | settings.get("args", {}))
    trainer = _trainer(GRPOTrainer, **defaults | settings)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropies, None)
    unread = torch.zeros(len(log_probs), 1, dtype=torch.long)
    tokens = {"prompt_ids": unread, "prompt_mask": unread, "completion_ids": torch.zeros_like(log_probs)}
    count = inputs["completion_mask"].sum()
    return trainer._compute_loss(None, tokens | {"num_items_in_batch": count} | inputs), _metrics(trainer)


def follow(policy: Any, reference: Any, share: float) -> None:
    """TR-DPO's soft update, as SyncRefModelCallback does it."""
    from trl.trainer.callbacks import SyncRefModelCallback

    SyncRefModelCallback._sync_target_model(policy, reference, share)
