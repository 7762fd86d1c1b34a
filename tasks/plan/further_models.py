"""Models beside the trained one in a plan: the critic of PPO, the teacher of GKD, and a reward model."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...bridge.checkpoint.hub import read_config, source_folder
from ...bridge.checkpoint.pretrained import empty_classifier, load_config
from ...bridge.checkpoint.quantized import quantization_of, weight_reader
from ...bridge.options import ModelOptions
from ..options import GkdOptions, GrpoOptions, PlanOptions, PpoOptions, SftOptions
from ..options.rollout import engine_kind
from .gpu_layout import GpuLayout
from .make_workload import make_workload
from .task import CRITIC, TEACHER, TaskWork
from .workload import FurtherModel, Workload


@dataclass(frozen=True)
class Source:
    """Checkpoint of a model: a folder or a hub id, or a megatron-core checkpoint. Its small files are enough."""

    model: str | None
    mcore_model: str | None = None
    flag: str = "--model"

    def workload(self, options: ModelOptions, plan: PlanOptions, task: TaskWork) -> Workload:
        """Return the workload of the model, all of whose parameters would be trained.

        options: of the hub; plan: batch and precision. Raises ValueError, with the flag.
        """
        try:
            return self._workload(options, plan, task)
        except (OSError, ValueError, ImportError) as error:
            text = str(error).replace("--model ", f"{self.flag} ")
            about = "" if self.flag in text else f"{self.flag} {self.model or self.mcore_model}: "
            raise ValueError(f"{about}{text}") from None

    def _workload(self, options: ModelOptions, plan: PlanOptions, task: TaskWork) -> Workload:
        folder = source_folder(replace(options, model=self.model or ""), self.mcore_model, weights=False)
        hf_config = read_config(folder, mcore=bool(self.mcore_model))
        weight_reader(folder, hf_config)  # raises ValueError for an unknown quantization
        name = self.model or self.mcore_model or ""
        plan = replace(plan, model=name, tuner_type="full", mtp_num_layers=None, image_share=0.0)
        return make_workload(hf_config, load_config(folder), plan, task)


def with_models_of_run(work: Workload, options: SftOptions, plan: PlanOptions) -> Workload:
    """Return the workload of a run with its critic, teacher and reward model. Raises ValueError."""
    hub: Any = options
    if isinstance(options, GrpoOptions) and options.rewards.reward_model:
        work = replace(work, reward_bytes=_reward_bytes(replace(hub, model=options.rewards.reward_model)))
    if isinstance(options, PpoOptions):
        critic = options.critic
        source = Source(critic.critic_model, critic.mcore_critic_model, "--critic_model")
        if not (source.model or source.mcore_model):
            source = Source(options.model, options.mcore_model)
        offloads = critic.offload_critic
        if offloads is None:
            offloads = engine_kind(options.engine) == "vllm"
        return replace(work, further=FurtherModel(source.workload(hub, plan, CRITIC), True, offloads))
    if isinstance(options, GkdOptions) and not options.teacher.teacher_model_server:
        source = Source(options.teacher.teacher_model, options.teacher.mcore_teacher_model, "--teacher_model")
        teacher = source.workload(hub, plan, TEACHER)
        return replace(work, further=FurtherModel(teacher, False, options.teacher.offload_teacher_model))
    return work


def _reward_bytes(options: ModelOptions) -> float:
    """Return the bytes of a reward model; 0 for one that transformers has no such class for, or quantizes."""
    try:
        folder = source_folder(options, None, weights=False)
        config = load_config(folder)
        if quantization_of(read_config(folder)):
            return 0.0
        with torch.device("meta"):
            model = empty_classifier(config)
    except (OSError, ValueError, ImportError):  # the run says what is wrong with it
        return 0.0
    dtype = getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
    return float(model.num_parameters() * dtype.itemsize)


def with_models_of_plan(work: Workload, options: PlanOptions) -> Workload:
    """Return the workload of `megatron plan` with a critic that begins as the model, or with a teacher."""
    if options.rlhf_type == "ppo":
        critic = Source(options.model).workload(options.model_options, options, CRITIC)
        return replace(work, further=FurtherModel(critic, True, True))
    if options.rlhf_type == "gkd":
        teacher = Source(options.teacher_model, flag="--teacher_model").workload(
            options.model_options, options, TEACHER
        )
        return replace(work, further=FurtherModel(teacher, False, False))
    return work


def divides_further_model(work: Workload, layout: GpuLayout) -> bool:
    """Return whether a layout divides the layers and experts of the further model, if there is one."""
    if work.further is None:
        return True
    config = work.further.work.config
    is_split = layout.pipeline > 1 and config.architecture.is_one_stage  # type: ignore[attr-defined]
    if is_split or not layout.divides(config.num_layers):
        return False
    experts, width = config.num_moe_experts, config.moe_ffn_hidden_size or 0
    return not experts or (experts % layout.expert == 0 and width % layout.expert_tensor == 0)
