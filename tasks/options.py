"""What the training loop reads, and the option set of each command. No torch here: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from ..bridge.options import (
    AdapterOptions,
    BuildOptions,
    LayoutOptions,
    LoraOptions,
    McoreAdapterOptions,
    McoreOptions,
    ModelOptions,
    PredictionLayers,
    TrainableOptions,
)
from ..templates.formats import Stage
from ..templates.options import PrepareOptions
from .rewards.options import RewardOptions
from .rollout.options import EngineOptions
from .rollout.options import RolloutOptions as RolloutOptions  # a command's, as those below

# The flags that choose among the option sets of a command: each set has its own as its default.
RlhfType = Annotated[
    Literal["dpo", "kto", "rm", "grpo", "gkd"],
    "What is trained: a policy by pairs of answers, one by single answers, a reward model, a policy by rewards of what "
    "it generates, or a student by a teacher. Each has flags of its own: --rlhf_type kto --help shows them.",
]
TaskType = Annotated[
    Literal["causal_lm", "seq_cls", "embedding", "reranker", "generative_reranker"],
    "What is trained: the next token, classes or numbers, vectors, or a score of documents by a head or by two tokens. "
    "Each has flags of its own: --task_type seq_cls --help shows them.",
]


@dataclass
class BatchOptions:
    """Batch and length of the run"""

    micro_batch_size: Annotated[int, "Samples (packs, where packed) of one forward pass on one data-parallel rank."] = 1
    global_batch_size: Annotated[int, "Samples of one optimizer step: micro batch x DP x accumulation."] = 16
    train_iters: Annotated[int | None, "Optimizer steps; this or --num_train_epochs is needed."] = None
    num_train_epochs: Annotated[float | None, "Passes over the data; this or --train_iters is needed."] = None
    eval_steps: Annotated[
        int | None, "Evaluate every N steps where there is a validation set; left out: whenever the run is saved."
    ] = None
    eval_iters: Annotated[int, "Global batches of one evaluation; -1: the whole validation set, 0: no evaluation."] = -1
    seed: Annotated[int, "Seed of everything but the data (see --data_seed)."] = 42
    manual_gc: Annotated[bool, "Collect Python's garbage at fixed steps, on all ranks at once."] = False
    manual_gc_steps: Annotated[int, "Steps between two collections; 0: never."] = 0
    manual_gc_eval: Annotated[bool, "Collect before and after an evaluation too."] = True
    dry_run: Annotated[bool, "Check and print all that needs no GPU, and train nothing."] = False


@dataclass
class OptimizerOptions:
    """Optimizer"""

    optimizer: Annotated[Literal["adam", "sgd"], "adam is AdamW."] = "adam"
    weight_decay: Annotated[float, "Weight decay, not on norms and biases."] = 0.1
    clip_grad: Annotated[float, "Clip the gradient to this norm; 0: never."] = 1.0
    adam_beta1: Annotated[float, "Adam's decay of the mean."] = 0.9
    adam_beta2: Annotated[float, "Adam's decay of the variance."] = 0.95
    adam_eps: Annotated[float, "Adam's epsilon."] = 1e-8
    sgd_momentum: Annotated[float, "SGD's momentum."] = 0.9
    lorap_lr_ratio: Annotated[
        float | None, "LoRA+: the B matrices of adapters learn at this multiple of --lr (2 to 16)."
    ] = None


@dataclass
class ScheduleOptions:
    """Learning rate"""

    lr: Annotated[float, "Highest learning rate; left out: 1e-5, and 1e-4 with LoRA."] = None  # type: ignore[assignment]
    min_lr: Annotated[float, "Lowest learning rate, where the decay ends."] = 0.0
    lr_decay_style: Annotated[Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"], "Decay."] = (
        "cosine"
    )
    lr_decay_iters: Annotated[int | None, "Steps until the decay ends; left out: all."] = None
    lr_warmup_fraction: Annotated[float | None, "Share of the decay's steps that warm up."] = None
    lr_warmup_iters: Annotated[int, "Steps that warm up (not with --lr_warmup_fraction)."] = 0
    lr_warmup_init: Annotated[float, "Learning rate at which the warmup begins."] = 0.0
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], "WSD: shape of the last part."
    ] = "exponential"
    lr_wsd_decay_iters: Annotated[int | None, "WSD: steps of the last part; left out: a tenth."] = None


@dataclass
class CheckpointOptions:
    """Checkpoints"""

    output_dir: Annotated[str | None, "Folder for the run; left out: megatron_output/<name of the model>."] = None
    add_version: Annotated[bool, "Write to a new v{N}-{time} folder in it."] = True
    save_strategy: Annotated[Literal["steps", "epoch"], "Save every --save_steps, or after each epoch."] = "steps"
    save_steps: Annotated[int, "Steps between two checkpoints (one is always saved at the end)."] = 500
    save_total_limit: Annotated[int | None, "Checkpoints to keep, the newest and the best; left out: all."] = None
    metric_for_best_model: Annotated[
        str | None, "Metric of evaluations by which the best checkpoint is known; left out: eval_loss (grpo: reward)."
    ] = None
    greater_is_better: Annotated[bool | None, "Whether more of it is better; left out: unless it is a loss."] = None
    no_save_optim: Annotated[
        bool,
        "Leave the optimizer's state out of checkpoints: they are smaller, and a run cannot go on from them exactly.",
    ] = False
    no_save_rng: Annotated[bool, "Leave the states of random numbers out of checkpoints."] = False
    async_save: Annotated[bool, "Copy what a checkpoint has to the host, and train on while it is written."] = False
    save_safetensors: Annotated[
        bool, "Save Hugging Face folders; false: megatron-core checkpoints, with which --mcore_model goes on."
    ] = True
    max_shard_size: Annotated[str, "Largest safetensors file, as in 5GB or 500MB."] = "5GB"


@dataclass
class ResumeOptions:
    """Resuming"""

    resume_from_checkpoint: Annotated[
        str | None,
        "The checkpoint to go on from: its folder; latest: the newest whole one under --output_dir; auto: the same, "
        "or a new run where there is none.",
    ] = None
    finetune: Annotated[
        bool, "Begin a new run from the weights given; false: go on with the run that saved them, as resuming does."
    ] = True
    no_load_optim: Annotated[bool, "Go on with a fresh optimizer."] = False
    no_load_rng: Annotated[bool, "Go on with fresh random numbers."] = False
    ignore_data_skip: Annotated[bool, "Go on with the data from its beginning."] = False
    exit_duration_in_mins: Annotated[
        float | None, "Save and end after so many minutes (with exit code 75), to be resumed."
    ] = None


@dataclass
class LoggingOptions:
    """Logging"""

    logging_steps: Annotated[int, "Steps between two log lines."] = 5
    report_to: Annotated[list[Literal["tensorboard", "wandb", "swanlab", "none"]], "Where metrics go as well."] = field(
        default_factory=lambda: ["tensorboard"]
    )
    tensorboard_dir: Annotated[str | None, "TensorBoard's folder; left out: runs/ in the run's folder."] = None
    wandb_project: Annotated[str, "wandb: project."] = "megaswift"
    wandb_exp_name: Annotated[str | None, "wandb: name of the run; left out: the folder's."] = None
    swanlab_project: Annotated[str, "swanlab: project."] = "megaswift"
    swanlab_exp_name: Annotated[str | None, "swanlab: name of the run; left out: the folder's."] = None


@dataclass
class ProfileOptions:
    """Profiling"""

    profile: Annotated[
        bool, "Write a trace of some steps, which it slows, and a table of their kernels, to profile/."
    ] = False
    profile_step_start: Annotated[int, "The first of these steps."] = 10
    profile_step_end: Annotated[int, "The last of them."] = 12
    profile_ranks: Annotated[list[int], "The processes that do."] = field(default_factory=lambda: [0])


@dataclass
class GenerationOptions:
    """Generation"""

    infer_backend: Annotated[Literal["transformers", "vllm"], "Engine."] = "transformers"
    val_dataset: Annotated[list[str], "Answer these rows and write a file; left out: a chat."] = field(
        default_factory=list
    )
    result_path: Annotated[str | None, "Where the answers go; left out: infer_result/ in the model's folder."] = None
    system: Annotated[str | None, "System prompt."] = None
    stream: Annotated[bool, "Print the answer as it comes."] = False
    temperature: Annotated[float | None, "0: always the likeliest token; left out: the model's generation config."] = (
        None
    )
    top_p: Annotated[float | None, "Keep the likeliest tokens up to this mass; left out: the generation config's."] = (
        None
    )
    top_k: Annotated[int | None, "Keep this many tokens, -1: all; left out: the generation config's."] = None
    repetition_penalty: Annotated[float | None, "Above 1: repeat less; left out: the generation config's."] = None
    max_new_tokens: Annotated[int | None, "Longest answer; left out: as long as the model allows."] = None
    max_batch_size: Annotated[int, "Rows answered at once (transformers)."] = 1
    seed: Annotated[int, "Seed of the sampling."] = 42
    vllm_tensor_parallel_size: Annotated[int, "vLLM: GPUs that share the model."] = 1
    vllm_gpu_memory_utilization: Annotated[float, "vLLM: share of the GPU's memory to take."] = 0.9
    vllm_max_model_len: Annotated[int | None, "vLLM: longest prompt and answer together; left out: the model's."] = None
    vllm_enforce_eager: Annotated[bool, "vLLM: no CUDA graphs (starts sooner, runs slower)."] = False


@dataclass
class ConversionOptions:
    """Conversion"""

    to_mcore: Annotated[bool, "From --model to a megatron-core checkpoint."] = False
    to_hf: Annotated[bool, "From --mcore_model to a Hugging Face folder."] = False
    output_dir: Annotated[
        str | None, "The folder to make; left out: <model>-mcore or <model>-hf, beside a model folder, else here."
    ] = None
    exist_ok: Annotated[bool, "Replace the folder of an earlier export."] = False
    test_convert_precision: Annotated[
        bool, "Compare both models' logits on several texts, and fail (leaving no folder) where they are apart."
    ] = False
    max_shard_size: Annotated[str, "to_hf: largest safetensors file, as in 5GB or 500MB."] = "5GB"


@dataclass
class ReferenceOptions:
    """Reference model"""

    ref_model: Annotated[
        str | None,
        "The reference: a folder, or a hub id; left out: the model as it is when training begins, with LoRA without "
        "the adapter.",
    ] = None
    mcore_ref_model: Annotated[str | None, "A megatron-core checkpoint, in place of --ref_model."] = None
    ref_adapters: Annotated[
        list[str], "The folder of an adapter (or its hub id) that makes the model the reference."
    ] = field(default_factory=list)
    offload_ref_model: Annotated[bool, "Keep the reference's weights in the host's memory while they are not used."] = (
        False
    )


@dataclass
class PrecomputeOptions(ReferenceOptions):
    """Reference model of what is known before training"""

    precompute_ref_log_probs: Annotated[
        bool, "Compute the reference's log-probabilities once, before training, and let it go."
    ] = False


@dataclass
class CompletionOptions:
    """Completions"""

    max_completion_length: Annotated[int, "Longest completion, in tokens."] = 512
    temperature: Annotated[float, "Of the completions' sampling, and of the log-probabilities that are trained on."] = (
        0.9
    )
    top_p: Annotated[float, "Keep the likeliest tokens up to this mass."] = 1.0
    top_k: Annotated[int, "Keep this many of the likeliest tokens; -1: all."] = -1
    repetition_penalty: Annotated[float, "Above 1: repeat less."] = 1.0
    stop_words: Annotated[list[str], "Texts that end a completion, and stay in it."] = field(default_factory=list)


@dataclass
class SamplingOptions(CompletionOptions):
    """Completions"""

    num_generations: Annotated[int, "Completions of each prompt, which are compared with each other."] = 8
    num_generations_eval: Annotated[int, "Completions of each prompt in an evaluation."] = 1
    generation_batch_size: Annotated[
        int | None, "Completions that are generated at a time; left out: --global_batch_size x --steps_per_generation."
    ] = None
    steps_per_generation: Annotated[int, "Optimizer steps that share what was generated at a time."] = None  # type: ignore[assignment]
    num_iterations: Annotated[int, "Times that what was generated is gone through."] = 1
    log_completions: Annotated[bool, "Write every completion with its rewards to completions.jsonl."] = False
    max_logprob_gap: Annotated[
        float | None,
        "Stop where the engine's and the trainer's log-probabilities of a batch differ by more, in the mean over "
        "tokens.",
    ] = None


@dataclass
class SftOptions(
    ModelOptions,
    McoreOptions,
    TrainableOptions,
    LoraOptions,
    AdapterOptions,
    McoreAdapterOptions,
    PrepareOptions,
    BatchOptions,
    ScheduleOptions,
    OptimizerOptions,
    BuildOptions,
    CheckpointOptions,
    ResumeOptions,
    LoggingOptions,
    ProfileOptions,
):
    """megatron sft"""

    stage: ClassVar[Stage] = "sft"  # what templates make of a row
    usual_metric: ClassVar[str] = "loss"  # by which the best checkpoint is known

    def __post_init__(self) -> None:
        """Fill in what is left out and follows from other options."""
        lora = self.tuner_type == "lora"
        if self.lr is None:
            self.lr = 1e-4 if lora else 1e-5
        if self.merge_lora is None and lora:
            self.merge_lora = self.save_safetensors


@dataclass
class PtOptions(SftOptions):
    """megatron pt"""

    stage = "pt"
    loss_scale: Literal["default", "last_round", "all"] = "all"


@dataclass
class DpoOptions(PrecomputeOptions, SftOptions):
    """DPO"""

    stage = "preference"
    rlhf_type: RlhfType = "dpo"
    beta: Annotated[float, "Higher: the policy stays nearer to the reference (ipo: tau)."] = 0.1
    loss_type: Annotated[
        list[
            Literal[
                "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
                "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
            ]
        ],
        "The loss, or several that are summed.",
    ] = field(default_factory=lambda: ["sigmoid"])  # fmt: skip
    loss_weights: Annotated[list[float], "The weight of each of --loss_type; left out: 1."] = field(
        default_factory=list
    )
    label_smoothing: Annotated[
        float, "Share of the pairs taken to be the wrong way round (sigmoid, robust, exo_pair, aot, aot_unpaired)."
    ] = 0.0
    rpo_alpha: Annotated[float | None, "Weight of the chosen answers' own loss per token, beside the others."] = None
    reference_free: Annotated[bool, "No reference: its log-probabilities count as 0."] = False
    f_divergence_type: Annotated[
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
        "How the distance from the reference is measured.",
    ] = "reverse_kl"
    f_alpha_divergence_coef: Annotated[float, "alpha_divergence: its alpha."] = 0.5
    discopop_tau: Annotated[float, "discopop: temperature of its two parts' mixture."] = 0.05
    loss_scale: Literal["default", "last_round", "all"] = "last_round"


@dataclass
class KtoOptions(PrecomputeOptions, SftOptions):
    """KTO"""

    stage = "kto"
    rlhf_type: RlhfType = "kto"
    beta: Annotated[float, "Higher: the policy stays nearer to the reference."] = 0.1
    loss_type: Annotated[
        Literal["kto", "apo_zero_unpaired"], "The loss: with a KL estimate as its zero, or without one."
    ] = "kto"
    desirable_weight: Annotated[float, "Weight of the answers that are wanted."] = 1.0
    undesirable_weight: Annotated[float, "Weight of those that are not."] = 1.0
    loss_scale: Literal["default", "last_round", "all"] = "last_round"


@dataclass
class RmOptions(SftOptions):
    """Reward model"""

    stage = "preference"
    rlhf_type: RlhfType = "rm"
    center_rewards_coefficient: Annotated[
        float | None, "Weight of a loss that keeps the mean reward of a pair at 0 (0.01, for instance)."
    ] = None


@dataclass
class GrpoOptions(ReferenceOptions, SamplingOptions, RewardOptions, EngineOptions, SftOptions):
    """GRPO"""

    stage = "prompts"
    usual_metric = "reward"
    rlhf_type: RlhfType = "grpo"
    beta: Annotated[float, "Weight of the KL divergence from the reference; 0: there is none."] = 0.04
    epsilon: Annotated[float, "How far below 1 a ratio of probabilities counts."] = 0.2
    epsilon_high: Annotated[float | None, "How far above 1; left out: --epsilon (cispo: 5)."] = None
    delta: Annotated[float | None, "Bound of the ratio itself, above 1 + epsilon (two-sided clipping)."] = None
    loss_type: Annotated[
        Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"],
        "The loss, and what it is a mean over: completions (grpo, sapo), tokens of a micro batch (bnpo), of the step "
        "(dapo, cispo), or completions of the greatest length (dr_grpo).",
    ] = "grpo"
    tau_pos: Annotated[float, "sapo: temperature where the advantage is positive."] = 1.0
    tau_neg: Annotated[float, "sapo: where it is not."] = 1.05
    importance_sampling_level: Annotated[
        Literal["token", "sequence", "sequence_token"], "Ratios of tokens, or of whole completions (GSPO, GSPO-token)."
    ] = "token"
    advantage_estimator: Annotated[
        Literal["grpo", "rloo", "reinforce_plus_plus"], "What a reward is compared with."
    ] = "grpo"
    scale_rewards: Annotated[
        Literal["group", "batch", "none"],
        "What advantages are divided by: the standard deviation of the prompt's rewards, of all, or nothing; left "
        "out: group (rloo: none, reinforce_plus_plus: batch).",
    ] = None  # type: ignore[assignment]
    kl_in_reward: Annotated[bool, "Take the KL divergence off the reward, in place of adding it to the loss."] = False
    dynamic_sample: Annotated[
        bool, "Generate anew in place of prompts whose completions all have the same reward (DAPO)."
    ] = False
    max_resample_times: Annotated[int, "dynamic_sample: so often at most, for a step."] = 3
    overlong_filter: Annotated[bool, "Leave completions that were cut off out of the loss."] = False
    top_entropy_quantile: Annotated[
        float, "Train only on this share of a step's tokens, those at which the policy was the least certain."
    ] = 1.0
    log_entropy: Annotated[bool, "Log how uncertain the policy is at its tokens."] = False
    rollout_importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None,
        "Weigh tokens (or completions) by the trainer's probability over the engine's, at most the threshold, or "
        "leave out those beyond it.",
    ] = None
    rollout_importance_sampling_threshold: Annotated[float, "The highest weight, or (mask) what is left out."] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_per_generation is None:
            self.steps_per_generation = max(1, (self.generation_batch_size or 0) // max(self.global_batch_size, 1))
        if self.generation_batch_size is None:
            self.generation_batch_size = self.global_batch_size * self.steps_per_generation
        if self.cosine_max_len is None:
            self.cosine_max_len = self.max_completion_length
        if self.soft_max_length is None:
            self.soft_max_length = self.max_completion_length
        if self.scale_rewards is None:
            self.scale_rewards = {"rloo": "none", "reinforce_plus_plus": "batch"}.get(self.advantage_estimator, "group")  # type: ignore[assignment]
        if self.epsilon_high is None:
            self.epsilon_high = 5.0 if self.loss_type == "cispo" else self.epsilon


@dataclass
class TeacherOptions:
    """Teacher"""

    teacher_model: Annotated[
        str | None,
        "The teacher: a folder, or a hub id, of a model with the same tokenizer. It is laid out over the processes as "
        "the student is.",
    ] = None
    mcore_teacher_model: Annotated[str | None, "A megatron-core checkpoint, in place of --teacher_model."] = None
    offload_teacher_model: Annotated[
        bool, "Keep the teacher's weights in the host's memory while they are not used."
    ] = False
    gkd_logits_topk: Annotated[
        int | None, "Compare the two over so many tokens alone, the teacher's likeliest; left out: over all."
    ] = None


@dataclass
class GkdOptions(TeacherOptions, CompletionOptions, EngineOptions, SftOptions):
    """GKD"""

    rlhf_type: RlhfType = "gkd"
    lmbda: Annotated[float, "Share of the steps that are on what the student generates, not on the data's answers."] = (
        0.5
    )
    beta: Annotated[
        float,
        "The divergence: 0 the teacher's from the student (forward KL), 1 the reverse, between a mixture of both.",
    ] = 0.5
    temperature: Annotated[float, "Of the completions' sampling, and of both models where they are compared."] = 0.9
    seq_kd: Annotated[bool, "Let the teacher generate in the place of the data's answers."] = False
    sft_alpha: Annotated[
        float, "Weight of the answers' own loss per token, beside the divergence; not of what the student generates."
    ] = 0.0
    loss_scale: Literal["default", "last_round", "all"] = "last_round"

    @property
    def stage(self) -> Stage:
        """Answers are needed where steps are on them."""
        return "asked" if self.seq_kd or self.lmbda == 1 else "answered"


@dataclass
class CausalLmOptions(SftOptions):
    """Task"""

    task_type: TaskType = "causal_lm"


@dataclass
class SeqClsOptions(SftOptions):
    """Classification"""

    stage = "seq_cls"
    task_type: TaskType = "seq_cls"
    num_labels: Annotated[int | None, "Outputs of the head; left out: those that the checkpoint's head has."] = None
    problem_type: Annotated[
        Literal["single_label_classification", "multi_label_classification", "regression"] | None,
        "One class of several, any number of them, or numbers; left out: the checkpoint's, else what the labels are.",
    ] = None


@dataclass
class EmbeddingOptions(SftOptions):
    """Embedding"""

    stage = "embedding"
    task_type: TaskType = "embedding"
    loss_type: Annotated[
        Literal["infonce", "contrastive", "online_contrastive", "cosine_similarity"],
        "Find the positive among others, or (with labels) push pairs together and apart, or to a score.",
    ] = "infonce"
    pooling: Annotated[Literal["last", "mean"], "A text's vector: its last token's, or the mean of all."] = "last"
    mrl_dims: Annotated[
        list[int], "Matryoshka: train the vectors' first so many dimensions to be vectors of their own, too."
    ] = field(default_factory=list)
    mrl_weights: Annotated[list[float], "The weight of each of --mrl_dims; left out: 1."] = field(default_factory=list)
    infonce_temperature: Annotated[float, "infonce: similarities are divided by it."] = 0.1
    infonce_use_batch: Annotated[bool, "In-batch negatives, across data-parallel ranks."] = True
    contrastive_margin: Annotated[float, "contrastive, online_contrastive: how far apart is far enough."] = 0.5


@dataclass
class RerankerOptions(SftOptions):
    """Reranker"""

    stage = "reranker"
    task_type: TaskType = "reranker"
    loss_type: Annotated[
        Literal["pointwise_reranker", "listwise_reranker"],
        "Each document is relevant or not, or the positive is found among its negatives.",
    ] = "pointwise_reranker"
    listwise_temperature: Annotated[float, "listwise_reranker: scores are divided by it."] = 1.0


@dataclass
class GenerativeRerankerOptions(RerankerOptions):
    """Generative reranker"""

    task_type: TaskType = "generative_reranker"
    positive_token: Annotated[str, "The token that says a document is relevant."] = "yes"
    negative_token: Annotated[str, "The one that says it is not."] = "no"


@dataclass
class ExportOptions(
    ModelOptions, McoreOptions, AdapterOptions, McoreAdapterOptions, PredictionLayers, ConversionOptions
):
    """swift export"""

    def __post_init__(self) -> None:
        if self.merge_lora is None:
            self.merge_lora = self.mcore_adapter is not None


@dataclass
class MegatronExportOptions(ExportOptions, LayoutOptions):
    """megatron export"""

    # A process may write for long, and others wait for it.
    ddp_timeout: Annotated[int, "Seconds after which a collective that waits is an error."] = 18_000_000


@dataclass
class InferOptions(ModelOptions, AdapterOptions, GenerationOptions):
    """swift infer"""
