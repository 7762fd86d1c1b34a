"""Memory that leaves and comes back: storages without bytes, views that stay; what vLLM is given beside a trainer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from megaswift.bridge.option_groups import compose
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.options.rollout import EngineOptions
from megaswift.tasks.rollout.memory_budget import EngineMemoryBudget, MemoryNeeds, _state_bytes, memory_budget
from megaswift.tasks.rollout.scoring_client import FLAG
from megaswift.tasks.rollout.server_connection import ClientSettings, ServerConnection
from megaswift.tasks.system.memory import GIB, oom_hints
from megaswift.tasks.train.offload import HostBuffer
from safetensors.torch import load_file, save_file


def test_storages_have_no_bytes_while_they_are_away_and_views_stay(tmp_path) -> None:
    flat = torch.arange(24.0)
    view, other = flat[4:10].view(2, 3), torch.ones(3, dtype=torch.bfloat16)
    save_file({"a": torch.arange(4.0)}, tmp_path / "a.safetensors")
    of_a_file = load_file(tmp_path / "a.safetensors")["a"]
    buffer = HostBuffer()
    for time in range(3):
        buffer.offload([flat, view, view, other, of_a_file])
        assert buffer.is_offloaded
        assert flat.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
        assert other.untyped_storage().nbytes() == 0
        buffer.onload()
        buffer.onload()
        assert not buffer.is_offloaded
        expected = torch.arange(24.0)
        expected[4:10] += time
        assert torch.equal(flat, expected)
        assert torch.equal(other, torch.ones(3, dtype=torch.bfloat16))
        assert torch.equal(of_a_file, torch.arange(4.0))
        view += 1  # still the same memory
        flat[:4] = torch.arange(4.0)


def test_the_host_keeps_its_memory_between_two_times() -> None:
    tensor, buffer = torch.ones(5), HostBuffer()
    places = set()
    for _ in range(2):
        buffer.offload([tensor])
        places |= {host.data_ptr() for _, host in buffer._offloaded}
        buffer.onload()
    assert len(places) == 1
    buffer.close()
    buffer.offload([tensor])
    buffer.onload()
    assert torch.equal(tensor, torch.ones(5))


# Qwen2.5-7B on four GPUs of 80 GB, TP2: weights and a reference in bf16, gradients in fp32, AdamW shared by two.
BILLION = 3.8e9
GUIDE = MemoryNeeds(79.1 * GIB, 2 * 2 * BILLION + 1.5 * GIB, 2 * BILLION, 4 * BILLION, 12 * BILLION / 2, 2 * 7.6e9)


def test_the_guides_example_fits() -> None:
    room = memory_budget(GUIDE, EngineOptions(), sleeps=True)
    assert room == EngineMemoryBudget(room.share, offload_weights=False, offload_optimizer=False, sleeps=True)
    stays = GUIDE.used + GUIDE.optimizer
    assert GUIDE.engine < room.share * GUIDE.total < GUIDE.total - stays - 4 * GIB


@pytest.mark.parametrize(
    ("times", "options", "moves"),
    [
        (1, {}, (False, False)),
        (1.6, {}, (False, True)),
        (6.2, {}, (True, True)),
        (1.6, {"offload_optimizer": False}, (True, False)),
        (1, {"offload_model": True}, (True, False)),
        (1, {"vllm_gpu_memory_utilization": 0.6}, (False, True)),
        (2.1, {"offload_model": False, "offload_optimizer": False, "vllm_gpu_memory_utilization": 0.7}, (False, False)),
    ],
)
def test_what_has_to_leave(times, options, moves) -> None:
    """As little as possible, by what is asked for."""
    held = GUIDE.used + 2 * BILLION * (times - 1)
    needs = replace(GUIDE, used=held, weights=2 * BILLION * times, optimizer=GUIDE.optimizer * times)
    room = memory_budget(needs, EngineOptions(**options), sleeps=True)
    assert (room.offload_weights, room.offload_optimizer) == moves
    assert room.share == options.get("vllm_gpu_memory_utilization", room.share)
    stays = held - room.offload_weights * needs.weights + (not room.offload_optimizer) * needs.optimizer
    assert "vllm_gpu_memory_utilization" in options or stays + room.share * needs.total < 0.95 * needs.total


def test_beside_an_engine_that_never_sleeps_a_step_has_its_memory_too() -> None:
    asleep, awake = (
        memory_budget(replace(GUIDE, engine=GIB), EngineOptions(), sleeps=sleeps) for sleeps in (True, False)
    )
    assert awake.share * GUIDE.total + GUIDE.used + GUIDE.optimizer + GUIDE.gradients < 0.75 * GUIDE.total
    assert awake.share < asleep.share


# Qwen3-4B on two GPUs of 140 GB, with a reference: 32 completions of at most 1,536 tokens on each.
SMALL = MemoryNeeds(139.8 * GIB, 18 * GIB, 7.5 * GIB, 15 * GIB, 22.5 * GIB, 7.5 * GIB, step=12 * GIB, cache=6.8 * GIB)


@pytest.mark.parametrize(
    ("changes", "options", "sleeps"),
    [
        ({}, {}, False),
        ({}, {"vllm_gpu_memory_utilization": 0.4}, False),
        ({}, {"vllm_gpu_memory_utilization": 0.6}, True),
        ({}, {"offload_optimizer": True}, True),
        ({"step": None}, {}, True),
        ({"cache": None}, {}, True),
        ({"cache": 60 * GIB}, {}, True),
        ({"total": 79.1 * GIB}, {}, True),
    ],
)
def test_vllm_stays_awake_where_a_training_step_fits_beside_it(changes, options, sleeps) -> None:
    needs = replace(SMALL, **changes)
    room = memory_budget(needs, EngineOptions(**options), sleeps=None)
    assert room.sleeps == sleeps
    training = needs.used + needs.gradients + needs.optimizer + (needs.step or 0)
    if not sleeps:
        assert training + room.share * needs.total < 0.95 * needs.total
        assert room.share * needs.total > needs.engine + (needs.cache or 0)
    else:
        assert room == memory_budget(needs, EngineOptions(**options), sleeps=True)


@pytest.mark.parametrize(
    ("flags", "of_bf16", "of_fp32"),
    [
        ({}, 12, 8),
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 8, 4),
        ({"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "main_params_dtype": "fp16"}, 4, 2),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}, 3, 2),
    ],
)
def test_the_optimizers_state_is_counted_in_its_types(flags, of_bf16, of_fp32) -> None:
    """Bytes of docs/memory.md, shared by two data-parallel ranks."""
    options: Any = compose(GrpoOptions, **flags)
    groups: Any = SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: 2))
    for dtype, expected in ((torch.bfloat16, of_bf16), (torch.float32, of_fp32)):
        parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype))
        assert _state_bytes(parameter, options, groups) == expected / 2


def test_no_room_is_an_error_with_its_cures() -> None:
    with pytest.raises(ValueError, match=r"vLLM's weights, 60.0 GiB of each GPU, do not fit beside .* --offload_ref"):
        memory_budget(replace(GUIDE, engine=60 * GIB), EngineOptions(offload_model=False), sleeps=True)


def test_out_of_memory_names_what_takes_less() -> None:
    options = compose(
        GrpoOptions, offload_optimizer=True, sleep_level=0, vllm_gpu_memory_utilization=0.9, micro_batch_size=4
    )
    with pytest.raises(RuntimeError, match=r"Tried to allocate 3 GiB\. To lower it, use ") as found, oom_hints(options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")
    flags = (
        "--offload_model true", "--sleep_level 1", "a lower --vllm_gpu_memory_utilization than 0.9",
        "--vllm_tensor_parallel_size", "--offload_ref_model true", "--recompute_granularity full",
        "a smaller --micro_batch_size than 4", "--tensor_model_parallel_size",
    )  # fmt: skip
    assert all(flag in str(found.value) for flag in flags)
    assert "--offload_optimizer" not in str(found.value)
    elsewhere = [
        ServerConnection("http://a:1", "a run", ClientSettings())._response_error(
            "/wake", httpx.Response(500, text="CUDA out of memory")
        ),
        RuntimeError(f"{FLAG} http://a:1, /top_log_probs: OutOfMemoryError: CUDA out of memory. (status 500)"),
    ]
    for other in (RuntimeError("a kernel broke"), *elsewhere):
        with pytest.raises(RuntimeError) as found, oom_hints(options):
            raise other
        assert found.value is other
