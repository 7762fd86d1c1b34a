"""Options of the model builder. Each field is one flag. Imports no torch, since the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

STORE = "MEGASWIFT_STORE"  # environment variable: path of the rendezvous file of a run on one node


@dataclass
class ModelOptions:
    """Model"""

    model: Annotated[str, "A Hugging Face checkpoint: a folder, or a hub id."] = ""
    use_hf: Annotated[bool, "Take hub ids from Hugging Face (else from ModelScope, if it is installed)."] = False
    hub_token: Annotated[str | None, "Token for gated models and datasets."] = None
    model_revision: Annotated[str | None, "Branch, tag or commit of the hub's model."] = None
    torch_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        "Type of the weights and the computation. Default: the checkpoint's.",
    ] = None
    rope_scaling: Annotated[
        dict[str, Any],
        "Scaling of the rotary embedding: a type (yarn, linear) with --max_model_len, or config.json's rope_scaling "
        "as JSON. Saved in the config.json of checkpoints.",
    ] = field(default_factory=dict)
    max_model_len: Annotated[
        int | None, "Positions of the model (max_position_embeddings). Default: the model's.", "[1, inf)"
    ] = None


@dataclass
class HubOptions:
    """Upload"""

    push_to_hub: Annotated[
        bool, "Upload an export, or a run's last checkpoint, to Hugging Face (--use_hf true) or ModelScope."
    ] = False
    hub_model_id: Annotated[str | None, "Repository to upload to, as OWNER/NAME; made if it does not exist."] = None
    hub_private_repo: Annotated[bool, "Make it a private one."] = False
    commit_message: Annotated[str | None, "Message of the upload's commit."] = None


@dataclass
class McoreOptions:
    """Weights in megatron-core's format"""

    mcore_model: Annotated[
        str | None, "A megatron-core checkpoint (with its config.json and tokenizer), instead of --model."
    ] = None


@dataclass
class AdapterOptions:
    """Adapters"""

    adapters: Annotated[
        list[str],
        "Folder of an adapter in PEFT's format (or its hub id): to continue training, to merge, or to run.",
    ] = field(default_factory=list)
    merge_lora: Annotated[
        bool | None,
        "Merge the adapter into the weights. Training saves merged weights beside the adapter (default: "
        "--save_safetensors); export writes them (default: true with --mcore_adapter or --to_hf); infer runs them.",
    ] = None


@dataclass
class McoreAdapterOptions:
    """Adapters in megatron-core's format"""

    mcore_adapter: Annotated[str | None, "An adapter's megatron-core checkpoint, instead of --adapters."] = None


@dataclass
class LoraOptions:
    """LoRA (with --tuner_type lora)"""

    lora_rank: Annotated[int, "Rank of each adapter.", "(0, inf)"] = 8
    lora_alpha: Annotated[float, "Scale of the adapters: lora_alpha / lora_rank.", "(0, inf)"] = 32
    lora_dropout: Annotated[
        float | None, "Dropout on the adapters' input. Default: 0.05; 0 with experts or DoRA.", "[0, 1)"
    ] = None
    lora_bias: Annotated[
        Literal["none", "all", "lora_only"], "Train the model's biases: none, all, or those beside adapters."
    ] = "none"
    lora_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None, "Type of the adapters. Default: the model's."
    ] = None
    use_rslora: Annotated[bool, "Rank-stabilized LoRA: divide --lora_alpha by the square root of the rank."] = False
    use_dora: Annotated[bool, "DoRA: train the magnitude of each weight row apart from its direction."] = False
    target_modules: Annotated[
        list[str],
        "Modules with adapters: all-linear, all-router, all-embedding, or names of Hugging Face (q_proj ...) "
        "or megatron-core (linear_qkv ...).",
    ] = field(default_factory=lambda: ["all-linear"])
    target_regex: Annotated[
        str | None, "A regular expression for full Hugging Face module names, instead of --target_modules."
    ] = None
    modules_to_save: Annotated[
        list[str], "Modules that are fully trained and saved with the adapter: embed_tokens, lm_head."
    ] = field(default_factory=list)


@dataclass
class TrainableOptions:
    """Trained parameters"""

    tuner_type: Annotated[
        Literal["full", "lora", "lora_llm"],
        "Train all weights, LoRA adapters, or adapters of the language model beside whole parts of the vision tower.",
    ] = "full"
    new_special_tokens: Annotated[
        list[str], "Special tokens to add to the tokenizer and the embedding: tokens, or a .txt file of them."
    ] = field(default_factory=list)
    freeze_parameters: Annotated[
        list[str], "Freeze weights whose Hugging Face or megatron-core name starts with one of these."
    ] = field(default_factory=list)
    freeze_parameters_regex: Annotated[
        str | None, "Freeze weights whose name contains a match of this regular expression."
    ] = None
    freeze_parameters_ratio: Annotated[
        float, "Freeze this share of the parameters, counted from the embedding.", "[0, 1]"
    ] = 0.0
    trainable_parameters: Annotated[
        list[str], "Train weights whose name starts with one of these, although another flag freezes them."
    ] = field(default_factory=list)
    trainable_parameters_regex: Annotated[
        str | None, "Train weights whose name contains a match of this regular expression."
    ] = None

    @property
    def has_adapters(self) -> bool:
        """Return whether LoRA adapters are trained."""
        return self.tuner_type != "full"


@dataclass
class VisionOptions:
    """Vision tower (of vision-language models, when the data has images or videos)"""

    freeze_llm: Annotated[bool, "Freeze the language model; with LoRA, it gets no adapters."] = False
    freeze_vit: Annotated[bool, "Freeze the vision tower's layers; with LoRA, they get no adapters."] = True
    freeze_aligner: Annotated[
        bool, "Freeze the mergers between the vision tower and the language model; with LoRA, they get no adapters."
    ] = True
    vit_lr: Annotated[float | None, "Learning rate of the vision tower's layers. Default: --lr.", "[0, inf)"] = None
    aligner_lr: Annotated[float | None, "Learning rate of the mergers. Default: --lr.", "[0, inf)"] = None
    vit_gradient_checkpointing: Annotated[
        bool | None,
        "Recompute the trained tower's forward pass, instead of keeping its activations. Default: with pipeline "
        "parallelism, where they would be those of all micro batches of a step, for what does not fit into memory.",
    ] = None
    precompute_features: Annotated[
        bool,
        "Compute a frozen tower's features of each image or video once, and read them from a cache on disk in later "
        "epochs and runs.",
    ] = False
    feature_cache_gib: Annotated[
        float,
        "Largest size of that cache, of all runs together. Features that were last used before the run go first.",
        "(0, inf)",
    ] = 100.0
    language_model_only: Annotated[
        bool, "Build and train the language model alone; the vision tower's weights are saved unchanged."
    ] = False


@dataclass
class KernelOptions:
    """Kernels and numerics (preferences: the nearest that this machine has runs, and the log names it)"""

    transformer_impl: Annotated[
        Literal["auto", "transformer_engine", "local"],
        "Layers: Transformer Engine's, or megaswift's (local). auto: local, with Transformer Engine's "
        "attention if it is installed, and its layers for FP8.",
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "flash", "flash_2", "flash_3", "flash_4", "fused", "unfused", "local"], "Attention kernel."
    ] = "auto"
    gradient_accumulation_fusion: Annotated[bool, "Accumulate weight gradients inside the matrix product."] = True
    bias_dropout_fusion: Annotated[bool, "Fuse bias, dropout and the residual sum."] = True
    bias_activation_fusion: Annotated[bool, "Fuse bias and activation (SwiGLU)."] = True
    apply_rope_fusion: Annotated[bool, "Fuse the rotary embedding."] = True
    attention_dropout: Annotated[float, "Dropout on attention probabilities.", "[0, 1)"] = 0.0
    hidden_dropout: Annotated[float, "Dropout on the residual branches.", "[0, 1)"] = 0.0
    deterministic_mode: Annotated[bool, "Only deterministic kernels: the same run twice gives the same bits."] = False


@dataclass
class Fp8Options:
    """FP8 (with Transformer Engine, and weights in bf16)"""

    fp8_format: Annotated[
        Literal["e4m3", "hybrid"] | None,
        "Compute matrix products in FP8: all in e4m3, or gradients in e5m2 (hybrid). Default: bf16.",
    ] = None
    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "blockwise", "mxfp8"],
        "Scaling: from past steps (delayed), per tensor, per block of 128, or per block of 32 (mxfp8, Blackwell only).",
    ] = "delayed"
    fp8_amax_history_len: Annotated[
        int, "delayed: number of micro batches whose largest values are kept.", "(0, inf)"
    ] = 1024
    fp8_amax_compute_algo: Annotated[
        Literal["max", "most_recent"], "delayed: scale by the largest or the most recent of these values."
    ] = "max"
    fp8_param_gather: Annotated[
        bool, "Store and gather weights in FP8; master weights and checkpoints are not in FP8."
    ] = False
    first_last_layers_bf16: Annotated[bool, "Compute the first and last layers in bf16 (not with delayed)."] = False
    num_layers_at_start_in_bf16: Annotated[int, "first_last_layers_bf16: number of first layers.", "[0, inf)"] = 1
    num_layers_at_end_in_bf16: Annotated[int, "first_last_layers_bf16: number of last layers.", "[0, inf)"] = 1

    @property
    def fp8_token_multiple(self) -> int:
        """Return the number that must divide the token count of a process in FP8."""
        if self.fp8_format is None:
            return 1
        return {"blockwise": 128, "mxfp8": 32}.get(self.fp8_recipe, 16)


@dataclass
class LayoutOptions:
    """Layout of the weights"""

    tensor_model_parallel_size: Annotated[int, "TP: processes over which each matrix is split.", "(0, inf)"] = 1
    pipeline_model_parallel_size: Annotated[int, "PP: processes over which the layers are split.", "(0, inf)"] = 1
    decoder_first_pipeline_num_layers: Annotated[
        int | None, "Layers of the first PP stage, for an uneven split.", "(0, inf)"
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        int | None, "Layers of the last PP stage, for an uneven split.", "(0, inf)"
    ] = None
    account_for_embedding_in_pipeline_split: Annotated[
        bool, "Count the embedding as one of the layers that are split evenly: the first PP stage has one layer less."
    ] = False
    account_for_loss_in_pipeline_split: Annotated[
        bool, "Count the output layer and the loss as one of these layers: the last PP stage has one layer less."
    ] = False
    pipeline_model_parallel_layout: Annotated[
        str | None,
        "What each stage has, in the model's order: E (embedding), t (a layer), L (output layer and loss), with | "
        "between the PP x VPP stages, as in Et*3|(tt|)*2L.",
    ] = None
    expert_model_parallel_size: Annotated[int, "EP: processes over which the experts are distributed.", "(0, inf)"] = 1
    expert_tensor_parallel_size: Annotated[
        int, "ETP: processes over which each expert's matrices are split.", "(0, inf)"
    ] = 1
    ddp_backend: Annotated[
        Literal["nccl", "gloo"] | None, "Communication library. Default: nccl on GPUs, gloo on CPUs."
    ] = None
    preflight: Annotated[
        bool,
        "Check GPUs, NCCL bandwidth, clocks, disks and host memory of all nodes before the model is loaded, "
        "in about ten seconds, and print a table.",
    ] = False
    ddp_timeout: Annotated[
        int, "Seconds without progress after which the run ends and writes all stack traces.", "(0, inf)"
    ] = 1800


@dataclass
class ParallelOptions(LayoutOptions):
    """Parallelism"""

    sequence_parallel: Annotated[bool, "SP: split activations between the matrices by tokens (needs TP)."] = False
    virtual_pipeline_model_parallel_size: Annotated[
        int | None, "VPP: chunks of layers in each PP stage.", "(0, inf)"
    ] = None
    microbatch_group_size_per_vp_stage: Annotated[
        int | None, "Consecutive micro batches of one VPP chunk. Default: PP.", "[1, inf)"
    ] = None
    overlap_p2p_comm: Annotated[bool, "Overlap communication between PP stages with computation (needs VPP)."] = True
    batch_p2p_comm: Annotated[
        bool | None, "Batch sends to and receives from PP neighbours. Default: true if they are not overlapped."
    ] = None
    context_parallel_size: Annotated[int, "CP: processes over which each sequence is split.", "(0, inf)"] = 1
    cp_comm_type: Annotated[
        Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None,
        "How CP exchanges keys and values; a preference. Default: all_gather with FlashAttention-4, but for latent "
        "attention, and p2p with Transformer Engine.",
    ] = None
    use_distributed_optimizer: Annotated[bool, "ZeRO-1: shard the optimizer's state over data-parallel ranks."] = True
    overlap_grad_reduce: Annotated[
        bool | None, "Reduce gradients during the backward pass. Default: true with data parallelism."
    ] = None
    overlap_param_gather: Annotated[
        bool | None,
        "Gather parameters during the forward pass (needs --overlap_grad_reduce). Default: true if possible.",
    ] = None
    accumulate_allreduce_grads_in_fp32: Annotated[bool, "Accumulate and reduce gradients in fp32."] = True


@dataclass
class RecomputeOptions:
    """Activations: recompute (checkpointing) and offload"""

    recompute_granularity: Annotated[
        Literal["full", "selective", "none"], "Recompute whole layers, some modules, or nothing."
    ] = "selective"
    recompute_method: Annotated[
        Literal["uniform", "block"] | None, "full: recompute units of N layers, or only the first N layers of a stage."
    ] = None
    recompute_num_layers: Annotated[int | None, "full: the N of --recompute_method.", "(0, inf)"] = None
    recompute_modules: Annotated[
        list[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]],
        "selective: the modules to recompute.",
    ] = field(default_factory=lambda: ["core_attn"])
    cpu_offloading: Annotated[
        bool,
        "Keep the activations of layers in host memory until their backward pass; of recomputed layers the inputs and "
        "attention's outputs, which are not recomputed then.",
    ] = False
    cpu_offloading_num_layers: Annotated[
        int, "--cpu_offloading: the first N layers of each pipeline stage.", "[0, inf)"
    ] = 0


@dataclass
class MoEOptions:
    """Mixture of experts"""

    moe_grouped_gemm: Annotated[bool, "All local experts in one grouped matrix product."] = True
    moe_permute_fusion: Annotated[bool, "Fuse the permutation of tokens; a preference."] = True
    moe_shared_expert_overlap: Annotated[bool, "Overlap the shared expert with the dispatch of tokens."] = False
    moe_token_dispatcher_type: Annotated[
        Literal["alltoall", "allgather", "flex"], "How tokens reach their experts; a preference."
    ] = "alltoall"
    moe_router_dtype: Annotated[Literal["fp32", "fp64", "none"], "Type of the router's arithmetic."] = "fp32"
    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None,
        "Load balancing of the experts. Default: the model's.",
    ] = None
    moe_aux_loss_coeff: Annotated[
        float, "Weight of the load-balancing loss. A higher weight balances more and costs quality.", "[0, inf)"
    ] = 0.0
    moe_z_loss_coeff: Annotated[float | None, "Weight of the router's z-loss.", "[0, inf)"] = None
    moe_expert_capacity_factor: Annotated[
        float | None, "Drop an expert's tokens beyond this multiple of its even share.", "(0, inf)"
    ] = None
    moe_pad_expert_input_to_capacity: Annotated[bool, "Pad each expert's input to its capacity."] = False
    moe_token_drop_policy: Annotated[Literal["probs", "position"], "Which tokens to drop beyond the capacity."] = (
        "probs"
    )

    @property
    def exchanges_equal_rows(self) -> bool:
        """Return whether ranks that share experts must hold the same number of tokens of a micro batch."""
        return self.moe_token_dispatcher_type == "allgather" or self.moe_pad_expert_input_to_capacity


@dataclass
class IndexerOptions:
    """Sparse attention"""

    dsa_indexer_loss_coeff: Annotated[
        float,
        "Weight of the loss of lightning indexers: the divergence of their scores from attention. 0: they are frozen.",
        "[0, inf)",
    ] = 0.0
    dsa_indexer_use_sparse_loss: Annotated[
        bool, "Indexers learn attention to the keys that they select, instead of attention to all earlier keys."
    ] = False


@dataclass
class PredictionLayers:
    """Multi-token prediction"""

    mtp_num_layers: Annotated[
        int | None,
        "Number of the checkpoint's multi-token prediction layers to build. Default: none; they are saved unchanged.",
        "[0, inf)",
    ] = None


@dataclass
class PredictionOptions(PredictionLayers):
    """Multi-token prediction: training"""

    mtp_loss_scaling_factor: Annotated[float, "Weight of the mean loss of multi-token prediction.", "[0, inf)"] = 0.1


# Fields of megatron-core's TransformerConfig that --megatron_extra_kwargs may set, with their types: none describes the
# model, and none is set by another flag.
CORE_SETTINGS: dict[str, type] = {
    "moe_input_jitter_eps": float,
    "moe_router_force_load_balancing": bool,
    "batch_p2p_sync": bool,
    "deallocate_pipeline_outputs": bool,
    "overlap_p2p_comm_warmup_flush": bool,
    "disable_parameter_transpose_cache": bool,
    "fp8_margin": int,
    "tp_only_amax_red": bool,
}


@dataclass
class CoreOptions:
    """Settings of megatron-core"""

    megatron_extra_kwargs: Annotated[
        dict[str, Any], "More fields of megatron-core's TransformerConfig, as JSON (docs/parallelism.md lists them)."
    ] = field(default_factory=dict)


@dataclass
class BuildOptions(
    ParallelOptions,
    RecomputeOptions,
    MoEOptions,
    IndexerOptions,
    PredictionOptions,
    Fp8Options,
    KernelOptions,
    CoreOptions,
):
    """Everything that the builder reads."""
