"""Sampling of completions, with seeds that differ from call to call."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from ...templates.batching.prompt_dataloader import Prompt
from ...templates.dataset.placed_media import PlacedMedium
from ...templates.media.processor import VisionProcessor
from ..options.groups import CompletionOptions, SamplingOptions
from ..rollout.engine import Completion, Request, Sampling
from ..rollout.engine_group import EngineGroup
from ..rollout.media_requests import with_media
from ..run.vocabulary import check_tokens


class Sampler:
    """Sampler of completions from the engines. Every rank has an instance and makes the same calls.

    `eos_ids`: tokens that end a completion; None: those of the engine's checkpoint. `vocab_size`: number of tokens in
    the model's embedding.
    """

    def __init__(
        self,
        rollout: EngineGroup,
        options: CompletionOptions,
        seed: int,
        *,
        eos_ids: Collection[int] | None,
        vocab_size: int,
        experts: bool = False,
        vision: VisionProcessor | None = None,
    ):
        """vision: processor of the prompts' images and videos; None: they have none"""
        self.rollout, self.seed, self.vocab_size, self.vision = rollout, seed, vocab_size, vision
        self.sampling = Sampling(
            options.temperature,
            options.top_p,
            options.top_k,
            options.repetition_penalty,
            options.max_completion_length,
            tuple(options.stop_words),
            experts,
            None if eos_ids is None else tuple(sorted(eos_ids)),
            options.min_p,
        )
        self.num_sampled = 0  # completions so far, from which seeds are derived

    def detach(self) -> "Sampler":
        """Return an independent copy, which raises WeightsLost if a server loses its weights."""
        sampler = copy.copy(self)
        sampler.rollout = self.rollout.detach()
        return sampler

    def for_evaluation(self, options: SamplingOptions) -> "Sampler":
        """Return a copy with the sampling of an evaluation, which starts with the seeds of the first call."""
        sampler = copy.copy(self)
        sampler.num_sampled = 0
        settings = {
            "temperature": options.eval_temperature, "top_p": options.eval_top_p, "top_k": options.eval_top_k
        }  # fmt: skip
        changes = {name: value for name, value in settings.items() if value is not None}
        sampler.sampling = replace(self.sampling, **changes)
        return sampler

    def __call__(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Return one completion of each prompt."""
        return self.complete([prompt.tokens for prompt in prompts], media=[prompt.media for prompt in prompts])

    def complete(
        self,
        tokens: Sequence[list[int]],
        limits: Sequence[int] | None = None,
        media: Sequence[Sequence[PlacedMedium]] = (),
    ) -> list[Completion]:
        """Return one completion of each tokenized prompt.

        `limits`: maximal lengths, if below --max_completion_length. `media`: of each prompt; () without any. Raises
        ValueError for a token outside the vocabulary.
        """
        check_tokens(max((max(ids) for ids in tokens if len(ids)), default=0), self.vocab_size)
        seeds = np.random.SeedSequence([self.seed, self.num_sampled]).generate_state(len(tokens), np.uint64) >> 1
        self.num_sampled += len(tokens)
        max_lengths = limits or [None] * len(tokens)
        requests = [Request(ids, int(seed), limit) for ids, seed, limit in zip(tokens, seeds, max_lengths, strict=True)]
        if any(media):
            assert self.vision is not None
            requests = with_media(requests, media, self.vision)
        completions = self.rollout.generate(requests, self.sampling)
        if self.sampling.experts and any(completion.experts is None for completion in completions):
            raise RuntimeError(
                "--router_replay_mode R3: the engine did not say which experts its tokens went to. Give R2, or another "
                "engine"
            )
        return completions
