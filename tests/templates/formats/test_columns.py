"""Renamed columns, and values of nested columns by dotted names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaswift.templates.formats.columns import apply_names, has_column, nested_names, parsed_json, parsed_object
from megaswift.templates.formats.presets import DatasetPreset
from megaswift.templates.formats.schemas import ArrowRow

VERL = {"data_source": "s", "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"a": {"b": 1}}}


@pytest.mark.parametrize(
    ("row", "columns", "result"),
    [
        ({"a": 1, "b": 2}, {"a": "c"}, {"c": 1, "b": 2}),
        (VERL, {"reward_model.ground_truth": "solution"}, VERL | {"solution": "7"}),
        (VERL, {"extra_info.a.b": "level"}, VERL | {"level": 1}),
        (
            VERL,
            {"reward_model": "truth"},
            {"data_source": "s", "truth": VERL["reward_model"], "extra_info": {"a": {"b": 1}}},
        ),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": "c"}, {"c": 1, "a": {"b": 2}}),  # a column of this name goes before
        ({"a": json.dumps({"b": 2})}, {"a.b": "c"}, {"a": '{"b": 2}', "c": 2}),  # CSV
        ({"a": {"b.c": 3}}, {"a.b.c": "d"}, {"a": {"b.c": 3}, "d": 3}),
        ({"a": {"b": None}}, {"a.b": "c"}, {"a": {"b": None}}),  # a row without the value lacks the column
        ({"a": [1]}, {"a.b": "c"}, {"a": [1]}),
        ({"a": "text"}, {"a.b": "c"}, {"a": "text"}),
        ({"b": 1}, {"a.b": "c"}, {"b": 1}),
    ],
)
def test_renamed(row, columns, result):
    assert apply_names(row, columns) == result
    found = apply_names(ArrowRow(row), columns)
    assert (found, type(found)) == (result, ArrowRow)


json_objects = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


def leaves(value: dict, path: tuple[str, ...] = ()):
    for name, inner in value.items():
        yield (*path, name), inner
        if isinstance(inner, dict):
            yield from leaves(inner, (*path, name))


@given(json_objects)
def test_each_nested_value_has_a_name(row):
    by_path = {".".join(path): value for path, value in leaves(row)}
    assert sorted(nested_names(row)) == sorted(by_path)
    for name, value in by_path.items():
        assert has_column(row, name)
        assert apply_names(row, {name: "new"})["new"] == value
        assert not has_column(row, f"{name}.x")


def test_values_written_as_json():
    assert parsed_object('{"a": 1}') == {"a": 1}
    assert parsed_object("[1]") == parsed_object("{a}") == parsed_object(None) == parsed_object([1]) == {}
    assert (parsed_json("[1]"), parsed_json([1]), parsed_json("text"), parsed_json(None)) == ([1], [1], None, None)


def test_dotted_names_in_rows_of_a_preset():
    preset = DatasetPreset("owner/name", columns={"question": "query"})
    row = preset({"question": "a", "reward": {"truth": "7"}}, {"reward.truth": "solution"})
    assert (row["query"], row["solution"], row["reward"]) == ("a", "7", {"truth": "7"})
    assert row.source_columns == {"question", "reward", "reward.truth"}
