"""Schedulers: what they are given, what they may return, and what a user reads of one that fails or hangs."""

import asyncio
import re
import time

import pytest
from megaswift.tasks.multi_turn import MultiTurnScheduler, Turn, call, multi_turns, scheduler
from megaswift.tasks.multi_turn.call import Scheduler, SchedulerCall, TurnError
from megaswift.tasks.multi_turn.ms_swift_compat import MsSwiftAdapter


def asked(*texts: str, number: int = 1, finish="stop", final: bool = False) -> list[SchedulerCall]:
    """Return calls for rows 10, 11, ..."""
    return [
        SchedulerCall(
            f"row {10 + row} of rows.jsonl",
            Turn(number, said(text), text, f"{text}<end>", [row, 1], finish, final, {"goal": row}, {}, {}),
        )
        for row, text in enumerate(texts)
    ]


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def run(function, *texts: str, timeout: float = 10):
    return Scheduler("s", function, timeout)(asked(*texts))


def failure(function, *texts: str, timeout: float = 10) -> str:
    with pytest.raises(TurnError) as error:
        run(function, *(texts or ("a", "b")), timeout=timeout)
    return str(error.value)


def test_what_one_may_return():
    said = {
        "text": "Why?",
        "message": user("Why?"),
        "list": [{"role": "tool_response", "content": "4"}, user("So?")],
        "none": None,
        "nothing": [],
    }

    async def later(turn):
        await asyncio.sleep(0.01)
        return said[turn.completion]

    tool = {"role": "tool", "content": "4"}
    wanted = [[user("Why?")], [user("Why?")], [tool, user("So?")], [], []]
    assert run(lambda turn: said[turn.completion], *said) == wanted
    assert run(later, *said) == wanted


def test_sync_ones_go_one_by_one_and_async_ones_together():
    order = []

    def sync(turn):
        order.append(turn.completion)

    async def wait(turn):
        await asyncio.sleep(0.5)

    letters = [str(number) for number in range(20)]
    run(sync, *letters)
    assert order == letters
    began = time.monotonic()
    run(wait, *letters)
    assert time.monotonic() - began < 5  # one by one: 10


def test_sessions_stay_open():
    """Every call is in the same event loop."""
    loops = []

    async def one(turn):
        loops.append(asyncio.get_running_loop())

    own = Scheduler("s", one, 10)
    own(asked("a"))
    own(asked("b"))
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            3,
            "returned 3 for row 10 of rows.jsonl, turn 1, completion 'a': it must return None, a text, a message",
        ),
        (["x"], "it must return None, a text, a message or a list of messages"),
        ({"content": "x"}, "a message has no role"),
        ({"role": "user"}, "a message has no content"),
        ({"role": "assistant", "content": "x"}, "the role assistant is reserved for the model"),
    ],
)
def test_what_one_may_not_return(returned, message):
    assert message in failure(lambda turn: returned)


def test_information_that_cannot_be_written_down():
    def odd(turn):
        turn.info["x"] = {1, 2}

    assert "Object of type set is not JSON serializable" in failure(odd)


def test_one_that_raises():
    def broken(turn):
        if turn.columns["goal"] == 1:
            raise KeyError("x")

    async def later(turn):
        await asyncio.sleep(0)
        broken(turn)

    def ends(turn):
        raise SystemExit(2)

    place = r"\(test_call.py, line \d+\) for row 11 of rows.jsonl, turn 1, completion 'b'. Fix it"
    for function in (broken, later):
        assert re.fullmatch(rf"--multi_turn_scheduler s raised KeyError: 'x' {place}", failure(function))
    assert "s raised SystemExit: 2" in failure(ends)


def test_one_that_hangs(monkeypatch):
    monkeypatch.setattr(call, "GRACE", 0.1)

    def hangs(turn):
        if turn.columns["goal"] == 1:
            time.sleep(60)

    async def waits(turn):
        if turn.columns["goal"] == 1:
            await asyncio.sleep(60)

    async def holds(turn):
        hangs(turn)

    for function in (hangs, waits, holds):
        began = time.monotonic()
        found = failure(function, timeout=0.4)
        assert time.monotonic() - began < 30
        assert re.match(
            r"--multi_turn_scheduler s did not return within 0.4 s \(it is at test_call.py, line \d+\) for row 11 of "
            r"rows.jsonl, turn 1, completion 'b'. Fix it, or raise --turn_timeout",
            found,
        )


def test_many_slow_ones_are_not_late():
    """The time is each one's own."""
    assert run(lambda turn: time.sleep(0.1), *"abcdefghij", timeout=0.5) == [[]] * 10


def test_a_name_is_taken_once():
    scheduler("twice")(print)
    with pytest.raises(ValueError, match=r'@scheduler\("twice"\): there is already such a scheduler'):
        scheduler("twice")(print)
    assert multi_turns["twice"] is print


class Guess(MultiTurnScheduler):
    """Scheduler in ms-swift's style."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append(user(f"{infer_request.data_dict['goal']}, not {response_choice.message.content}"))
        return {"infer_request": infer_request, "rollout_infos": {"guesses": current_turn}}

    def check_finished(self, infer_request, response_choice, current_turn):
        if infer_request.messages[-1]["content"] == "right":
            return True
        return super().check_finished(infer_request, response_choice, current_turn)


def test_ms_swift_s():
    each = asked("wrong", "right")
    own = Scheduler("s", MsSwiftAdapter(Guess(max_turns=2)), 10)
    assert own(each) == [[user("0, not wrong")], []]
    assert [one.turn.info for one in each] == [{"guesses": 1}, {}]
    assert own(asked("wrong", number=2)) == [[]]
    assert own(asked("wrong", finish="length", final=True)) == [[]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "must append messages, or text to the answer"),
        ({"messages": [user("?"), user("x"), user("y")]}, "must keep the messages before the answer, and the answer"),
        ({"messages": [user("!"), *said("a")[1:], user("y")]}, "must keep the messages before the answer, and"),
        ({"messages": [*said("b"), user("y")]}, "changes the answer's text and not its tokens"),
        ({"response_loss_mask": [1]}, "a response_loss_mask with 0 or 1 for each of response_token_ids"),
        ({"response_token_ids": [5], "response_loss_mask": [1]}, "a response_loss_mask of 1 for tokens that the mod"),
    ],
)
def test_what_ms_swift_s_may_not(changes, message):
    class Other(MultiTurnScheduler):
        def step(self, infer_request, response_choice, current_turn):
            infer_request.messages = changes.get("messages", infer_request.messages)
            return {"infer_request": infer_request, **changes}

    assert message in failure(MsSwiftAdapter(Other()))
