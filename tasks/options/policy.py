"""Options of the policy loss of GRPO and its relatives."""

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass
class PolicyLossOptions:
    """Policy loss"""

    epsilon: Annotated[float, "Lower clipping range of the probability ratio, below 1.", "[0, inf)"] = 0.2
    epsilon_high: Annotated[
        float | None, "Upper clipping range, above 1. Default: --epsilon (cispo: 5).", "[0, inf)"
    ] = None
    delta: Annotated[
        float | None, "Upper bound of the ratio for two-sided clipping, above 1 + epsilon.", "(0, inf)"
    ] = None
    dual_clip: Annotated[
        float | None,
        "Dual-clip PPO: least objective of a token, times its advantage, where that is negative; such as 3.",
        "(1, inf)",
    ] = None
    loss_type: Annotated[
        Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo"],
        "Loss and its normalization: per completion (grpo, sapo), per token of a micro batch (bnpo) or of "
        "the step (dapo, cispo, fipo), by the maximum length (dr_grpo), or per prompt (real).",
    ] = "grpo"
    loss_agg_mode: Annotated[
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None,
        "Mean over all tokens, or over completions of their tokens' means, sums, or sums over "
        "--max_completion_length. Default: that of --loss_type.",
    ] = None
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3", "abs"] | None,
        "Estimate of a token's KL divergence from the reference. Default: k3 in the loss, k1 in the reward.",
    ] = None
    entropy_coef: Annotated[
        float, "Weight of the mean entropy of tokens, which is subtracted from the loss.", "[0, inf)"
    ] = 0.0
    tau_pos: Annotated[float, "sapo: temperature for positive advantages.", "(0, inf)"] = 1.0
    tau_neg: Annotated[float, "sapo: temperature for other advantages.", "(0, inf)"] = 1.05
    real_tau: Annotated[float, "real: temperature of the scores.", "(0, inf)"] = 0.5
    fipo_decay_rate: Annotated[
        float, "fipo: tokens after which the influence of a later token has halved.", "(0, inf)"
    ] = 32.0
    fipo_clip_range: Annotated[float, "fipo: range of a token's weight around 1; 0: no bounds.", "[0, inf)"] = 0.2
    fipo_clip_high_only: Annotated[bool, "fipo: the lowest weight is 1."] = True
    fipo_safety_threshold: Annotated[
        float,
        "fipo: probability ratio above which a token with a negative advantage has a weight of 0.8 to 1.",
        "(0, inf)",
    ] = 4.0
    importance_sampling_level: Annotated[
        Literal["token", "sequence", "sequence_token"],
        "Probability ratios per token, or per completion (GSPO, GSPO-token).",
    ] = "token"
    top_entropy_quantile: Annotated[
        float, "Train only on this share of a step's tokens, those with the highest entropy.", "(0, 1]"
    ] = 1.0
    log_entropy: Annotated[bool, "Log the policy's entropy."] = False
    rollout_importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None,
        "Weight tokens or completions by the ratio of the trainer's to the engine's probability, truncated "
        "at the threshold, or mask those above it.",
    ] = None
    rollout_importance_sampling_threshold: Annotated[
        float, "Threshold of --rollout_importance_sampling_mode.", "(0, inf)"
    ] = 2.0
    log_rollout_offpolicy_metrics: Annotated[
        bool, "Log how far the trainer's probabilities are from the engine's: rollout_correction/*."
    ] = False
    off_policy_sequence_mask_delta: Annotated[
        float | None,
        "Mask completions with a negative advantage whose mean log-probability is higher in the engine than "
        "in the trainer by more than this (DeepSeek-V3.2).",
        "(0, inf)",
    ] = None
