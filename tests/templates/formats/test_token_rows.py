"""Rows that hold tokens, as ms-swift's cached datasets do."""

import datasets
import pytest
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.formats.token_rows import tokens_of
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare


@pytest.mark.parametrize(
    ("row", "runs"),
    [
        ({"input_ids": [5, 6, 7]}, [(3, 1)]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, [(1, 0), (2, 1)]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_scale": [0.0, 2.0, 0.5]}, [(1, 0), (1, 2), (1, 0.5)]),
        ({"input_ids": [5, 6, 7], "labels": None, "loss_scale": None}, [(3, 1)]),
    ],
)
def test_weights_by_hand(row, runs):
    ids, found = tokens_of(row, 8)
    assert (ids.tolist(), found) == ([5, 6, 7], runs)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input_ids": []}, "is empty"),
        ({"input_ids": [5, 8]}, "a token that the tokenizer does not have"),
        ({"input_ids": ["a"]}, "input_ids is not a list of numbers"),
        ({"input_ids": [5, 6], "labels": [5]}, "labels and input_ids are not equally many"),
        ({"input_ids": [5, 6], "labels": [6, 5]}, "labels are neither"),
        ({"input_ids": [5, 6], "loss_scale": [1, -1]}, "loss_scale is not at least 0"),
    ],
)
def test_other_rows_are_refused(row, problem):
    with pytest.raises(UnusableRow, match=problem):
        tokens_of(row, 8)


def test_a_cached_dataset_gives_the_samples_of_its_rows(tmp_path, make_tokenizer):
    """What ms-swift saves: tokens with labels, by save_to_disk, beside rows of text."""
    tokenizer = make_tokenizer()
    rows = [{"query": f"q{n}", "response": f"a{n}" * (n + 1)} for n in range(4)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    text = prepare(
        PrepareOptions(dataset=[str(tmp_path / "rows")], dataset_shuffle=False), tokenizer, stage="sft"
    ).train
    cached = []
    for number in range(4):
        [(ids, weights)] = text.row(number)
        labels = [token if weight else -100 for token, weight in zip(ids.tolist(), weights, strict=True)]
        cached.append({"input_ids": ids.tolist(), "labels": labels, "length": len(ids), "loss_scale": None})
    datasets.Dataset.from_list(cached).save_to_disk(str(tmp_path / "tokens"))
    tokens = str(tmp_path / "tokens")
    options = PrepareOptions(cached_dataset=[tokens], cached_val_dataset=[tokens], dataset_shuffle=False)
    prepared = prepare(options, tokenizer, stage="sft")
    for store in (prepared.train, prepared.val):
        for number in range(4):
            [(ids, weights)], [(expected_ids, expected_weights)] = store.row(number), text.row(number)
            assert (ids.tolist(), weights.tolist()) == (expected_ids.tolist(), expected_weights.tolist())
    both = prepare(PrepareOptions(dataset=[str(tmp_path / "rows")], cached_dataset=[tokens]), tokenizer, stage="sft")
    assert len(both.train) == 8
    longest = max(map(int, text.lengths))
    short = prepare(PrepareOptions(cached_dataset=[tokens], max_length=longest - 1), tokenizer, stage="sft")
    assert len(short.train) == 3
