"""Plugins, names and weights: what is taken, and what a user reads of what is not."""

import pytest
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards import orms, reward
from megaswift.tasks.rewards.functions import Accuracy
from megaswift.tasks.rewards.load import MODEL, check_rewards, load_rewards, reward_names, reward_weights
from megaswift.tasks.system.plugins import load_plugins

OURS = """
from dataclasses import dataclass
from helper_of_plugin import SCALE
from megaswift.tasks.rewards import reward

@dataclass
class Settings:
    scale: float = SCALE

@reward("length")
def length(completions, **columns):
    return [Settings().scale * len(text) for text in completions]
"""
MS_SWIFTS = """
from megaswift.tasks.rewards import ORM, AsyncORM, orms

class Starts(ORM):
    def __call__(self, completions, first, **kwargs):
        return [float(text.startswith(letter)) for text, letter in zip(completions, first)]

class Later(AsyncORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args)
        self.weight = args.repetition_max_penalty

    async def __call__(self, completions, **kwargs):
        return [self.weight for _ in completions]

class Bare:
    def __call__(self, completions):
        return [7.0 for _ in completions]

orms["starts"], orms["later"], orms["bare"] = Starts, Later, Bare
"""


def test_plugins_register_in_both_ways(tmp_path):
    (tmp_path / "helper_of_plugin.py").write_text("SCALE = 0.5\n")
    files = [tmp_path / "ours.py", tmp_path / "theirs.py"]
    for file, text in zip(files, (OURS, MS_SWIFTS), strict=True):
        file.write_text(text)
    options = RewardOptions(
        reward_funcs=["length", "starts", "later", "bare", "format"],
        repetition_max_penalty=-3,
    )
    for _ in range(2):  # once in the command, once in the run: files are imported once
        load_plugins([str(file) for file in files])
    check_rewards(options)
    rewards = {reward.name: reward.function for reward in load_rewards(options, options)}
    assert list(rewards) == options.reward_funcs
    assert rewards["length"](completions=["abcd"], other=1) == [2]
    assert rewards["starts"](completions=["abcd"], first=["a"]) == [1]
    assert rewards["later"].weight == -3
    assert rewards["bare"](completions=[""]) == [7]


def test_a_reward_model_comes_last_where_it_is_not_named():
    options = RewardOptions(reward_funcs=["format"], reward_model="folder", reward_weights=[0.5, 2])
    check_rewards(options)
    assert reward_names(options) == ["format", MODEL]
    assert reward_weights(options) == [0.5, 2]
    model = sum
    assert [reward.function for reward in load_rewards(options, options, model)][1] is model
    named = RewardOptions(reward_funcs=[MODEL, "accuracy"], reward_model="folder")
    check_rewards(named)
    assert reward_names(named) == [MODEL, "accuracy"]
    assert reward_weights(named) == [1, 1]
    assert isinstance(load_rewards(named, named, model)[1].function, Accuracy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RewardOptions(), "--reward_funcs: completions need a reward"),
        (RewardOptions(reward_funcs=["acuracy"]), "--reward_funcs acuracy: .*The nearest is accuracy"),
        (
            RewardOptions(reward_funcs=["zzz"]),
            "no such reward. Use one of by_source, accuracy, format, .*--external_plugins",
        ),
        (RewardOptions(reward_funcs=["format", "format"]), "format occurs twice"),
        (RewardOptions(reward_funcs=[MODEL]), "--reward_funcs reward_model: set --reward_model"),
        (
            RewardOptions(reward_funcs=["format", "accuracy"], reward_weights=[1]),
            "--reward_weights 1: set 2, one for each of format, accuracy",
        ),
        (RewardOptions(reward_funcs=["format"], reward_weights=[float("nan")]), "--reward_weights nan: .*finite"),
        (RewardOptions(reward_funcs=["format"], reward_timeout=0), "--reward_timeout 0: set seconds"),
        (RewardOptions(reward_funcs=["cosine"]), "--cosine_max_len"),
        (RewardOptions(reward_funcs=["repetition"], repetition_n_grams=0), "--repetition_n_grams 0"),
        (RewardOptions(reward_funcs=["repetition"], repetition_max_penalty=1), "--repetition_max_penalty 1"),
        (RewardOptions(reward_funcs=["soft_overlong"], soft_max_length=100), "--soft_cache_length None"),
        (
            RewardOptions(reward_funcs=["soft_overlong"], soft_max_length=9, soft_cache_length=9),
            "--soft_cache_length 9 is not above 0 and below --soft_max_length 9",
        ),
    ],
)
def test_what_cannot_be_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        check_rewards(options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 1\nb = a / 0\n", r"ZeroDivisionError: division by zero \(broken.py, line 2\)"),
        ("a = 1\nprint((a)\n", r"SyntaxError: '\(' was never closed \(broken.py, line 2\)\. Fix the file"),
        ("import no_such_module_at_all\n", "no_such_module_at_all.*Install it"),
        ("from swift.rewards import CosORM\n", "swift.rewards.CosORM does not exist here. swift.rewards has AsyncORM,"),
        ("from megaswift.tasks.rewards import reward\nreward('format')(len)\n", "there is already such a reward"),
    ],
)
def test_a_plugin_that_raises_is_named(text, words, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"--external_plugins {file}: (?s:.*){words}"):
        load_plugins([str(file)])


def test_a_missing_plugin_is_named():
    with pytest.raises(ValueError, match=r"--external_plugins /no/plugin\.py: no such"):
        load_plugins(["/no/plugin.py"])


def test_a_name_is_taken_once():
    reward("mine")(len)
    with pytest.raises(ValueError, match=r'@reward\("mine"\)'):
        reward("mine")(sum)
    assert orms["mine"] is len


def test_without_a_name_it_is_the_functions():
    @reward
    def shortest(completions):
        return [0.0] * len(completions)

    assert orms["shortest"] is shortest
    with pytest.raises(ValueError, match=r'@reward\("shortest"\)'):
        reward(shortest)
