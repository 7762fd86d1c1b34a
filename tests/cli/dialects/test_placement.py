"""Mappings of GPUs as ROLL writes them, and what they mean here."""

import pytest
from megaswift.cli.dialects.placement import LARGEST, MappingError, RolePlacement, differing_roles, parse_devices, place


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("list(range(0,4))", [0, 1, 2, 3]),
        (" list( range( 2 , 4 ) ) ", [2, 3]),
        ("list(range(4))", [0, 1, 2, 3]),
        ("list(range(0,8,3))", [0, 3, 6]),
        ("list(range(0,2)) + list(range(6,8))", [0, 1, 6, 7]),
        ("list(range(0,2))+[5]+list([7])", [0, 1, 5, 7]),
        ("[3, 1]", [3, 1]),
        ([0, 2], [0, 2]),
        (5, [5]),
    ],
)
def test_mappings(value: object, devices: list[int]) -> None:
    assert list(parse_devices(value)) == devices
    if isinstance(value, str):
        assert devices == eval(value)


@pytest.mark.parametrize(
    "value",
    [
        "", "[]", "list(range(4,2))", "range(0,2)", "list(range(0,2)) * 2", "list(range(x))", "list(range(0,True))",
        "__import__('os').system('true')", "list(range(0,2)) + list(range(1,3))", "[-1, 0]", "[0.5]", ["a"], [True],
        "list(map(int, '12'))", f"list(range(0,{LARGEST + 1}))", None, {"a": 1}, "(" * 500,
    ],
)  # fmt: skip
def test_mappings_that_are_none(value: object) -> None:
    with pytest.raises(MappingError):
        parse_devices(value)


@pytest.mark.parametrize(
    ("training", "engines", "placement"),
    [
        (range(8), range(8), RolePlacement(8, 1, "colocate")),
        (range(8), None, RolePlacement(8, 1, "colocate")),
        (range(16), range(16), RolePlacement(16, 2, "colocate")),
        (range(4), range(4, 8), RolePlacement(4, 1, "server", 4)),
        (range(4, 8), [0], RolePlacement(4, 1, "server", 1)),
        (range(16), range(16, 24), RolePlacement(16, 2, "server", 8, is_one_node=False)),
        (range(8), range(8, 16), RolePlacement(8, 1, "server", 8, is_one_node=False)),
    ],
)
def test_engines_in_training_or_apart(training: range, engines: range | None, placement: RolePlacement) -> None:
    assert place(training, engines, 8) == placement


def test_engines_on_a_part_of_training() -> None:
    placement = place(range(16), range(12), 8)
    assert (placement.processes, placement.mode) == (16, "colocate")
    assert placement.note == "engines are on all 16 GPUs of training, with the same numbers"


def test_engines_across_the_edge_of_training() -> None:
    with pytest.raises(MappingError) as caught:
        place(range(4), [2, 3, 4, 6], 8)
    assert "GPUs of training, list(range(0,4)), or to others, such as list([4,6])" in str(caught.value)


def test_nodes_of_unequal_size() -> None:
    with pytest.raises(MappingError, match="11 training processes are not equally many on each of 2 nodes"):
        place(range(11), None, 8)


def test_roles_beside_training() -> None:
    roles = {"reference": range(4), "critic": range(4, 8), "teacher": range(8)}
    assert differing_roles(range(8), roles) == ["reference", "critic"]
