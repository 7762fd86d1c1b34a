"""`megatron rlhf --rlhf_type gkd`: a student learns a teacher's distributions (https://arxiv.org/abs/2306.13649).

The loop is `Gkd.steps`: prompts; for a share of the steps, --lmbda, what the student writes itself, else the data's
answers or (--seq_kd) the teacher's. How far student and teacher are apart on it, tasks/distillation/teacher.py says.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...bridge.model.build import Model
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan, Sequences
from ...templates.batching.prompt_dataloader import Prompt, Prompts
from ...templates.dataset.store import Document
from ..distributed.collectives import on_every_rank
from ..losses.distillation import distillation_loss
from ..options import GkdOptions
from ..rl.episode import Episode, as_bytes, from_bytes
from ..rl.rollout_metrics import RolloutLog
from ..rl.sampler import Generation
from ..rollout.engine_group import Rollout
from ..rollout.eos import end_tokens
from ..rollout.factory import ModelRollout, open_rollout
from ..rollout.transformers_engine import TransformersEngine
from ..run.context import Run, episode_plan
from ..train.objective import Objective, forward_flops, grouping_of, means, nothing
from ..train.setup import train
from ..train.step import Training
from ..train.trainer import evaluate_on
from .teacher import Teacher


def run(options: GkdOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    return train(options, sources, make_gkd)  # type: ignore[arg-type]


def make_gkd(run: Run, model: Model, train: Prompts, val: Prompts | None) -> tuple[Objective, list[str]]:
    gkd = Gkd(run, model, train)
    if val is not None and not (val.store.document_counts > 1).any():
        raise ValueError("--val_dataset: no row has an answer, and an evaluation is on the answers. Leave it out")
    return gkd.objective, gkd.notes


class Gkd:
    """Where the steps of a run come from, and their loss."""

    def __init__(self, run: Run, model: Model, prompts: Prompts):
        options = run.options
        assert isinstance(options, GkdOptions)
        self.options, self.prompts = options, prompts
        self.plan: BatchPlan = episode_plan(run)
        self.teacher = Teacher(run, model, options, self.plan)
        self.notes = [f"teacher: {self.teacher.name}{self.teacher.place}"]
        self.student: ModelRollout | None = None
        self.writers: dict[str, Generation] = {}  # who may write completions
        if options.lmbda > 0:
            self.student = open_rollout(run, model, options)
            ends = end_tokens(run.model_folder, run.tokenizer)
            self.writers["student"] = Generation(
                self.student, options, options.seed, ends=ends, vocab_size=model.architecture.vocab_size
            )
            self.notes.append(self.student.note)
        # A teacher ends as it has learned to, by the tokens that its own folder names.
        if options.seq_kd and self.teacher.server:
            reader = self.teacher.server.reader if dist.get_rank() == 0 else None
            self.writers["teacher"] = Generation(
                Rollout(reader, None), options, options.seed, ends=None, vocab_size=self.teacher.vocab_size
            )
        elif options.seq_kd:
            # Whatever generates for the student: a server has its weights, and no others.
            engine = on_every_rank(lambda: TransformersEngine(self.teacher.folder, dtype=run.dtype))
            engine.sleep()
            self.writers["teacher"] = Generation(
                Rollout(engine, 1), options, options.seed, ends=None, vocab_size=self.teacher.vocab_size
            )
            self.notes.append("the teacher's completions: transformers, a copy of it in each process")
        self.sequences = Sequences([], [], [])  # of the micro batches that were made last
        self.done = 0  # steps
        self.log = RolloutLog()
        self.objective = Objective(
            self.loss,
            ["loss", "jsd", *(["nll_loss", "given"] if options.sft_alpha else [])],
            forward=lambda model, chunk, batch, scored: self.teacher.compare(
                model, chunk, batch, scored, likelihood=self.with_likelihood(batch)
            ),
            prepare=self.prepare,
            means=_means,
            more_flops=partial(forward_flops, self.teacher.flops) if self.teacher.flops else nothing,
            source=self,
        )

    def steps(self, training: Training, most: int) -> Iterator[list[Batch]]:
        """This rank's micro batches of one step after the other, of so many."""
        for _ in range(most):
            prompts = self.prompts.next_batch(self.options.global_batch_size)
            own = np.random.default_rng([self.options.seed, self.done]).random() < self.options.lmbda
            self.done += 1
            if own and self.student:
                with self.student.awake():
                    with self.log.timed("sync"):
                        self.log.synced(self.student.take_weights(training))
                    documents = self.written("student", prompts)
            elif self.options.seq_kd:
                self.writers["teacher"].rollout.wake()
                documents = self.written("teacher", prompts)
                self.writers["teacher"].rollout.sleep()
            else:
                documents = [prompt.reference_document for prompt in prompts if prompt.reference_document]
            self.log.mean("on_policy", [own])
            self.log.step()
            yield self.batches(documents, given=not own)

    def written(self, by: str, prompts: list[Prompt]) -> list[Document]:
        """The prompts with completions, of which all tokens are trained on."""
        with self.log.timed("generate"):
            found = self.writers[by](prompts)
        episodes = [
            Episode.of(prompt, n, each, "") for n, (prompt, each) in enumerate(zip(prompts, found, strict=True))
        ]
        self.log.lengths(episodes)
        return [(episode.tokens, episode.trained) for episode in episodes]

    def batches(self, documents: list[Document], *, given: bool) -> list[Batch]:
        """`given`: somebody else than the student has written them, which their label tells the loss."""
        tokens, weights = ([document[part] for document in documents] for part in range(2))
        self.sequences = Sequences(tokens, weights, [float(given)] * len(documents))
        return self.plan.batches(self.sequences)

    def prepare(self, training: Training, batches: list[Batch], evaluates: bool) -> list[Batch]:
        """With what the teacher makes of them."""
        with nullcontext() if evaluates else self.log.timed("teacher"):
            return self.teacher.looks(batches, self.sequences)

    def with_likelihood(self, batch: Batch) -> bool:
        return self.options.sft_alpha > 0 and bool(grouping_of(batch).labels.any())

    def loss(self, batch: Batch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`output`: as `Teacher.compare` gives it."""
        weights, tokens, alpha = batch.loss_weights, batch.loss_tokens, self.options.sft_alpha
        if self.with_likelihood(batch):
            loss, found = distillation_loss(output[0], weights, tokens, log_probs=output[1], sft_alpha=alpha)
            return loss, found | {"given": weights.sum() / max(tokens, 1.0)}
        loss, found = distillation_loss(output, weights, tokens)
        return loss, found | (dict.fromkeys(("nll_loss", "given"), torch.zeros_like(loss)) if alpha else {})

    def evaluate(self, training: Training, val: Prompts, most: int, tick: Callable[[], None]) -> dict[str, float]:
        """The same loss on the answers of the evaluation data, as `eval_<name>`; `most`: as of `evaluate`."""
        each = (
            [p.reference_document for p in prompts if p.reference_document]
            for prompts in val.once(self.options.global_batch_size)
        )
        steps = (self.batches(documents, given=True) for documents in each if documents)
        return evaluate_on(training, islice(steps, most if most >= 0 else None), self.objective, tick)

    def metrics(self) -> dict[str, float]:
        """What of the steps since the last line of the log is to be in it."""
        return self.log.take()

    def tensors(self) -> dict[str, Tensor]:
        """What a run needs besides to go on from here."""
        asked = {by: writer.asked for by, writer in self.writers.items()}
        return {"rollout/numbers": as_bytes({"done": self.done, "asked": asked, "log": self.log.state()})}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        numbers = from_bytes(tensors["rollout/numbers"])
        self.done = numbers["done"]
        self.log.load(numbers["log"])
        for by, writer in self.writers.items():
            writer.asked = numbers["asked"].get(by, 0)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.rollout.close()

    def let_go(self) -> None:
        if self.student is not None:
            self.student.let_go()


def _means(sums: dict[str, float], weight: float) -> dict[str, float]:
    """The answers' own loss: over the tokens that have one, where there were some."""
    found = means(sums, weight)
    given = found.pop("given", 0.0)
    nll = found.pop("nll_loss", 0.0)
    return found | ({"nll_loss": nll / given} if given else {})
