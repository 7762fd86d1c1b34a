"""`megatron rlhf --rlhf_type grpo`: RL from rewards of generated completions (https://arxiv.org/abs/2402.03300).

`Grpo.train` is the whole loop. Every rank has all episodes; templates/batching/episode_batches.py divides them into
micro batches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ...bridge.layers.replay import record_experts
from ...bridge.model.model import Model
from ...bridge.model.outputs import LogProbs
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ...templates.batching.prompt_dataloader import Prompts
from ..distributed.redistribute import gather_by_document
from ..losses.group_scores import ScoredGroups, score_groups
from ..observability.flops import Flops
from ..options import GrpoOptions
from ..reference.reference_model import RolloutReference, token_entropies, token_log_probs
from ..rewards.reward_fn import TrainerState
from ..rollout.eos import eos_token_ids
from ..rollout.factory import open_rollout
from ..run.context import Run, episode_plan
from ..system.append_file import AppendFile
from ..train.objective import Objective, StepRunner, forward_flops
from ..train.router_replay import check_replay, gather_experts
from ..train.setup import train
from ..train.step import TrainState
from .advantage_teacher import AdvantageTeacher
from .advantages import AdvantageEstimator
from .async_rollout import AsyncRollout, RolloutBatch
from .completion_text import CompletionTexts
from .episode import Episode, as_bytes, from_bytes, from_tensors, sequences_of, to_tensors
from .multi_turn import MultiTurn, Phase
from .policy_loss import PolicyLoss
from .reward_scorer import RewardScorer, check_data
from .rollout_metrics import (
    COMPLETIONS,
    RolloutMetrics,
    depends_on_machine,
    truncate_completions,
    write_completions,
)
from .rollout_worker import RolloutWorker
from .sampler import Sampler

ENTROPY_TOLERANCE = 1e-5  # nats


def run(options: GrpoOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    return train(options, sources, make_grpo, check_data)


def make_grpo(run: Run, model: Model, train: Prompts, val: Prompts | None) -> tuple[Objective, list[str]]:
    options = run.options
    assert isinstance(options, GrpoOptions)
    check_replay(model, options.router_replay_mode)
    reference, teacher = make_reference(run, model, options), None
    notes = [reference.note] if reference else []
    if options.teacher.teacher_model or options.teacher.mcore_teacher_model:
        teacher = AdvantageTeacher(run, options)
        notes.append(teacher.note)
    grpo = Grpo(run, model, train, reference, teacher)
    return grpo.objective(), [*notes, *grpo.worker.scorer.notes, grpo.rollout.note]


def make_reference(run: Run, model: Model, options: GrpoOptions) -> RolloutReference | None:
    """Return the reference model; None without a KL divergence (`--beta 0`)."""
    if not options.beta:
        return None
    return RolloutReference(run, model, options.reference, options.sampling.temperature)


def _extra_flops(
    frozen: list[Flops], num_iterations: int, groups: ProcessGroupCollection, batches: list[Batch]
) -> float:
    """Return a step's share of the FLOPs of each frozen model's forward pass on the rollout batch."""
    return sum(forward_flops(flops, groups, batches) for flops in frozen) / num_iterations


class Grpo:
    """The GRPO loop and its state between steps."""

    def __init__(
        self,
        run: Run,
        model: Model,
        prompts: Prompts,
        reference: RolloutReference | None,
        teacher: AdvantageTeacher | None = None,
    ):
        options = run.options
        assert isinstance(options, GrpoOptions)
        self.run, self.options, self.groups = run, options, model.groups
        self.reference, self.teacher = reference, teacher
        self.plan: BatchPlan = episode_plan(run, model.groups)
        scorer = RewardScorer(run, options.rewards)
        self.replay = options.router_replay_mode
        with_experts = self.replay == "R3"
        self.rollout = open_rollout(run, model, options.engine, experts=with_experts)
        sampler = Sampler(
            self.rollout,
            options.sampling,
            options.training.seed,
            eos_ids=eos_token_ids(run.model_folder, run.tokenizer),
            vocab_size=model.architecture.vocab_size,
            experts=with_experts,
            vision=run.vision,
        )
        multi_turn = MultiTurn(run, options) if options.multi_turn.multi_turn_scheduler else None
        self.worker = RolloutWorker(options, prompts, sampler, CompletionTexts(run, options), multi_turn, scorer)
        self.metrics = self.worker.metrics
        self.loss = PolicyLoss(options)
        self.advantages = AdvantageEstimator(options)
        self.async_rollout = AsyncRollout() if options.async_generate else None
        self.next_batch: RolloutBatch | None = None  # generated ahead
        self.pending: list[list[Episode]] = []  # episodes of each remaining step on the current rollout batch
        self.generations = 0
        self.completions: AppendFile | None = None  # --log_completions, on the rank that writes it

    def objective(self) -> Objective:
        """Return the task as the trainer sees it."""
        output = LogProbs(
            self.options.sampling.temperature,
            entropies=self.loss.with_entropies,
            trains_entropy=self.loss.trains_entropy,
        )
        frozen = [role.flops for role in (self.reference, self.teacher) if role]
        return Objective(
            self.loss,
            self.loss.names,
            output=lambda batch: output,
            extra_flops=partial(_extra_flops, frozen, self.options.sampling.num_iterations, self.groups),
            loop=self,
            reference_sync=self.reference and self.reference.follower,
        )

    def train(self, trainer: StepRunner) -> None:
        """Run the training loop."""
        for step in trainer.steps():
            if not self.pending:
                episodes = self.collect(trainer, step)
                if self.options.records_old_log_probs:
                    self.record_old_log_probs(trainer, episodes)
                if self.reference:
                    self.record_ref_log_probs(trainer, episodes, self.reference)
                if self.teacher:
                    with self._phase(trainer, "teacher"):
                        for episode, log_probs in zip(episodes, self.teacher.log_probs(episodes), strict=True):
                            episode.teacher_log_probs = log_probs
                self.metrics.add_means(self.advantages(episodes))
                self.log_episodes(episodes)
                self.pending = self.split_into_steps(episodes)
            elif self.reference and any(episode.ref_log_probs is None for episode in self.pending[0]):
                # The checkpoint is of an earlier version, or of a run with --beta 0.
                self.record_ref_log_probs(trainer, self.pending[0], self.reference)
            trainer.step(self.next_batches(trainer))
            self.add_step_metrics()
            if self.async_rollout:
                self.async_rollout.raise_if_failed()

    def collect(self, trainer: StepRunner, step: int) -> list[Episode]:
        """Return the scored episodes of the next rollout batch.

        --async_generate: the batch was generated during the previous steps, with weights one rollout batch older. The
        engines get the current weights and generate the following batch.
        """
        self.generations += 1
        self.worker.scorer.trainer_state = TrainerState(step - 1, trainer.max_steps)
        phase = partial(self._phase, trainer)
        if self.async_rollout is None and self.next_batch is None:
            with self.rollout.awake():
                self.update_weights(trainer.state, phase)
                return self.worker.collect(phase)
        if self.async_rollout is None:  # resumed from a run with --async_generate
            return self.take_next_batch()
        steps_per_batch = self.options.sampling.steps_per_generation * self.options.sampling.num_iterations
        needs_next = trainer.max_steps - step + 1 > steps_per_batch
        with phase("idle"):
            self.wait_for_async_rollout()
        if needs_next or self.next_batch is None:
            self.update_weights(trainer.state, phase)
        if self.next_batch is None:  # the first batch, or a server lost its weights
            worker = replace(self.worker, metrics=RolloutMetrics())
            self.next_batch = RolloutBatch(worker.collect(phase), worker.metrics)
        episodes = self.take_next_batch()
        if needs_next:
            self.async_rollout.start(self.worker.detached())
        return episodes

    @contextmanager
    def _phase(self, trainer: StepRunner, name: str) -> Iterator[None]:
        """Name a phase of the loop for the watchdog, the profiler and the log (`timing_s/{name}`)."""
        with trainer.phase(name), self.metrics.timed(name):
            yield

    def update_weights(self, state: TrainState, phase: Phase) -> None:
        with phase("update_weights"):
            self.metrics.add_weight_sync(self.rollout.update_weights(state))

    def take_next_batch(self) -> list[Episode]:
        batch, self.next_batch = self.next_batch, None
        assert batch is not None
        self.metrics.merge(batch.metrics)
        return batch.episodes

    def wait_for_async_rollout(self) -> None:
        """Wait for the batch in generation. Prompts and seeds continue after it."""
        if self.async_rollout and self.async_rollout.is_running:
            self.next_batch = self.async_rollout.wait()
            if self.next_batch:
                self.worker.prompts.consumed = self.next_batch.prompts_consumed
                self.worker.sampler.num_sampled = self.next_batch.completions_sampled
            self.count_pending()

    def count_pending(self) -> None:
        """Set the number of samples not yet trained on: an epoch ends with the last of them."""
        ahead_samples = len(self.next_batch.episodes) * self.options.sampling.num_iterations if self.next_batch else 0
        self.worker.prompts.pending_samples = sum(map(len, self.pending)) + ahead_samples

    def record_old_log_probs(self, trainer: StepRunner, episodes: list[Episode]) -> None:
        """Record the log-probabilities by the current policy, before the steps on this rollout batch.

        With router replay R2 also the experts of each token.
        """
        state, batches = trainer.state, self.plan.batches(sequences_of(episodes, drop_truncated=False))
        with self._phase(trainer, "old_log_prob"):
            with record_experts(state.chunks if self.replay == "R2" else ()) as recorded:
                values = token_log_probs(
                    state.model, state.chunks, batches, self.options.sampling.temperature, replays=self.replay == "R3"
                )
                chosen_experts = recorded()
            for episode, log_probs in zip(
                episodes, gather_by_document(self.plan, self.groups, batches, values), strict=True
            ):
                episode.old_log_probs = log_probs
            if self.replay == "R2":
                layers = len(state.model.architecture.layers)
                for episode, experts in zip(
                    episodes, gather_experts(self.plan, batches, chosen_experts, layers, self.groups), strict=True
                ):
                    episode.experts = experts

    def record_ref_log_probs(self, trainer: StepRunner, episodes: list[Episode], reference: RolloutReference) -> None:
        """Record the log-probabilities by the reference."""
        with self._phase(trainer, "ref"):
            ref_log_probs = reference.log_probs(sequences_of(episodes, drop_truncated=False), trainer.state)
        for episode, log_probs in zip(episodes, ref_log_probs, strict=True):
            episode.ref_log_probs = log_probs

    def log_episodes(self, episodes: list[Episode]) -> None:
        """Write the episodes to completions.jsonl (`--log_completions`)."""
        if self.options.sampling.log_completions and self.run.writes:
            self.completions = self.completions or AppendFile(self.run.folder / COMPLETIONS, print)
            write_completions(self.completions, self.generations, episodes)

    def split_into_steps(self, episodes: list[Episode]) -> list[list[Episode]]:
        """Return the episodes of each step, in order. Those of a prompt stay together as far as they fit."""
        size = self.options.training.global_batch_size
        steps = [episodes[start : start + size] for start in range(0, len(episodes), size)]
        return steps * self.options.sampling.num_iterations

    def next_batches(self, trainer: StepRunner) -> list[Batch]:
        """Return this rank's micro batches of the next step."""
        with trainer.phase("data"):
            episodes = self.pending.pop(0)
            self.count_pending()
            sequences = sequences_of(episodes, drop_truncated=self.options.overlong_filter)
            batches = self.plan.batches(sequences)
            self.loss.begin_step(sequences, batches)
            self.metrics.count_step()
        if self.options.policy.loss_type == "real":
            with self._phase(trainer, "scores"):
                self.loss.scored_groups = self.score_groups(trainer.state, episodes, sequences, batches)
        if self.options.policy.top_entropy_quantile < 1:
            with self._phase(trainer, "entropy"):
                self.loss.entropy_threshold = self.entropy_threshold(trainer.state, batches)
        return batches

    def score_groups(
        self, state: TrainState, episodes: list[Episode], sequences: Sequences, batches: list[Batch]
    ) -> ScoredGroups:
        """Return the losses of the step's groups, from the policy's scores before the step: --loss_type real."""
        scores = torch.zeros(len(episodes), dtype=torch.float64)
        if sequences.old_log_probs:  # else the policy is the one that has sampled
            values = token_log_probs(
                state.model, state.chunks, batches, self.options.sampling.temperature, replays=True
            )
            current = gather_by_document(self.plan, self.groups, batches, values)
            for i, (new, old, mask) in enumerate(zip(current, sequences.old_log_probs, sequences.weights, strict=True)):
                scores[i] = float(((new - old).astype(np.float64) * mask).sum() / max(mask.sum(), 1.0))
        is_member = [
            not np.isnan(episode.reward) and bool(mask.any())
            for episode, mask in zip(episodes, sequences.weights, strict=True)
        ]
        return score_groups(
            scores,
            torch.tensor([episode.advantage for episode in episodes]),
            torch.tensor([episode.group for episode in episodes]),
            torch.tensor(is_member),
            self.options.policy.real_tau,
        )

    def entropy_threshold(self, state: TrainState, batches: list[Batch]) -> float:
        """Return the policy's entropy at --top_entropy_quantile of the step's tokens, over all ranks."""
        values = token_entropies(state.model, state.chunks, batches, self.options.sampling.temperature)
        rank_values = [v[0][batch.loss_weights[0] != 0].cpu() for batch, v in zip(batches, values, strict=False)]
        rank_values = rank_values if self.groups.tp.rank() == 0 else []
        all_values: list[np.ndarray] = [np.empty(0)] * dist.get_world_size()
        dist.all_gather_object(all_values, torch.cat([torch.empty(0), *rank_values]).numpy())
        entropies = np.concatenate(all_values)
        if not len(entropies):  # every completion was truncated and filtered out
            return 0.0
        # First tokens of a prompt's completions have equal entropies up to rounding. The tolerance keeps all or none.
        return float(np.quantile(entropies, 1 - self.options.policy.top_entropy_quantile)) - ENTROPY_TOLERANCE

    def evaluate(self, state: TrainState, val: Prompts, max_batches: int, tick: Callable[[], None]) -> dict[str, float]:
        """Return means over `max_batches` global batches of evaluation prompts (-1: all), as `eval_<name>`."""
        self.wait_for_async_rollout()
        group_size, metrics = self.options.sampling.num_generations_eval, RolloutMetrics()
        sampler = self.worker.sampler.for_evaluation(self.options.sampling)
        worker = replace(self.worker, sampler=sampler, metrics=metrics)
        prompts_per_batch, episodes = max(1, self.options.training.global_batch_size // group_size), list[Episode]()
        with self.rollout.awake():
            self.update_weights(state, metrics.timed)
            for prompts in islice(val.one_pass(prompts_per_batch), max_batches if max_batches >= 0 else None):
                tick()
                groups = worker.rollout(prompts, group_size, metrics.timed)
                # Experts are large, and not needed here.
                episodes += [replace(episode, experts=None) for group in groups for episode in group]
        metrics.add(episodes, group_size)
        return {f"eval_{name}": value for name, value in metrics.means().items() if not depends_on_machine(name)}

    def add_step_metrics(self) -> None:
        """Add the statistics of the last step, unless they have been added. Every rank calls it."""
        self.metrics.add_policy_stats(
            self.loss.stats.pop(self.groups), self.options.sampling.max_sampling_logp_difference
        )

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the rollouts since the last log line. Every rank calls it."""
        self.add_step_metrics()
        return self.metrics.pop()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the loop for a checkpoint, with the batch in generation."""
        with suppress(Exception):  # the error ends the run at the next step; this checkpoint stays complete
            self.wait_for_async_rollout()
        self.add_step_metrics()
        counters = {
            "asked": self.worker.sampler.num_sampled,
            "generations": self.generations,
            "advantages": self.advantages.state(),
            "log": self.metrics.state(),
            "steps": [len(step) for step in self.pending],
            "ahead": self.next_batch and self.next_batch.metrics_state(),
        }
        tensors = to_tensors([episode for step in self.pending for episode in step])
        tensors |= self.next_batch.tensors() if self.next_batch else {}
        return {f"rollout/{name}": value for name, value in (tensors | {"numbers": as_bytes(counters)}).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        tensors = {name.removeprefix("rollout/"): value for name, value in tensors.items()}
        counters, episodes = from_bytes(tensors["numbers"]), iter(from_tensors(tensors))
        self.worker.sampler.num_sampled, self.generations = counters["asked"], counters["generations"]
        self.metrics.load(counters["log"])
        if state := counters.get("advantages"):  # earlier versions had none
            self.advantages.load(state)
        self.pending = [list(islice(episodes, length)) for length in counters["steps"]]
        if counters.get("ahead") is not None:
            self.next_batch = RolloutBatch.load(tensors, counters["ahead"])
        if self.run.writes:
            truncate_completions(self.run.folder, self.generations)

    def close(self) -> None:
        if self.completions:
            self.completions.close()
        self.rollout.close()

    def release(self) -> None:
        self.rollout.release()
