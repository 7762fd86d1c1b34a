"""Plugins written for ms-swift: their imports are an alias of this project, only while a plugin is loaded or runs."""

import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from megaswift.tasks import rewards
from megaswift.tasks.multi_turn import MultiTurnScheduler, multi_turns
from megaswift.tasks.multi_turn.gym_env import Env, envs
from megaswift.tasks.options.rewards import RewardOptions
from megaswift.tasks.rewards.load import check_rewards, load_rewards
from megaswift.tasks.rewards.reward_fn import Reward, RewardSample
from megaswift.tasks.rewards.scoring import score
from megaswift.tasks.system.ms_swift_imports import ms_swift_imports
from megaswift.tasks.system.ms_swift_names import MODULES
from megaswift.tasks.system.plugins import load_plugins

PLUGIN = """
import swift.rl_core
import swift.rewards.orm as orm_module
from swift import rollout
from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutInferRequest
from swift.plugin.orm import MathAccuracy, ORM as OldORM
from swift.rewards import ORM, PRM, AsyncORM, orms, prms, rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.template import Messages, Template
from swift.utils import get_logger, to_device

logger = get_logger()
assert OldORM is ORM is orm_module.ORM and rollout.multi_turns is multi_turns


class Late(ORM):
    def __init__(self, args=None, **kwargs):
        super().__init__(args)
        from swift.rewards.orm import MathAccuracy  # after the file has been loaded
        self.accuracy = MathAccuracy()

    def __call__(self, completions, solution, **kwargs):
        from swift.rewards.orm import Format
        return self.accuracy(completions, solution, **kwargs)


class Judge(DefaultRMPlugin):
    pass


class Lake(Env):
    pass


class Walk(MultiTurnScheduler):
    pass


orms["late"], rm_plugins["judge"], envs["lake"], multi_turns["walk"] = Late, Judge, Lake, Walk
"""


@pytest.fixture
def registries():
    before = [(registry, dict(registry)) for registry in (multi_turns, envs)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


def plugin(folder: Path, text: str, name: str = "plugin") -> list[str]:
    (folder / f"{name}.py").write_text(text)
    return [str(folder / f"{name}.py")]


def sample(text: str, **columns) -> RewardSample:
    return RewardSample("row 1", "?", [{"role": "user", "content": "?"}], text, [1], columns)


def test_names_are_ours(tmp_path, registries):
    options = RewardOptions(reward_funcs=["late"])
    load_plugins(plugin(tmp_path, PLUGIN))
    check_rewards(options)
    assert find_spec("swift") is None
    assert issubclass(rewards.orms["late"], rewards.ORM)
    assert issubclass(multi_turns["walk"], MultiTurnScheduler)
    assert issubclass(envs["lake"], Env)
    samples = [sample(r"\boxed{4}", solution="4"), sample("5", solution="4")]
    scores = score(load_rewards(options, options), [1.0], samples, 60)
    assert scores.rewards.tolist() == [1, 0]
    assert find_spec("swift") is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "swift"]


def test_every_name_of_the_table_exists():
    with ms_swift_imports():
        for module, names in MODULES.items():
            namespace = {}
            exec(f"from {module} import *", namespace)
            assert names.keys() <= namespace.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import swift.pluginz", r"swift.pluginz does not exist here. swift has callbacks, infer_engine, .*rewards"),
        ("from swift.plugin.loss import loss_map", "swift.plugin.loss does not exist here. swift.plugin has .*ORM"),
        ("from swift.rl_core import CISPO", "swift.rl_core.CISPO does not exist here. swift.rl_core has data"),
        (
            "from swift.infer_engine import TransformersEngine as T\nT(None)",
            "swift.infer_engine.TransformersEngine does not exist here. Rewrite TransformersEngine without",
        ),
    ],
)
def test_other_names_are_refused(text, words, tmp_path):
    with pytest.raises(ValueError, match=rf"--external_plugins .*: importing it raises .*{words}"):
        load_plugins(plugin(tmp_path, text))


def test_a_plugin_may_handle_an_absent_name(tmp_path):
    text = "try:\n    from swift.trainers import Trainer\nexcept ImportError:\n    Trainer = None\n"
    load_plugins(plugin(tmp_path, text))


def test_an_installed_ms_swift_is_kept(tmp_path, monkeypatch):
    """Plugins get this project's registry; other code gets the installed package, before and after."""
    package = tmp_path / "site" / "swift"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "rewards.py").write_text("orms = {'theirs': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    import swift.rewards as installed  # pyright: ignore[reportMissingImports]

    try:
        load_plugins(plugin(tmp_path, "from swift.rewards import orms\norms['mine'] = len\n"))
        assert rewards.orms["mine"] is len
        import swift.rewards as again  # pyright: ignore[reportMissingImports]

        assert again is installed
        assert installed.orms == {"theirs": 1}
    finally:
        for name in ("swift", "swift.rewards"):
            sys.modules.pop(name, None)


def test_threads_share_the_alias():
    """The alias stays until the last block ends, and classes keep their identity."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with ms_swift_imports():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    with ms_swift_imports():
        from swift.rewards import orms as one  # pyright: ignore[reportMissingImports]
    from swift.rewards import orms as two  # pyright: ignore[reportMissingImports]  # the thread still holds it

    leave.set()
    thread.join()
    assert one is two is rewards.orms
    assert find_spec("swift") is None


def test_an_async_reward_imports_late(tmp_path):
    text = (
        "from swift.rewards import AsyncORM, orms\n"
        "class Slow(AsyncORM):\n"
        "    async def __call__(self, completions, **kwargs):\n"
        "        from swift.utils import get_logger\n"
        "        return [float(len(text)) for text in completions]\n"
        "orms['slow'] = Slow\n"
    )
    options = RewardOptions(reward_funcs=["slow"])
    load_plugins(plugin(tmp_path, text))
    (reward,) = load_rewards(options, options)
    assert isinstance(reward, Reward)
    assert reward([sample("abc")]) == [3]


@pytest.mark.skipif("MS_SWIFT_EXAMPLES" not in os.environ, reason="MS_SWIFT_EXAMPLES: folder of ms-swift's examples")
def test_example_plugins_load(registries):
    folder = Path(os.environ["MS_SWIFT_EXAMPLES"])
    load_plugins([str(folder / f"{name}.py") for name in ("plugin", "gsm8k_plugin", "frozen_lake_plugin")])
    assert {"external_countdown", "gsm8k_accuracy", "thinking_tips", "async_genrm"} <= rewards.orms.keys()
    assert {"tool_call_scheduler"} <= multi_turns.keys()
    assert {"frozen_lake", "custom_env"} <= envs.keys()
