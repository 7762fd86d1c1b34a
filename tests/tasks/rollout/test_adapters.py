"""Adapters alone: what is sent in place of whole weights, and which servers take it."""

import pytest
import torch
from megaswift.tasks.rollout.client import ServerEngine
from megaswift.tasks.rollout.lora_support import lora_rank_bucket
from megaswift.tasks.rollout.server_connection import ClientSettings
from megaswift.tasks.rollout.weight_sync import BaseWeightsCheck, scaled

from .served import serving, tensors


def test_scaling_is_in_what_is_sent() -> None:
    """Compare with the matrices that PEFT adds, in another dtype and without alpha."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    base = torch.nn.Sequential(torch.nn.Linear(7, 5, dtype=torch.float64))
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=11, use_rslora=True, target_modules=["0"]))  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        model.base_model.model[0].lora_B["default"].weight.normal_()  # pyright: ignore[reportArgumentType, reportIndexIssue, reportAttributeAccessIssue]
    sent = dict(scaled(get_peft_model_state_dict(model).items(), 11 / 3**0.5, torch.float32))
    (a, b) = (sent[f"base_model.model.0.lora_{matrix}.weight"] for matrix in "AB")
    assert a.dtype == b.dtype == torch.float32
    delta = model.base_model.model[0].get_delta_weight("default")  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue]
    torch.testing.assert_close((b.double() @ a.double()), delta, atol=1e-6, rtol=1e-6)


def test_rooms() -> None:
    assert [lora_rank_bucket(rank) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]
    for rank in (0, 513):
        with pytest.raises(ValueError, match=f"rank 1 to 512, not {rank}"):
            lora_rank_bucket(rank)


@pytest.mark.parametrize(
    ("room", "sent", "message"),
    [
        (0, 5, "it takes full weights, not adapters. Start it with vLLM and --vllm_enable_lora true --vllm_"),
        (8, 0, "it was started with --vllm_enable_lora true and takes only adapters. Set it for the training too"),
        (8, 9, "its adapters have at most rank 8, not 9. Start it with --vllm_max_lora_rank 9"),
        (8, 8, None),
    ],
)
def test_what_a_server_takes(room: int, sent: int, message: str | None) -> None:
    with serving() as (url, engine, server):
        server.backend.max_adapter_rank = room
        if message:
            with pytest.raises(ValueError, match=message):
                ServerEngine([url], ClientSettings(timeout=10, adapter_rank=sent))
            assert server.owner.run is None  # free for others
            return
        client = ServerEngine([url], ClientSettings(timeout=10, adapter_rank=sent))
        client.update(tensors().items())
        assert engine.weights.keys() == tensors().keys()
        client.close()


def test_what_is_beneath_is_compared_and_not_kept() -> None:
    with serving() as (url, engine, _):
        client = ServerEngine([url], ClientSettings(timeout=10))
        client.update({"scale": torch.tensor(2.0)}.items())
        beneath = BaseWeightsCheck(client)
        beneath.update(iter([("scale", torch.tensor(3.0))]))
        assert engine.weights["scale"] == 2.0
        assert beneath.checksums(["scale"]) == client.checksums(["scale"])
        client.close()
