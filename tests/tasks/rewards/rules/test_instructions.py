"""IFEval's instructions: answers that follow each, and answers that do not."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megaswift.tasks.rewards.rules.ifeval import score_ifeval
from megaswift.tasks.rewards.rules.instructions import (
    CHECKERS,
    NAMED_CHECKERS,
    count_sentences,
    count_words,
    follows,
    satisfies,
)
from megaswift.tasks.rewards.rules.sample import RuleSample

THREE = "One. Two! Three?"
FACTS = [  # instruction, arguments, answers that follow it, others
    ("keywords:existence", {"keywords": ["river", "blue"]}, ["A Blue river."], ["A river.", ""]),
    (
        "keywords:frequency",
        {"keyword": "fish", "frequency": 2, "relation": "at least"},
        ["Fish eat fish.", "fishfish"],
        ["fish"],
    ),
    ("keywords:frequency", {"keyword": "fish", "frequency": 2, "relation": "less than"}, ["a fish", ""], ["fish fish"]),
    ("keywords:forbidden_words", {"forbidden_words": ["bad", "C++"]}, ["badly put", "fine"], ["So BAD.", "a bad one"]),
    (
        "keywords:letter_frequency",
        {"letter": "A", "let_frequency": 3, "let_relation": "at least"},
        ["banana", "AAA"],
        ["bana"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 1, "let_relation": "less than"},
        ["no mark"],
        ["# mark"],
    ),
    ("language:response_language", {"language": "de"}, ["Das ist nicht der Weg."], ["That is not the way."]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, [THREE], ["One. Two!"]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, ["One. Two!"], [THREE]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***a***b***"],
        ["a\n\nb", "a***b***c", "a\n*** ***\nb"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["a b, c"], ["a b"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a b"], ["a b c"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Rivers"},
        ["A.\n\nRivers, long.", "A.\n\n'rivers' run"],
        ["Rivers.\n\nA.", "A.\n\nRiverside", "A.\n\nB.\n\nRivers", "Rivers"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] [b c]"], ["[a] (b)"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. Ask", "p. s. Ask"], ["Bye. PS Ask"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S. Ask", "p. p.s"], ["P.S. Ask"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "* a\ntext\n- b"],
        ["* a", "* a\n* b\n* c", "**a**\n**b**", "+ a\n+ b"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is maybe.", "So: My answer is no."], ["Maybe.", "yes"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and **b**", "*a* **b**"],
        ["*a*", "* *  **", "a b"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION2 SECTION3"],
        ["SECTION 1 a", "Section 1 Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[1]\n```", "3"],
        ['{"a": 1', "a: 1", 'Here: {"a": 1}'],
    ),
    ("detectable_format:title", {}, ["<<Poem of joy>>\nA", "a <<b>> c"], ["<Poem>", "<< >>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["a\n******\nb", "******a******b"], ["a", "a******a", "a******b******c"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "What is it?"},
        ["What is it? A cat.", " what is IT?"],
        ["It is what? What is it?"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Is that all?"},
        ["Yes. Is that all?", '"is that all?" '],
        ["Is that all? Y"],
    ),
    ("startend:quotation", {}, ['"Yes."', ' "a" and "b" '], ['"Yes.', "Yes", '"', "'Yes'"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["GO AND see", "I saw NASA"],
        ["GO on", "Go On"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "less than"},
        ["Go On"],
        ["GO on"],
    ),
    ("change_case:english_capital", {}, ["THIS IS IT, AND THAT IS 4."], ["This is it.", "DAS IST NICHT DER WEG", "42"]),
    ("change_case:english_lowercase", {}, ["this is it, and that is 4."], ["This is it.", "das ist nicht der weg"]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
]
NAMED_FACTS = [
    ("verify_keywords", {"keyword_list": ["river", "blue"]}, ["Blue River"], ["blue"]),
    ("verify_keyword_frequency", {"word": "Fish", "N": 2}, ["fish, fish"], ["fish", "fishes fish", "fish " * 3]),
    ("validate_forbidden_words", {"forbidden_words": ["bad"]}, ["good"], ["badly"]),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, ["banA a"], ["banana"]),
    ("validate_response_language", {"language": "en"}, ["This is the way."], ["Das ist der Weg."]),
    ("verify_paragraph_count", {"N": 2}, ["a\n* * *\nb", "a\n***\nb"], ["a", "a\n* * *\n"]),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, ["a " * 18, "a " * 22], ["a " * 17, "a " * 23]),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, ["a b"], ["a b c"]),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, ["One. Two.", THREE], ["One."]),
    (
        "validate_paragraphs",
        {"N": 2, "first_word": "Rivers", "i": 2},
        ["A\n\nRivers run"],
        ["Rivers\n\nA", "Rivers", "A\n\nB\n\nRivers"],
    ),
    ("verify_postscript", {"postscript_marker": "P.S."}, ["a P.S. b"], ["a", "a P.S."]),
    ("validate_placeholders", {"N": 1}, ["[a]"], ["a"]),
    ("verify_bullet_points", {"N": 2}, ["* a\n- b"], ["* a"]),
    ("validate_title", {}, ["<<a>>"], ["<a>"]),
    ("validate_choice", {"options": ["yes", "no"]}, ["yes", " no "], ["maybe", "y", ""]),
    ("validate_highlighted_sections", {"N": 2}, ["*a* *b*"], ["*a*"]),
    ("validate_sections", {"N": 2, "section_splitter": "##"}, ["## a ## b"], ["## a"]),
    ("validate_json_format", {}, ["[1]"], ["[1"]),
    ("validate_repeat_prompt", {"original_prompt": "What?"}, ["What? That."], ["That."]),
    ("validate_two_responses", {}, ["a ****** b"], ["a", "a ****** a"]),
    ("validate_uppercase", {}, ["GO, 1"], ["Go"]),
    ("validate_lowercase", {}, ["go, 1"], ["Go"]),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at least"}, ["GO on"], ["go on"]),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "around"}, ["GO on"], ["GO ON"]),
    ("validate_end", {"end_phrase": "bye"}, ["good bye"], ["bye."]),
    ("validate_quotation", {}, ['"a"'], ["a"]),
    ("validate_no_commas", {}, ["a"], ["a,"]),
]


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), [*FACTS, *NAMED_FACTS])
def test_instruction(instruction, arguments, good, bad):
    unused = {"num_words": None, "language_hint": None}  # Parquet has the arguments of all rows
    assert {text: follows(text, instruction, unused | arguments) for text in good} == dict.fromkeys(good, True)
    assert {text: follows(text, instruction, unused | arguments) for text in bad} == dict.fromkeys(bad, False)


def test_each_instruction_has_facts():
    assert {instruction for instruction, *_ in FACTS} == set(CHECKERS)
    assert {instruction for instruction, *_ in NAMED_FACTS} == set(NAMED_CHECKERS)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No end", 1),
        (THREE, 3),
        ("Dr. Lee paid 3.50 dollars. Then he left.", 2),
        ("J. R. Smith wrote it. He did.", 2),
        ('She said "Go." Then she left.', 2),
        ("Wait... what?! Yes.", 3),
        ("A title\n\nA sentence.", 2),
        ("See e.g. this one.", 1),
        ("这是第一句。这是第二句。", 2),
    ],
)
def test_sentences(text, count):
    assert count_sentences(text) == count


@given(st.lists(st.sampled_from(["river", "Blue", "x1", "naïve"]), max_size=30), st.sampled_from([" ", "\n", ", "]))
def test_words_by_brute_force(words, separator):
    text = separator.join(words)
    assert count_words(text) == len(words)
    bound = len(words)
    assert satisfies(count_words(text), "at least", bound)
    assert not satisfies(count_words(text), "less than", bound)


@pytest.mark.parametrize(
    ("instruction", "arguments", "problem"),
    [
        ("keywords:nonsense", {}, "no such instruction: keywords:nonsense"),
        ("keywords:existence", {"keywords": None}, "keywords:existence lacks keywords"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "near"}, "unknown relation 'near'"),
    ],
)
def test_rows_that_cannot_be_checked(instruction, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        follows("text", instruction, arguments)


@pytest.mark.parametrize(
    "text", ["[", "<<", "*", "* ", "A. ", "\n", " ", "-\n", "***", "a", "``` ", "<<a>> ", "P. ", '"', "一。"]
)
def test_long_and_degenerate_texts_take_linear_time(text):
    """Quadratic time would be minutes."""
    start = time.process_time()
    for instruction, arguments, *_ in (*FACTS, *NAMED_FACTS):
        follows(text * (300_000 // len(text)), instruction, arguments)
    assert time.process_time() - start < 30


def score(completion: str, **columns: object) -> float | None:
    return score_ifeval([RuleSample(completion, "", columns)])[0]


def test_all_instructions_of_a_row_count():
    columns = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 3.0, "relation": "at least"}],
    }
    assert score("one two three", **columns) == 1
    assert score("one, two three", **columns) == 0
    assert score("one two", **columns) == 0
    assert score("<think>a, b</think>one two three", **columns) == 1
    assert score("<think>one two three</think>", **columns) == 0
    as_json = {name: json.dumps(value) for name, value in columns.items()}
    assert score("one two three", **as_json) == 1
    assert score("one two", ground_truth=json.dumps(columns)) == 0
    assert score("one two three", reward_model={"ground_truth": columns}) == 1


def test_instructions_by_the_names_of_functions():
    truth = {"func_name": "verify_keyword_frequency", "word": "fish", "N": 1, "quantifier": None}
    assert score("a fish", ground_truth=json.dumps(truth)) == 1
    assert score("a bird", ground_truth=truth) == 0


def test_rows_without_instructions_have_no_score():
    assert score("text", ground_truth="42") is None
    assert score("text") is None
    with pytest.raises(ValueError, match="2 instruction_id_list and not as many kwargs"):
        score("text", instruction_id_list=["punctuation:no_comma"] * 2, kwargs=[{}])
