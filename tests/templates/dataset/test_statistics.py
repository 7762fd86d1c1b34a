"""Statistics of the data, beside numpy's."""

import json

import numpy as np
import pytest
from megaswift.templates.dataset.statistics import BARS, histogram
from megaswift.templates.options import PrepareOptions
from megaswift.templates.prepare import prepare


@pytest.mark.parametrize(
    "lengths",
    [[5], [7, 7, 7], [1, 50], [1, 51], [99, 100, 101], [0, 10**6], np.random.default_rng(0).integers(3, 9000, 500)],
)
def test_histograms_are_those_of_numpy(lengths):
    lengths = np.array(lengths)
    bars = histogram(lengths)
    counts, start, width = bars["counts"], bars["start"], bars["width"]
    assert 1 <= len(counts) <= BARS
    assert str(width).rstrip("0") in ("1", "2", "5")
    expected, _ = np.histogram(lengths, bins=start + width * np.arange(len(counts) + 1) - 0.5)
    assert counts == expected.tolist()
    assert counts[0] > 0
    assert counts[-1] > 0
    assert bars["quantiles"]["median"] == np.quantile(lengths, 0.5, method="inverted_cdf")
    assert bars["quantiles"]["mean"] == pytest.approx(lengths.mean())


def test_statistics_of_prepared_data(tmp_path, make_tokenizer):
    """The dropped row is counted once, also where the rows are split."""
    file = tmp_path / "data.jsonl"
    rows = [{"query": f"{number}?", "response": f"{number}. " * (number % 5 + 1)} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"query": "no answer"}]))
    data = prepare(PrepareOptions(dataset=[str(file)], split_dataset_ratio=0.25), make_tokenizer(), stage="sft")
    train, val = data.statistics["train"], data.statistics["val"]
    assert (train["samples"], val["samples"]) == (len(data.train), len(data.val))
    assert train["tokens"] == sum(len(data.train.row(i)[0][0]) for i in range(len(data.train)))
    assert train["trained_tokens"] == sum(int((data.train.row(i)[0][1] > 0).sum()) for i in range(len(data.train)))
    assert [reason["rows"] for reason in train["sources"][0]["dropped"]] == [1]
    assert val["sources"][0]["dropped"] == []
    assert json.loads(json.dumps(data.statistics)) == data.statistics


def test_statistics_of_a_stream_are_its_sources(tmp_path, make_tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"query": "a", "response": "b"}) + "\n")
    data = prepare(PrepareOptions(dataset=[str(file)], streaming=True), make_tokenizer(), stage="sft")
    assert data.statistics == {"train": {"sources": [{"name": str(file)}], "is_streamed": True}}
