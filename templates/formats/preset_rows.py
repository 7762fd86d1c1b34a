"""Conversion of rows of named datasets. Each function returns the new columns, or None to leave the row out.

`presets.py` says which dataset uses which function. The columns that a function reads are the names of its parameters.
"""

import json
import re
from collections.abc import Callable

from ..json_types import Json, JsonObject
from .recipes import RECIPES

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
TOXIC = "toxic-dpo-v0.2"  # source of orpo-dpo-mix-40k that is left out
VARIATION_SELECTOR = "\ufe0f"  # follows many emojis, and only sometimes
FIREFLY_KINDS = {
    "ProseGeneration", "MRC", "JinYongGeneration", "TextCorrection", "ClassicalChinese", "BELLE", "StoryGeneration",
    "Couplet", "Cot", "Dictionary", "Translation", "Program", "SentimentAnalyze", "OpenQA", "AncientPoem",
    "TextMatching", "NLI", "Summary", "KeywordRecognition", "ProductDesc", "LyricGeneration", "Composition",
    "MusicComment", "NER",
}  # fmt: skip

type Converter = Callable[..., JsonObject | None]


def alpaca_zh(instruction: str, input: str, output: str) -> JsonObject:
    return {"instruction": instruction, "input": (input or "").removeprefix("输入\uff1a"), "output": output}


def long_alpaca(output: str) -> JsonObject:
    return {"output": output.removeprefix("Answer: ").strip()}


def self_cognition_qwen3(query: str, response: str) -> JsonObject:
    return {"query": f"{query} /no_think", "response": EMPTY_THOUGHT + response}


def self_cognition_empty_think(response: str) -> JsonObject:
    return {"response": EMPTY_THOUGHT + response}


def stsb(sentence1: str, sentence2: str, score: float) -> JsonObject:
    return {"anchor": sentence1, "positive": sentence2, "label": score}


def stsb_positive(sentence1: str, sentence2: str, score: float) -> JsonObject | None:
    """Leave out the score: InfoNCE takes every pair as similar."""
    return {"anchor": sentence1, "positive": sentence2} if score >= 0.75 else None


def _similarity_prompt(sentence1: str, sentence2: str) -> str:
    return (
        "Task: Based on the given two sentences, provide a similarity score between 0.0 and 1.0.\n"
        f"Sentence 1: {sentence1}\nSentence 2: {sentence2}\nSimilarity score: "
    )


def stsb_generate(sentence1: str, sentence2: str, score: float) -> JsonObject:
    return {"query": _similarity_prompt(sentence1, sentence2), "response": f"{score:.1f}"}


def stsb_regression(sentence1: str, sentence2: str, score: float) -> JsonObject:
    return {"query": _similarity_prompt(sentence1, sentence2), "label": score}


def jd_generation(sentence: str, label: float | None) -> JsonObject | None:
    if label is None:
        return None
    query = f"Task: Sentiment Classification\nSentence: {sentence}\nCategory: negative, positive\nOutput:"
    return {"query": query, "response": ("negative", "positive")[int(label)]}


def jd_label(sentence: str, label: float | None) -> JsonObject | None:
    return None if label is None else {"query": sentence, "label": int(label)}


def clue_nli(sentence1: str, sentence2: str, label: float | None) -> JsonObject | None:
    if label is None or not 0 <= label <= 2:
        return None
    kinds = "neutral", "entailment", "contradiction"
    texts = f"Sentence1: {sentence1}\nSentence2: {sentence2}"
    query = f"Task: Natural Language Inference\n{texts}\nCategory: {', '.join(kinds)}\nOutput:"
    return {"query": query, "response": kinds[int(label)]}


def emoji_pair(question: str, answer_zh: str, answer_en: str) -> JsonObject:
    texts = {"query": question, "response": answer_zh, "rejected_response": answer_en}
    return {name: text.replace(VARIATION_SELECTOR, "") for name, text in texts.items()}


def orpo_mix(source: str, chosen: Json, rejected: Json) -> JsonObject | None:
    return None if source == TOXIC else {"messages": chosen, "rejected_messages": rejected}


def function_calling_chatml(conversations: list[JsonObject], function_description: str) -> JsonObject:
    messages = []
    for message in conversations:
        role, text = message["from"].replace("-", "_"), message["value"]
        if role != "system":  # it repeats the tools
            messages.append({"from": role, "value": _call_with_json(text) if role == "function_call" else text})
    tools = [tool for tool in (function_description or "").split("\n\n") if tool.strip()]
    return {"conversations": messages, "tools": tools}


def _call_with_json(text: str) -> str:
    """Return a call whose arguments are JSON, where they are quoted by apostrophes."""
    quoted = re.fullmatch(r"""\s*(\{.*"arguments":\s*)'(.*)'\s*\}\s*""", text, re.DOTALL)
    return f"{quoted[1]}{quoted[2]}}}" if quoted else text


def latex_ocr(image: Json, text: str) -> JsonObject:
    return {"query": "Using LaTeX to perform OCR on the image.", "response": text, "images": [image]}


def aishell(recording: Json, transcript: str) -> JsonObject:
    """Return a recording with the order to write it down; the dataset has a blank between words."""
    return {"query": "语音转文本", "response": transcript.replace(" ", ""), "audios": [recording]}


def countdown(nums: list[int], target: int) -> JsonObject:
    query = (
        f"Using the numbers {nums}, create an equation that equals {target}.\n"
        "You can use basic arithmetic operations (+, -, *, /) and each number can only be used once.\n"
        "Show your work in <think> </think> tags. And return the final equation and answer "
        "in <answer> </answer> tags, for example <answer> (1 + 2) / 3 * 4 = 4 </answer>."
    )
    return {"query": query, "nums": nums, "target": target}


def countdown_oumi(nums: list[int], target: int) -> JsonObject:
    """Return the prompt of Oumi, which is TinyZero's for models without a chat template."""
    query = (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        f"User: Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And "
        "return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.\n"
        "Assistant: Let me solve this step by step.\n<think>"
    )
    return {"query": query, "data_source": "countdown", "ground_truth": {"target": target, "numbers": nums}}


def gsm8k_verl(question: str, answer: str) -> JsonObject:
    """Return the columns of verl's data, as `swift prepare gsm8k` writes them."""
    return RECIPES["gsm8k"]({"question": question, "answer": answer}, split="", index=0)


def xlam(query: str, answers: str, tools: str | list[JsonObject]) -> JsonObject:
    calls = [{"role": "tool_call", "content": json.dumps(call, ensure_ascii=False)} for call in json.loads(answers)]
    return {"messages": [{"role": "user", "content": query}, *calls], "tools": _openai_tools(tools)}


def xlam_grpo(query: str, answers: str, tools: str | list[JsonObject]) -> JsonObject:
    call = json.loads(answers)[0]
    solution = f"Action: {call['name']}\nAction Input: {json.dumps(call['arguments'], ensure_ascii=False)}"
    return {"query": query, "response": solution, "solution": solution, "tools": _openai_tools(tools)}


def _openai_tools(tools: str | list[JsonObject]) -> list[JsonObject]:
    functions: list[JsonObject] = json.loads(tools) if isinstance(tools, str) else tools
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in functions]


def hh_rlhf(chosen: str, rejected: str) -> JsonObject:
    return {"messages": _dialogue(chosen), "rejected_messages": _dialogue(rejected)}


def _dialogue(text: str) -> list[JsonObject]:
    parts = re.split(r"\n\n(?:Human|Assistant|Hum):", "\n\n" + text.strip())[1:]
    roles = ("user", "assistant") * len(parts)
    return [{"role": role, "content": part.strip()} for role, part in zip(roles, parts, strict=False)]


def hh_rlhf_cn(context: list[JsonObject], chosen: JsonObject, rejected: JsonObject) -> JsonObject:
    turns = [{"from": turn["role"], "value": turn["text"]} for turn in (*context, chosen)]
    return {"messages": turns, "rejected_response": rejected["text"]}


def dolly(instruction: str, context: str, response: str) -> JsonObject:
    before = f"Here gives some useful information:\n{context}\n" if context else ""
    return {"query": before + instruction, "response": response}


def text_to_sql(sql_prompt: str, sql_context: str, sql: str, sql_explanation: str) -> JsonObject:
    return {
        "query": f"Sql Table information:\n{sql_context}\n{sql_prompt}",
        "response": f"Let's think step by step:\n{sql_explanation}\nSo the final sql is:\n{sql}",
    }


def sql_create_context(question: str, context: str, answer: str) -> JsonObject:
    return {"instruction": question, "input": context, "output": answer}


def blossom_math(input: str, output: str, answer: str) -> JsonObject:
    return {"query": input, "response": f"{output}\n\nAnswer: {answer}"}


def leetcode(code_with_problem: str, explanation_only: str) -> JsonObject:
    problem, fence, code = code_with_problem.partition("```python")
    return {
        "query": problem.removeprefix("# "),
        "response": f"{(fence + code).strip()}\n\n{explanation_only}",
    }


def firefly(kind: str, input: str, target: str) -> JsonObject | None:
    return {"query": input, "response": target} if kind in FIREFLY_KINDS else None


def advertise(content: str, summary: str) -> JsonObject:
    return {
        "query": f"Task: Generating advertisements based on keywords.\nKeywords: {content}\nAdvertisements:",
        "response": summary,
    }


def dureader(text1: str, text2: str) -> JsonObject:
    answer, context = text1.split("[SEP]")
    return {
        "query": f"Task: Question Generation\nContext: {context}\nAnswer: {answer}\nQuestion:",
        "response": text2,
    }


def sudoku(question: str, answer: str) -> JsonObject:
    grids = (
        "\n".join(grid[i : i + 9] for i in range(0, len(grid), 9)) for grid in (question.replace(".", "0"), answer)
    )
    prompt = (
        "Solve the following 9x9 Sudoku puzzle. Empty cells are marked with '0'. "
        "Provide the completed grid as your answer.\n\nPuzzle:\n"
    )
    return {"query": prompt + next(grids), "response": next(grids)}


def numina_math(problem: str, solution: str) -> JsonObject:
    """Keep `solution`, which rewards read."""
    return {"query": problem, "response": solution, "solution": solution}
