"""Options of models beside the trained one: references, critics, teachers. No torch: the command line imports this."""

from dataclasses import dataclass, field
from typing import Annotated


@dataclass
class ReferenceOptions:
    """Reference model"""

    ref_model: Annotated[
        str | None,
        "Reference model: a folder or a hub id. Default: the initial model; with LoRA, the base model.",
    ] = None
    mcore_ref_model: Annotated[str | None, "Reference model as a megatron-core checkpoint, instead of --ref_model."] = (
        None
    )
    ref_adapters: Annotated[list[str], "Adapter (a folder or a hub id) that turns the model into the reference."] = (
        field(default_factory=list)
    )
    offload_ref_model: Annotated[bool, "Keep the reference's weights in host memory between uses."] = False
    sync_ref_model: Annotated[bool, "Update the reference towards the trained model (TR-DPO)."] = False
    ref_model_mixup_alpha: Annotated[
        float, "sync_ref_model: weight of the trained model in an update; 1: replace the reference.", "(0, 1]"
    ] = 0.6
    ref_model_sync_steps: Annotated[int, "sync_ref_model: steps between updates.", "[1, inf)"] = 512

    @property
    def is_separate(self) -> bool:
        """Return whether the flags name a model: else that of adapters is the trained one without them."""
        return bool(self.ref_model or self.mcore_ref_model or self.ref_adapters)


@dataclass
class PrecomputeOptions(ReferenceOptions):
    """Reference model of what is known before training"""

    precompute_ref_log_probs: Annotated[
        bool, "Compute the reference's log-probabilities before training, then release the reference."
    ] = False


@dataclass
class RolloutReferenceOptions(ReferenceOptions):
    """Reference model of what is generated"""

    ref_tensor_model_parallel_size: Annotated[
        int | None, "TP of the reference, with SP. Default, also below: the policy's.", "[1, inf)"
    ] = None
    ref_pipeline_model_parallel_size: Annotated[int | None, "PP of the reference.", "[1, inf)"] = None
    ref_context_parallel_size: Annotated[int | None, "CP of the reference.", "[1, inf)"] = None
    ref_expert_model_parallel_size: Annotated[int | None, "EP of the reference.", "[1, inf)"] = None
    ref_expert_tensor_parallel_size: Annotated[int | None, "ETP of the reference.", "[1, inf)"] = None


@dataclass
class CriticOptions:
    """Critic"""

    critic_model: Annotated[
        str | None,
        "Model that the critic starts from, a folder or a hub id: a reward model (--rlhf_type rm), or a language "
        "model, which gets a head of zeros. Default: the initial model.",
    ] = None
    mcore_critic_model: Annotated[str | None, "The same as a megatron-core checkpoint, instead of --critic_model."] = (
        None
    )
    critic_lr: Annotated[
        float, "Peak learning rate of the critic. Its schedule is the policy's otherwise.", "[0, inf)"
    ] = 1e-5
    critic_warmup: Annotated[int, "Steps at the start that train only the critic.", "[0, inf)"] = 0
    gamma: Annotated[float, "Discount of later rewards.", "[0, 1]"] = 1.0
    lam: Annotated[
        float, "Lambda of generalized advantage estimation; 1: the return less the value, 0: one step.", "[0, 1]"
    ] = 0.95
    cliprange_value: Annotated[
        float, "Clipping range of a value around that before the steps on a generated batch.", "(0, inf)"
    ] = 0.2
    critic_tensor_model_parallel_size: Annotated[
        int | None, "TP of the critic, with SP. Default, also below: the policy's.", "[1, inf)"
    ] = None
    critic_pipeline_model_parallel_size: Annotated[int | None, "PP of the critic.", "[1, inf)"] = None
    critic_context_parallel_size: Annotated[int | None, "CP of the critic.", "[1, inf)"] = None
    critic_expert_model_parallel_size: Annotated[int | None, "EP of the critic.", "[1, inf)"] = None
    critic_expert_tensor_parallel_size: Annotated[int | None, "ETP of the critic.", "[1, inf)"] = None
    offload_critic: Annotated[
        bool | None,
        "Keep the critic's weights and optimizer state in host memory between uses. Default: true if vLLM shares its "
        "GPUs.",
    ] = None


@dataclass
class TeacherOptions:
    """Teacher"""

    teacher_model: Annotated[
        str | None,
        "Teacher: a folder or a hub id of a model with the same tokenizer. Its layout is the student's by default.",
    ] = None
    mcore_teacher_model: Annotated[str | None, "Teacher as a megatron-core checkpoint, instead of --teacher_model."] = (
        None
    )
    teacher_tensor_model_parallel_size: Annotated[
        int | None, "TP of the teacher, with SP. Default, also below: the student's.", "[1, inf)"
    ] = None
    teacher_pipeline_model_parallel_size: Annotated[int | None, "PP of the teacher.", "[1, inf)"] = None
    teacher_context_parallel_size: Annotated[int | None, "CP of the teacher.", "[1, inf)"] = None
    teacher_expert_model_parallel_size: Annotated[int | None, "EP of the teacher.", "[1, inf)"] = None
    teacher_expert_tensor_parallel_size: Annotated[int | None, "ETP of the teacher.", "[1, inf)"] = None
    offload_teacher_model: Annotated[bool, "Keep the teacher's weights in host memory between uses."] = False


@dataclass
class DistillationOptions(TeacherOptions):
    """Teacher of a distillation"""

    teacher_model_server: Annotated[
        str | None,
        "Address (http://host:port) of a `swift rollout` or `vllm serve` of the teacher, instead of "
        "--teacher_model. Needs --gkd_logits_topk.",
    ] = None
    teacher_model_server_api_key: Annotated[
        str | None, "API key of the teacher's server. Default: that of `swift rollout` on this machine."
    ] = None
    gkd_logits_topk: Annotated[
        int | None,
        "Compare only the teacher's K most likely tokens. Default: all.",
        "[2, inf)",
    ] = None
