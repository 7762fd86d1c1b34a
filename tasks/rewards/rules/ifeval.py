"""Rule for instructions that a program can verify, as in IFEval."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....templates.formats.columns import parsed_json, parsed_object
from .instructions import follows
from .sample import RuleSample

IDS, ARGUMENTS, NAME = "instruction_id_list", "kwargs", "func_name"


def score_ifeval(samples: Sequence[RuleSample]) -> list[float | None]:
    """Return 1 where the answer follows all instructions of its row, else 0; None for a row without instructions.

    Instructions are IFEval's `instruction_id_list` with `kwargs`, in columns or in the ground truth; or the ground
    truth is an object with `func_name` and its arguments, as in RLVR-IFeval. Both may be JSON.
    Raises ValueError for an unknown instruction.
    """
    return [_score(sample) for sample in samples]


def _score(sample: RuleSample) -> float | None:
    instructions = list(_instructions(sample))
    if not instructions:
        return None
    if not sample.answer.strip():
        return 0.0
    return float(all(follows(sample.answer, name, arguments) for name, arguments in instructions))


def _instructions(sample: RuleSample) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the instructions of a row with their arguments."""
    truth = parsed_json(sample.truth)
    if isinstance(truth, list):  # objects, one for each prompt or each instruction
        truths = [item for item in truth if isinstance(item, dict)]
    else:
        truths = [truth] if isinstance(truth, dict) else []
    for table in (sample.columns, *truths):
        if isinstance(table, Mapping) and isinstance(table.get(NAME), str):
            yield table[NAME], {name: value for name, value in table.items() if name != NAME}
        ids = parsed_json(table.get(IDS))
        if not isinstance(ids, list):
            continue
        arguments = parsed_json(table.get(ARGUMENTS)) or [{}] * len(ids)
        if not isinstance(arguments, list) or len(arguments) != len(ids):
            raise ValueError(f"a row has {len(ids)} {IDS} and not as many {ARGUMENTS}")
        for name, values in zip(ids, arguments, strict=True):
            yield str(name), parsed_object(values)
