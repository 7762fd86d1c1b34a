"""Documents and labels of each stage, against transformers and by hand, and the token store."""

import json
import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megaswift.templates.dataset.cache_entry import open_or_build
from megaswift.templates.dataset.samples import EncodedSample
from megaswift.templates.dataset.sources import open_source
from megaswift.templates.dataset.store import TokenFile, TokenStore
from megaswift.templates.dataset.token_format import record_batch
from megaswift.templates.dataset.tokenize import Encoder
from megaswift.templates.options import PrepareOptions, TemplateOptions
from megaswift.templates.prepare import prepare
from tokenizers.processors import TemplateProcessing

USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Is it?"), ("assistant", "It is better."), ("assistant", "Never. Although."))
)
EARLIER = [{"role": "user", "content": "And é?"}, {"role": "assistant", "content": "漢 is 🎈"}]
PAIR = {"messages": [*EARLIER, USER, GOOD], "rejected_response": BAD["content"]}


def encode(tokenizer, stage, rows, sample_length=None, **options) -> tuple[list, str]:
    """Return the documents as (ids, weights) and the label of each sample, and the dropped rows."""
    options = TemplateOptions(**{"loss_scale": "last_round", **options})
    encoder = Encoder(tokenizer, options, stage, {}, sample_length)
    samples, dropped = encoder.encode([(number, f"row {number}", row) for number, row in enumerate(rows)])
    found = [([(ids.tolist(), weights_of(runs)) for ids, runs in s.documents], s.label) for s in samples]
    return found, str(dropped)


def weights_of(runs) -> list[float]:
    return [weight for tokens, weight in runs for _ in range(tokens)]


def rendered(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen3", "tagged"])
@pytest.mark.parametrize("loss_scale", ["last_round", "default", "all"])
def test_pairs(make_tokenizer, template, loss_scale):
    """Each of the two is the tokens and the weights of sft on that conversation."""
    tokenizer = make_tokenizer(template)
    [([chosen, rejected], label)], _ = encode(tokenizer, "preference", [PAIR], loss_scale=loss_scale)
    assert label == []
    for document, answer in ((chosen, GOOD), (rejected, BAD)):
        messages = [*EARLIER, USER, answer]
        assert document[0] == rendered(tokenizer, messages)
        [([alone], _)], _ = encode(tokenizer, "sft", [{"messages": messages}], loss_scale=loss_scale)
        assert document == alone
    assert encode(tokenizer, "preference", [{**PAIR, "margin": "0.25"}])[0][0][1] == [0.25]


def test_what_pairs_are_trained_on(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    [([*documents], _)], _ = encode(tokenizer, "preference", [PAIR])
    for (ids, weights), answer in zip(documents, (GOOD, BAD), strict=True):
        assert set(weights) == {0, 1}
        assert tokenizer.decode(np.array(ids)[np.array(weights) > 0]) == answer["content"] + "<|im_end|>"


def test_answers_are_lent(make_tokenizer):
    """Each prompt comes with the answer of the row before it, the first with the last's; rows left out lend none."""
    tokenizer = make_tokenizer("chatml")
    rows = [{"query": f"{n} is?", "response": f"{n}. " * (n + 1), "label": bool(n % 2)} for n in range(4)]
    samples, refused = encode(tokenizer, "kto", [*rows[:2], {"query": "q", "response": "a"}, *rows[2:]])
    assert "1 row: it has no label: true, false, 1 or 0 is expected (row 2)" in refused
    assert [label for _, label in samples] == [[0.0], [1.0], [0.0], [1.0]]
    for n, (documents, _) in enumerate(samples):
        for (ids, weights), lender in zip(documents, (n, (n - 1) % 4), strict=True):
            answer = {"role": "assistant", "content": rows[lender]["response"]}
            assert ids == rendered(tokenizer, [{"role": "user", "content": rows[n]["query"]}, answer])
            assert tokenizer.decode(np.array(ids)[np.array(weights) > 0]) == answer["content"] + "<|im_end|>"
    [([own, lent], _)], _ = encode(tokenizer, "kto", rows[2:3])
    assert own == lent, "a row alone lends to itself"


@pytest.mark.parametrize("loss_scale", ["default", "all"])
def test_what_is_lent_of_a_longer_conversation(make_tokenizer, loss_scale):
    """The answer to the last user message, whatever is trained on; of the prompt as much as in its own row."""
    tokenizer = make_tokenizer("chatml")
    rows = [{"messages": [*EARLIER, USER, GOOD], "label": 1}, {"messages": [USER, BAD], "label": 0}]
    samples, _ = encode(tokenizer, "kto", rows, loss_scale=loss_scale)
    for (documents, _), before, lender in zip(samples, ([*EARLIER, USER], [USER]), (BAD, GOOD), strict=True):
        prompt = rendered(tokenizer, before, add_generation_prompt=True)
        ids, weights = documents[1]
        assert ids == rendered(tokenizer, [*before, lender])
        assert weights[: len(prompt)] == documents[0][1][: len(prompt)]
        answer = tokenizer.decode(ids[len(prompt) :])
        assert answer == lender["content"] + "<|im_end|>\n"


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_long_answers(make_tokenizer, strategy):
    """Both documents of KTO are within --max_length, and what is lent is what is left of the answer."""
    tokenizer = make_tokenizer("chatml")
    limit = len(rendered(tokenizer, [USER], add_generation_prompt=True)) + 20
    options = {"max_length": limit, "truncation_strategy": strategy}
    rows = [{"query": "Is it?", "response": "It is. " * 30, "label": 1},
            {"query": "Is it? " * 20, "response": "Yes.", "label": 0}]  # fmt: skip
    samples, refused = encode(tokenizer, "kto", rows, **options)
    whole = [documents[0] for documents, _ in encode(tokenizer, "kto", rows)[0]]
    kept = slice(-limit, None) if strategy == "left" else slice(limit)
    own = [(ids[kept], weights[kept]) for ids, weights in whole]
    if strategy == "right":
        assert refused == f"  1 row: its prompt leaves no room for an answer within --max_length {limit} (row 1)"
        assert samples == [([own[0], own[0]], [1.0])]
    else:
        answers = [len(ids) - weights.index(1.0) for ids, weights in whole]
        prompts = [max(limit - answer, 0) for answer in answers]
        assert prompts[0] == 0 < prompts[1] < limit - 1
        lent = [
            tuple((mine[:prompt] + others[lent:])[:limit] for mine, others in zip(own[n], own[1 - n], strict=True))
            for n, (prompt, lent) in enumerate(zip(prompts, prompts[::-1], strict=True))
        ]
        assert [documents for documents, _ in samples] == [[own[n], lent[n]] for n in range(2)]


def test_long_pairs(make_tokenizer):
    tokenizer, prompt = make_tokenizer("chatml"), [USER]
    limit = len(rendered(tokenizer, prompt, add_generation_prompt=True)) + 20
    pair = {"query": USER["content"], "response": "It is. " * 30, "rejected_response": "No."}
    [([(chosen, _), (rejected, _)], _)], _ = encode(
        tokenizer, "preference", [pair], max_length=limit, truncation_strategy="right"
    )
    for ids, answer in ((chosen, pair["response"]), (rejected, "No.")):  # each is cut for itself
        assert ids == rendered(tokenizer, [*prompt, {"role": "assistant", "content": answer}])[:limit]
    assert len(rejected) < len(chosen) == limit


def test_pairs_that_cannot_be_used(make_tokenizer):
    tokenizer, same = make_tokenizer("llama3"), {"messages": [USER, GOOD], "rejected_response": " It is better. "}
    assert "its chosen and rejected answers are the same (row 0)" in encode(tokenizer, "preference", [same])[1]
    start = {"query": "q", "response": "It is. It is better.", "rejected_response": "It is. It is not."}
    length = len(rendered(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It"}]))
    cut = {"max_length": length, "truncation_strategy": "right"}
    assert "its chosen and rejected answers are the same" in encode(tokenizer, "preference", [start], **cut)[1]
    assert "longer than --max_length 20" in encode(tokenizer, "preference", [PAIR], max_length=20)[1]
    silent = {"messages": [USER, {**GOOD, "loss": False}], "rejected_response": "b"}
    assert "none of its tokens is trained on" in encode(tokenizer, "preference", [silent])[1]
    wrong = {**PAIR, "margin": "much"}
    assert "its margin is 'much', where a number" in encode(tokenizer, "preference", [wrong])[1]
    together = sum(len(ids) for ids, _ in encode(tokenizer, "preference", [PAIR])[0][0][0])
    assert encode(tokenizer, "preference", [PAIR], sample_length=together)[1] == ""
    refused = encode(tokenizer, "preference", [PAIR], sample_length=together - 1)[1]
    assert f"its documents are together longer than --packing_length {together - 1} (row 0)" in refused


def with_ends(tokenizer):
    """As Qwen3-Embedding's, and a token before the text too."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<|im_start|> $A <|endoftext|>", None, [("<|im_start|>", 1), ("<|endoftext|>", 0)]
    )
    return tokenizer


def test_texts_to_embed(make_tokenizer):
    """The tokens are those of tokenizer(text), as sentence-transformers' encode makes them of a prompt and a text."""
    tokenizer = with_ends(make_tokenizer("chatml"))
    row = {"messages": [{"role": "system", "content": "Query: "}, USER], "positive": ["p é", "漢"], "negative": "n"}
    samples, _ = encode(tokenizer, "embedding", [row])
    for (documents, label), positive in zip(samples, ("p é", "漢"), strict=True):
        assert label == []
        assert [ids for ids, _ in documents] == tokenizer(["Query: Is it?", positive, "n"])["input_ids"]
        assert all(set(weights) == {1.0} for _, weights in documents)
    [(documents, label)], _ = encode(tokenizer, "embedding", [{"anchor": "a", "positive": "p", "score": "0.5"}])
    assert ([ids for ids, _ in documents], label) == (tokenizer(["a", "p"])["input_ids"], [0.5])
    [(documents, _)], _ = encode(tokenizer, "embedding", [{"anchor": "a", "positive": "p"}], system="To: ")
    assert [ids for ids, _ in documents] == tokenizer(["To: a", "p"])["input_ids"]
    plain = make_tokenizer(None)
    [(documents, _)], _ = encode(plain, "embedding", [{"anchor": "a", "positive": "b"}])
    assert [ids for ids, _ in documents] == plain(["a", "b"])["input_ids"], "no special tokens, no chat template"


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_keep_their_special_tokens(make_tokenizer, side):
    text = "Is it better? " * 9
    options = {"max_length": 12, "truncation_strategy": side}
    for stage, row in (("embedding", {"anchor": text, "positive": text}), ("seq_cls", {"text": text, "label": 1})):
        [(documents, _)], _ = encode(with_ends(make_tokenizer("chatml")), stage, [row], **options)
        other = with_ends(make_tokenizer("chatml", truncation_side=side))
        assert all(ids == other(text, truncation=True, max_length=12)["input_ids"] for ids, _ in documents)
        assert len(documents[0][1]) == 12


def test_classification(make_tokenizer):
    tokenizer = with_ends(make_tokenizer("qwen3"))
    rows = [
        {"messages": [USER, GOOD, USER], "label": 3},
        {"messages": [USER, GOOD], "label": [0, 2]},
        {"query": "Is it?", "label": "0.5", "system": "Be flat."},
        {"text": "Is it? <|im_end|>", "label": []},
    ]
    samples, refused = encode(tokenizer, "seq_cls", rows)
    assert refused == ""
    assert [label for _, label in samples] == [[3.0], [0.0, 2.0], [0.5], []]
    assert [document[0] for [document], _ in samples] == [
        rendered(tokenizer, [USER, GOOD, USER]),
        rendered(tokenizer, [USER, GOOD]),
        rendered(tokenizer, [{"role": "system", "content": "Be flat."}, USER]),
        tokenizer(rows[3]["text"])["input_ids"],
    ]
    plain = with_ends(make_tokenizer(None))
    [([(ids, _)], _)], refused = encode(plain, "seq_cls", [{"text": "a", "label": 1}, {"messages": [USER], "label": 1}])
    assert ids == plain("a")["input_ids"]
    assert "the tokenizer has no chat template, which messages need: use rows with a column `text` (row 1)" in refused
    refused = encode(tokenizer, "seq_cls", [{"text": " ", "label": 1}, {"text": "a"}, {"text": "a", "label": "good"}])[
        1
    ]
    for message in ("it is empty (row 0)", "it has no label: a number or", "its label is 'good', where a number or"):
        assert message in refused


def ranked(
    query, document, instruct="Given a web search query, retrieve relevant passages that answer the query"
) -> str:
    """As the model card of Qwen3-Reranker writes it down."""
    return (
        '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct '
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )  # fmt: skip


def test_documents_to_rank(make_tokenizer):
    tokenizer = with_ends(make_tokenizer("qwen3"))

    def texts(row, **options):
        samples, _ = encode(tokenizer, "reranker", [row], **options)
        assert all(set(weights) == {1.0} for documents, _ in samples for _, weights in documents)
        return [([tokenizer.decode(ids) for ids, _ in documents], label) for documents, label in samples]

    row = {"messages": [USER], "positive": ["p", "é 漢"], "negative": ["n", "m"]}
    others = [ranked("Is it?", "n"), ranked("Is it?", "m")]
    assert texts(row) == [([ranked("Is it?", p), *others], [1.0, 0.0, 0.0]) for p in ("p", "é 漢")]
    instructed = [([ranked("Is it?", "p", "Find.")], [0.0])]
    assert texts({"query": "Is it?", "system": "Find.", "positive": "p", "label": 0}) == instructed
    assert texts({"query": "Is it?", "positive": "p", "label": 0}, system="Find.") == instructed
    [([thinking], _)] = texts({"query": "q", "positive": "p", "label": True}, enable_thinking=True)
    assert thinking.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_documents_to_rank_keep_the_question(make_tokenizer, side):
    """The form around what the user says is left whole: the answer comes after its last token."""
    tokenizer, options = make_tokenizer("qwen3"), {"max_length": 240, "truncation_strategy": side}
    row = {"query": "Is it?", "positive": "A long one. " * 40, "label": 1}
    [([(ids, weights)], _)], _ = encode(tokenizer, "reranker", [row], **options)
    assert len(ids) == len(weights) == 240
    text, whole = tokenizer.decode(ids), ranked("Is it?", row["positive"].rstrip())
    start, end = whole.index("<Instruct>"), whole.index("<|im_end|>\n<|im_start|>assistant")
    assert text.startswith(whole[:start])
    assert text.endswith(whole[end:])
    assert ("<Query>: Is it?" in text) == (side == "right")
    refused = encode(tokenizer, "reranker", [row], **{**options, "max_length": 40})[1]
    assert "longer than --max_length 40 even without all text that may be truncated" in refused


@pytest.mark.parametrize(
    ("stage", "row", "message"),
    [
        ("embedding", {"anchor": "a", "positive": ["p", "q"], "label": 1}, "it has a label, which is for one positive"),
        ("embedding", {"anchor": "a", "positive": "p", "negative": "n", "score": 1}, "it has a label, which is for"),
        ("embedding", {"anchor": "a", "positive": "p", "label": [1, 2]}, "its label is [1, 2], where one number"),
        ("reranker", {"query": "a", "positive": "p"}, "it has neither negative texts nor a label"),
        ("reranker", {"query": "a", "positive": "p", "label": 0.5}, "its label is 0.5, where true, false, 1 or 0"),
        ("reranker", {"query": "a", "positive_messages": [[{"role": "system", "content": "s"}, USER]], "label": 1},
         "a document has a system prompt: move the instructions to the query's"),
    ],
)  # fmt: skip
def test_comparisons_that_cannot_be_used(make_tokenizer, stage, row, message):
    assert message in encode(make_tokenizer("qwen3"), stage, [row])[1]


def test_what_does_not_fit_together(make_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        encode(make_tokenizer(None), "preference", [])
    for stage in ("kto", "embedding"):
        with pytest.raises(ValueError, match="truncation_strategy split: for plain text"):
            encode(make_tokenizer(), stage, [], truncation_strategy="split")
        options = PrepareOptions(dataset=[str(tmp_path)], streaming=True)
        with pytest.raises(ValueError, match=f"--streaming true: cannot be used for {stage}, whose loss"):
            prepare(options, make_tokenizer(), stage=stage)
    with pytest.raises(ValueError, match="--enable_thinking: cannot be used with --task_type embedding"):
        encode(make_tokenizer(), "embedding", [], enable_thinking=False)


def test_the_store_gives_back_what_it_was_given(tmp_path):
    """Documents, labels and lengths against plain Python, over several record batches and files, in any order."""
    random = np.random.default_rng(0)

    def sample(number):
        documents = []
        for _ in range(random.integers(1, 5)):
            ids = random.integers(0, 99, random.integers(1, 9)).astype(np.int32)
            first = int(random.integers(1, len(ids) + 1))
            runs = [(first, 0.5), (len(ids) - first, 2.0)] if first < len(ids) else [(first, 0.5)]
            documents.append((ids, runs))
        return EncodedSample(number, documents, random.random(random.integers(0, 3)).tolist())

    samples = [sample(number) for number in range(60)]
    files = [
        open_or_build(tmp_path / name, lambda part=part: written(part), rebuild=False)
        for name, part in (("a", samples[:40]), ("b", samples[40:]))
    ]
    order = random.permutation(60)[:45]
    store = TokenStore([TokenFile(file.folder) for file in files], order, "embedding")
    for i, number in enumerate(order.tolist()):
        for (ids, weights), (expected, runs) in zip(store.row(i), samples[number].documents, strict=True):
            assert (ids.tolist(), weights.tolist()) == (expected.tolist(), weights_of(runs))
        assert store.label(i).tolist() == np.array(samples[number].label, np.float32).tolist()
    chosen = [samples[number] for number in order.tolist()]
    lengths = [[len(ids) for ids, _ in sample.documents] for sample in chosen]
    assert store.lengths.tolist() == [sum(some) for some in lengths]
    assert store.document_counts.tolist() == [len(some) for some in lengths]
    assert store.label_width == max(len(sample.label) for sample in chosen)
    widest = [sample.label + [np.nan] * (store.label_width - len(sample.label)) for sample in chosen]
    assert np.array_equal(store.labels, np.array(widest, np.float32), equal_nan=True)
    for multiple in (1, 4):
        padded = [[-(-length // multiple) * multiple for length in some] for some in lengths]
        assert store.padded_lengths(multiple, separate_rows=False).tolist() == [sum(some) for some in padded]
        assert store.padded_lengths(multiple, separate_rows=True).tolist() == [max(some) for some in padded]
        assert store.padded_lengths(multiple, separate_rows=True).dtype == np.int64
    weights = [weights_of(sample.documents[0][1])[1:] for sample in chosen]
    assert store.weights.tolist() == [sum(some) for some in weights]
    assert store.trained_tokens == sum(map(len, weights))


def test_filled_columns_count_on_through_batches(tmp_path):
    """Batches of seven samples: a column's sample is its place in the file, not in the batch."""
    document = (np.ones(2, np.int32), [(2, 1.0)])
    rows = [{"solution": "1"} if number % 3 else {"other": None} for number in range(20)]
    samples = [EncodedSample(n, [document], [], json.dumps(row).encode()) for n, row in enumerate(rows)]
    file = TokenFile(open_or_build(tmp_path / "a", lambda: written(samples), rebuild=False).folder)
    assert {name: places.nonzero()[0].tolist() for name, places in file.column_masks.items()} == {
        "solution": [number for number in range(20) if number % 3],
        "other": [number for number in range(20) if not number % 3],
    }


def written(samples):
    from megaswift.templates.dataset.dropped_rows import DroppedRows

    for start in range(0, len(samples), 7):
        yield record_batch(samples[start : start + 7]), DroppedRows()


REPORTS = {
    "preference": (
        PAIR,
        "--- chosen\n{prompt}⟦It is better.<|im_end|>⟧\n\n--- rejected\n{prompt}⟦Never. Although.<|im_end|>⟧\n",
    ),
    "kto": ({"messages": [USER, GOOD], "label": True}, "label 1 (⟦⟧: trained on):\n--- answer\n"),
    "seq_cls": ({"text": "Is it?", "label": [2, 0.5]}, "The first sample, label 2 0.5:\n--- text\nIs it?"),
    "embedding": (
        {"anchor": "a", "positive": "p", "negative": ["n", "m"]},
        "The first sample:\n--- anchor\na\n--- positive\np\n--- negative\nn\n--- negative\nm",
    ),
    "reranker": (
        {"query": "q", "positive": "p", "negative": "n"},
        "The first sample, label 1 0:\n--- first document\n",
    ),
}


@pytest.mark.parametrize("stage", REPORTS)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_report(tmp_path, make_tokenizer, stage, streaming):
    if streaming and stage in ("kto", "embedding"):
        return
    row, expected = REPORTS[stage]
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    options = PrepareOptions(dataset=[str(tmp_path / "a.jsonl")], loss_scale="last_round", streaming=streaming)
    prepared = prepare(options, make_tokenizer("chatml"), stage=stage)
    prompt = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in [*EARLIER, USER])
    assert expected.replace("{prompt}", f"{prompt}<|im_start|>assistant\n") in prepared.report
    if not streaming:
        tokens, documents = prepared.train.lengths.sum(), prepared.train.document_counts.sum()
        assert re.search(rf"together 3 samples of .*: {tokens:,} tokens, in {documents} documents", prepared.report)


def test_packing_length_is_of_a_samples_documents_together(tmp_path, make_tokenizer):
    (tmp_path / "a.jsonl").write_text((json.dumps(PAIR) + "\n") * 3)
    options = {"dataset": [str(tmp_path / "a.jsonl")], "packing": True, "max_length": 90}
    with pytest.raises(
        ValueError, match=r"(?s)no row .*3 rows: its documents are together longer than --packing_length 90"
    ):
        prepare(PrepareOptions(**options, packing_length=None), make_tokenizer("chatml"), stage="preference")
    found = prepare(PrepareOptions(**options, packing_length=180), make_tokenizer("chatml"), stage="preference")
    assert "packed into 3 packs of 180 tokens" in found.report


def test_the_nulls_that_arrow_fills_in_are_not_seen(make_tokenizer, tmp_path):
    """Tools and calls with different keys, of tables: as of a JSON file, where nothing is filled in."""

    def calling(name: str, **argument: str) -> dict:
        tool = {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in argument}},
        }
        said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": argument}}]}
        return {"dialog": [USER, said], "tools": [{"type": "function", "function": tool}], "of": [argument]}

    rows = [calling("weather", city="Rome"), calling("sum", expression="1+1")]
    rows[0]["chat_template_kwargs"], rows[1]["chat_template_kwargs"] = {"enable_thinking": False}, {"other": 1}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    tokenizer, found = make_tokenizer("qwen3"), []
    for name in ("rows.jsonl", "rows.parquet", "saved"):
        encoder = Encoder(tokenizer, TemplateOptions(enable_thinking=True), "asked", {"dialog": "messages"})
        source = open_source(str(tmp_path / name))
        for given in (source.rows(np.arange(2)), source.stream()):
            samples, _ = encoder.encode(given)
            found.append([[ids.tolist() for ids, _ in sample.documents] for sample in samples])
        of = [json.loads(sample.columns)["of"][0] for sample in samples]
    assert len(found[0]) == 2
    assert all(tokens == found[0] for tokens in found[1:])
    assert of == [{"city": "Rome", "expression": None}, {"city": None, "expression": "1+1"}], (
        "rewards get what is there"
    )


ODD = [
    {"query": "x\ud83d", "response": "y"},
    {"query": "x", "response": "y", "of": "\ud83d"},
    {"messages": [{"role": "user", "content": ["x"]}, GOOD]},
    {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": ["f"]}]},
    {"messages": [{"role": ["user"], "content": "x"}, GOOD]},
    {"query": "x", "response": "y", "history": 5},
    {"query": "x", "response": "y", "tools": 5},
]


def test_rows_of_an_odd_form_are_left_out(make_tokenizer):
    good = {"query": "漢 is?", "response": "🎈"}
    samples, refused = encode(make_tokenizer("chatml"), "sft", [*ODD, good])
    assert len(samples) == 2, "of sft only the texts matter"
    assert "1 row: it contains a lone surrogate, which is no text (row 0)" in refused
    assert "1 row: the content of a message is a list that holds text; expected is text, or a list of blocks" in refused
    assert all(f"(row {number})" in refused for number in (3, 4, 5, 6))
    rows = [(number, f"row {number}", row) for number, row in enumerate([*ODD, good])]
    samples, _ = Encoder(make_tokenizer("chatml"), TemplateOptions(), "prompts", {}).encode(rows)
    assert [sample.row for sample in samples] == [7]
    samples, refused = encode(make_tokenizer("chatml"), "pt", [{"text": "a\ud83d b"}, {"text": "é"}])
    assert len(samples) == 1
    assert "lone surrogate" in refused
