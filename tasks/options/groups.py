"""Options that belong together, of which options.py makes each command's. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

TEMPERATURES = 1e-3, 1e3  # sampling range beside 0; outside it a scaled logit is infinite or rounds to 0


@dataclass
class TrainingOptions:
    """Batch and length of the run"""

    micro_batch_size: Annotated[
        int, "Samples (packs, where packed) of one forward pass on one data-parallel rank.", "(0, inf)"
    ] = 1
    global_batch_size: Annotated[int, "Samples of one optimizer step: micro batch x DP x accumulation.", "(0, inf)"] = (
        16
    )
    train_iters: Annotated[
        int | None, "Optimizer steps; this or --num_train_epochs is needed (grpo: 1 epoch).", "(0, inf)"
    ] = None
    num_train_epochs: Annotated[float | None, "Passes over the data; this or --train_iters is needed.", "(0, 1e6]"] = (
        None
    )
    eval_steps: Annotated[
        int | None,
        "Evaluate every N steps where there is a validation set; left out: whenever the run is saved.",
        "(0, inf)",
    ] = None
    eval_iters: Annotated[
        int, "Global batches of one evaluation; -1: the whole validation set, 0: no evaluation.", "[-1, inf)"
    ] = -1
    seed: Annotated[int, "Seed of everything but the data (see --data_seed).", "[0, inf)"] = 42
    manual_gc: Annotated[bool, "Collect Python's garbage at fixed steps, on all ranks at once."] = False
    manual_gc_steps: Annotated[int, "Steps between two collections; 0: never.", "[0, inf)"] = 0
    manual_gc_eval: Annotated[bool, "Collect before and after an evaluation too."] = True
    dry_run: Annotated[bool, "Check and print all that needs no GPU, and train nothing."] = False


@dataclass
class OptimizerOptions:
    """Optimizer"""

    optimizer: Annotated[Literal["adam", "sgd"], "adam is AdamW."] = "adam"
    weight_decay: Annotated[float, "Weight decay, not on norms and biases.", "[0, inf)"] = 0.1
    clip_grad: Annotated[float, "Clip the gradient to this norm; 0: never.", "[0, inf)"] = 1.0
    adam_beta1: Annotated[float, "Adam's decay of the mean.", "[0, 1)"] = 0.9
    adam_beta2: Annotated[float, "Adam's decay of the variance.", "[0, 1)"] = 0.95
    adam_eps: Annotated[float, "Adam's epsilon.", "(0, inf)"] = 1e-8
    loss_spike_sigma: Annotated[
        float | None,
        "Skip the update of a step whose loss or gradient norm lies more than so many standard deviations above the "
        "mean of the last 128 steps; 6 is usual, and left out: never.",
        "(0, inf)",
    ] = None
    iterations_to_skip: Annotated[
        list[int], "Steps whose update is skipped: their data is passed over.", "[1, inf)"
    ] = field(default_factory=list)
    sgd_momentum: Annotated[float, "SGD's momentum.", "[0, 1)"] = 0.9
    lorap_lr_ratio: Annotated[
        float | None, "LoRA+: the B matrices of adapters learn at this multiple of --lr (2 to 16).", "(0, inf)"
    ] = None


@dataclass
class ScheduleOptions:
    """Learning rate"""

    lr: Annotated[float, "Highest learning rate; left out: 1e-5, and 1e-4 with LoRA.", "[0, inf)"] = None  # type: ignore[assignment]
    min_lr: Annotated[float, "Lowest learning rate, where the decay ends.", "[0, inf)"] = 0.0
    lr_decay_style: Annotated[Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"], "Decay."] = (
        "cosine"
    )
    lr_decay_iters: Annotated[int | None, "Steps until the decay ends; left out: all.", "(0, inf)"] = None
    lr_warmup_fraction: Annotated[float | None, "Share of the decay's steps that warm up.", "[0, 1)"] = None
    lr_warmup_iters: Annotated[int, "Steps that warm up (not with --lr_warmup_fraction).", "[0, inf)"] = 0
    lr_warmup_init: Annotated[float, "Learning rate at which the warmup begins.", "[0, inf)"] = 0.0
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], "WSD: shape of the last part."
    ] = "exponential"
    lr_wsd_decay_iters: Annotated[int | None, "WSD: steps of the last part; left out: a tenth.", "(0, inf)"] = None


@dataclass
class CheckpointOptions:
    """Checkpoints"""

    output_dir: Annotated[str | None, "Folder for the run; left out: megatron_output/<name of the model>."] = None
    add_version: Annotated[
        bool, "Write to a new v{N}-{time} folder in it; false: to it itself, where no run has left checkpoints."
    ] = True
    save_strategy: Annotated[Literal["steps", "epoch"], "Save every --save_steps, or after each epoch."] = "steps"
    save_steps: Annotated[int, "Steps between two checkpoints (one is always saved at the end).", "(0, inf)"] = 500
    save_total_limit: Annotated[
        int | None, "Checkpoints to keep, the newest and the best; left out: all.", "(0, inf)"
    ] = None
    metric_for_best_model: Annotated[
        str | None, "Metric of evaluations by which the best checkpoint is known; left out: eval_loss (grpo: reward)."
    ] = None
    greater_is_better: Annotated[bool | None, "Whether more of it is better; left out: unless it is a loss."] = None
    no_save_optim: Annotated[
        bool,
        "Leave the optimizer's state out of checkpoints: they are smaller, and a run cannot resume from them exactly.",
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
        "The checkpoint to resume from: its folder; latest: the newest whole one under --output_dir; auto: the same, "
        "or a new run where there is none.",
    ] = None
    finetune: Annotated[
        bool, "Begin a new run from the weights given; false: go on with the run that saved them, as resuming does."
    ] = True
    no_load_optim: Annotated[bool, "Go on with a fresh optimizer."] = False
    no_load_rng: Annotated[bool, "Go on with fresh random numbers."] = False
    ignore_data_skip: Annotated[bool, "Go on with the data from its beginning."] = False
    exit_duration_in_mins: Annotated[
        float | None, "Save and end after so many minutes (with exit code 75), to be resumed.", "(0, 1e9]"
    ] = None


@dataclass
class LoggingOptions:
    """Logging"""

    logging_steps: Annotated[int, "Steps between two log lines.", "(0, inf)"] = 5
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
    profile_step_start: Annotated[int, "The first of these steps.", "[0, inf)"] = 10
    profile_step_end: Annotated[int, "The last of them.", "[0, inf)"] = 12
    profile_ranks: Annotated[list[int], "The processes that do.", "[0, inf)"] = field(default_factory=lambda: [0])


@dataclass
class GenerationOptions:
    """Generation"""

    infer_backend: Annotated[Literal["transformers", "vllm"], "Engine."] = "transformers"
    val_dataset: Annotated[list[str], "Answer these rows and write a file; left out: a chat."] = field(
        default_factory=list
    )
    columns: Annotated[dict[str, str], 'Columns to rename, as JSON: \'{"old": "new"}\'.'] = field(default_factory=dict)
    result_path: Annotated[
        str | None, "Where the answers go; default: infer_result/ in the model's folder, for a checkpoint in its run's."
    ] = None
    system: Annotated[str | None, "System prompt."] = None
    stream: Annotated[bool, "Print the answer as it comes."] = False
    temperature: Annotated[
        float | None, "0: always the likeliest token; left out: the model's generation config.", "[0, inf)"
    ] = None
    top_p: Annotated[
        float | None, "Keep the likeliest tokens up to this mass; left out: the generation config's.", "(0, 1]"
    ] = None
    top_k: Annotated[int | None, "Keep this many tokens, -1: all; left out: the generation config's.", "[-1, inf)"] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, "Above 1: repeat less; left out: the generation config's.", "(0, inf)"
    ] = None
    max_new_tokens: Annotated[int | None, "Longest answer; left out: as long as the model allows.", "[1, inf)"] = None
    max_batch_size: Annotated[int, "Rows answered at once (transformers).", "[1, inf)"] = 1
    seed: Annotated[int, "Seed of the sampling.", "[0, inf)"] = 42
    vllm_tensor_parallel_size: Annotated[int, "vLLM: GPUs that share the model.", "[1, inf)"] = 1
    vllm_gpu_memory_utilization: Annotated[float, "vLLM: share of the GPU's memory to take.", "(0, 1]"] = 0.9
    vllm_max_model_len: Annotated[
        int | None, "vLLM: longest prompt and answer together; left out: the model's.", "[1, inf)"
    ] = None
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
    sync_ref_model: Annotated[bool, "Let the reference follow the model that is trained (TR-DPO)."] = False
    ref_model_mixup_alpha: Annotated[
        float, "sync_ref_model: the model's share in what the reference becomes; 1: the model itself.", "(0, 1]"
    ] = 0.6
    ref_model_sync_steps: Annotated[int, "sync_ref_model: steps between two times that it follows.", "[1, inf)"] = 512


@dataclass
class PrecomputeOptions(ReferenceOptions):
    """Reference model of what is known before training"""

    precompute_ref_log_probs: Annotated[
        bool, "Compute the reference's log-probabilities once, before training, and let it go."
    ] = False


@dataclass
class CompletionOptions:
    """Completions"""

    max_completion_length: Annotated[int, "Longest completion, in tokens.", "[1, inf)"] = 512
    temperature: Annotated[
        float, "Of the completions' sampling, and of the log-probabilities that are trained on.", "[0.001, 1000]"
    ] = 0.9
    top_p: Annotated[float, "Keep the likeliest tokens up to this mass.", "(0, 1]"] = 1.0
    top_k: Annotated[int, "Keep this many of the likeliest tokens; -1: all.", "[-1, inf)"] = -1
    repetition_penalty: Annotated[float, "Above 1: repeat less.", "(0, inf)"] = 1.0
    stop_words: Annotated[list[str], "Texts that end a completion, and stay in it."] = field(default_factory=list)


@dataclass
class SamplingOptions(CompletionOptions):
    """Completions"""

    num_generations: Annotated[int, "Completions of each prompt, which are compared with each other.", "[2, inf)"] = 8
    num_generations_eval: Annotated[int, "Completions of each prompt in an evaluation.", "[1, inf)"] = 1
    generation_batch_size: Annotated[
        int | None,
        "Completions that are generated at a time; left out: --global_batch_size x --steps_per_generation.",
        "[1, inf)",
    ] = None
    steps_per_generation: Annotated[int, "Optimizer steps that share what was generated at a time.", "[1, inf)"] = None  # type: ignore[assignment]
    num_iterations: Annotated[int, "Times that what was generated is gone through.", "[1, inf)"] = 1
    log_completions: Annotated[bool, "Write every completion with its rewards to completions.jsonl."] = False
    max_sampling_logp_difference: Annotated[
        float | None,
        "Stop where the engine's and the trainer's log-probabilities of a batch differ by more, in the mean over "
        "tokens.",
        "(0, inf)",
    ] = None


@dataclass
class TeacherOptions:
    """Teacher"""

    teacher_model: Annotated[
        str | None,
        "The teacher: a folder, or a hub id, of a model with the same tokenizer. It is laid out over the processes as "
        "the student is, unless flags say otherwise.",
    ] = None
    mcore_teacher_model: Annotated[str | None, "A megatron-core checkpoint, in place of --teacher_model."] = None
    teacher_model_server: Annotated[
        str | None,
        "The address (http://host:port) of a server of the teacher, `swift rollout` or `vllm serve`, in place of "
        "--teacher_model: then no process here has it. Needs --gkd_logits_topk.",
    ] = None
    teacher_model_server_api_key: Annotated[
        str | None, "The key of the teacher's server; left out: on this machine as --api_key of `swift rollout`."
    ] = None
    teacher_tensor_model_parallel_size: Annotated[
        int | None, "TP of the teacher, with SP; left out, here as below: the student's.", "[1, inf)"
    ] = None
    teacher_pipeline_model_parallel_size: Annotated[int | None, "PP of the teacher.", "[1, inf)"] = None
    teacher_context_parallel_size: Annotated[int | None, "CP of the teacher.", "[1, inf)"] = None
    teacher_expert_model_parallel_size: Annotated[int | None, "EP of the teacher.", "[1, inf)"] = None
    teacher_expert_tensor_parallel_size: Annotated[int | None, "ETP of the teacher.", "[1, inf)"] = None
    offload_teacher_model: Annotated[
        bool, "Keep the teacher's weights in the host's memory while they are not used."
    ] = False
    gkd_logits_topk: Annotated[
        int | None,
        "Compare the two over so many tokens alone, the teacher's likeliest; left out: over all.",
        "[2, inf)",
    ] = None
