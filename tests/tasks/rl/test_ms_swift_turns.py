"""Episodes of ms-swift's schedulers and environments: prompts, tokens, loss masks, log-probabilities and rewards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch.distributed as dist
from megaswift.bridge.option_groups import compose
from megaswift.tasks.multi_turn import MultiTurnScheduler, multi_turns
from megaswift.tasks.multi_turn.call import TurnError
from megaswift.tasks.multi_turn.gym_env import Env, envs
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.rl import multi_turn, reward_scorer
from megaswift.tasks.rl.episode import Episode
from megaswift.tasks.rl.rollout_worker import RolloutWorker
from megaswift.tasks.rollout.engine import Completion
from megaswift.templates.batching.prompt_dataloader import Prompts
from megaswift.templates.prepare import prepare
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests import tiny
from tests.tasks.preference.runs import write

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    for module in (reward_scorer, multi_turn):
        monkeypatch.setattr(module, "gloo_group", lambda: None)
    for registry in (multi_turns, envs):
        for name, entry in registry.items():
            monkeypatch.setitem(registry, name, entry)


class Says:
    """Engine that answers by the next of its texts, with log-probabilities -1, -2, ... over all its tokens."""

    def __init__(self, tokenizer: Any, *texts: str):
        self.tokenizer, self.texts, self.prompts = tokenizer, list(texts), []
        self.count = 0

    def __call__(self, prompts: list) -> list[Completion]:
        return self.complete([prompt.tokens for prompt in prompts], [])

    def complete(self, tokens: list, limits: list, images: Any = ()) -> list[Completion]:
        self.prompts += [self.tokenizer.decode(ids) for ids in tokens]
        return [self._next() for _ in tokens]

    def _next(self) -> Completion:
        ids = self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)
        start, self.count = self.count + 1, self.count + len(ids)
        return Completion(ids, [-float(n) for n in range(start, self.count + 1)], "stop")


def play(tokenizer: Any, folder: Path, texts: list[str], rows: list[dict], **flags: Any) -> tuple[list[Episode], Says]:
    """Return an episode of each row, and the engine."""
    write(folder / "rows.jsonl", rows)
    options = compose(GrpoOptions, dataset=[str(folder / "rows.jsonl")], max_completion_length=1000, **flags)
    data = prepare(options.data, tokenizer, stage="prompts")
    run: Any = SimpleNamespace(tokenizer=tokenizer, data=data, options=options, model_folder=folder, sees_media=False)
    engine = Says(tokenizer, *texts)
    worker = RolloutWorker(
        options,
        Prompts(data.train, completions_per_prompt=1, shuffle=False, seed=0),  # type: ignore[arg-type]
        engine,  # type: ignore[arg-type]
        multi_turn.CompletionTexts(run, options),
        multi_turn.MultiTurn(run, options),
        reward_scorer.RewardScorer(run, options.rewards),
    )
    groups = worker.rollout(worker.prompts.next_batch(len(rows)), 1, worker.metrics.timed)
    return [episode for (episode,) in groups], engine


class AppendsToAnswer(MultiTurnScheduler):
    """Scheduler that appends a tool's result to the model's own message, as ms-swift's tool-call example."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return "call" not in response_choice.message.content

    def step(self, infer_request, response_choice, current_turn):
        result = self.tokenizer.encode(" = 7", add_special_tokens=False)
        infer_request.messages[-1]["content"] += " = 7"
        ids = response_choice.token_ids
        mask = [1] * len(ids) + [0] * len(result)
        ids.extend(result)
        infos = {"calls": current_turn, "goal": infer_request.data_dict["goal"]}
        return {
            "infer_request": infer_request,
            "response_token_ids": ids,
            "response_loss_mask": mask,
            "rollout_infos": infos,
        }


def test_the_model_s_message_goes_on(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(multi_turns, "appends", AppendsToAnswer)
    seen = []

    def watches(completions, completion_ids, messages, rollout_infos):
        seen.append((completions, completion_ids, messages, rollout_infos))
        return [1.0]

    monkeypatch.setitem(reward_scorer.load_rewards.__globals__["orms"], "watches", watches)
    texts = ["call 3+4", " so call it", " seven." + END]
    (episode,), engine = play(
        tokenizer,
        tmp_path,
        texts,
        [{"query": "?", "goal": 5}],
        multi_turn_scheduler="appends",
        reward_funcs=["watches"],
    )
    whole = "call 3+4 = 7 so call it = 7 seven."
    prompt, _ = engine.prompts[0], None
    assert engine.prompts == [prompt, f"{prompt}call 3+4 = 7", f"{prompt}call 3+4 = 7 so call it = 7"]
    assert tokenizer.decode(episode.tokens) == prompt + whole + END
    is_generated = episode.loss_mask > 0
    assert tokenizer.decode(episode.tokens[is_generated]) == "call 3+4 so call it seven." + END
    # The engine's own numbers, in order, and 0 elsewhere.
    assert episode.rollout_log_probs[is_generated].tolist() == [-float(n + 1) for n in range(is_generated.sum())]
    assert not episode.rollout_log_probs[~is_generated].any()
    assert episode.text == whole
    ((completions, ids, messages, infos),) = seen
    assert completions == [whole]
    assert ids == [episode.tokens[is_generated].tolist()]
    assert messages == [[{"role": "user", "content": "?"}, {"role": "assistant", "content": whole}]]
    assert infos == [{"calls": 2, "goal": 5, "num_turns": 3}]


class CutsOff(MultiTurnScheduler):
    """Scheduler that cuts an answer off at `stop`, goes on from there once, and then asks."""

    def step(self, infer_request, response_choice, current_turn):
        answer = infer_request.messages[-1]
        if current_turn == 1:
            kept = self.tokenizer.encode("one two", add_special_tokens=False)
            tip = self.tokenizer.encode(" but", add_special_tokens=False)
            answer["content"] = "one two but"
            # A generated token may be left out of the loss, too.
            mask = [0] + [1] * (len(kept) - 1) + [0] * len(tip)
            return {"infer_request": infer_request, "response_token_ids": kept + tip, "response_loss_mask": mask}
        infer_request.messages.append({"role": "user", "content": "sure?"})
        return {"infer_request": infer_request}


def test_an_answer_is_cut_off(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(multi_turns, "cuts", CutsOff)
    texts = ["one two stop it" + END, " three" + END, "yes" + END]
    (episode,), engine = play(
        tokenizer, tmp_path, texts, [{"query": "?"}], multi_turn_scheduler="cuts", max_turns=3, reward_funcs=["format"]
    )
    prompt = engine.prompts[0]
    assert engine.prompts[1] == f"{prompt}one two but"
    assert engine.prompts[2] == f"{prompt}one two but three{END}\n<|im_start|>user\nsure?{END}\n<|im_start|>assistant\n"
    kept = tokenizer.encode("one two", add_special_tokens=False)
    dropped = len(tokenizer.encode(texts[0], add_special_tokens=False))
    is_generated = np.flatnonzero(episode.loss_mask)
    values = episode.rollout_log_probs[is_generated].tolist()
    later = len(values) - (len(kept) - 1)
    assert values == [*(-float(n) for n in range(2, len(kept) + 1)), *(-float(dropped + n + 1) for n in range(later))]
    assert [message["content"] for message in episode.turns] == ["one two but three", "sure?", "yes"]
    assert episode.text == "yes"


def test_text_alone_is_not_trained_on(tokenizer, tmp_path, monkeypatch):
    """A scheduler may append text and return no tokens."""

    class Tips(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages[-1]["content"] += " wait"
            infer_request.messages.append({"role": "assistant", "content": None})  # a placeholder
            return {"infer_request": infer_request}

    monkeypatch.setitem(multi_turns, "tips", Tips)
    (episode,), _ = play(
        tokenizer,
        tmp_path,
        ["one", " two" + END],
        [{"query": "?"}],
        multi_turn_scheduler="tips",
        max_turns=2,
        reward_funcs=["format"],
    )
    assert tokenizer.decode(episode.tokens).endswith("one wait two" + END)
    assert tokenizer.decode(episode.tokens[episode.loss_mask > 0]) == "one two" + END


class Count(Env):
    """Environment in which the model has to say the number of the row `wanted`."""

    closed: ClassVar[list[int]] = []

    async def reset(self, config):
        self.wanted = config.data_dict["wanted"]
        return f"Guess. {self.env_config.get('hint', '')}", {}, "You guess numbers."

    async def step(self, action):
        guess = int(action[-1]["content"])
        if guess == self.wanted:
            return "", 1.0, True, {}
        return f"{guess} is wrong.", -0.25, False, {}

    async def close(self):
        self.closed.append(self.wanted)


def test_an_environment_s_episodes(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(envs, "count", Count)
    monkeypatch.setattr(Count, "closed", [])
    rows = [
        {"query": "unused", "wanted": 3},
        {"query": "unused", "wanted": 4, "env_config": {"name": "count", "hint": "Small."}},
    ]
    texts = ["1" + END, "4" + END, "2" + END, "3" + END]
    flags = {"multi_turn_scheduler": "gym_scheduler", "gym_env": "count", "reward_funcs": [], "dataset_shuffle": False}
    episodes, engine = play(tokenizer, tmp_path, texts, rows, max_turns=3, **flags)
    assert engine.prompts[1].endswith(
        f"system\nYou guess numbers.{END}\n<|im_start|>user\nGuess. Small.{END}\n<|im_start|>assistant\n"
    )
    assert engine.prompts[2].endswith(f"1{END}\n<|im_start|>user\n1 is wrong.{END}\n<|im_start|>assistant\n")
    assert [episode.reward for episode in episodes] == [0.5, 1.0]
    assert episodes[0].rewards == {"gym_reward": 0.5}
    assert episodes[0].info == {
        "total_reward": 0.5,
        "step_rewards": [-0.25, -0.25, 1.0],
        "gym_done": True,
        "num_turns": 3,
    }
    assert tokenizer.decode(episodes[0].tokens[episodes[0].loss_mask > 0]) == f"1{END}2{END}3{END}"
    assert sorted(Count.closed) == [3, 4]
    # The last of --max_turns ends an episode, too, and its environment is closed.
    (episode,), _ = play(tokenizer, tmp_path, ["1" + END], rows[:1], max_turns=1, **flags)
    assert episode.reward == -0.25
    assert sorted(Count.closed) == [3, 3, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"gym_env": None},
            "raised ValueError: no environment None. Set --gym_env, or `name` in the column env_config",
        ),
        ({"max_length": 5}, "--max_length 5: below the .* tokens that --multi_turn_scheduler gym_scheduler says for"),
    ],
)
def test_an_environment_that_cannot_start(flags, message, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(envs, "count", Count)
    settings = {"gym_env": "count", "use_gym_env": True, "reward_funcs": [], "truncation_strategy": "left"} | flags
    with pytest.raises(TurnError, match=message):
        play(tokenizer, tmp_path, [], [{"query": "?", "wanted": 3}], multi_turn_scheduler="gym_scheduler", **settings)
