"""Option class of each command, composed of groups. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from ...bridge.option_groups import group
from ...bridge.options import (
    AdapterOptions,
    BuildOptions,
    HubOptions,
    LayoutOptions,
    LoraOptions,
    McoreAdapterOptions,
    McoreOptions,
    ModelOptions,
    PredictionLayers,
    TrainableOptions,
    VisionOptions,
)
from ...templates.formats.schemas import Stage
from ...templates.options import MediaOptions, PrepareOptions
from .advantages import AdvantageOptions
from .further_models import (
    CriticOptions,
    DistillationOptions,
    PrecomputeOptions,
    RolloutReferenceOptions,
    TeacherOptions,
)
from .further_models import ReferenceOptions as ReferenceOptions  # the base of several groups
from .groups import (
    CheckpointOptions,
    CompletionOptions,
    ConversionOptions,
    GenerationOptions,
    LoggingOptions,
    OptimizerOptions,
    ProfileOptions,
    ResumeOptions,
    SamplingOptions,
    ScheduleOptions,
    TokenLossOptions,
    TrainingOptions,
)
from .multi_turn import TurnOptions
from .plan import PlanOptions as PlanOptions  # the option class of `megatron plan`
from .plugins import PluginOptions
from .policy import PolicyLossOptions
from .recipes import RecipeOptions as RecipeOptions  # the option class of `swift prepare`
from .report import ReportOptions as ReportOptions  # the option class of `megatron report`
from .rewards import RewardOptions
from .rollout import EngineOptions
from .rollout import RolloutOptions as RolloutOptions  # the option class of `swift rollout`
from .tune import TuneOptions as TuneOptions  # the option class of `megatron tune`

# Flags that select the option class of a command. Each class has its own value as the default.
RlhfType = Annotated[
    Literal["dpo", "orpo", "simpo", "cpo", "kto", "rm", "grpo", "ppo", "gkd"],
    "Algorithm: preference pairs with a reference (dpo) or without (orpo, simpo, cpo), desirable and undesirable "
    "answers (kto), a reward model (rm), rewards of generated completions (grpo; ppo: with a critic), or distillation "
    "(gkd). Each has its own flags: see --rlhf_type kto --help.",
]
TaskType = Annotated[
    Literal["causal_lm", "seq_cls", "embedding", "reranker", "generative_reranker"],
    "Task: next tokens, classification or regression, embeddings, or reranking by a score head or by two "
    "tokens. Each has its own flags: see --task_type seq_cls --help.",
]


@dataclass
class SftOptions(ModelOptions, McoreOptions, AdapterOptions, McoreAdapterOptions):
    """megatron sft"""

    tuner: TrainableOptions = group(TrainableOptions)
    lora: LoraOptions = group(LoraOptions)
    vision: VisionOptions = group(VisionOptions)
    data: PrepareOptions = group(PrepareOptions)
    build: BuildOptions = group(BuildOptions)
    training: TrainingOptions = group(TrainingOptions)
    schedule: ScheduleOptions = group(ScheduleOptions)
    optimizer: OptimizerOptions = group(OptimizerOptions)
    checkpoint: CheckpointOptions = group(CheckpointOptions)
    hub: HubOptions = group(HubOptions)
    resume: ResumeOptions = group(ResumeOptions)
    logging: LoggingOptions = group(LoggingOptions)
    profile: ProfileOptions = group(ProfileOptions)
    plugins: PluginOptions = group(PluginOptions)

    stage: ClassVar[Stage] = "sft"  # decides what a dataset row is converted to
    usual_metric: ClassVar[str] = "loss"  # default of --metric_for_best_model
    scores_documents: ClassVar[bool] = False  # whether a score head with one output replaces the output layer
    generates: ClassVar[bool] = False  # whether the trained model or a teacher generates completions
    rolls_out: ClassVar[bool] = False  # whether the trained model generates completions

    def __post_init__(self) -> None:
        """Fill in defaults that depend on other options."""
        lora = self.tuner.has_adapters
        if self.schedule.lr is None:
            self.schedule.lr = 1e-4 if lora else 1e-5
        if self.merge_lora is None and lora:
            self.merge_lora = self.checkpoint.save_safetensors


@dataclass
class PtOptions(SftOptions):
    """megatron pt"""

    data: PrepareOptions = group(PrepareOptions, loss_scale="all")
    token_loss: TokenLossOptions = group(TokenLossOptions)

    stage = "pt"


@dataclass
class DpoOptions(SftOptions):
    """DPO"""

    stage = "preference"
    rlhf_type: RlhfType = "dpo"
    reference: PrecomputeOptions = group(PrecomputeOptions)
    beta: Annotated[
        float,
        "Strength of the KL constraint: a higher value keeps the policy closer to the reference (ipo: tau).",
        "(0, inf)",
    ] = 0.1
    loss_type: Annotated[
        list[
            Literal[
                "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
                "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
            ]
        ],
        "The loss, or several losses to sum.",
    ] = field(default_factory=lambda: ["sigmoid"])  # fmt: skip
    loss_weights: Annotated[list[float], "Weight of each --loss_type. Default: 1.", "(-inf, inf)"] = field(
        default_factory=list
    )
    label_smoothing: Annotated[
        float,
        "Assumed share of swapped pairs (sigmoid, robust, exo_pair, aot, aot_unpaired).",
        "[0, 0.5)",
    ] = 0.0
    rpo_alpha: Annotated[
        float | None, "Weight of an additional cross-entropy loss on the chosen answers.", "[0, inf)"
    ] = None
    reference_free: Annotated[bool, "No reference: its log-probabilities count as 0."] = False
    f_divergence_type: Annotated[
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
        "Divergence between the policy and the reference.",
    ] = "reverse_kl"
    f_alpha_divergence_coef: Annotated[float, "alpha_divergence: its alpha.", "(-inf, inf)"] = 0.5
    discopop_tau: Annotated[float, "discopop: temperature of its two parts' mixture.", "(0, inf)"] = 0.05
    data: PrepareOptions = group(PrepareOptions, loss_scale="last_round")


@dataclass
class OrpoOptions(SftOptions):
    """ORPO"""

    stage = "preference"
    rlhf_type: RlhfType = "orpo"
    beta: Annotated[
        float,
        "Weight of the odds ratio's loss beside the chosen answers' cross-entropy (the paper's lambda).",
        "[0, inf)",
    ] = 0.1


@dataclass
class CpoOptions(SftOptions):
    """CPO"""

    stage = "preference"
    rlhf_type: RlhfType = "cpo"
    beta: Annotated[float, "Scale of the log-probabilities that are compared (ipo: tau).", "(0, inf)"] = 0.1
    loss_type: Annotated[
        Literal["sigmoid", "hinge", "ipo", "simpo"],
        "The loss. simpo and ipo compare means over an answer's tokens, the others sums.",
    ] = "sigmoid"
    label_smoothing: Annotated[float, "Assumed share of swapped pairs (sigmoid, simpo).", "[0, 0.5)"] = 0.0
    cpo_alpha: Annotated[float, "Weight of the chosen answers' cross-entropy; 0: none.", "[0, inf)"] = 1.0
    simpo_gamma: Annotated[float, "simpo: target margin of the rewards.", "[0, inf)"] = 1.0
    data: PrepareOptions = group(PrepareOptions, loss_scale="last_round")


@dataclass
class SimpoOptions(CpoOptions):
    """SimPO"""

    rlhf_type: RlhfType = "simpo"
    beta: Annotated[float, "Scale of the log-probabilities that are compared (ipo: tau).", "(0, inf)"] = 2.0
    loss_type: Annotated[
        Literal["sigmoid", "hinge", "ipo", "simpo"],
        "The loss. simpo and ipo compare means over an answer's tokens, the others sums.",
    ] = "simpo"


@dataclass
class KtoOptions(SftOptions):
    """KTO"""

    stage = "kto"
    rlhf_type: RlhfType = "kto"
    reference: PrecomputeOptions = group(PrecomputeOptions)
    beta: Annotated[
        float, "Strength of the KL constraint: a higher value keeps the policy closer to the reference.", "(0, inf)"
    ] = 0.1
    loss_type: Annotated[
        Literal["kto", "apo_zero_unpaired"],
        "Loss, with or without an estimate of the KL divergence as its reference point.",
    ] = "kto"
    desirable_weight: Annotated[float, "Weight of the desirable answers.", "[0, inf)"] = 1.0
    undesirable_weight: Annotated[float, "Weight of the undesirable answers.", "[0, inf)"] = 1.0
    data: PrepareOptions = group(PrepareOptions, loss_scale="last_round")


@dataclass
class RmOptions(SftOptions):
    """Reward model"""

    stage = "preference"
    scores_documents = True
    rlhf_type: RlhfType = "rm"
    center_rewards_coefficient: Annotated[
        float | None, "Weight of a loss that centers the rewards of a pair at 0, such as 0.01.", "[0, inf)"
    ] = None


@dataclass
class GrpoOptions(SftOptions):
    """GRPO"""

    stage = "prompts"
    usual_metric = "reward"
    generates = rolls_out = True
    rlhf_type: RlhfType = "grpo"
    reference: RolloutReferenceOptions = group(RolloutReferenceOptions)
    sampling: SamplingOptions = group(SamplingOptions)
    rewards: RewardOptions = group(RewardOptions)
    multi_turn: TurnOptions = group(TurnOptions)
    engine: EngineOptions = group(EngineOptions)
    policy: PolicyLossOptions = group(PolicyLossOptions)
    advantages: AdvantageOptions = group(AdvantageOptions)
    teacher: TeacherOptions = group(TeacherOptions)
    teacher_kl_coef: Annotated[
        float, "With a teacher: weight of its log-probability over the policy's in each token's advantage.", "[0, inf)"
    ] = 1.0
    beta: Annotated[float, "Weight of the KL divergence from the reference; 0: no reference model.", "[0, inf)"] = 0.04
    advantage_estimator: Annotated[
        Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce"],
        "Baseline that a reward is compared with; reinforce: none.",
    ] = "grpo"
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        "Scale advantages by the standard deviation of the prompt's rewards (group), of all (batch), or not. "
        "Default: group (rloo, reinforce: none, reinforce_plus_plus: batch).",
    ] = None  # type: ignore[assignment]
    kl_in_reward: Annotated[bool, "Subtract the KL divergence from the reward instead of adding it to the loss."] = (
        False
    )
    dynamic_sample: Annotated[
        bool, "Replace prompts whose completions all have the same reward by other prompts (DAPO)."
    ] = False
    max_resample_times: Annotated[int, "dynamic_sample: maximum number of resampling rounds of a step.", "[1, inf)"] = 3
    overlong_filter: Annotated[bool, "Exclude truncated completions from the loss."] = False
    router_replay_mode: Annotated[
        Literal["disabled", "R2", "R3"],
        "MoE: reuse the experts chosen in the forward pass before training (R2), or in the rollout engine (R3).",
    ] = "disabled"
    async_generate: Annotated[bool, "Generate the next completions during training (needs --vllm_mode server)."] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.num_train_epochs is None and self.training.train_iters is None:
            self.training.num_train_epochs = 1.0
        if self.sampling.steps_per_generation is None:
            self.sampling.steps_per_generation = max(
                1, (self.sampling.generation_batch_size or 0) // max(self.training.global_batch_size, 1)
            )
        if self.sampling.generation_batch_size is None:
            self.sampling.generation_batch_size = self.training.global_batch_size * self.sampling.steps_per_generation
        if self.rewards.use_gym_env is None:
            self.rewards.use_gym_env = self.multi_turn.gym_env is not None
        if self.rewards.cosine_max_len is None:
            self.rewards.cosine_max_len = self.sampling.max_completion_length
        if self.rewards.soft_max_length is None:
            self.rewards.soft_max_length = self.sampling.max_completion_length
        if self.scale_rewards is None:
            scales = {"rloo": "none", "reinforce": "none", "reinforce_plus_plus": "batch"}
            self.scale_rewards = scales.get(self.advantage_estimator, "group")  # type: ignore[assignment]
        policy = self.policy
        if policy.epsilon_high is None:
            policy.epsilon_high = 5.0 if policy.loss_type == "cispo" else policy.epsilon

    @property
    def records_old_log_probs(self) -> bool:
        """Return whether the policy's log-probabilities are computed before the steps on a rollout batch."""
        steps = (self.sampling.steps_per_generation or 1) * self.sampling.num_iterations
        return steps > 1 or self.kl_in_reward or self.router_replay_mode == "R2"


@dataclass
class PpoOptions(GrpoOptions):
    """PPO"""

    rlhf_type: RlhfType = "ppo"
    critic: CriticOptions = group(CriticOptions)
    sampling: SamplingOptions = group(SamplingOptions, num_generations=1)
    policy: PolicyLossOptions = group(PolicyLossOptions, loss_type="dapo")
    advantages: AdvantageOptions = group(AdvantageOptions, whiten_advantages=True)
    beta: Annotated[float, "Weight of the KL divergence from the reference; 0: no reference model.", "[0, inf)"] = 0.05
    kl_in_reward: Annotated[
        bool, "Subtract the KL divergence from the reward of each token; false: add it to the loss."
    ] = True

    @property
    def records_old_log_probs(self) -> bool:
        return True


@dataclass
class GkdOptions(SftOptions):
    """GKD"""

    rlhf_type: RlhfType = "gkd"
    teacher: DistillationOptions = group(DistillationOptions)
    sampling: CompletionOptions = group(CompletionOptions)
    multi_turn: TurnOptions = group(TurnOptions)
    engine: EngineOptions = group(EngineOptions)
    lmbda: Annotated[
        float, "Share of the steps that train on the student's completions instead of the data's answers.", "[0, 1]"
    ] = 0.5
    beta: Annotated[
        float,
        "Generalized Jensen-Shannon divergence: 0 is the forward KL divergence, 1 the reverse.",
        "[0, 1]",
    ] = 0.5
    seq_kd: Annotated[bool, "Train on the teacher's completions instead of the data's answers."] = False
    sft_alpha: Annotated[
        float,
        "Weight of an additional cross-entropy loss on the answers, in steps without the student's completions.",
        "[0, inf)",
    ] = 0.0
    data: PrepareOptions = group(PrepareOptions, loss_scale="last_round")

    @property
    def stage(self) -> Stage:
        """Return the stage, in which rows need answers only if some steps train on them."""
        return "asked" if self.seq_kd or self.lmbda == 1 else "answered"

    @property
    def generates(self) -> bool:
        """Return whether the student or the teacher generates completions."""
        return self.rolls_out or self.seq_kd

    @property
    def rolls_out(self) -> bool:
        """Return whether the student generates completions."""
        return self.lmbda > 0


@dataclass
class CausalLmOptions(SftOptions):
    """Task"""

    task_type: TaskType = "causal_lm"
    token_loss: TokenLossOptions = group(TokenLossOptions)


@dataclass
class SeqClsOptions(SftOptions):
    """Classification"""

    stage = "seq_cls"
    task_type: TaskType = "seq_cls"
    num_labels: Annotated[int | None, "Outputs of the head. Default: those of the checkpoint's head.", "(0, inf)"] = (
        None
    )
    problem_type: Annotated[
        Literal["regression", "single_label_classification", "multi_label_classification"] | None,
        "One class, several classes, or numbers. Default: the checkpoint's, else derived from the labels.",
    ] = None


@dataclass
class EmbeddingOptions(SftOptions):
    """Embedding"""

    stage = "embedding"
    task_type: TaskType = "embedding"
    loss_type: Annotated[
        Literal["infonce", "contrastive", "online_contrastive", "cosine_similarity"],
        "Loss: positives among negatives (infonce), labelled pairs (contrastive), or scored pairs (cosine_similarity).",
    ] = "infonce"
    pooling: Annotated[Literal["last", "mean"], "Pooling of a text's hidden states: the last token's, or the mean."] = (
        "last"
    )
    mrl_dims: Annotated[
        list[int],
        "Matryoshka: also train the first N dimensions as embeddings, for each N.",
        "[1, inf)",
    ] = field(default_factory=list)
    mrl_weights: Annotated[list[float], "Weight of each of --mrl_dims. Default: 1.", "(-inf, inf)"] = field(
        default_factory=list
    )
    infonce_temperature: Annotated[float, "infonce: temperature of the similarities.", "(0, inf)"] = 0.1
    infonce_use_batch: Annotated[bool, "In-batch negatives, across data-parallel ranks."] = True
    contrastive_margin: Annotated[
        float, "contrastive, online_contrastive: margin between the texts of a negative pair.", "[0, inf)"
    ] = 0.5


@dataclass
class RerankerOptions(SftOptions):
    """Reranker"""

    stage = "reranker"
    scores_documents = True
    task_type: TaskType = "reranker"
    loss_type: Annotated[
        Literal["pointwise_reranker", "listwise_reranker"],
        "Loss per document (relevant or not), or per list (the positive among its negatives).",
    ] = "pointwise_reranker"
    listwise_temperature: Annotated[float, "listwise_reranker: temperature of the scores.", "(0, inf)"] = 1.0


@dataclass
class GenerativeRerankerOptions(RerankerOptions):
    """Generative reranker"""

    scores_documents = False
    task_type: TaskType = "generative_reranker"
    positive_token: Annotated[str, "Token for a relevant document."] = "yes"
    negative_token: Annotated[str, "Token for an irrelevant document."] = "no"


@dataclass
class ExportOptions(
    ModelOptions, McoreOptions, AdapterOptions, McoreAdapterOptions, PredictionLayers, ConversionOptions, HubOptions
):
    """swift export"""

    def __post_init__(self) -> None:
        if self.quant_method and not self.to_mcore:
            self.to_hf = True
        if self.merge_lora is None:
            self.merge_lora = self.mcore_adapter is not None or (self.to_hf and bool(self.adapters))


@dataclass
class MegatronExportOptions(ExportOptions, LayoutOptions):
    """megatron export"""

    fp8_format: Annotated[Literal["e4m3"] | None, "With --fp8_param_gather true: --quant_method fp8."] = None
    fp8_recipe: Annotated[Literal["blockwise"] | None, "With --fp8_param_gather true: --quant_method fp8."] = None
    fp8_param_gather: Annotated[bool, "Write an FP8 checkpoint, as --quant_method fp8."] = False
    # Very long, because other ranks wait while one writes.
    ddp_timeout: Annotated[int, "Timeout of collectives, in seconds.", "(0, inf)"] = 18_000_000

    def __post_init__(self) -> None:
        if self.fp8_param_gather:
            self.quant_method = "fp8"
        super().__post_init__()


@dataclass
class InferOptions(ModelOptions, AdapterOptions, GenerationOptions, MediaOptions):
    """swift infer"""
