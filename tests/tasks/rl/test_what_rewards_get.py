"""What rewards and schedulers get: texts from where the assistant's turn begins, and all columns of the dataset."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megaswift.bridge.option_groups import compose
from megaswift.tasks.multi_turn import multi_turns, scheduler
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.rewards import orms
from megaswift.tasks.rl import multi_turn, reward_scorer
from megaswift.tasks.rl.advantages import AdvantageEstimator
from megaswift.tasks.rl.episode import Episode
from megaswift.tasks.rl.rollout_metrics import COMPLETIONS, RolloutMetrics, truncate_completions, write_completions
from megaswift.tasks.rl.rollout_worker import RolloutWorker, _rewards_differ
from megaswift.tasks.rollout.engine import Completion
from megaswift.tasks.system.append_file import AppendFile
from megaswift.templates.batching.prompt_dataloader import Prompt, Prompts
from megaswift.templates.prepare import prepare
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests import tiny

SAID = "hm</think>\n<answer>22</answer>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """Under a template that opens the thought itself, as those of QwQ and of R1's distills do."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    found = AutoTokenizer.from_pretrained(folder)
    found.add_tokens(["<think>", "</think>"])
    found.chat_template = found.chat_template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    return found


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MODELSCOPE_CACHE", raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    for module in (reward_scorer, multi_turn):
        monkeypatch.setattr(module, "gloo_group", lambda: None)


def made(tokenizer: Any, folder: Path, rows: list[dict], more: list[dict] | None = None, **given: Any) -> RolloutWorker:
    return made_with_data(tokenizer, folder, rows, more, **given)[0]


def made_with_data(
    tokenizer: Any, folder: Path, rows: list[dict], more: list[dict] | None = None, **given: Any
) -> tuple[RolloutWorker, Any]:
    """Return a worker whose engine answers each prompt by SAID, and its data."""
    files = []
    for name, each in (("train.jsonl", rows), ("val.jsonl", more or [])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in each))
        files.append([str(folder / name)] if each else [])
    options = compose(GrpoOptions, dataset=files[0], val_dataset=files[1], max_completion_length=1000, **given)
    data = prepare(options.data, tokenizer, stage="prompts")
    run: Any = SimpleNamespace(tokenizer=tokenizer, data=data, options=options, model_folder=folder, sees_media=False)
    drawn = tokenizer(SAID + "<|im_end|>", add_special_tokens=False).input_ids

    def complete(prompts: list) -> list[Completion]:
        return [Completion(drawn, [-1.0] * len(drawn), "stop") for _ in prompts]

    complete.complete = lambda tokens, limits, images: complete(tokens)  # type: ignore[attr-defined]
    worker = RolloutWorker(
        options,
        Prompts(data.train, completions_per_prompt=2, shuffle=False, seed=0),  # type: ignore[arg-type]
        complete,  # type: ignore[arg-type]
        multi_turn.CompletionTexts(run, options),
        multi_turn.MultiTurn(run, options) if options.multi_turn.multi_turn_scheduler else None,
        reward_scorer.RewardScorer(run, options.rewards),
    )
    return worker, data


def rollout(worker: RolloutWorker, prompts: list[Prompt], group_size: int) -> list[list[Episode]]:
    return worker.rollout(prompts, group_size, worker.metrics.timed)


def test_the_template_s_part_of_an_answer(tokenizer, tmp_path):
    """It is in the text, and not among the tokens that the model drew."""
    worker = made(tokenizer, tmp_path, [{"query": "7 + 15?", "solution": "22"}], reward_funcs=["accuracy", "format"])
    (prompt,) = worker.prompts.next_batch(1)
    assert tokenizer.decode(prompt.tokens).endswith("<|im_start|>assistant\n<think>\n")
    ((episode, _),) = rollout(worker, [prompt], 2)
    assert episode.text == f"<think>\n{SAID}"
    assert episode.rewards == {"accuracy": 1.0, "format": 1.0}
    assert tokenizer.decode(episode.tokens[episode.loss_mask > 0]) == f"{SAID}<|im_end|>"
    assert [*prompt.tokens, *tokenizer.encode(f"{SAID}<|im_end|>")] == episode.tokens.tolist()
    write_completions(AppendFile(tmp_path / COMPLETIONS, print), 1, [episode])
    assert json.loads((tmp_path / COMPLETIONS).read_text())["completion"] == episode.text


def test_every_answer_of_an_episode(tokenizer, tmp_path):
    asked = []

    @scheduler("once more")
    def once_more(turn):
        asked.append((turn.completion, turn.raw, turn.columns))
        return None if turn.number == 2 else "Again."

    try:
        rows = [{"query": "?"}, {"query": "!", "level": 3}]
        worker = made(tokenizer, tmp_path, rows, reward_funcs=["format"], multi_turn_scheduler="once more", max_turns=3)
        prompts = Prompts(worker.prompts.store, completions_per_prompt=1, shuffle=False, seed=0).next_batch(2)
        (episode,), _ = rollout(worker, prompts, 1)
    finally:
        del multi_turns["once more"]
    whole = {"role": "assistant", "content": f"<think>\n{SAID}"}
    assert episode.turns == [whole, {"role": "user", "content": "Again."}, whole]
    assert [text for text, *_ in asked] == [whole["content"]] * 4
    assert [raw for _, raw, _ in asked] == [f"{SAID}<|im_end|>"] * 4
    assert sorted(str(columns["level"]) for *_, columns in asked) == ["3", "3", "None", "None"]
    assert episode.reward == 1
    assert tokenizer.decode(episode.tokens).count(f"<|im_start|>assistant\n<think>\n{SAID}<|im_end|>") == 2


def test_columns_that_some_rows_lack(tokenizer, tmp_path):
    """Rewards get every column of the dataset each time, None where a row lacks it."""
    rows, more = [{"query": "a", "level": 1}, {"query": "b", "solution": "22"}, {"query": "c"}], [{"query": "d"}]
    given = {"reward_funcs": ["accuracy", "format"], "dataset_shuffle": False}
    worker, data = made_with_data(tokenizer, tmp_path, rows, more, **given)
    for prompt, accuracy in zip(worker.prompts.next_batch(3), (None, 1.0, None), strict=True):
        ((episode, _),) = rollout(worker, [prompt], 2)
        assert episode.rewards == {"accuracy": accuracy, "format": 1.0}
    (prompts,) = Prompts(data.val, completions_per_prompt=1, shuffle=False, seed=0).one_pass(8)
    (episode,) = rollout(worker, prompts, 1)[0]
    assert episode.rewards["accuracy"] is None
    assert worker.scorer.columns == ["level", "query", "solution"]
    # Those of the evaluation count as well.
    assert made(tokenizer, tmp_path, [{"query": "a"}], rows, **given).scorer.columns == ["level", "query", "solution"]


def test_a_column_that_no_row_has(tokenizer, tmp_path):
    """It is said before anything is generated."""
    with pytest.raises(
        ValueError, match=r"accuracy: it requires the column solution, and .* dataset has level, query\. Add"
    ):
        made(tokenizer, tmp_path, [{"query": "a", "level": 2, "solution": None}], reward_funcs=["accuracy"])


def test_the_row_that_an_error_names(tokenizer, tmp_path):
    """As it is in the file, however rows are shuffled, and whatever was left out before it."""
    rows = [{"response": "no question"}, *({"query": f"q{n}", "line": n} for n in range(2, 12))]
    more = [{"query": f"v{n}", "line": n} for n in range(1, 4)]
    worker, data = made_with_data(tokenizer, tmp_path, rows, more, reward_funcs=["format"], val_dataset_shuffle=True)
    for name in ("train", "val"):
        prompts = Prompts(getattr(data, name), completions_per_prompt=1, shuffle=True, seed=3)
        for prompt in prompts.next_batch(len(prompts.store)):
            assert prompt.source_row == f"row {prompt.columns['line']} of {tmp_path / name}.jsonl"
    assert [prompt.columns["line"] for prompt in worker.prompts.next_batch(10)] != list(range(2, 12))
    orms["fails"] = lambda completions, line: [1 / (number - 7) for number in line]
    try:
        worker = made(tokenizer, tmp_path, rows, reward_funcs=["fails"])
        with pytest.raises(RuntimeError, match=r"for row 7 of \S+train.jsonl, completion '<think>"):
            rollout(worker, worker.prompts.next_batch(10), 1)
    finally:
        del orms["fails"]


def test_completions_that_nothing_judges(tokenizer, tmp_path):
    """Those of the other rows have the advantages, and the log the numbers, that TRL gives them."""
    from trl.trainer.utils import nanstd

    rows = [{"query": "7 + 15?", "solution": "22"}, {"query": "Which?", "solution": "an apple"}]
    worker = made(tokenizer, tmp_path, rows, reward_funcs=["accuracy"], num_generations=4, log_completions=True)
    prompts = sorted(worker.prompts.next_batch(2), key=lambda prompt: prompt.source_row)
    episodes = [episode for group in rollout(worker, prompts, 4) for episode in group]
    assert [episode.reward for episode in episodes[:4]] == [1.0] * 4
    assert all(np.isnan(episode.reward) for episode in episodes[4:])
    for episode, reward in zip(episodes, [1, 0, 0, np.nan], strict=False):
        episode.reward = reward
    AdvantageEstimator(worker.options)(episodes)
    write_completions(AppendFile(tmp_path / COMPLETIONS, print), 1, episodes)
    rewards = torch.tensor([[episode.reward for episode in episodes[:4]]], dtype=torch.float64)
    theirs = (rewards - rewards.nanmean()) / (nanstd(rewards, dim=1) + 1e-4)
    found = [episode.advantage for episode in episodes]
    assert found == pytest.approx([*theirs.nan_to_num().flatten().tolist(), 0, 0, 0, 0], abs=1e-9)
    written = [json.loads(line) for line in (tmp_path / COMPLETIONS).read_text().splitlines()]
    assert [row["reward"] for row in written] == [1, 0, 0, None, None, None, None, None]
    log = RolloutMetrics()
    log.add(episodes, 4)
    means = log.means()
    assert means["completions/unscored_ratio"] == 5 / 8
    assert (means["reward"], means["frac_reward_zero_std"]) == (pytest.approx(1 / 3), 0)
    assert means["reward_std"] == pytest.approx(nanstd(rewards).item())
    assert [_rewards_differ(episodes[:4]), _rewards_differ(episodes[1:4]), _rewards_differ(episodes[4:])] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\r", "\n"])
def test_a_run_goes_on_behind_any_text(character, tmp_path):
    """Of completions.jsonl the rows up to a generation stay, and no half of one."""
    tokens = np.zeros(2, np.int32)
    episode = Episode("", 0, tokens, tokens.astype(np.float32), tokens.astype(np.float32), "stop", {"messages": []})
    episode.text = f"one{character}two"
    for generation in (1, 2, 3):
        write_completions(AppendFile(tmp_path / COMPLETIONS, print), generation, [episode] * 2)
    file = tmp_path / COMPLETIONS
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"generation": 1, "info": {}')
    truncate_completions(tmp_path, 2)
    rows = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    assert [(row["generation"], row["completion"]) for row in rows] == [(n, episode.text) for n in (1, 1, 2, 2)]
