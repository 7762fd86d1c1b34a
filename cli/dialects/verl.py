"""verl's and siiRL's configs: `actor_rollout_ref`, `critic`, `data`, `algorithm`, `trainer`."""

from .keys import Keys
from .table import Row, computed, needless, only, same
from .translation import Default, Dialect, Translation

ROWS: tuple[Row, ...] = (
    computed("algorithm.adv_estimator", "rlhf_type", text="gae: ppo; grpo: grpo"),
    same("actor_rollout_ref.model.path", "model"),
    same("data.train_files", "dataset"),
    same("data.val_files", "val_dataset"),
    same("actor_rollout_ref.actor.optim.lr", "lr"),
    needless("actor_rollout_ref.actor.megatron.use_mbridge", "weights are read from Hugging Face folders"),
    only("actor_rollout_ref.actor.strategy", "megatron", fix="Training is by megatron-core"),
)


def _compute(keys: Keys, translation: Translation) -> None:
    estimator = keys.text("algorithm.adv_estimator", "gae")
    translation.set("rlhf_type", "ppo" if estimator == "gae" else "grpo", keys.source("algorithm.adv_estimator"))


DEFAULTS = {"weight_decay": Default(0.01, "actor_rollout_ref.actor.optim.weight_decay")}
VERL = Dialect("verl", ROWS, _compute, DEFAULTS)
SIIRL = Dialect("siiRL", ROWS, _compute, DEFAULTS)
