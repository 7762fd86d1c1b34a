"""Sharing of the prompt of a pair, and the reasons against it."""

import pytest
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import DpoOptions, GrpoOptions, KtoOptions, OrpoOptions, SftOptions
from megaswift.tasks.run.prompt_sharing import prompts_unshared_because, role_configs, share_pairs
from megaswift.templates.prepare import Prepared

from tests import tiny
from tests.templates.batching.pairs import PairStore

BALANCED = "experts with a balancing loss, a z-loss, a capacity or a score bias"
CONTEXT = {"context_parallel_size": 2}
ADAPTERS = {"tuner_type": "lora"}


def config(family: str, **changes) -> dict:
    return tiny.config(family, **changes).to_dict()


def prepared(**attributes) -> Prepared:
    store = PairStore()
    for name, value in attributes.items():
        setattr(store, name, value)
    return Prepared(store, None, lambda data: "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("qwen3", {}, ""),
        ("qwen3_moe", {}, ""),
        ("qwen3", CONTEXT, "context parallelism"),
        ("qwen3", {"hidden_dropout": 0.1}, "dropout"),
        ("qwen3", {"attention_dropout": 0.1}, "dropout"),
        ("qwen3", ADAPTERS, "dropout of adapters (--lora_dropout 0: none)"),
        ("qwen3", ADAPTERS | {"lora_dropout": 0.0}, ""),
        ("qwen3_next", {}, "layers that are not attention"),
        (
            "qwen3_moe",
            {"moe_aux_loss_coeff": 0.1},
            BALANCED,
        ),
    ],
)
@pytest.mark.parametrize("kind", [DpoOptions, OrpoOptions])
def test_reasons(kind, family, options, reason):
    data = prepared()
    share_pairs(compose(kind, **options), data, [config("qwen3"), config(family)])
    assert data.unshared_because == reason
    assert data.shares_prompts == (not reason)


def test_data_that_shares_nothing():
    for data in (prepared(has_media=True), prepared()):
        share_pairs(compose(DpoOptions), data, [config("qwen3")])
        assert data.unshared_because == ("images or videos" if data.has_media else "")
        assert data.shares_prompts == (not data.has_media)
    for kind in (SftOptions, KtoOptions):
        share_pairs(compose(kind), data := prepared(), [config("qwen3")])
        assert not data.shares_prompts


def test_other_models_count(tmp_path):
    """A reference whose layers do not allow it has the same micro batches."""
    tiny.config("qwen3_next").save_pretrained(tmp_path)
    options = compose(DpoOptions, ref_model=str(tmp_path))
    [reference] = role_configs(options)
    assert reference["model_type"] == "qwen3_next"
    share_pairs(options, data := prepared(), [config("qwen3"), reference])
    assert data.unshared_because == "layers that are not attention"
    assert role_configs(compose(KtoOptions, ref_model=str(tmp_path))) == []
    teacher = compose(GrpoOptions, teacher_model=str(tmp_path))
    assert prompts_unshared_because(teacher, role_configs(teacher)) == "layers that are not attention"
    assert prompts_unshared_because(teacher, [config("qwen3")]) == ""
