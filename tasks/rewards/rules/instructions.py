"""Checkers of IFEval's verifiable instructions (https://arxiv.org/abs/2311.07911), by their published ids.

Each checker takes the response and the instruction's arguments by their published names. Two differences from the
benchmark's own program: sentences end at punctuation, without NLTK's trained model, and languages are told apart by
script and frequent words (language.py). A policy's text may be long and degenerate, so every checker takes linear time.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .language import language_of

Checker = Callable[..., bool]

CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
CLOSING = "\"')]\u201d\u2019"  # quotes and brackets behind a sentence's end
FULL_WIDTH = "\u3002\uff01\uff1f"  # ends of Chinese and Japanese sentences
SENTENCE_END = re.compile(rf"[.!?{FULL_WIDTH}]+[{re.escape(CLOSING)}]*(?=\s|$)|[{FULL_WIDTH}]|\n{{2,}}")
ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|[A-Z])\.$")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w+(?:[-'\u2019.&]\w+)*")


def satisfies(count: int, relation: str, bound: int) -> bool:
    """Return whether a count meets a bound. Raises ValueError for an unknown relation."""
    match relation:
        case "at least":
            return count >= bound
        case "less than":
            return count < bound
        case "at most":
            return count <= bound
        case "exactly" | "equal to":
            return count == bound
        case "around":  # within a tenth
            return abs(count - bound) <= max(round(bound / 10), 1)
    raise ValueError(f"unknown relation {relation!r}")


def count_words(text: str) -> int:
    return len(WORD.findall(text))


def count_sentences(text: str) -> int:
    """Return the number of sentences. Abbreviations, initials and decimal points end none."""
    count, start = 0, 0
    for end in SENTENCE_END.finditer(text):
        if end.group().startswith(".") and ABBREVIATION.search(text, max(end.start() - 6, 0), end.start() + 1):
            continue
        count += bool(WORD.search(text, start, end.end()))
        start = end.end()
    return count + bool(WORD.search(text, start))


def enclosed(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield what stands between marks of the same line."""
    for line in text.split("\n"):
        start = line.find(opening)
        while start >= 0 and (end := line.find(closing, start + len(opening))) >= 0:
            yield line[start + len(opening) : end]
            start = line.find(opening, end + len(closing))


def occurrences(word: str, text: str) -> int:
    """Return how often a word or phrase occurs, in any case, also within words."""
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))


def has_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(occurrences(keyword, text) for keyword in keywords)


def has_keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return satisfies(occurrences(keyword, text), relation, frequency)


def has_no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def has_letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return satisfies(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def is_in_language(text: str, language: str) -> bool:
    """Return whether a text is in a language, or in none that can be told."""
    return language_of(text) in (language.partition("-")[0], None)


def has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return satisfies(count_sentences(text), relation, num_sentences)


def has_words(text: str, num_words: int, relation: str) -> bool:
    return satisfies(count_words(text), relation, num_words)


def has_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return whether `***` divides a text into this number of paragraphs, none of which is empty within it."""
    paragraphs = [part.strip() for part in text.split("***")]
    inner = paragraphs[1:-1]
    return all(inner) and sum(map(bool, paragraphs)) == num_paragraphs


def has_first_word_of_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether blank lines divide a text into this number of paragraphs, and one begins with the word."""
    paragraphs = text.split("\n\n")
    if sum(bool(part.strip()) for part in paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == first_word.strip().lower()


def has_placeholders(text: str, num_placeholders: int) -> bool:
    return sum(1 for _ in enclosed(text, "[", "]")) >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    """Return whether a text has the marker, in any case; in P.S. and P.P.S a space may follow a point."""
    marker = postscript_marker.strip()
    pattern = POSTSCRIPTS.get(marker, re.escape(marker))
    return re.search(pattern, text, re.IGNORECASE) is not None


def has_bullets(text: str, num_bullets: int) -> bool:
    """Return whether a text has exactly this number of lines that begin with `-`, or with a single `*`."""
    lines = [line.lstrip() for line in text.split("\n")]
    return (
        sum(line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines) == num_bullets
    )


def is_constrained_response(text: str) -> bool:
    return any(option in text for option in CONSTRAINED_RESPONSES)


def has_highlights(text: str, num_highlights: int) -> bool:
    """Return whether a text has this number of *parts* or **parts** that are not empty, or more.

    The benchmark finds single and double marks in two passes, so this does too.
    """
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*([^\n*]*)\*\*", text) if part.strip()]
    return len(single) + len(double) >= num_highlights


def has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def is_json(text: str) -> bool:
    """Return whether a text is JSON, which may be in a Markdown fence."""
    content = text.strip()
    if content.startswith("```"):
        content = content.removeprefix("```").removesuffix("```")
        content = content[4:] if content[:4].lower() == "json" else content
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.strip("<> \t") for title in enclosed(text, "<<", ">>"))


def has_two_responses(text: str) -> bool:
    """Return whether `******` divides a text into two different responses."""
    parts = [part.strip() for part in text.split("******")]
    responses = list(filter(None, parts))
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def has_end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return satisfies(sum(word.isupper() for word in TOKEN.findall(text)), capital_relation, capital_frequency)


def is_english_capital(text: str) -> bool:
    return text.isupper() and is_in_language(text, "en")


def is_english_lowercase(text: str) -> bool:
    return text.islower() and is_in_language(text, "en")


def has_no_comma(text: str) -> bool:
    return "," not in text


def is_quoted(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


CHECKERS: dict[str, Checker] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_frequency,
    "keywords:forbidden_words": has_no_forbidden_words,
    "keywords:letter_frequency": has_letter_frequency,
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:number_words": has_words,
    "length_constraints:nth_paragraph_first_word": has_first_word_of_paragraph,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_constrained_response,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": has_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": has_end,
    "startend:quotation": is_quoted,
    "change_case:capital_word_frequency": has_capital_words,
    "change_case:english_capital": is_english_capital,
    "change_case:english_lowercase": is_english_lowercase,
    "punctuation:no_comma": has_no_comma,
}

# Instructions of RLVR-IFeval and of ROLL's data by the names of their functions; each takes the arguments there.
NAMED_CHECKERS: dict[str, Checker] = {
    "verify_keywords": lambda text, keyword_list: has_keywords(text, keyword_list),
    "verify_keyword_frequency": lambda text, word, N: (
        [token.lower() for token in WORD.findall(text)].count(word.strip().lower()) == N
    ),
    "validate_forbidden_words": lambda text, forbidden_words: not any(occurrences(w, text) for w in forbidden_words),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "validate_response_language": lambda text, language: language_of(text) == language,
    "verify_paragraph_count": lambda text, N: _all_filled(re.split(r"\* ?\* ?\*", text), N),
    "validate_word_constraint": lambda text, N, quantifier: satisfies(len(text.split()), quantifier, N),
    "verify_sentence_constraint": lambda text, N, quantifier: _near(count_sentences(text), quantifier, N),
    "validate_paragraphs": lambda text, N, first_word, i: (
        len(parts := text.split("\n\n")) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)
    ),
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda text, N: has_placeholders(text, N),
    "verify_bullet_points": lambda text, N: sum(line.lstrip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": lambda text: any(True for _ in enclosed(text, "<<", ">>")),
    "validate_choice": lambda text, options: any(text.strip() == option.strip() for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": lambda text, N, section_splitter: (
        len(text.removeprefix(section_splitter).split(section_splitter)) == N
    ),
    "validate_json_format": lambda text: is_json(text),
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: text.count("******") == 1 and has_two_responses(text),
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: satisfies(
        len(re.findall(r"\b[A-Z]+\b", text)), "exactly" if quantifier == "around" else quantifier, N
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": has_no_comma,
}


def _all_filled(parts: Sequence[str], count: int) -> bool:
    return len(parts) == count and all(part.strip() for part in parts)


def _near(count: int, relation: str, bound: int) -> bool:
    """Return whether a count meets a bound; `around` allows a difference of one."""
    return abs(count - bound) <= 1 if relation == "around" else satisfies(count, relation, bound)


def follows(text: str, instruction: str, arguments: dict[str, Any]) -> bool:
    """Return whether a response follows an instruction. Missing arguments may be None.

    Raises ValueError for an unknown instruction, or for arguments that it does not take.
    """
    checkers = CHECKERS if instruction in CHECKERS else NAMED_CHECKERS
    if instruction not in checkers:
        raise ValueError(f"no such instruction: {instruction}")
    checker = checkers[instruction]
    _, *parameters = inspect.signature(checker).parameters  # the first is the text
    if missing := [name for name in parameters if arguments.get(name) is None]:
        raise ValueError(f"the instruction {instruction} lacks {', '.join(missing)}")
    return checker(text, **{name: _as_int(arguments[name]) for name in parameters})


def _as_int(value: Any) -> Any:
    """Return a whole number as int: columns with missing values hold floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
