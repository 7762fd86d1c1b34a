"""Fields of megatron-core's config that `--megatron_extra_kwargs` sets."""

import dataclasses

import torch
from megaswift.bridge.layers.replay import find_routers
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import CORE_SETTINGS, BuildOptions
from megatron.core.transformer.transformer_config import TransformerConfig

from tests import tiny
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)


def test_they_are_fields_and_have_no_flag():
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    flags = {field.name for field in dataclasses.fields(BuildOptions)}
    assert CORE_SETTINGS.keys() <= fields - flags


def test_they_have_an_effect(one_process):  # noqa: F811
    hf_config = tiny.config("qwen3_moe").to_dict()
    settings = {"moe_input_jitter_eps": 0.25, "batch_p2p_sync": True}
    model = build_model(hf_config, BuildOptions(megatron_extra_kwargs=settings), torch.float32)
    assert model.config.batch_p2p_sync
    router, plain = (
        next(iter(find_routers(each.chunks[0]).values()))
        for each in (model, build_model(hf_config, BuildOptions(), torch.float32))
    )
    states = torch.ones(64, 1, model.config.hidden_size)
    jittered = router.apply_input_jitter(states)
    assert 0.75 <= jittered.min() < 0.76 < 1.24 < jittered.max() <= 1.25
    assert torch.equal(plain.apply_input_jitter(states), states)
