"""Prompts, with answers of the rows in stages that keep them, and micro batches that are not full."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from megaswift.templates.batching.collator import BatchLayout
from megaswift.templates.batching.episode_batches import BatchPlan, Sequences
from megaswift.templates.batching.prompt_dataloader import Prompts
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.options import PrepareOptions, TemplateOptions
from megaswift.templates.prepare import prepare

from tests.templates.batching.stopping import Documents

TURNS = [
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Never?"},
]
ANSWERED = {"messages": [*TURNS, {"role": "assistant", "content": "Never."}]}
SILENT = {"messages": TURNS}
EMPTY = {"query": "Why?", "response": " "}


@pytest.mark.parametrize(("stage", "documents"), [("prompts", 1), ("answered", 2), ("asked", 2)])
def test_a_prompt_and_its_answer(stage, documents, make_tokenizer):
    tokenizer = make_tokenizer()
    [sample], _ = Encoder(tokenizer, TemplateOptions(loss_scale="last_round"), stage, {}).encode([(3, "", ANSWERED)])
    assert len(sample.documents) == documents
    prompt = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert sample.documents[0][0].tolist() == prompt
    assert json.loads(sample.columns)["messages"] == TURNS
    for ids, runs in sample.documents[1:]:
        trained = np.repeat([weight for _, weight in runs], [length for length, _ in runs]) > 0
        assert tokenizer.decode(ids[trained]) == "Never.<|im_end|>"
        assert ids[: len(prompt)].tolist() == prompt
        assert not trained[: len(prompt)].any()


def test_rows_without_an_answer(make_tokenizer):
    rows = [(number, f"row {number}", row) for number, row in enumerate((SILENT, ANSWERED, EMPTY))]
    samples, dropped = Encoder(make_tokenizer(), TemplateOptions(), "answered", {}).encode(rows)
    assert [sample.row for sample in samples] == [1]
    assert dropped.places == {"it has no answer: add one, or use --lmbda 1 or --seq_kd true": ["row 0", "row 2"]}
    samples, dropped = Encoder(make_tokenizer(), TemplateOptions(), "asked", {}).encode(rows)
    assert [len(sample.documents) for sample in samples] == [1, 2, 1]
    assert not dropped.counts


def test_they_are_taken_together(make_tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (SILENT, ANSWERED)))
    options = PrepareOptions(dataset=[str(file)], dataset_shuffle=False)
    prepared = prepare(options, make_tokenizer(), stage="asked")
    prompts = Prompts(prepared.train, completions_per_prompt=1, shuffle=False, seed=0)  # type: ignore[arg-type]
    silent, answered = prompts.next_batch(2)
    assert silent.reference_document is None
    assert answered.reference_document is not None
    assert answered.reference_document[0][: len(answered.tokens)].tolist() == answered.tokens == silent.tokens
    assert "⟦" not in prepared.report


@pytest.mark.parametrize("rank", [0, 1])
def test_fewer_documents_than_places(rank):
    """Three in micro batches of two, on two ranks: one place stays empty."""
    tokens = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 7, 4)]
    weights = [np.ones(len(ids), np.float32) for ids in tokens]
    [batch] = BatchPlan(BatchLayout(stage="prompts"), 2, rank, 2).batches(Sequences(tokens, weights, [1.0, 1.0, 1.0]))
    assert batch.loss_tokens == 13
    assert batch.grouping.items.tolist() == ([1] if rank == 0 else [0, 2])
    assert batch.grouping.documents_per_rank == [1, 2]


def rows_of(plan: BatchPlan, sequences: Sequences) -> list[list[int]]:
    """The lengths of the rows of each micro batch, by rank."""
    by_rank = [[b.tokens.shape[1] for b in plan.for_rank(rank, 0).batches(sequences)] for rank in range(plan.ranks)]
    return [list(row) for row in zip(*by_rank, strict=True)]


def episodes(lengths: list[int], prompts: list[int] | None = None, prompt_length: int = 1) -> Sequences:
    """Documents that begin with the prompts of these numbers; without numbers, each with another one."""
    tokens = [np.arange(length, dtype=np.int32) + 1000 for length in lengths]
    weights = [np.ones(length, np.float32) for length in lengths]
    for number, (ids, weight) in enumerate(zip(tokens, weights, strict=True)):
        ids[:prompt_length] = prompts[number] if prompts else number
        weight[:prompt_length] = 0
    return Sequences(tokens, weights, [1.0] * len(lengths))


def test_rows_of_packs_have_no_padding():
    """Documents of 22 tokens in all, in four packs of at most 10, or in two of at most 20, also rounded up."""
    sequences = episodes([6, 5, 4, 3, 2, 2])
    layout = BatchLayout(stage="prompts")
    plan = BatchPlan(layout, 1, 0, 2, pack_length=10)
    assert sorted(map(sorted, rows_of(plan, sequences))) == [[5, 6], [5, 6]]
    assert rows_of(replace(plan, pack_length=20), sequences) == [[11, 11]]
    rounded = replace(plan, pack_length=20, layout=replace(layout, length_multiple=8))
    assert rows_of(rounded, sequences) == [[16, 16]]
    three = replace(plan, ranks=1, pack_length=8)
    assert sorted(row[0] for row in rows_of(three, sequences)) == [6, 8, 8]
    assert rows_of(replace(three, equal_lengths=True), sequences) == [[8]] * 3
    uneven = episodes([9, 2])
    assert sorted(rows_of(plan, uneven)[0]) == [2, 9]
    assert rows_of(replace(plan, equal_over_ranks=True), uneven) == [[9, 9]]
    with pytest.raises(ValueError, match="belongs to the plan"):
        replace(plan, layout=replace(layout, pack_length=10))
    with pytest.raises(ValueError, match="is one pack"):
        replace(plan, micro_batch_size=2)


def test_prompts_are_shared_where_a_step_gets_shorter():
    """Two prompts of 40 tokens, with four answers of 20 each: 480 tokens, or 249 with each prompt once."""
    sequences = episodes([60] * 8, [1] * 4 + [2] * 4, 40)
    plan = BatchPlan(BatchLayout(stage="prompts"), 1, 0, 1, pack_length=512, shares_prompts=True)
    assert rows_of(replace(plan, shares_prompts=False), sequences) == [[480]]
    assert rows_of(plan, sequences) == [[480 - 6 * 39]]  # as many packs, and fewer tokens
    assert rows_of(replace(plan, ranks=2), sequences) == [[123, 123]]
    assert rows_of(replace(plan, ranks=4), sequences) == [[81, 81, 81, 81]]  # a prompt on two ranks
    assert rows_of(replace(plan, ranks=8), sequences) == [[60] * 8]  # nothing to share


def test_sharing_takes_no_more_micro_batches():
    """Three prompts of 10 tokens, with four answers of 25 each. Three packs of a prompt each would have 339 tokens."""
    sequences = episodes([35] * 12, [1] * 4 + [2] * 4 + [3] * 4, 10)
    plan = BatchPlan(BatchLayout(stage="prompts"), 1, 0, 1, pack_length=215, shares_prompts=True)
    assert rows_of(replace(plan, shares_prompts=False), sequences) == [[210], [210]]
    assert sorted(rows_of(plan, sequences)) == [[174], [183]]
    assert rows_of(replace(plan, pack_length=430), sequences) == [[339]]


@pytest.mark.parametrize("rows", [5, 12, 13])
@pytest.mark.parametrize(("batch", "generation", "iterations"), [(8, 1, 1), (8, 4, 1), (8, 4, 2), (16, 2, 3)])
@pytest.mark.parametrize("epochs", [1, 1.5, 2])
def test_a_run_that_goes_on_makes_as_many_steps(rows, batch, generation, iterations, epochs):
    """Wherever it was stopped: the last generation may be of more prompts than the epochs have."""

    def prompts() -> Prompts:
        return Prompts(Documents(count=rows), completions_per_prompt=4 * iterations, shuffle=True, seed=0)  # type: ignore[arg-type]

    run = prompts()
    whole, steps, waiting = math.ceil(epochs * run.samples / batch), 0, 0
    while steps < whole:
        if not waiting:
            run.consumed += batch * generation // 4
            waiting = batch * generation * iterations
        waiting -= batch
        run.pending_samples, steps = waiting, steps + 1
        later = prompts()
        position = json.loads(json.dumps(run.position()))
        later.resume(position, {})
        assert steps + math.ceil(later.samples_until(epochs) / batch) == whole
