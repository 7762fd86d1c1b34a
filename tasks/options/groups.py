"""Groups of options, composed to option classes in options/__init__.py. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

TEMPERATURES = 1e-3, 1e3  # allowed range besides 0: outside it a scaled logit is infinite or rounds to 0


@dataclass
class TrainingOptions:
    """Batch and length of the run"""

    micro_batch_size: Annotated[
        int,
        "Samples, or packs with --packing true, of one forward pass of a data-parallel rank; auto: as many as "
        "fit by the plan (docs/plan.md) and are not slower. Default on GPUs, of pt and sft: as few as are about as "
        "fast, where the plan's memory has been measured; else 1.",
        "(0, inf)",
        "auto",
    ] = 1
    global_batch_size: Annotated[int, "Samples of one optimizer step: micro batch x DP x accumulation.", "(0, inf)"] = (
        16
    )
    train_iters: Annotated[
        int | None, "Optimizer steps. Set this or --num_train_epochs (grpo: 1 epoch).", "(0, inf)"
    ] = None
    num_train_epochs: Annotated[float | None, "Epochs. Set this or --train_iters.", "(0, 1e6]"] = None
    eval_steps: Annotated[
        int | None,
        "Steps between evaluations. Default: at each checkpoint.",
        "(0, inf)",
    ] = None
    eval_on_start: Annotated[bool, "Also evaluate before the first step."] = False
    eval_iters: Annotated[
        int, "Global batches of an evaluation; -1: the whole validation set, 0: no evaluation.", "[-1, inf)"
    ] = -1
    seed: Annotated[int, "Random seed of all but the data (see --data_seed).", "[0, inf)"] = 42
    manual_gc: Annotated[bool, "Run Python's garbage collector at the same steps on all ranks."] = False
    manual_gc_steps: Annotated[int, "Steps between garbage collections; 0: never.", "[0, inf)"] = 0
    manual_gc_eval: Annotated[bool, "Also collect garbage before and after an evaluation."] = True
    plan: Annotated[
        Literal["check", "auto", "off"],
        "On GPUs: refuse a run that cannot fit, before the weights are read (check), or start it in any case, with "
        "--micro_batch_size 1 by default (off); "
        "auto: take the fastest layout that fits, within the flags that are set (docs/plan.md).",
    ] = "check"
    dry_run: Annotated[bool, "Check options, model and data, print the plan, and do not train."] = False
    use_ray: Annotated[
        bool,
        "Start the processes, and the servers of --rollout_num_gpus, on the nodes of a Ray cluster: that of "
        "RAY_ADDRESS, or of this machine.",
    ] = False


@dataclass
class TokenLossOptions:
    """Loss of tokens"""

    enable_dft_loss: Annotated[
        bool, "Dynamic fine-tuning: weight each token's loss by the probability that the model gives it."
    ] = False


@dataclass
class OptimizerOptions:
    """Optimizer"""

    optimizer: Annotated[
        Literal["adam", "sgd", "muon", "dist_muon"],
        "Optimizer; adam is AdamW; muon: Muon on the layers' matrices, AdamW on the rest; dist_muon: its state is "
        "divided among data-parallel ranks.",
    ] = "adam"
    weight_decay: Annotated[float, "Weight decay of all but norms and biases.", "[0, inf)"] = 0.1
    apply_wd_to_qk_layernorm: Annotated[
        bool, "Weight decay also of the norms of queries and keys, as Qwen3-Next was trained."
    ] = False
    clip_grad: Annotated[float, "Maximum gradient norm; 0: no clipping.", "[0, inf)"] = 1.0
    adam_beta1: Annotated[float, "Adam: decay rate of the first moment.", "[0, 1)"] = 0.9
    adam_beta2: Annotated[float, "Adam: decay rate of the second moment.", "[0, 1)"] = 0.95
    adam_eps: Annotated[float, "Adam: epsilon.", "(0, inf)"] = 1e-8
    loss_spike_sigma: Annotated[
        float | None,
        "Skip the update of a step whose loss or gradient norm is this many standard deviations above the "
        "mean of the last 128 steps, such as 6. Default: never.",
        "(0, inf)",
    ] = None
    iterations_to_skip: Annotated[list[int], "Steps whose update is skipped, with their data.", "[1, inf)"] = field(
        default_factory=list
    )
    sgd_momentum: Annotated[float, "SGD: momentum.", "[0, 1)"] = 0.9
    muon_lr: Annotated[float | None, "Muon: peak learning rate of the matrices. Default: --lr.", "[0, inf)"] = None
    muon_min_lr: Annotated[float | None, "Muon: the matrices' --min_lr. Default: --min_lr.", "[0, inf)"] = None
    muon_momentum: Annotated[float, "Muon: momentum.", "[0, 1)"] = 0.9
    muon_use_nesterov: Annotated[bool, "Muon: Nesterov momentum."] = False
    muon_num_ns_steps: Annotated[int, "Muon: steps of the Newton-Schulz iteration.", "[1, inf)"] = 5
    muon_coefficient_type: Annotated[
        Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"],
        "Muon: coefficients of the Newton-Schulz iteration.",
    ] = "quintic"
    muon_fp32_matmul_prec: Annotated[
        Literal["medium", "high", "highest"], "Muon: precision of the Newton-Schulz iteration; medium: bf16."
    ] = "medium"
    muon_scale_mode: Annotated[
        Literal["spectral", "unit_rms_norm", "shape_scaling"],
        "Muon: scale of an update of a matrix [out, in]: sqrt(max(out, in)), sqrt(out / in), sqrt(max(1, out / in)).",
    ] = "spectral"
    muon_extra_scale_factor: Annotated[float, "Muon: further scale of an update.", "(0, inf)"] = 1.0
    muon_split_qkv: Annotated[bool, "Muon: orthogonalize queries, keys and values separately."] = True
    muon_tp_mode: Annotated[
        Literal["duplicated", "distributed", "blockwise"],
        "Muon under tensor parallelism: each rank iterates on the whole matrix, its shard with all-reduces, or its "
        "shard alone, which is another update in each layout.",
    ] = "duplicated"
    optimizer_cpu_offload: Annotated[
        bool, "Keep AdamW's state in host memory, from where it visits the GPU for its update."
    ] = False
    optimizer_offload_fraction: Annotated[
        float, "Share of the parameters whose state --optimizer_cpu_offload keeps on the host.", "[0, 1]"
    ] = 1.0
    exp_avg_dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"],
        "AdamW: type of the first moment; fp16 and fp8 have a scale per 256 values.",
    ] = "fp32"
    exp_avg_sq_dtype: Annotated[
        Literal["fp32", "fp16", "bf16", "fp8"],
        "AdamW: type of the second moment; fp16 and fp8 hold its root.",
    ] = "fp32"
    main_params_dtype: Annotated[
        Literal["fp32", "fp16"],
        "AdamW: type of half-precision weights' masters; fp16 has a scale per 256 values.",
    ] = "fp32"
    lorap_lr_ratio: Annotated[
        float | None, "LoRA+: ratio of the B matrices' learning rate to --lr (2 to 16).", "(0, inf)"
    ] = None


@dataclass
class ScheduleOptions:
    """Learning rate"""

    lr: Annotated[float, "Peak learning rate. Default: 1e-5; 1e-4 with LoRA.", "[0, inf)"] = None  # type: ignore[assignment]
    min_lr: Annotated[float, "Learning rate at the end of the decay.", "[0, inf)"] = 0.0
    lr_decay_style: Annotated[
        Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"], "Decay of the learning rate."
    ] = "cosine"
    lr_decay_iters: Annotated[int | None, "Steps until the decay ends. Default: all.", "(0, inf)"] = None
    lr_warmup_fraction: Annotated[float | None, "Warmup as a share of the decay's steps.", "[0, 1)"] = None
    lr_warmup_iters: Annotated[int, "Warmup steps (not with --lr_warmup_fraction).", "[0, inf)"] = 0
    lr_warmup_init: Annotated[float, "Learning rate at the start of the warmup.", "[0, inf)"] = 0.0
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], "WSD: shape of the final decay."
    ] = "exponential"
    lr_wsd_decay_iters: Annotated[int | None, "WSD: steps of the final decay. Default: a tenth of all.", "(0, inf)"] = (
        None
    )


@dataclass
class CheckpointOptions:
    """Checkpoints"""

    output_dir: Annotated[str | None, "Folder for the run. Default: megatron_output/<name of the model>."] = None
    add_version: Annotated[
        bool, "Write to a new subfolder v{N}-{time}; false: to --output_dir itself, which must have no checkpoints."
    ] = True
    save_strategy: Annotated[Literal["steps", "epoch"], "Save every --save_steps, or after each epoch."] = "steps"
    save_steps: Annotated[int, "Steps between checkpoints; the last step is always saved.", "(0, inf)"] = 500
    save_total_limit: Annotated[
        int | None, "Checkpoints to keep: the newest and the best. Default: all.", "(0, inf)"
    ] = None
    save_retain_interval: Annotated[
        int | None,
        "Also keep the checkpoints of steps that are multiples of this. Of the others --save_total_limit stay, by "
        "default the newest.",
        "(0, inf)",
    ] = None
    metric_for_best_model: Annotated[
        str | None, "Evaluation metric that selects the best checkpoint. Default: eval_loss (grpo: reward)."
    ] = None
    greater_is_better: Annotated[
        bool | None, "Whether a higher metric is better. Default: true unless it is a loss."
    ] = None
    eval_command: Annotated[
        str | None,
        "Command to run on each saved checkpoint, {checkpoint} in it: the numbers of the JSON object that it prints "
        "are logged as eval_<key>. See docs/checkpoints.md.",
    ] = None
    eval_command_timeout: Annotated[float, "eval_command: seconds after which it is ended.", "(0, inf)"] = 3600.0
    no_save_optim: Annotated[
        bool,
        "Save checkpoints without the optimizer's state: smaller, but a run cannot resume exactly.",
    ] = False
    no_save_rng: Annotated[bool, "Save checkpoints without the state of random number generators."] = False
    async_save: Annotated[bool, "Copy the checkpoint to host memory and write it during training."] = False
    save_safetensors: Annotated[
        bool, "Save Hugging Face folders; false: megatron-core checkpoints, for --mcore_model."
    ] = True
    max_shard_size: Annotated[str, "Largest safetensors file, as in 5GB or 500MB."] = "5GB"


@dataclass
class ResumeOptions:
    """Resuming"""

    resume_from_checkpoint: Annotated[
        str | None,
        "Checkpoint to resume from: a folder; latest: the newest complete one under --output_dir; auto: "
        "latest, or a new run if there is none.",
    ] = None
    finetune: Annotated[bool, "Start a new run from the model's weights; false: resume the run that saved them."] = True
    no_load_optim: Annotated[bool, "Resume with a new optimizer state."] = False
    no_load_rng: Annotated[bool, "Resume with new random numbers."] = False
    ignore_data_skip: Annotated[bool, "Resume from the start of the data."] = False
    exit_duration_in_mins: Annotated[
        float | None, "Minutes after which the run saves and ends with exit code 75, to be resumed.", "(0, 1e9]"
    ] = None


@dataclass
class LoggingOptions:
    """Logging"""

    logging_steps: Annotated[int, "Steps between log lines.", "(0, inf)"] = 5
    report_to: Annotated[
        list[Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio", "none"]], "Where to report metrics."
    ] = field(default_factory=lambda: ["tensorboard"])
    tensorboard_dir: Annotated[str | None, "TensorBoard's folder. Default: runs/ in the run's folder."] = None
    wandb_project: Annotated[str, "wandb: project."] = "megaswift"
    wandb_exp_name: Annotated[str | None, "wandb: name of the run. Default: the folder's."] = None
    swanlab_project: Annotated[str, "swanlab: project."] = "megaswift"
    swanlab_exp_name: Annotated[str | None, "swanlab: name of the run. Default: the folder's."] = None


@dataclass
class ProfileOptions:
    """Profiling"""

    profile: Annotated[bool, "Write a trace and a kernel table of some steps to profile/. These steps are slower."] = (
        False
    )
    profile_step_start: Annotated[int, "First profiled step.", "[0, inf)"] = 10
    profile_step_end: Annotated[int, "Last profiled step.", "[0, inf)"] = 12
    profile_ranks: Annotated[list[int], "Profiled ranks.", "[0, inf)"] = field(default_factory=lambda: [0])


@dataclass
class GenerationOptions:
    """Generation"""

    infer_backend: Annotated[Literal["transformers", "vllm"], "Inference engine."] = "transformers"
    val_dataset: Annotated[list[str], "Dataset to answer, into a file. Default: an interactive chat."] = field(
        default_factory=list
    )
    load_data_args: Annotated[
        bool, "Answer the evaluation data of the run that saved the checkpoint, with its data and template options."
    ] = False
    columns: Annotated[dict[str, str], 'Columns to rename, as JSON: \'{"old": "new"}\'.'] = field(default_factory=dict)
    result_path: Annotated[
        str | None,
        "Output file. Default: in infer_result/ of the model's folder, or of the run's folder for a checkpoint.",
    ] = None
    write_batch_size: Annotated[
        int | None, "Rows per write to the output file; -1: all at the end. Default: as they are answered.", "[-1, inf)"
    ] = None
    metric: Annotated[
        Literal["acc", "rouge"] | None,
        "Compare the answers with the dataset's: share of equal ones, or ROUGE-1, -2 and -L.",
    ] = None
    system: Annotated[str | None, "System prompt."] = None
    enable_thinking: Annotated[bool | None, "Passed to the chat template. Default: the template's."] = None
    attention_backend: Annotated[
        Literal["auto", "flash", "flash_2", "flash_3", "unfused"],
        "transformers: attention kernel. vLLM chooses its own.",
    ] = "auto"
    stream: Annotated[bool, "Print the answer while it is generated."] = False
    temperature: Annotated[
        float | None, "Sampling temperature; 0: greedy. Default: the model's generation config.", "[0, inf)"
    ] = None
    top_p: Annotated[
        float | None,
        "Nucleus sampling: cumulative probability to keep. Default: the model's generation config.",
        "(0, 1]",
    ] = None
    top_k: Annotated[
        int | None,
        "Number of most likely tokens to sample from; -1 or 0: all. Default: the model's generation config.",
        "[-1, inf)",
    ] = None
    min_p: Annotated[
        float | None,
        "Sample no token below this share of the most likely one's probability. Default: the model's generation "
        "config.",
        "[0, 1]",
    ] = None
    repetition_penalty: Annotated[
        float | None, "Repetition penalty, above 1 to repeat less. Default: the model's generation config.", "(0, inf)"
    ] = None
    max_new_tokens: Annotated[int | None, "Longest answer in tokens. Default: the model's limit.", "[1, inf)"] = None
    max_batch_size: Annotated[int, "transformers: rows per batch.", "[1, inf)"] = 1
    seed: Annotated[int, "Sampling seed.", "[0, inf)"] = 42
    vllm_tensor_parallel_size: Annotated[int, "vLLM: GPUs over which the model is split.", "[1, inf)"] = 1
    vllm_gpu_memory_utilization: Annotated[float, "vLLM: share of GPU memory to use.", "(0, 1]"] = 0.9
    vllm_max_model_len: Annotated[
        int | None, "vLLM: longest prompt and answer together. Default: the model's limit.", "[1, inf)"
    ] = None
    vllm_quantization: Annotated[
        str | None, "vLLM: method by which it quantizes the weights that it reads, such as fp8. Default: none."
    ] = None
    vllm_enforce_eager: Annotated[bool, "vLLM: no CUDA graphs; starts faster, runs slower."] = False
    vllm_limit_mm_per_prompt: Annotated[
        dict[str, int], "vLLM: most images of a prompt, as JSON: '{\"image\": 4}'. Default: vLLM's."
    ] = field(default_factory=dict)
    vllm_mm_processor_cache_gb: Annotated[
        float | None, "vLLM: host memory for images that it has resized, in GiB. Default: vLLM's.", "[0, inf)"
    ] = None
    vllm_engine_kwargs: Annotated[
        dict[str, Any], "vLLM: more fields of its EngineArgs, as JSON: '{\"max_num_batched_tokens\": 8192}'."
    ] = field(default_factory=dict)


@dataclass
class ConversionOptions:
    """Conversion"""

    to_mcore: Annotated[bool, "Convert to a megatron-core checkpoint."] = False
    to_hf: Annotated[bool, "Convert to a Hugging Face folder."] = False
    quant_method: Annotated[
        Literal["fp8"] | None,
        "Quantize the linear layers of a Hugging Face folder. fp8: e4m3 in blocks of 128 x 128, as DeepSeek-V3.",
    ] = None
    output_dir: Annotated[
        str | None,
        "Output folder. Default: <model>-mcore, -hf or -fp8, beside a model folder, else in the working directory.",
    ] = None
    exist_ok: Annotated[bool, "Replace the folder of an earlier export."] = False
    test_convert_precision: Annotated[
        bool, "Compare the logits of both models on several texts; if they differ, fail and leave no folder."
    ] = False
    max_shard_size: Annotated[str, "to_hf: largest safetensors file, as in 5GB or 500MB."] = "5GB"


@dataclass
class CompletionOptions:
    """Completions"""

    max_completion_length: Annotated[int, "Longest completion, in tokens.", "[1, inf)"] = 512
    temperature: Annotated[
        float, "Temperature of sampling, and of the log-probabilities in training.", "[0.001, 1000]"
    ] = 0.9
    top_p: Annotated[float, "Nucleus sampling: cumulative probability to keep.", "(0, 1]"] = 1.0
    top_k: Annotated[int, "Number of most likely tokens to sample from; -1 or 0: all.", "[-1, inf)"] = -1
    min_p: Annotated[float, "Sample no token below this share of the most likely one's probability.", "[0, 1]"] = 0.0
    repetition_penalty: Annotated[float, "Repetition penalty, above 1 to repeat less.", "(0, inf)"] = 1.0
    stop_words: Annotated[list[str], "Stop strings, which stay in the completion."] = field(default_factory=list)


@dataclass
class SamplingOptions(CompletionOptions):
    """Completions"""

    num_generations: Annotated[int, "Completions per prompt.", "[1, inf)"] = 8
    num_generations_eval: Annotated[int, "Completions per prompt in an evaluation.", "[1, inf)"] = 1
    eval_temperature: Annotated[
        float | None, "Temperature of sampling in an evaluation; 0: greedy. Default: --temperature.", "[0, 1000]"
    ] = None
    eval_top_p: Annotated[float | None, "--top_p of an evaluation. Default: --top_p.", "(0, 1]"] = None
    eval_top_k: Annotated[int | None, "--top_k of an evaluation. Default: --top_k.", "[-1, inf)"] = None
    generation_batch_size: Annotated[
        int | None,
        "Completions generated at a time. Default: --global_batch_size x --steps_per_generation.",
        "[1, inf)",
    ] = None
    steps_per_generation: Annotated[int, "Optimizer steps per generated batch.", "[1, inf)"] = None  # type: ignore[assignment]
    num_iterations: Annotated[int, "Epochs over each generated batch.", "[1, inf)"] = 1
    log_completions: Annotated[bool, "Write all completions with their rewards to completions.jsonl."] = False
    max_sampling_logp_difference: Annotated[
        float | None,
        "Stop if the mean difference of the engine's and the trainer's log-probabilities of a batch exceeds this.",
        "(0, inf)",
    ] = None
