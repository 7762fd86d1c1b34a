"""`megatron rlhf --rlhf_type gkd`: a student learns a teacher's distributions (https://arxiv.org/abs/2306.13649).

`Gkd.train` is the whole loop. A fraction --lmbda of the steps trains on the student's completions. The others train on
the answers of the dataset or, with --seq_kd, on the teacher's completions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge.model.model import Model
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ...templates.batching.prompt_dataloader import Prompt, Prompts
from ...templates.dataset.placed_media import Document, PlacedMedium
from ..distributed.collectives import run_on_all_ranks
from ..losses.distillation import distillation_loss
from ..options import GkdOptions
from ..rl.episode import Episode, as_bytes, from_bytes
from ..rl.multi_turn import MultiTurn
from ..rl.rollout_metrics import RolloutMetrics
from ..rl.sampler import Sampler
from ..rollout.engine_group import EngineGroup
from ..rollout.eos import eos_token_ids
from ..rollout.factory import ModelRollout, check_media, open_rollout
from ..rollout.transformers_engine import TransformersEngine
from ..run.context import Run, episode_plan
from ..train.evaluation import evaluate_on
from ..train.objective import Objective, StepRunner, forward_flops, grouping_of, means, no_flops
from ..train.setup import train
from ..train.step import TrainState
from .teacher import Teacher

Answers = list[tuple[Document, Sequence[PlacedMedium]]]  # conversations with their images and videos


def run(options: GkdOptions, sources: dict[str, str]) -> int:
    """Run the task and return its exit code. sources: where each option's value came from, for args.json."""
    return train(options, sources, make_gkd, check_answers)  # type: ignore[arg-type]


def check_answers(run: Run) -> None:
    """Raise ValueError if the data has videos that an engine of the run does not see."""
    options = run.options
    assert isinstance(options, GkdOptions)
    if options.lmbda > 0:
        check_media(run, options.engine)


def make_gkd(run: Run, model: Model, train: Prompts, val: Prompts | None) -> tuple[Objective, list[str]]:
    gkd = Gkd(run, model, train)
    if val is not None and not (val.store.document_counts > 1).any():
        raise ValueError("--val_dataset: no row has an answer, and an evaluation is on the answers. Leave it out")
    return gkd.objective, gkd.notes


class Gkd:
    """The distillation loop, its state between steps, and the loss."""

    def __init__(self, run: Run, model: Model, prompts: Prompts):
        options = run.options
        assert isinstance(options, GkdOptions)
        self.options, self.prompts = options, prompts
        self.plan: BatchPlan = episode_plan(run, model.groups)
        self.teacher = Teacher(run, model, options, self.plan)
        self.notes = [f"teacher: {self.teacher.name}{self.teacher.location}"]
        self.student: ModelRollout | None = None
        self.samplers: dict[str, Sampler] = {}  # student, teacher: those that generate
        if options.lmbda > 0:
            self.student = open_rollout(run, model, options.engine)
            eos_ids = eos_token_ids(run.model_folder, run.tokenizer)
            self.samplers["student"] = Sampler(
                self.student,
                options.sampling,
                options.training.seed,
                eos_ids=eos_ids,
                vocab_size=model.architecture.vocab_size,
                vision=run.vision,
            )
            self.notes.append(self.student.note)
        self.multi_turn = MultiTurn(run, options) if options.multi_turn.multi_turn_scheduler else None
        # The teacher's eos tokens are those of its own checkpoint.
        if options.seq_kd and self.teacher.server:
            reader = self.teacher.server.reader if dist.get_rank() == 0 else None
            self.samplers["teacher"] = Sampler(
                EngineGroup(reader, None),
                options.sampling,
                options.training.seed,
                eos_ids=None,
                vocab_size=self.teacher.vocab_size,
                vision=run.vision,
            )
        elif options.seq_kd:
            # Also if the student's completions come from a server, which holds only the student's weights.
            engine = run_on_all_ranks(lambda: TransformersEngine(self.teacher.folder, dtype=run.dtype))
            engine.sleep()
            self.samplers["teacher"] = Sampler(
                EngineGroup(engine, 1),
                options.sampling,
                options.training.seed,
                eos_ids=None,
                vocab_size=self.teacher.vocab_size,
                vision=run.vision,
            )
            self.notes.append("the teacher's completions: transformers, a copy of it in each process")
        self.sequences = Sequences([], [], [])  # of the latest micro batches
        self.steps_done = 0
        self.metrics = RolloutMetrics()
        self.objective = Objective(
            self.loss,
            ["loss", "jsd", *(["nll_loss", "given"] if options.sft_alpha else [])],
            output=lambda batch: self.teacher.compare(batch, likelihood=self.with_likelihood(batch)),
            prepare=self.prepare,
            means=_gkd_means,
            extra_flops=partial(forward_flops, self.teacher.flops, model.groups) if self.teacher.flops else no_flops,
            loop=self,
        )

    def train(self, trainer: StepRunner) -> None:
        """Run the training loop."""
        for _ in trainer.steps():
            prompts = self.prompts.next_batch(self.options.training.global_batch_size)
            is_on_policy = (
                np.random.default_rng([self.options.training.seed, self.steps_done]).random() < self.options.lmbda
            )
            self.steps_done += 1
            if is_on_policy and self.student:
                with self.student.awake():
                    with self._phase(trainer, "update_weights"):
                        self.metrics.add_weight_sync(self.student.update_weights(trainer.state))
                    answers = self.generate(trainer, "student", prompts)
            elif self.options.seq_kd:
                self.samplers["teacher"].rollout.wake()
                answers = self.generate(trainer, "teacher", prompts)
                self.samplers["teacher"].rollout.sleep()
            else:
                answers = _answers(prompts)
            self.metrics.add_mean("gkd/on_policy_fraction", [is_on_policy])
            self.metrics.count_step()
            with trainer.phase("data"):
                batches = self.batches(answers, off_policy=not is_on_policy)
            with self._phase(trainer, "teacher"):
                batches = self.teacher.annotate(batches, self.sequences)
            trainer.step(batches)

    @contextmanager
    def _phase(self, trainer: StepRunner, name: str) -> Iterator[None]:
        """Name a phase of the loop for the watchdog, the profiler and the log (`timing_s/{name}`)."""
        with trainer.phase(name), self.metrics.timed(name):
            yield

    def generate(self, trainer: StepRunner, writer: str, prompts: list[Prompt]) -> Answers:
        """Return the prompts with completions of `writer` (student or teacher). All their tokens are trained on."""
        phase, turns = partial(self._phase, trainer), self.multi_turn if writer == "student" else None
        first = self.prompts.consumed - len(prompts)
        request_ids = [f"prompt-{first + n}-0" for n in range(len(prompts))]
        if turns:
            with phase("multi_turn"):
                prompts = turns.start(prompts, request_ids)
        with phase("gen"):
            completions = self.samplers[writer](prompts)
        texts = [""] * len(prompts)
        if turns:
            texts = turns.texts([p.columns for p in prompts], [p.tokens for p in prompts], completions)
        rows = enumerate(zip(prompts, completions, texts, strict=True))
        episodes = [Episode.from_completion(prompt, n, completion, text) for n, (prompt, completion, text) in rows]
        if turns:
            for episode, request_id in zip(episodes, request_ids, strict=True):
                episode.request_id = request_id
            turns(self.samplers[writer], prompts, episodes, self.metrics, phase)
        self.metrics.add_lengths(episodes)
        return [((episode.tokens, episode.loss_mask), episode.media) for episode in episodes]

    def batches(self, answers: Answers, *, off_policy: bool) -> list[Batch]:
        """Return micro batches of the documents. off_policy: not by the student; the documents' labels hold this."""
        tokens, weights = ([document[part] for document, _ in answers] for part in range(2))
        media = [media for _, media in answers]
        self.sequences = Sequences(tokens, weights, [float(off_policy)] * len(answers), media=media)
        return self.plan.batches(self.sequences)

    def prepare(self, state: TrainState, batches: list[Batch], evaluates: bool) -> list[Batch]:
        return self.teacher.annotate(batches, self.sequences) if evaluates else batches

    def with_likelihood(self, batch: Batch) -> bool:
        return self.options.sft_alpha > 0 and bool(grouping_of(batch).labels.any())

    def loss(self, batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics. `output`: of `Teacher.compare`."""
        weights, tokens, alpha = batch.loss_weights, batch.loss_tokens, self.options.sft_alpha
        if self.with_likelihood(batch):
            loss, metrics = distillation_loss(output[0], weights, tokens, log_probs=output[1], sft_alpha=alpha)
            return loss, metrics | {"given": weights.sum() / max(tokens, 1.0)}
        loss, metrics = distillation_loss(output, weights, tokens)
        return loss, metrics | (dict.fromkeys(("nll_loss", "given"), torch.zeros_like(loss)) if alpha else {})

    def evaluate(self, state: TrainState, val: Prompts, max_batches: int, tick: Callable[[], None]) -> dict[str, float]:
        """Return the loss on the answers of the evaluation data, as `eval_<name>` (see `Loop.evaluate`)."""
        prompt_batches = val.one_pass(self.options.training.global_batch_size)
        steps = (self.batches(answers, off_policy=True) for answers in map(_answers, prompt_batches) if answers)
        return evaluate_on(state, islice(steps, max_batches if max_batches >= 0 else None), self.objective, tick)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last log line."""
        return self.metrics.pop()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the loop for a checkpoint."""
        num_sampled = {writer: sampler.num_sampled for writer, sampler in self.samplers.items()}
        return {
            "rollout/numbers": as_bytes({"done": self.steps_done, "asked": num_sampled, "log": self.metrics.state()})
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        numbers = from_bytes(tensors["rollout/numbers"])
        self.steps_done = numbers["done"]
        self.metrics.load(numbers["log"])
        for writer, sampler in self.samplers.items():
            sampler.num_sampled = numbers["asked"].get(writer, 0)

    def close(self) -> None:
        for sampler in self.samplers.values():
            sampler.rollout.close()

    def release(self) -> None:
        if self.student is not None:
            self.student.release()


def _answers(prompts: list[Prompt]) -> Answers:
    """Return the conversations of the rows that have an answer."""
    return [(prompt.reference_document, prompt.reference_media) for prompt in prompts if prompt.reference_document]


def _gkd_means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """Return means. `nll_loss` is a mean over the off-policy tokens; without any it is omitted."""
    values = means(sums, weight)
    off_policy = values.pop("given", 0.0)
    nll = values.pop("nll_loss", 0.0)
    return values | ({"nll_loss": nll / off_policy} if off_policy else {})
