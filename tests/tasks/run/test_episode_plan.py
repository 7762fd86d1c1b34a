"""The plan of a run's micro batches of completions, from its flags."""

from types import SimpleNamespace

import pytest
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.run import context


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"packing": True, "packing_length": 64}, (1, 128)),
        ({"packing": True, "max_length": 48}, (1, 96)),
        ({"packing": False}, (2, None)),
    ],
)
def test_a_pack_of_completions_is_a_micro_batch(flags, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(context, "prompts_unshared_because", lambda *_: None)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    run = SimpleNamespace(
        options=compose(GrpoOptions, micro_batch_size=2, **flags),
        tokenizer=SimpleNamespace(pad_token_id=0),
        vision=None,
        hf_config={},
        role_configs=[],
    )
    plan = context.episode_plan(run, SimpleNamespace(tp=group, cp=group, pp=group, dp=group))  # type: ignore[arg-type]
    assert (plan.micro_batch_size, plan.pack_length) == expected
