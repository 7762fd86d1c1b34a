"""Distillation on the student's episodes of several turns."""

import pytest

from tests.tasks.distillation.runs import Distilled

pytestmark = pytest.mark.slow
PLUGIN = """
import json
from pathlib import Path

from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns


class Again(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "Again."})
        return {"infer_request": infer_request}


multi_turns["again"] = Again
"""


def test_turns_of_the_student(place: Distilled) -> None:
    """Both turns of each episode are trained on, and the teacher annotates both."""
    (place.folder / "again.py").write_text(PLUGIN)
    flags = "--lmbda 1 --max_completion_length 60 --stop_words e"
    alone = place.run(flags)
    found = place.run(f"{flags} --external_plugins again.py --multi_turn_scheduler again --max_turns 2")
    assert len(found.steps) == 3
    assert max(step["num_turns"] for step in found.steps) > 1
    assert all("num_turns" not in step for step in alone.steps)
    assert [step["jsd"] for step in found.steps] != [step["jsd"] for step in alone.steps]
