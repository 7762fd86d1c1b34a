"""`megatron rlhf --rlhf_type grpo`: a policy learns from the rewards of what it generates (https://arxiv.org/abs/2402.03300).

The loop is `Grpo.steps`: prompts, weights to the engines, completions, rewards, advantages; then steps on them, whose
loss is `Grpo.loss`. Every rank has all completions; templates/batching/episode_batches.py divides them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from math import isnan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ...bridge.layers.replay import record_experts
from ...bridge.model.build import Model
from ...templates.batching.collator import Batch
from ...templates.batching.episode_batches import BatchPlan
from ...templates.batching.prompt_dataloader import Prompt, Prompts
from ..losses.policy import advantages
from ..options import GrpoOptions
from ..reference.reference_model import entropies_of, log_probs_of, reference_of
from ..rollout.eos import end_tokens
from ..rollout.factory import open_rollout
from ..run.context import Run, episode_plan
from ..system.append_file import AppendFile
from ..train.objective import Objective, forward_flops, nothing
from ..train.router_replay import by_episode, check_replay, replaying
from ..train.setup import train
from ..train.step import Training, log_probs
from .async_rollout import Ahead, Drawn
from .completion_text import Texts
from .episode import Episode, as_bytes, from_bytes, from_tensors, sequences_of, to_tensors
from .multi_turn import Turns
from .policy_loss import PolicyLoss
from .reward_scorer import Judge
from .rollout_metrics import COMPLETIONS, RolloutLog, forget_completions, of_this_machine, write_completions
from .sampler import Generation

ENTROPY_TOLERANCE = 1e-5  # nats


def run(options: GrpoOptions, sources: dict[str, str]) -> int:
    """Do what the options say. `sources`: where each option's value came from, for args.json. Returns the exit code."""
    return train(options, sources, make_grpo)


def make_grpo(run: Run, model: Model, train: Prompts, val: Prompts | None) -> tuple[Objective, list[str]]:
    options = run.options
    assert isinstance(options, GrpoOptions)
    check_replay(model, options.router_replay_mode)
    reference, flops, follower, notes = None, None, None, []
    if options.beta:
        of = partial(log_probs_of, temperature=options.temperature)
        reference, flops, name, follower = reference_of(run, model, options, of)
        notes = [f"reference: {name}"]
    source = Grpo(run, model, train, reference)

    def more_flops(batches: list[Batch]) -> float:
        return forward_flops(flops, batches) if flops else 0.0

    forward = partial(log_probs, temperature=options.temperature, entropies=source.loss.with_entropies)
    objective = Objective(
        source.loss,
        source.loss.names,
        forward=replaying(forward),
        prepare=source.prepare,
        more_flops=more_flops if flops else nothing,
        source=source,
        follower=follower,
    )
    return objective, [*notes, *source.judge.notes, source.rollout.note]


class Grpo:
    """Where the steps of a run come from."""

    def __init__(self, run: Run, model: Model, prompts: Prompts, reference: Any):
        options = run.options
        assert isinstance(options, GrpoOptions)
        self.run, self.options, self.prompts, self.reference = run, options, prompts, reference
        self.plan: BatchPlan = episode_plan(run)
        self.judge = Judge(run, options)
        self.replays = options.router_replay_mode
        self.rollout = open_rollout(run, model, options, experts=self.replays == "R3")
        ends = end_tokens(run.model_folder, run.tokenizer)
        vocab_size = model.architecture.vocab_size
        self.complete = Generation(
            self.rollout, options, options.seed, ends=ends, vocab_size=vocab_size, experts=self.replays == "R3"
        )
        self.texts = Texts(run, options)
        self.turns = Turns(run, options) if options.multi_turn_scheduler else None
        self.loss = PolicyLoss(options)
        self.remembers = options.steps_per_generation * options.num_iterations > 1 or options.kl_in_reward
        self.remembers |= self.replays == "R2"
        self.waiting: list[list[Episode]] = []  # of each step still to be done with what was generated
        self.ahead = Ahead() if options.async_generate else None
        self.next: Drawn | None = None  # for the steps behind those that wait
        self.generations = 0
        self.log = RolloutLog()
        self.completions: AppendFile | None = None  # --log_completions, on the rank that writes it

    def steps(self, training: Training, most: int) -> Iterator[list[Batch]]:
        """This rank's micro batches of one step after the other, of so many."""
        for left in range(most, 0, -1):
            if not self.waiting:
                self.generations += 1
                episodes = self.episodes(training, left)
                if self.remembers:
                    self.remember(training, episodes)
                self.compare(episodes)
                self.waiting = self.in_steps(episodes)
            episodes = self.waiting.pop(0)
            self.count_waiting()
            sequences = sequences_of(episodes, drop_cut_off=self.options.overlong_filter)
            batches = self.plan.batches(sequences)
            self.loss.begin_step(sequences, batches)
            self.log.step()
            yield batches
            self.log.seen(self.loss.seen.take(), self.options.max_logprob_gap)
            if self.ahead:
                self.ahead.look()

    def episodes(self, training: Training, left: int) -> list[Episode]:
        """Of the next steps, of the `left` ones of the run.

        --async_generate: those that were drawn while the steps before were trained on. Then the engines are given the
        weights as they are, and draw the episodes after these: so these are by weights that are one generation older.
        """
        if self.ahead is None and self.next is None:
            with self.rollout.awake():
                self.give_weights(training)
                return self.generate_and_score()
        if self.ahead is None:  # the run that this one goes on from drew ahead
            return self.drawn().episodes
        more = left > self.options.steps_per_generation * self.options.num_iterations
        with self.log.timed("wait"):
            self.settle()
        if more or self.next is None:
            self.give_weights(training)
        if self.next is None:  # the first ones, or a server was lost
            self.next = Drawn(self.generate_and_score(), RolloutLog())
        found = self.drawn()
        if more:
            self.ahead.start(self)
        return found.episodes

    def drawn(self) -> Drawn:
        """What was drawn for these steps, which is taken and logged."""
        assert self.next is not None
        found, self.next = self.next, None
        self.log.add_all(found.log)
        return found

    def settle(self) -> None:
        """Wait for what is under way; prompts and random numbers go on from behind it."""
        if self.ahead and self.ahead.under_way:
            self.next = self.ahead.wait()
            if self.next:
                self.prompts.consumed, self.complete.asked = self.next.given, self.next.asked
            self.count_waiting()

    def count_waiting(self) -> None:
        """Samples that are still to be trained on, of prompts that were taken."""
        ahead = len(self.next.episodes) * self.options.num_iterations if self.next else 0
        self.prompts.pending_samples = sum(map(len, self.waiting)) + ahead

    def give_weights(self, training: Training) -> None:
        with self.log.timed("sync"):
            self.log.synced(self.rollout.take_weights(training))

    def generate_and_score(self) -> list[Episode]:
        """Episodes for the steps of a generation: of each prompt as many as are compared with each other.

        --dynamic_sample: prompts of whose completions none is better than another teach nothing, and others take their
        place, as long as --max_resample_times allows.
        """
        options, wanted = self.options, (self.options.generation_batch_size or 0) // self.options.num_generations
        kept: list[list[Episode]] = []
        spare: list[list[Episode]] = []
        for _ in range(1 + options.max_resample_times * options.dynamic_sample):
            groups = self.answered(self.prompts.next_batch(wanted - len(kept)), options.num_generations)
            self.log.add([episode for group in groups for episode in group], options.num_generations)
            teaches = [not options.dynamic_sample or _differ(group) for group in groups]
            kept += [group for group, good in zip(groups, teaches, strict=True) if good]
            spare += [group for group, good in zip(groups, teaches, strict=True) if not good]
            if len(kept) == wanted:
                break
        return [episode for group in (kept + spare)[:wanted] for episode in group]

    def answered(self, prompts: list[Prompt], completions: int) -> list[list[Episode]]:
        """Of each prompt so many completions, with their rewards."""
        with self.log.timed("generate"):
            asked = [prompt for prompt in prompts for _ in range(completions)]
            found = self.complete(asked)
        texts = self.texts([p.columns for p in asked], [p.tokens for p in asked], found)
        rows = zip(asked, found, texts, strict=True)
        episodes = [Episode.of(p, n // completions, found, text) for n, (p, found, text) in enumerate(rows)]
        if self.turns:
            self.turns(self.complete, asked, episodes, self.log)
        with self.log.timed("reward"):
            self.judge(episodes)
        return [episodes[start : start + completions] for start in range(0, len(episodes), completions)]

    def remember(self, training: Training, episodes: list[Episode]) -> None:
        """The log-probabilities of what was drawn by the model as it is now: steps to come will have changed it."""
        with self.log.timed("log_probs"):
            batches = self.plan.batches(sequences_of(episodes, drop_cut_off=False))
            with record_experts(training.chunks if self.replays == "R2" else ()) as recorded:
                found = log_probs_of(
                    training.model, training.chunks, batches, self.options.temperature, replays=self.replays == "R3"
                )
                chosen = recorded()
            for episode, values in zip(episodes, self.whole(batches, found), strict=True):
                episode.old = values
            if self.replays == "R2":
                layers = len(training.model.architecture.layers)
                for episode, experts in zip(episodes, by_episode(self.plan, batches, chosen, layers), strict=True):
                    episode.experts = experts
            if self.options.kl_in_reward and self.reference:
                theirs = self.whole(batches, self.reference(batches, training))
                for episode, values in zip(episodes, theirs, strict=True):
                    episode.penalty = self.options.beta * float(((episode.old - values) * episode.trained).sum())

    def compare(self, episodes: list[Episode]) -> None:
        """The advantage of each over the others of its prompt (or over all); of one that nothing judges: none."""
        options, rewards = self.options, np.array([episode.reward - episode.penalty for episode in episodes])
        groups = np.arange(len(episodes)) // options.num_generations
        judged, found = ~np.isnan(rewards), np.zeros(len(episodes))
        found[judged] = advantages(
            torch.from_numpy(rewards[judged]),
            torch.from_numpy(groups[judged]),
            estimator=options.advantage_estimator,
            scale=options.scale_rewards,
        ).numpy()
        for episode, advantage, group in zip(episodes, found.tolist(), groups.tolist(), strict=True):
            episode.advantage, episode.group = advantage, group
        if options.log_completions and self.run.writes:
            self.completions = self.completions or AppendFile(self.run.folder / COMPLETIONS, print)
            write_completions(self.completions, self.generations, episodes)

    def in_steps(self, episodes: list[Episode]) -> list[list[Episode]]:
        """The episodes of each step, in order: a step's hold whole prompts, as far as they fit."""
        each = self.options.global_batch_size
        once = [episodes[start : start + each] for start in range(0, len(episodes), each)]
        return once * self.options.num_iterations

    def prepare(self, training: Training, batches: list[Batch], evaluates: bool) -> list[Batch]:
        """With the reference's log-probabilities."""
        if self.options.top_entropy_quantile < 1:
            with self.log.timed("log_probs"):
                self.loss.least_entropy = self.least_entropy(training, batches)
        if self.reference is None or self.options.kl_in_reward:
            return batches
        with self.log.timed("log_probs"):
            found = self.reference(batches, training)
        return [
            replace(b, known=b.known | {"ref": values}) for b, values in zip(batches, found, strict=False)
        ] or batches

    def least_entropy(self, training: Training, batches: list[Batch]) -> float:
        """The entropy above which the policy is at --top_entropy_quantile of the step's tokens, on all ranks."""
        found = entropies_of(training.model, training.chunks, batches, self.options.temperature, replays=True)
        own = [values[0][batch.loss_weights[0] != 0].cpu() for batch, values in zip(batches, found, strict=False)]
        own = own if parallel_state.get_tensor_model_parallel_rank() == 0 else []
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, torch.cat([torch.empty(0), *own]).numpy())
        entropies = np.concatenate(everyone)
        if not len(entropies):  # every completion was cut off, and filtered out
            return 0.0
        # The first tokens of a prompt's completions have the same entropy, up to rounding: all of them are in, or none.
        return float(np.quantile(entropies, 1 - self.options.top_entropy_quantile)) - ENTROPY_TOLERANCE

    def evaluate(self, training: Training, val: Prompts, most: int, tick: Callable[[], None]) -> dict[str, float]:
        """Means over the prompts to evaluate on, as `eval_<name>`; `most`: of them, in global batches; -1: all."""
        self.settle()
        each, training_log, asked = self.options.num_generations_eval, self.log, self.complete.asked
        self.log, self.complete.asked = RolloutLog(), 0  # the same random numbers at each evaluation
        per_batch, episodes = max(1, self.options.global_batch_size // each), list[Episode]()
        with self.rollout.awake():
            self.give_weights(training)
            for prompts in islice(val.once(per_batch), most if most >= 0 else None):
                tick()
                found = [episode for group in self.answered(prompts, each) for episode in group]
                episodes += [replace(episode, experts=None) for episode in found]  # which are large
        self.log.add(episodes, each)
        found = self.log.means()
        self.log, self.complete.asked = training_log, asked
        return {f"eval_{name}": value for name, value in found.items() if not of_this_machine(name)}

    def whole(self, batches: list[Batch], values: list[Tensor]) -> list[np.ndarray]:
        """Numbers of the tokens of all episodes, on every rank, of what each rank has of them."""
        own = self.plan.label_values_by_document(batches, values) if values else {}
        own = own if parallel_state.get_tensor_model_parallel_rank() == 0 else {}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        found: dict[int, np.ndarray] = {}
        for of_rank in everyone:
            for item, numbers in of_rank.items():  # context-parallel ranks have each a part
                found[item] = found[item] + numbers if item in found else numbers
        return [found[item] for item in sorted(found)]

    def metrics(self) -> dict[str, float]:
        """What of the rollouts since the last line of the log is to be in it. Every rank asks."""
        self.log.seen(self.loss.seen.take(), self.options.max_logprob_gap)
        return self.log.take()

    def tensors(self) -> dict[str, Tensor]:
        """What a run needs besides to go on from here; what is drawn meanwhile too, once it is."""
        with suppress(Exception):  # which ends the run when the next step is asked for: this checkpoint is whole
            self.settle()
        self.log.seen(self.loss.seen.take(), self.options.max_logprob_gap)
        numbers = {
            "asked": self.complete.asked,
            "generations": self.generations,
            "log": self.log.state(),
            "steps": [len(step) for step in self.waiting],
            "ahead": self.next and self.next.numbers(),
        }
        found = to_tensors([episode for step in self.waiting for episode in step])
        found |= self.next.tensors() if self.next else {}
        return {f"rollout/{name}": value for name, value in (found | {"numbers": as_bytes(numbers)}).items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        tensors = {name.removeprefix("rollout/"): value for name, value in tensors.items()}
        numbers, episodes = from_bytes(tensors["numbers"]), iter(from_tensors(tensors))
        self.complete.asked, self.generations = numbers["asked"], numbers["generations"]
        self.log.load(numbers["log"])
        self.waiting = [list(islice(episodes, length)) for length in numbers["steps"]]
        if numbers.get("ahead") is not None:
            self.next = Drawn.of(tensors, numbers["ahead"])
        if self.run.writes:
            forget_completions(self.run.folder, self.generations)

    def close(self) -> None:
        if self.completions:
            self.completions.close()
        self.rollout.close()

    def let_go(self) -> None:
        self.rollout.let_go()


def _differ(group: list[Episode]) -> bool:
    """Whether some completions of a prompt are better than others."""
    return len({episode.reward for episode in group if not isnan(episode.reward)}) > 1
