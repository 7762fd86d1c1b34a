"""Options of the model builder: one field is one flag. No torch here: the command line imports this file."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

STORE = "MEGASWIFT_STORE"  # variable: the file through which the processes of a run on one node find each other


@dataclass
class ModelOptions:
    """Model"""

    model: Annotated[str, "A Hugging Face checkpoint: a folder, or a hub id."] = ""
    use_hf: Annotated[bool, "Take hub ids from Hugging Face (else from ModelScope, where it is installed)."] = False
    hub_token: Annotated[str | None, "Token for gated models and datasets."] = None
    model_revision: Annotated[str | None, "Branch, tag or commit of the hub's model."] = None
    torch_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        "Type of the weights and of the arithmetic; left out: the checkpoint's own.",
    ] = None


@dataclass
class McoreOptions:
    """Weights in megatron-core's format"""

    mcore_model: Annotated[
        str | None, "A megatron-core checkpoint (with its config.json and tokenizer), in place of --model."
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
        "Put the adapter into the weights: sft, pt save them as well, beside the adapter (left out: as "
        "--save_safetensors is), export makes them (left out: of --mcore_adapter), infer runs them.",
    ] = None


@dataclass
class McoreAdapterOptions:
    """Adapters in megatron-core's format"""

    mcore_adapter: Annotated[str | None, "An adapter's megatron-core checkpoint, in place of --adapters."] = None


@dataclass
class LoraOptions:
    """LoRA (with --tuner_type lora)"""

    lora_rank: Annotated[int, "Rank of each adapter.", "(0, inf)"] = 8
    lora_alpha: Annotated[float, "Adapters count this much, divided by the rank.", "(0, inf)"] = 32
    lora_dropout: Annotated[
        float | None, "Dropout on what goes into adapters; left out: 0.05, and 0 with experts or DoRA.", "[0, 1)"
    ] = None
    lora_bias: Annotated[
        Literal["none", "all", "lora_only"], "Train the model's biases: none, all, or those beside adapters."
    ] = "none"
    lora_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None, "Type of the adapters; left out: the model's."
    ] = None
    use_rslora: Annotated[bool, "Divide --lora_alpha by the root of the rank."] = False
    use_dora: Annotated[bool, "DoRA: train the length of each row of a matrix apart from its direction."] = False
    target_modules: Annotated[
        list[str],
        "What has adapters: all-linear, all-router, all-embedding, or names of modules, Hugging Face's (q_proj ...) or "
        "megatron-core's (linear_qkv ...).",
    ] = field(default_factory=lambda: ["all-linear"])
    target_regex: Annotated[
        str | None, "A regular expression for whole Hugging Face module names, in place of --target_modules."
    ] = None
    modules_to_save: Annotated[
        list[str], "Modules that are trained whole and saved with the adapter: embed_tokens, lm_head."
    ] = field(default_factory=list)


@dataclass
class TrainableOptions:
    """Trained parameters"""

    tuner_type: Annotated[Literal["full", "lora"], "Train all weights, or adapters beside them."] = "full"
    freeze_parameters: Annotated[
        list[str], "Prefixes of the names, Hugging Face's or megatron-core's, of weights that stay as they are."
    ] = field(default_factory=list)
    freeze_parameters_regex: Annotated[str | None, "The same by a regular expression that is found in a name."] = None
    freeze_parameters_ratio: Annotated[
        float, "Share of the parameters that stays, counted from the embedding.", "[0, 1]"
    ] = 0.0
    trainable_parameters: Annotated[list[str], "Prefixes of the names of weights that are trained all the same."] = (
        field(default_factory=list)
    )
    trainable_parameters_regex: Annotated[str | None, "The same by a regular expression."] = None


@dataclass
class KernelOptions:
    """Kernels and numerics (preferences: the nearest that this machine has runs, and the log names it)"""

    transformer_impl: Annotated[
        Literal["auto", "transformer_engine", "local"],
        "Layers: Transformer Engine's, or ours. auto: ours, with its attention where it is installed, and its for FP8.",
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
        "Compute matrix products in FP8: all of it in e4m3, or gradients in e5m2 (hybrid); left out: in bf16.",
    ] = None
    fp8_recipe: Annotated[
        Literal["delayed", "tensorwise", "blockwise", "mxfp8"],
        "Scales by past steps, by each tensor as it is, by blocks of 128, or by blocks of 32 (Blackwell's alone).",
    ] = "delayed"
    fp8_amax_history_len: Annotated[int, "delayed: micro batches whose largest values are kept.", "(0, inf)"] = 1024
    fp8_amax_compute_algo: Annotated[
        Literal["max", "most_recent"], "delayed: scale by the largest of these, or by the newest."
    ] = "max"
    fp8_param_gather: Annotated[bool, "Hold and gather these weights in FP8; masters and checkpoints are not."] = False
    first_last_layers_bf16: Annotated[bool, "Compute the first and last layers in bf16 (not with delayed)."] = False
    num_layers_at_start_in_bf16: Annotated[int, "first_last_layers_bf16: how many first ones.", "[0, inf)"] = 1
    num_layers_at_end_in_bf16: Annotated[int, "first_last_layers_bf16: how many last ones.", "[0, inf)"] = 1

    @property
    def fp8_token_multiple(self) -> int:
        """Multiple that the number of tokens of a process must have in FP8."""
        if self.fp8_format is None:
            return 1
        return {"blockwise": 128, "mxfp8": 32}.get(self.fp8_recipe, 16)


@dataclass
class LayoutOptions:
    """Layout of the weights"""

    tensor_model_parallel_size: Annotated[int, "TP: processes that share each matrix.", "(0, inf)"] = 1
    pipeline_model_parallel_size: Annotated[int, "PP: processes that share the layers.", "(0, inf)"] = 1
    decoder_first_pipeline_num_layers: Annotated[
        int | None, "Layers of the first PP stage, where uneven.", "(0, inf)"
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        int | None, "Layers of the last PP stage, where uneven.", "(0, inf)"
    ] = None
    expert_model_parallel_size: Annotated[int, "EP: processes that share the experts.", "(0, inf)"] = 1
    expert_tensor_parallel_size: Annotated[int, "ETP: processes that share each expert's matrices.", "(0, inf)"] = 1
    ddp_backend: Annotated[
        Literal["nccl", "gloo"] | None, "Communication library; left out: nccl on GPUs, gloo on a CPU."
    ] = None
    preflight: Annotated[
        bool,
        "Measure GPUs, links between them, clocks, disks and host memory of all nodes before the model is loaded, in "
        "ten seconds, and print a table.",
    ] = False
    ddp_timeout: Annotated[
        int, "Seconds without progress after which a run ends, and writes all stacks.", "(0, inf)"
    ] = 1800


@dataclass
class ParallelOptions(LayoutOptions):
    """Parallelism"""

    sequence_parallel: Annotated[bool, "SP: split what is between the matrices by tokens (needs TP)."] = False
    virtual_pipeline_model_parallel_size: Annotated[
        int | None, "VPP: chunks of layers in each PP stage.", "(0, inf)"
    ] = None
    microbatch_group_size_per_vp_stage: Annotated[
        int | None, "Micro batches that one VPP chunk takes in a row; left out: PP.", "[1, inf)"
    ] = None
    overlap_p2p_comm: Annotated[bool, "Overlap the sends between PP stages with computation (under VPP)."] = True
    batch_p2p_comm: Annotated[
        bool | None, "Send to and receive from PP neighbours in one batch; left out: where they are not overlapped."
    ] = None
    context_parallel_size: Annotated[int, "CP: processes that share each sequence.", "(0, inf)"] = 1
    cp_comm_type: Annotated[
        Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None,
        "How CP exchanges keys and values; a preference. Left out: p2p with Transformer Engine.",
    ] = None
    use_distributed_optimizer: Annotated[bool, "ZeRO-1: share the optimizer's state among data-parallel ranks."] = True
    overlap_grad_reduce: Annotated[
        bool | None, "Reduce gradients during the backward pass; left out: where there are processes to share with."
    ] = None
    overlap_param_gather: Annotated[
        bool | None,
        "Gather parameters during the forward pass (needs --overlap_grad_reduce); left out: as far as it is possible.",
    ] = None
    accumulate_allreduce_grads_in_fp32: Annotated[bool, "Accumulate and reduce gradients in fp32."] = True


@dataclass
class RecomputeOptions:
    """Recompute (activation checkpointing)"""

    recompute_granularity: Annotated[
        Literal["full", "selective", "none"], "Recompute whole layers, some modules, or nothing."
    ] = "selective"
    recompute_method: Annotated[
        Literal["uniform", "block"] | None, "full: units of N layers each, or only the first N of a stage."
    ] = None
    recompute_num_layers: Annotated[int | None, "full: the N of --recompute_method.", "(0, inf)"] = None
    recompute_modules: Annotated[
        list[Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]],
        "selective: the modules to recompute.",
    ] = field(default_factory=lambda: ["core_attn"])


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
        "How experts are kept evenly loaded; left out: the model's own way.",
    ] = None
    moe_aux_loss_coeff: Annotated[
        float, "Weight of the balancing loss: higher is more even, and worse.", "[0, inf)"
    ] = 0.0
    moe_z_loss_coeff: Annotated[float | None, "Weight of the router's z-loss.", "[0, inf)"] = None
    moe_expert_capacity_factor: Annotated[
        float | None, "Drop an expert's tokens beyond this multiple of its even share.", "(0, inf)"
    ] = None
    moe_pad_expert_input_to_capacity: Annotated[bool, "Pad each expert's input to its capacity."] = False
    moe_token_drop_policy: Annotated[Literal["probs", "position"], "Which tokens are dropped beyond capacity."] = (
        "probs"
    )

    @property
    def exchanges_equal_rows(self) -> bool:
        """True if ranks that share experts must hold equally many tokens of a micro batch."""
        return self.moe_token_dispatcher_type == "allgather" or self.moe_pad_expert_input_to_capacity


@dataclass
class PredictionLayers:
    """Multi-token prediction"""

    mtp_num_layers: Annotated[
        int | None,
        "Build so many of the checkpoint's layers that predict further tokens; left out: they stay as is.",
        "[0, inf)",
    ] = None


@dataclass
class PredictionOptions(PredictionLayers):
    """Multi-token prediction: training"""

    mtp_loss_scaling_factor: Annotated[float, "Weight of their mean loss beside the model's own.", "[0, inf)"] = 0.1


@dataclass
class BuildOptions(ParallelOptions, RecomputeOptions, MoEOptions, PredictionOptions, Fp8Options, KernelOptions):
    """Everything that the builder reads."""
