"""Multi-turn episodes: the scheduler's messages after an answer, then the model's next answer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ...templates.batching.prompt_dataloader import Prompt
from ...templates.chat_template.continuation import Continuation
from ...templates.formats.schemas import UnusableRow
from ..distributed.collectives import broadcast_from_rank0, gloo_group, rank0_only
from ..multi_turn.call import SchedulerCall, TurnError
from ..multi_turn.load import load_scheduler, prompt_tools
from ..multi_turn.registry import Turn
from ..options import GrpoOptions
from ..rollout.eos import eos_token_ids
from ..run.context import Run
from .completion_text import Texts
from .episode import Episode
from .rollout_metrics import RolloutMetrics
from .sampler import Sampler

Phase = Callable[[str], AbstractContextManager[None]]  # names a part of the loop: gen, reward, multi_turn, ...


class Next(NamedTuple):
    """Continuation of an episode."""

    messages: list[dict[str, Any]]  # none: it is over
    tokens: list[int]  # of the messages, to the generation prompt
    full: bool  # there is no room for them: it is over, and cut off
    info: dict[str, Any]


class MultiTurn:
    """Plays the turns after the first answers. The scheduler runs on the first rank, for all."""

    def __init__(self, run: Run, options: GrpoOptions):
        self._tokenizer, self._texts = run.tokenizer, Texts(run, options)
        self._most, self._room = options.multi_turn.max_turns, options.sampling.max_completion_length
        self._name = options.multi_turn.multi_turn_scheduler
        self._columns = rank0_only(lambda: run.data.columns) or []
        self._scheduler = rank0_only(lambda: load_scheduler(options))
        thinking = options.data.enable_thinking
        self._continuation = rank0_only(
            lambda: Continuation(
                run.tokenizer,
                eos_token_ids(run.model_folder, run.tokenizer),
                tools=prompt_tools(options),
                **({} if thinking is None else {"enable_thinking": thinking}),
            )
        )

    def __call__(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        episodes: Sequence[Episode],
        metrics: RolloutMetrics,
        phase: Phase,
    ) -> None:
        """Play the episodes, one of each prompt, to their ends. Every rank calls it alike.

        Raises TurnError, on every rank, for a scheduler that fails.
        """
        going = list(zip(prompts, episodes, strict=True))
        states: dict[int, dict[str, Any]] = {}  # on the first rank, by episode
        number = 1
        while going:
            with phase("multi_turn"):
                continuations = broadcast_from_rank0(lambda: self._next(going, number, states), gloo_group())  # noqa: B023  at once
            for (_, episode), each in zip(going, continuations, strict=True):
                episode.info = each.info | {"num_turns": number}
                episode.finish_reason = "length" if each.full else episode.finish_reason
            continued = [(pair, each) for pair, each in zip(going, continuations, strict=True) if each.tokens]
            if continued:
                with phase("gen"):
                    self._answer(sampler, continued)
            going, number = [pair for pair, _ in continued], number + 1
        metrics.mean("num_turns", [episode.info["num_turns"] for episode in episodes])

    def _answer(self, sampler: Sampler, asked: list[tuple[tuple[Prompt, Episode], Next]]) -> None:
        tokens = [[*episode.tokens.tolist(), *each.tokens] for (_, episode), each in asked]
        limits = [
            self._room - (len(ids) - len(prompt.tokens)) for ids, ((prompt, _), _) in zip(tokens, asked, strict=True)
        ]
        completions = sampler.of(tokens, limits)
        texts = self._texts([episode.columns for (_, episode), _ in asked], tokens, completions)
        for ((_, episode), each), completion, text in zip(asked, completions, texts, strict=True):
            episode.append_turn(each.messages, each.tokens, completion, text)

    def _next(self, going: list[tuple[Prompt, Episode]], number: int, states: dict[int, dict[str, Any]]) -> list[Next]:
        assert self._scheduler is not None
        requests = [self._asked(episode, number, states.setdefault(id(episode), {})) for _, episode in going]
        replies = self._scheduler(requests)
        return [
            self._after(*pair, request, messages)
            for pair, request, messages in zip(going, requests, replies, strict=True)
        ]

    def _asked(self, episode: Episode, number: int, state: dict[str, Any]) -> SchedulerCall:
        ids = episode.last_answer.tolist()
        turn = Turn(
            number,
            [*episode.columns["messages"], *episode.messages],
            episode.text,
            self._tokenizer.decode(ids, skip_special_tokens=False),
            ids,
            "length" if episode.finish_reason == "length" else "stop",
            episode.finish_reason == "length" or number == self._most,
            {name: episode.columns.get(name) for name in self._columns},
            state,
            episode.info,
        )
        return SchedulerCall(episode.source_row, turn)

    def _after(self, prompt: Prompt, episode: Episode, asked: SchedulerCall, messages: list[dict[str, Any]]) -> Next:
        assert self._continuation is not None
        if not messages or asked.turn.final:
            return Next([], [], False, asked.turn.info)
        try:
            tokens = self._continuation(messages, episode.columns, asked.turn.token_ids)
        except UnusableRow as error:
            raise TurnError(f"--multi_turn_scheduler {self._name}: {error} (what it says to {asked})") from None
        used = len(episode.tokens) - len(prompt.tokens) + len(tokens)
        if used >= self._room:
            return Next([], [], True, asked.turn.info)
        return Next(messages, tokens, False, asked.turn.info)
