"""Sampler: completions of prompts, with random numbers that go on from call to call."""

import copy
from collections.abc import Collection, Sequence

import numpy as np

from ...templates.batching.prompt_dataloader import Prompt
from ..options.groups import CompletionOptions
from ..rollout.engine import Completion, Request, Sampling
from ..rollout.engine_group import EngineGroup
from ..run.vocabulary import check_tokens


class Sampler:
    """Has engines complete prompts as the options say. Every rank has one, and calls it alike.

    `ends`: tokens that end a completion, whatever the engine's folder says of it; None: as that says. `vocab_size`:
    tokens that the model's embedding has.
    """

    def __init__(
        self,
        rollout: EngineGroup,
        options: CompletionOptions,
        seed: int,
        *,
        ends: Collection[int] | None,
        vocab_size: int,
        experts: bool = False,
    ):
        self.rollout, self.seed, self.vocab_size = rollout, seed, vocab_size
        self.sampling = Sampling(
            options.temperature,
            options.top_p,
            options.top_k,
            options.repetition_penalty,
            options.max_completion_length,
            tuple(options.stop_words),
            experts,
            None if ends is None else tuple(sorted(ends)),
        )
        self.drawn = 0  # completions so far: each has random numbers of its own

    def detach(self) -> "Sampler":
        """Return a sampler that goes on from here by itself; it raises WeightsLost where a server is lost."""
        other = copy.copy(self)
        other.rollout = self.rollout.detach()
        return other

    def restarted(self) -> "Sampler":
        """Return a sampler with the random numbers of the first call."""
        other = copy.copy(self)
        other.drawn = 0
        return other

    def __call__(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Return one completion of each prompt."""
        return self.of([prompt.tokens for prompt in prompts])

    def of(self, tokens: Sequence[list[int]], limits: Sequence[int] | None = None) -> list[Completion]:
        """Return one completion of each tokenized prompt; `limits`: its longest, if below --max_completion_length.

        Raises ValueError for a token that the model does not have.
        """
        check_tokens(max((max(ids) for ids in tokens if len(ids)), default=0), self.vocab_size)
        seeds = np.random.SeedSequence([self.seed, self.drawn]).generate_state(len(tokens), np.uint64) >> 1
        self.drawn += len(tokens)
        most = limits or [None] * len(tokens)
        requests = [Request(ids, int(seed), limit) for ids, seed, limit in zip(tokens, seeds, most, strict=True)]
        completions = self.rollout.generate(requests, self.sampling)
        if self.sampling.experts and any(completion.experts is None for completion in completions):
            raise RuntimeError(
                "--router_replay_mode R3: the engine did not say which experts its tokens went to. Give R2, or another "
                "engine"
            )
        return completions
