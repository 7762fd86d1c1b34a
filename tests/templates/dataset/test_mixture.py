"""Mixtures of datasets, against `datasets.interleave_datasets`."""

import json

import datasets
import pytest
from megaswift.templates.dataset.mixture import Mixture
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize(("sizes", "probabilities"), [([3, 40], (0.3, 0.7)), ([700, 900, 5], (0.5, 0.45, 0.05))])
def test_the_order_is_that_of_datasets(sizes, probabilities, strategy):
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    tables = [
        datasets.Dataset.from_dict({"n": list(range(start, start + size))})
        for start, size in zip(starts, sizes, strict=True)
    ]
    expected = datasets.interleave_datasets(tables, list(probabilities), seed=7, stopping_strategy=strategy)["n"]
    assert Mixture(probabilities, strategy == "all_exhausted", 7).order(sizes).tolist() == list(expected)


def test_the_training_data_are_mixed_and_evaluation_is_whole(tmp_path, make_tokenizer):
    names = []
    for name, size in (("a", 4), ("b", 30)):
        names.append(str(tmp_path / f"{name}.jsonl"))
        rows = [{"query": f"{name}{n}", "response": "x"} for n in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def letters(**options) -> list[str]:
        options = PrepareOptions(dataset=names, val_dataset=names, interleave_prob=[0.5, 0.5], **options)
        prepared = prepare(options, make_tokenizer(), stage="sft")
        assert len(prepared.val or []) == 34
        store = prepared.train
        return [make_tokenizer().decode(store.row(n)[0][0]).split("\n")[1][0] for n in range(len(store))]

    once = letters()
    assert once.count("a") == 4
    assert 0 < once.count("b") < 30
    all_used = letters(stopping_strategy="all_exhausted")
    assert all_used.count("b") >= 30
    assert all_used.count("a") > 4


def test_an_empty_dataset_is_named():
    with pytest.raises(ValueError, match="--interleave_prob: one of --dataset has no sample"):
        Mixture((0.5, 0.5), False, 0).order([3, 0])
