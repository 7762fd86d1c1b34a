"""Options of `megatron plan`. No torch: the command line imports this."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ...bridge.options import ModelOptions

MomentType = Literal["fp32", "fp16", "bf16", "fp8"]
PlannedRlhf = Literal["dpo", "orpo", "simpo", "cpo", "kto", "rm", "grpo", "ppo", "gkd"]
GpuName = Literal["h100", "h200", "h20", "a100", "b200", "l40s"]


@dataclass
class PlanOptions:
    """megatron plan"""

    model: Annotated[str, "Hugging Face checkpoint: a folder, or a hub id. Its config.json is enough."] = ""
    use_hf: Annotated[bool, "Take hub ids from Hugging Face (else from ModelScope, if it is installed)."] = False
    hub_token: Annotated[str | None, "Token for gated models."] = None
    model_revision: Annotated[str | None, "Branch, tag or commit of the hub's model."] = None
    rlhf_type: Annotated[
        PlannedRlhf | None,
        "Plan `megatron rlhf` with its reference model, critic or teacher; grpo, ppo, gkd: training on what is "
        "generated, without vLLM. Default: `megatron sft`.",
    ] = None
    beta: Annotated[float | None, "grpo, ppo: as in the run; 0: without a reference model.", "[0, inf)"] = None
    teacher_model: Annotated[str | None, "gkd: the teacher, a folder or a hub id. Its config.json is enough."] = None
    gpus: Annotated[int, "Number of GPUs.", "(0, inf)"] = 8
    gpus_per_node: Annotated[int, "GPUs of a node, which NVLink connects.", "(0, inf)"] = 8
    gpu: Annotated[GpuName, "Kind of GPU; none needs to be present."] = "h100"
    memory: Annotated[float | None, "GiB of a GPU. Default: the kind's.", "(0, inf)"] = None
    max_length: Annotated[int, "Tokens of a pack.", "(0, inf)"] = 4096
    document_length: Annotated[int | None, "Tokens of a document in the mean. Default: --max_length.", "(0, inf)"] = (
        None
    )
    global_batch_size: Annotated[int, "Packs of a step.", "(0, inf)"] = 16
    tuner_type: Annotated[Literal["full", "lora"], "Train all parameters, or adapters on all linear layers."] = "full"
    lora_rank: Annotated[int, "Rank of the adapters.", "(0, inf)"] = 8
    lora_dropout: Annotated[
        float | None, "Dropout on the adapters' input. Default: 0.05; 0 with experts.", "[0, 1)"
    ] = None
    mtp_num_layers: Annotated[
        int | None, "Number of the checkpoint's multi-token prediction layers that are built.", "[0, inf)"
    ] = None
    image_share: Annotated[
        float | None,
        "Share of the tokens of images in packs. Default: 0.5 for models with a vision tower, which 0 leaves out.",
        "[0, 1)",
    ] = None
    image_tokens: Annotated[float, "Tokens of an image in the mean.", "(0, inf)"] = 600
    freeze_vit: Annotated[bool, "Freeze the vision tower's layers."] = True
    freeze_aligner: Annotated[bool, "Freeze the mergers between the vision tower and the language model."] = True
    vit_gradient_checkpointing: Annotated[
        bool | None, "Recompute the trained tower's forward pass. Default: with pipeline parallelism, as needed."
    ] = None
    fp8_format: Annotated[
        Literal["e4m3", "hybrid"] | None, "Compute matrix products in FP8 (not of experts). Default: bf16."
    ] = None
    fp8_param_gather: Annotated[bool, "Store weights in FP8."] = False
    tensor_model_parallel_size: Annotated[int | None, "Default: searched.", "(0, inf)"] = None
    pipeline_model_parallel_size: Annotated[int | None, "Default: searched.", "(0, inf)"] = None
    virtual_pipeline_model_parallel_size: Annotated[int | None, "Default: searched.", "(0, inf)"] = None
    decoder_first_pipeline_num_layers: Annotated[
        int | None, "Layers of the first pipeline stage. Default: as the others.", "(0, inf)"
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        int | None, "Layers of the last pipeline stage. Default: searched.", "(0, inf)"
    ] = None
    context_parallel_size: Annotated[int | None, "Default: searched.", "(0, inf)"] = None
    cp_comm_type: Annotated[
        Literal["p2p", "all_gather"] | None,
        "How CP exchanges keys and values. Default: all_gather if FlashAttention-4 is installed here, but for latent "
        "attention.",
    ] = None
    expert_model_parallel_size: Annotated[int | None, "Default: searched.", "(0, inf)"] = None
    expert_tensor_parallel_size: Annotated[
        int | None, "Default: searched where there are no more experts to distribute.", "(0, inf)"
    ] = None
    micro_batch_size: Annotated[int | None, "Default: searched.", "(0, inf)"] = None
    recompute: Annotated[
        Literal["none", "mlp", "full"] | None,
        "Recompute MLPs, or all layers. Default: the cheapest with which the layout fits.",
    ] = None
    optimizer_cpu_offload: Annotated[
        bool | None, "Keep the optimizer's state in host memory. Default: only where the layout does not fit."
    ] = None
    exp_avg_dtype: Annotated[MomentType, "AdamW: type of the first moment."] = "fp32"
    exp_avg_sq_dtype: Annotated[MomentType, "AdamW: type of the second moment."] = "fp32"
    main_params_dtype: Annotated[Literal["fp32", "fp16"], "AdamW: type of the weights' masters."] = "fp32"
    accumulate_allreduce_grads_in_fp32: Annotated[bool, "Accumulate and reduce gradients in fp32."] = True
    optimizer_offload_fraction: Annotated[float, "Share of the optimizer's state that is kept there.", "[0, 1]"] = 1.0
    cpu_offloading_num_layers: Annotated[
        int | None,
        "Keep the activations of the first N layers of each pipeline stage in host memory. All layers are recomputed "
        "then, unless --recompute is set. Default: searched.",
        "[0, inf)",
    ] = None
    rows: Annotated[int, "Layouts to print.", "(0, inf)"] = 8

    @property
    def model_options(self) -> ModelOptions:
        return ModelOptions(self.model, self.use_hf, self.hub_token, self.model_revision)
