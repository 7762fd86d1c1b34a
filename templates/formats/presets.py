"""Named datasets: how the datasets of ms-swift's examples are read.

A preset is a row of PRESETS. A dataset without one is read by its columns alone.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from ..json_types import JsonObject
from . import preset_rows as rows
from .columns import apply_names, has_column
from .preset_rows import Converter
from .schemas import ArrowRow, UnusableRow, drop_missing, row_errors

VERSION = 2  # of the conversions; cached tokens of other versions are not used
TRAIN_AND_TEST, TRAIN_AND_VALIDATION = ("train", "test"), ("train", "validation")


class ConvertedRow(ArrowRow):
    """Row of a named dataset, with renamed and converted columns.

    source_columns: names of its columns before
    refusal: reason to leave it out
    """

    source_columns: frozenset[str] = frozenset()
    refusal: UnusableRow | None = None


@dataclass(frozen=True)
class DatasetPreset:
    """How a named dataset is read. The hubs have it by different ids; "" where they have not.

    subset: the hub's subset, where the dataset's name has none
    splits: joined where the name has none
    columns: columns to rename
    convert: function of the columns that its parameters name; a row without one of these is left as it is
    views: names behind `:` that read the data in another way: changes of this preset
    """

    modelscope: str
    hugging_face: str = ""
    subset: str | None = None
    splits: tuple[str, ...] = ("train",)
    columns: Mapping[str, str] = field(default_factory=dict)
    convert: Converter | None = None
    views: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        return [dataset_id for dataset_id in (self.modelscope, self.hugging_face) if dataset_id]

    def view(self, name: str) -> "DatasetPreset | None":
        return replace(self, views={}, **self.views[name]) if name in self.views else None

    @property
    def changes_rows(self) -> bool:
        return bool(self.columns or self.convert)

    @property
    def key(self) -> str:
        """Name of the conversion, for the token cache."""
        return (
            f"preset {VERSION} {self.modelscope} {getattr(self.convert, '__name__', '')} {sorted(self.columns.items())}"
        )

    @cached_property
    def _reads(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.convert).parameters) if self.convert else frozenset()

    def __call__(self, row: JsonObject, columns: Mapping[str, str]) -> ConvertedRow:
        """Return the converted row. `columns` (those of --columns) are renamed before."""
        names = {**self.columns, **columns}
        new_row = drop_missing(apply_names(ArrowRow(row), names))
        converted = ConvertedRow(new_row)
        converted.source_columns = frozenset(row) | {name for name in columns if has_column(row, name)}
        if self.convert and self._reads <= {names.get(column, column) for column in row}:
            values = {name: new_row.get(name) for name in self._reads}
            try:
                with row_errors():
                    added = self._converted(values)
            except UnusableRow as error:
                converted.refusal = error
                return converted
            for name in self._reads:
                converted.pop(name, None)
            converted.update(added)
        return converted

    def _converted(self, values: JsonObject) -> JsonObject:
        assert self.convert
        try:
            added = self.convert(**values)
        except ValueError as error:
            raise UnusableRow(f"it has not the form of {self.modelscope}") from error
        if added is None:
            raise UnusableRow(f"{self.modelscope} leaves such rows out")
        return added


PAIRED_TEXTS = {"prompt": "query", "chosen": "response", "rejected": "rejected_response"}
QUESTION_SYSTEM = {"question": "query", "system_prompt": "system"}

PRESETS = (
    # Instructions and conversations
    DatasetPreset("AI-ModelScope/alpaca-gpt4-data-zh", "llm-wizard/alpaca-gpt4-data-zh", convert=rows.alpaca_zh),
    DatasetPreset("AI-ModelScope/alpaca-gpt4-data-en", "vicgalle/alpaca-gpt4"),
    DatasetPreset("AI-ModelScope/alpaca-cleaned", "yahma/alpaca-cleaned"),
    DatasetPreset("AI-ModelScope/LongAlpaca-12k", "Yukang/LongAlpaca-12k", convert=rows.long_alpaca),
    DatasetPreset(
        "swift/self-cognition", "modelscope/self-cognition",
        views={"qwen3": {"convert": rows.self_cognition_qwen3},
               "empty_think": {"convert": rows.self_cognition_empty_think}},
    ),
    DatasetPreset("liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT",
                  "Congliu/Chinese-DeepSeek-R1-Distill-data-110k-SFT"),
    DatasetPreset("ZhipuAI/LongWriter-6k", "zai-org/LongWriter-6k"),
    DatasetPreset("swift/ultrachat_200k", "HuggingFaceH4/ultrachat_200k", splits=("train_sft",)),
    DatasetPreset("AI-ModelScope/databricks-dolly-15k", "databricks/databricks-dolly-15k", convert=rows.dolly),
    DatasetPreset("AI-ModelScope/firefly-train-1.1M", "YeungNLP/firefly-train-1.1M", convert=rows.firefly),
    DatasetPreset("AI-ModelScope/OpenOrca", "Open-Orca/OpenOrca", columns=QUESTION_SYSTEM),
    DatasetPreset("AI-ModelScope/OpenOrca-Chinese", "yys/OpenOrca-Chinese", columns=QUESTION_SYSTEM),
    DatasetPreset("FreedomIntelligence/medical-o1-reasoning-SFT", "FreedomIntelligence/medical-o1-reasoning-SFT",
                  subset="en", columns={"Question": "query", "Response": "response"}),
    DatasetPreset(
        "ServiceNow-AI/R1-Distill-SFT", "ServiceNow-AI/R1-Distill-SFT",
        views={"v0": {"subset": "v0", "columns": {"problem": "query", "reannotated_assistant_content": "response"}},
               "v1": {"subset": "v1", "columns": {"messages": "_", "reannotated_messages": "messages"}}},
    ),
    DatasetPreset("lvjianjin/AdvertiseGen", "shibing624/AdvertiseGen", splits=TRAIN_AND_VALIDATION,
                  convert=rows.advertise),
    DatasetPreset("modelscope/DuReader_robust-QG", splits=("train", "validation", "test"), convert=rows.dureader),
    DatasetPreset("modelscope/clue", "clue", subset="cmnli", splits=TRAIN_AND_VALIDATION, convert=rows.clue_nli),
    DatasetPreset("AI-ModelScope/sql-create-context", "b-mc2/sql-create-context", convert=rows.sql_create_context),
    DatasetPreset("AI-ModelScope/synthetic_text_to_sql", "gretelai/synthetic_text_to_sql", convert=rows.text_to_sql),
    DatasetPreset("AI-ModelScope/leetcode-solutions-python", convert=rows.leetcode),
    # Images
    DatasetPreset("AI-ModelScope/LaTeX_OCR", "linxy/LaTeX_OCR", subset="default", convert=rows.latex_ocr),
    # Audio
    DatasetPreset(
        "speech_asr/speech_asr_aishell1_trainsets", subset="default",
        columns={"Audio:FILE": "recording", "Text:LABEL": "transcript"}, convert=rows.aishell,
        views={split: {"splits": (split,)} for split in ("train", "validation", "test")},
    ),
    # Tools
    DatasetPreset("AI-ModelScope/function-calling-chatml", "Locutusque/function-calling-chatml",
                  convert=rows.function_calling_chatml),
    DatasetPreset(
        "LLM-Research/xlam-function-calling-60k", "Salesforce/xlam-function-calling-60k", subset="dataset",
        convert=rows.xlam, views={"grpo": {"convert": rows.xlam_grpo}},
    ),
    # Mathematics and puzzles
    DatasetPreset("open-r1/DAPO-Math-17k-Processed", "open-r1/DAPO-Math-17k-Processed", subset="all"),
    DatasetPreset("modelscope/gsm8k", "openai/gsm8k", subset="main", views={"verl": {"convert": rows.gsm8k_verl}}),
    DatasetPreset("AI-MO/NuminaMath-TIR", "AI-MO/NuminaMath-TIR"),
    DatasetPreset("AI-MO/NuminaMath-CoT", "AI-MO/NuminaMath-CoT"),
    DatasetPreset("AI-MO/NuminaMath-1.5", "AI-MO/NuminaMath-1.5", convert=rows.numina_math),
    DatasetPreset("AI-ModelScope/MATH-lighteval", "DigitalLearningGmbH/MATH-lighteval", convert=rows.numina_math),
    DatasetPreset("AI-ModelScope/blossom-math-v2", "Azure99/blossom-math-v2", convert=rows.blossom_math),
    DatasetPreset("tastelikefeet/competition_math", splits=TRAIN_AND_TEST),
    DatasetPreset("modelscope/MathR-32B-Distill", subset="data"),
    DatasetPreset("zouxuhong/Countdown-Tasks-3to4", "Jiayi-Pan/Countdown-Tasks-3to4", convert=rows.countdown),
    DatasetPreset("d1shs0ap/countdown", "d1shs0ap/countdown", convert=rows.countdown_oumi),
    DatasetPreset("sapientinc/sudoku-extreme-1k", "sapientinc/sudoku-extreme-1k", convert=rows.sudoku),
    # Pairs of answers
    DatasetPreset("hjh0119/shareAI-Llama3-DPO-zh-en-emoji", "shareAI/DPO-zh-en-emoji", convert=rows.emoji_pair),
    DatasetPreset("AI-ModelScope/orpo-dpo-mix-40k", "mlabonne/orpo-dpo-mix-40k", convert=rows.orpo_mix),
    DatasetPreset("AI-ModelScope/ultrafeedback-binarized-preferences-cleaned-kto",
                  "argilla/ultrafeedback-binarized-preferences-cleaned-kto"),
    DatasetPreset("AI-ModelScope/hh-rlhf", "Anthropic/hh-rlhf", splits=TRAIN_AND_TEST, convert=rows.hh_rlhf),
    DatasetPreset("AI-ModelScope/hh_rlhf_cn", splits=TRAIN_AND_TEST, convert=rows.hh_rlhf_cn),
    DatasetPreset("swift/orca_dpo_pairs", "Intel/orca_dpo_pairs", columns=PAIRED_TEXTS | {"question": "query"}),
    DatasetPreset("AI-ModelScope/zhihu_rlhf_3k", "liyucheng/zhihu_rlhf_3k", columns=PAIRED_TEXTS),
    DatasetPreset("HumanLLMs/Human-Like-DPO-Dataset", "HumanLLMs/Human-Like-DPO-Dataset", columns=PAIRED_TEXTS),
    # Labels, texts that belong together
    DatasetPreset(
        "sentence-transformers/stsb", "sentence-transformers/stsb", convert=rows.stsb,
        views={"positive": {"convert": rows.stsb_positive}, "generate": {"convert": rows.stsb_generate},
               "reg": {"convert": rows.stsb_regression}},
    ),
    DatasetPreset(
        "DAMO_NLP/jd", splits=TRAIN_AND_VALIDATION, convert=rows.jd_generation,
        views={"cls": {"convert": rows.jd_label}},
    ),
    DatasetPreset("MTEB/scidocs-reranking", "mteb/scidocs-reranking", splits=("validation", "test")),
    DatasetPreset("MTEB/stackoverflowdupquestions-reranking", "mteb/stackoverflowdupquestions-reranking",
                  splits=TRAIN_AND_TEST),
)  # fmt: skip


@cache
def _presets_by_id() -> dict[str, DatasetPreset]:
    return {dataset_id: preset for preset in PRESETS for dataset_id in preset.ids}


def preset_of(dataset_id: str) -> DatasetPreset | None:
    """Return the preset of a hub id."""
    return _presets_by_id().get(dataset_id)


def preset_of_path(parts: tuple[str, ...]) -> DatasetPreset | None:
    """Return the preset whose id is two successive parts of a path; the last ones count.

    Also of a part as Hugging Face's cache names it: `datasets--owner--name`.
    """
    for first, second in reversed(list(zip(("", *parts[:-1]), parts, strict=True))):
        cached = second.removeprefix("datasets--").replace("--", "/", 1) if second.startswith("datasets--") else ""
        if preset := preset_of(cached or f"{first}/{second}"):
            return preset
    return None


def rename_columns(row: JsonObject, columns: Mapping[str, str]) -> JsonObject:
    """Return a row with its columns renamed as in --columns. Raises UnusableRow if its preset leaves it out."""
    if isinstance(row, ConvertedRow):  # whose columns the preset renamed
        if row.refusal:
            raise row.refusal
        return row
    return apply_names(row, columns) if columns else row
