"""Multi-turn episodes: after each answer the scheduler sends messages, and the model answers again."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from ...templates.batching.prompt_dataloader import Prompt
from ...templates.chat_template.continuation import Continuation
from ...templates.chat_template.render import Renderer
from ...templates.dataset.placed_media import PlacedMedium, expand
from ...templates.dataset.tokenize import place_media
from ...templates.formats.medium import Medium, to_tags
from ...templates.formats.replies import split_replies
from ...templates.formats.schemas import UnusableRow
from ..distributed.collectives import broadcast_from_rank0, gloo_group, rank0_only
from ..multi_turn.call import EpisodeStart, SchedulerCall, TurnError
from ..multi_turn.load import load_scheduler, prompt_tools
from ..multi_turn.registry import EditedAnswer, Turn
from ..options import GkdOptions, GrpoOptions
from ..rollout.eos import eos_token_ids
from ..run.context import Run
from .completion_text import CompletionTexts
from .episode import Episode
from .rollout_metrics import RolloutMetrics
from .sampler import Sampler

Phase = Callable[[str], AbstractContextManager[None]]  # context of a phase of the loop: gen, reward, multi_turn, ...


class NextTurn(NamedTuple):
    """Messages of the scheduler before the model's next answer."""

    messages: list[dict[str, Any]]  # empty: the episode is over
    tokens: list[int]  # of the messages, up to and including the generation prompt
    is_full: bool  # the messages exceed the maximal length: the episode is over, and truncated
    info: dict[str, Any]
    edit: EditedAnswer | None = None  # what the scheduler has made of the answer
    images: Sequence[PlacedMedium] = ()  # images of the messages, placed in `tokens`

    @property
    def is_over(self) -> bool:
        return not (self.messages or self.edit)


class MultiTurn:
    """Turns after the first answers. The scheduler runs on rank 0, for all ranks."""

    def __init__(self, run: Run, options: GrpoOptions | GkdOptions):
        self._tokenizer, self.texts = run.tokenizer, CompletionTexts(run, options)
        self._most_images = options.multi_turn.turn_images
        self._max_turns, self._max_length = options.multi_turn.max_turns, options.sampling.max_completion_length
        self._name = options.multi_turn.multi_turn_scheduler
        self._columns = rank0_only(lambda: run.data.columns) or []
        self._scheduler = rank0_only(lambda: load_scheduler(options, run.tokenizer))
        self._starts_episodes = broadcast_from_rank0(
            lambda: self._scheduler is not None and self._scheduler.starts_episodes, gloo_group()
        )
        self._vision = run.vision if run.sees_media else None
        self._renderer = Renderer(run.tokenizer, options.data, "prompts", prompt_tools(options))
        self._max_prompt = options.data.max_length
        thinking = options.data.enable_thinking
        self._continuation = rank0_only(
            lambda: Continuation(
                run.tokenizer,
                eos_token_ids(run.model_folder, run.tokenizer),
                tools=prompt_tools(options),
                **({} if thinking is None else {"enable_thinking": thinking}),
            )
        )

    def start(self, prompts: Sequence[Prompt], request_ids: Sequence[str]) -> list[Prompt]:
        """Return the prompts of episodes, as the scheduler has changed them. Every rank makes the same call.

        Raises TurnError on every rank if the scheduler fails.
        """
        if not self._starts_episodes:
            return list(prompts)
        return broadcast_from_rank0(lambda: self._start(prompts, request_ids), gloo_group())

    def _start(self, prompts: Sequence[Prompt], request_ids: Sequence[str]) -> list[Prompt]:
        assert self._scheduler is not None
        starts = [
            EpisodeStart(
                prompt.source_row, request_id, deepcopy(prompt.columns["messages"]), self._row_columns(prompt.columns)
            )
            for prompt, request_id in zip(prompts, request_ids, strict=True)
        ]
        self._scheduler.start(starts)
        return [self._started(prompt, start) for prompt, start in zip(prompts, starts, strict=True)]

    def _started(self, prompt: Prompt, start: EpisodeStart) -> Prompt:
        """Return a prompt with the messages that the scheduler has set."""
        if start.messages == prompt.columns["messages"]:
            return prompt
        if prompt.media:
            raise TurnError(
                f"--multi_turn_scheduler {self._name}: it changes the messages of a prompt with images, which is not "
                f"supported in this version ({start}). Leave them, or remove the images"
            )
        try:
            columns = prompt.columns | {"messages": start.messages}
            ((text,), _), *_ = self._renderer(columns | {"system": None})
        except UnusableRow as error:
            raise TurnError(f"--multi_turn_scheduler {self._name}: {error} (what it says for {start})") from None
        tokens = self._tokenizer.encode(text.text, add_special_tokens=False)
        if self._max_prompt and len(tokens) > self._max_prompt:
            raise TurnError(
                f"--max_length {self._max_prompt}: below the {len(tokens)} tokens that --multi_turn_scheduler "
                f"{self._name} says for {start}. Raise it"
            )
        return prompt._replace(tokens=tokens, columns=columns)

    def _row_columns(self, columns: dict[str, Any]) -> dict[str, Any]:
        return {name: columns.get(name) for name in self._columns}

    def __call__(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        episodes: Sequence[Episode],
        metrics: RolloutMetrics,
        phase: Phase,
    ) -> None:
        """Play the episodes, one per prompt, to the end. Every rank makes the same call.

        Raises TurnError on every rank if the scheduler fails.
        """
        active = list(zip(prompts, episodes, strict=True))
        states: dict[int, dict[str, Any]] = {}  # on rank 0, by id of the episode
        number = 1
        while active:
            with phase("multi_turn"):
                continuations = broadcast_from_rank0(lambda: self._next_turns(active, number, states), gloo_group())  # noqa: B023  called immediately
            for (_, episode), next_turn in zip(active, continuations, strict=True):
                episode.info = next_turn.info | {"num_turns": number}
                episode.finish_reason = "length" if next_turn.is_full else episode.finish_reason
                if next_turn.edit:
                    episode.edit_answer(next_turn.edit)
            continued = [
                (pair, next_turn)
                for pair, next_turn in zip(active, continuations, strict=True)
                if not next_turn.is_over
            ]
            if continued:
                with phase("gen"):
                    self._answer(sampler, continued)
            active, number = [pair for pair, _ in continued], number + 1
        metrics.add_mean("num_turns", [episode.info["num_turns"] for episode in episodes])

    def _answer(self, sampler: Sampler, continued: list[tuple[tuple[Prompt, Episode], NextTurn]]) -> None:
        tokens = [[*episode.tokens.tolist(), *next_turn.tokens] for (_, episode), next_turn in continued]
        limits = [
            self._max_length - (len(ids) - len(prompt.tokens))
            for ids, ((prompt, _), _) in zip(tokens, continued, strict=True)
        ]
        images = [episode.following(next_turn.images) for (_, episode), next_turn in continued]
        media = [[*episode.media, *added] for ((_, episode), _), added in zip(continued, images, strict=True)]
        completions = sampler.complete(tokens, limits, media)
        texts = self.texts([episode.columns for (_, episode), _ in continued], tokens, completions)
        for ((_, episode), next_turn), added, completion, text in zip(
            continued, images, completions, texts, strict=True
        ):
            episode.append_turn(next_turn.messages, next_turn.tokens, completion, text, added)

    def _next_turns(
        self, active: list[tuple[Prompt, Episode]], number: int, states: dict[int, dict[str, Any]]
    ) -> list[NextTurn]:
        assert self._scheduler is not None
        calls = [self._scheduler_call(episode, number, states.setdefault(id(episode), {})) for _, episode in active]
        replies = self._scheduler(calls)
        return [
            self._next_turn(*pair, call, messages) for pair, call, messages in zip(active, calls, replies, strict=True)
        ]

    def _scheduler_call(self, episode: Episode, number: int, state: dict[str, Any]) -> SchedulerCall:
        ids = episode.last_answer.tolist()
        turn = Turn(
            number,
            [*episode.columns["messages"], *episode.messages],
            episode.text[episode.answer_offset :],
            self._tokenizer.decode(ids, skip_special_tokens=False),
            ids,
            "length" if episode.finish_reason == "length" else "stop",
            episode.finish_reason == "length" or number == self._max_turns,
            self._row_columns(episode.columns),
            state,
            episode.info,
            episode.request_id,
        )
        return SchedulerCall(episode.source_row, turn)

    def _next_turn(
        self, prompt: Prompt, episode: Episode, call: SchedulerCall, reply: list[dict[str, Any]] | EditedAnswer
    ) -> NextTurn:
        assert self._continuation is not None
        edit = reply if isinstance(reply, EditedAnswer) else None
        messages = edit.messages if edit else reply
        assert isinstance(messages, list)
        if (not messages and not edit) or call.turn.final:
            return NextTurn([], [], False, call.turn.info)
        answer = edit.token_ids if edit else call.turn.token_ids
        if self._vision and not set(answer).isdisjoint(self._vision.reserved_ids):
            return NextTurn([], [], False, call.turn.info)  # an engine would look for the image of such a token
        messages, media = split_replies(messages)
        try:
            tokens = self._continuation(messages, episode.columns, answer) if messages else []
            tokens, images = self._with_images(tokens, media, sent=len(episode.media) - len(prompt.media))
        except UnusableRow as error:
            raise TurnError(f"--multi_turn_scheduler {self._name}: {error} (what it says to {call})") from None
        used = episode.answer_start + len(answer) - len(prompt.tokens) + len(tokens)
        if used >= self._max_length:
            return NextTurn([], [], True, call.turn.info)
        messages = [message | {"content": to_tags(message["content"])} for message in messages]
        return NextTurn(messages, tokens, False, call.turn.info, edit, images)

    def _with_images(
        self, tokens: list[int], media: Sequence[Medium], *, sent: int
    ) -> tuple[list[int], list[PlacedMedium]]:
        """Return the tokens of messages with those of their images, and these. Raises UnusableRow.

        sent: images of earlier messages
        """
        if self._vision is None:
            if media:
                raise UnusableRow(
                    "it has an image, and no vision tower is built, since the data has none. Set --turn_images to the "
                    "most images of an episode"
                )
            return tokens, []
        if self._most_images is not None and sent + len(media) > self._most_images:
            raise UnusableRow(f"it has image {self._most_images + 1}, and --turn_images is {self._most_images}")
        ids = np.array(tokens, np.int32)
        (ids, _), images = expand(ids, np.zeros(len(ids), np.float32), place_media(ids, media, self._vision))
        return ids.tolist(), images
