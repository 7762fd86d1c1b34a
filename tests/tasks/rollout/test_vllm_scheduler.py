"""vLLM's scheduler with completions in one piece, over a stand-in of vLLM's: no vLLM is needed."""

import enum
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megaswift.tasks.rollout.engine import Completion, Sampling
from megaswift.tasks.rollout.vllm_requests import to_completion

NAME = "megaswift.tasks.rollout.vllm_scheduler"


class Kind(enum.Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 2


class Scheduler:
    """Hands over the outputs that it is given, per client."""

    def __init__(self, vllm_config: Any):
        self.requests: dict[str, Any] = {}

    def update_from_output(self, step: dict[int, Any], _runner: object = None) -> dict[int, Any]:
        for outputs in step.values():
            for output in outputs.outputs:
                if output.finished:
                    del self.requests[output.request_id]
        return step

    def finish_requests(self, names: list[str], _status: object = None) -> list[Any]:
        return [self.requests.pop(name) for name in names]


class AsyncScheduler(Scheduler):
    pass


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    contents = {
        "vllm": {},
        "vllm.sampling_params": {"RequestOutputKind": Kind, "SamplingParams": object},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    make = importlib.import_module(NAME).CompletionScheduler
    for is_async in (False, True):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
        made = make(vllm_config=config)
        assert isinstance(made, AsyncScheduler) == is_async
    yield made
    sys.modules.pop(NAME, None)


def ask(scheduler: Any, *names: str, **changes: Any) -> None:
    wanted = {"output_kind": Kind.FINAL_ONLY, "detokenize": False, "logprobs": 0, "prompt_logprobs": None} | changes
    for name in names:
        scheduler.requests[name] = SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(**wanted))


def output(name: str, tokens: list[int], *, ends: bool = False, prefill_stats: str | None = None) -> Any:
    """An output of a step. The log-probability of token n is -n / 8."""
    log_probs = SimpleNamespace(logprobs=np.array(tokens, np.float32)[:, None] / -8) if tokens else None
    return SimpleNamespace(
        request_id=name,
        new_token_ids=tokens,
        new_logprobs=log_probs,
        finished=ends,
        prefill_stats=prefill_stats,
        kv_transfer_params=None,
    )


def step(scheduler: Any, *outputs: Any, **fields: Any) -> dict[int, Any]:
    """Return what the scheduler hands over to client 0."""
    fields = {"finished_requests": None, "scheduler_stats": None} | fields
    return scheduler.update_from_output({0: SimpleNamespace(outputs=list(outputs), **fields)}, None)


def test_a_completion_comes_in_one_piece(scheduler) -> None:
    ask(scheduler, "a", "b")
    assert step(scheduler, output("a", [3], prefill_stats="a's"), output("b", [4], prefill_stats="b's")) == {}
    assert step(scheduler, output("a", [5, 6]), output("b", [7])) == {}
    (ended,) = step(scheduler, output("a", [8]), output("b", [9], ends=True))[0].outputs
    assert (ended.request_id, ended.new_token_ids, ended.prefill_stats) == ("b", [4, 7, 9], "b's")
    assert ended.new_logprobs is None
    assert ended.kv_transfer_params == {"log_probs": [-4 / 8, -7 / 8, -9 / 8]}
    (ended,) = step(scheduler, output("a", [], ends=True))[0].outputs
    assert (ended.new_token_ids, ended.prefill_stats) == ([3, 5, 6, 8], "a's")
    assert ended.kv_transfer_params == {"log_probs": [-3 / 8, -5 / 8, -6 / 8, -1]}
    ask(scheduler, "a")
    (alone,) = step(scheduler, output("a", [7], ends=True))[0].outputs
    assert alone.new_token_ids == [7]
    assert alone.new_logprobs is not None  # vLLM's own way for a single token


def test_an_aborted_request_leaves_nothing(scheduler) -> None:
    ask(scheduler, "a", "b")
    step(scheduler, output("a", [3]), output("b", [4]))
    scheduler.finish_requests(["a"])
    ask(scheduler, "a")
    step(scheduler, output("a", [5]))
    (ended,) = step(scheduler, output("a", [6], ends=True))[0].outputs
    assert ended.new_token_ids == [5, 6]


@pytest.mark.parametrize(
    "changes", [{"output_kind": Kind.CUMULATIVE}, {"detokenize": True}, {"logprobs": 3}, {"prompt_logprobs": 1}]
)
def test_other_requests_are_vllms_own(changes, scheduler) -> None:
    ask(scheduler, "a", **changes)
    for ends in (False, True):
        (passed,) = step(scheduler, output("a", [3], ends=ends))[0].outputs
        assert (passed.new_token_ids, passed.kv_transfer_params) == ([3], None)


def test_what_is_not_of_requests_is_handed_over(scheduler) -> None:
    ask(scheduler, "a")
    for fields in ({"finished_requests": {"z"}}, {"scheduler_stats": object()}):
        assert step(scheduler, output("a", [3]), **fields)[0].outputs == []


def test_who_has_which_scheduler(scheduler) -> None:
    from megaswift.tasks.rollout.vllm_engine import scheduler_kwargs

    assert scheduler_kwargs({}, experts=False)["scheduler_cls"].__module__ == NAME
    assert scheduler_kwargs({"scheduler_cls": "mine.Scheduler"}, experts=False) == {}
    assert scheduler_kwargs({}, experts=True) == {}


def completed(reason: str, params: dict | None, logprobs: Any) -> Any:
    completion = SimpleNamespace(token_ids=[3, 5], logprobs=logprobs, finish_reason=reason, routed_experts=None)
    return SimpleNamespace(outputs=[completion], kv_transfer_params=params)


def test_log_probabilities_of_either_scheduler() -> None:
    by_token = [{3: SimpleNamespace(logprob=-1.0)}, {5: SimpleNamespace(logprob=-2.0)}]
    expected = Completion([3, 5], [-1.0, -2.0], "stop")
    assert to_completion(completed("stop", {"log_probs": [-1.0, -2.0]}, []), Sampling()) == expected
    assert to_completion(completed("stop", {"of a connector": 1}, by_token), Sampling()) == expected
    with pytest.raises(RuntimeError, match="1 log-probabilities of 2 tokens"):
        to_completion(completed("stop", {"log_probs": [-1.0]}, []), Sampling())
    with pytest.raises(RuntimeError, match="ended a completion by 'abort'"):
        to_completion(completed("abort", {"log_probs": [-1.0, -2.0]}, []), Sampling())
