"""Flags of the vision tower on the command line."""

from pathlib import Path

import pytest
from megaswift.bridge.option_groups import compose
from megaswift.cli.checks.vision import check_vision, has_tower
from megaswift.cli.flags import UsageError
from megaswift.tasks.options import SftOptions
from megaswift.templates.media.families import FAMILIES

from tests.cli import ms_swift_stand_ins as stand_ins
from tests.cli.checks.test_checks import check
from tests.cli.conftest import write_model


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return write_model(tmp_path / "seeing", stand_ins.config("Qwen3-VL-8B-Instruct"))


def vision_notes(model: Path, words: str, gpus: int = 0) -> list[str]:
    return [note for note in check(model, words, gpus=gpus)[1] if "tower" in note or "freezes" in note]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--vit_lr 1e-5", "Remove it."),
        ("--aligner_lr 1e-5", "Remove it."),
        ("--freeze_llm true", "Remove it."),
        ("--tuner_type lora_llm", "Set --tuner_type lora."),
    ],
)
def test_a_tower_is_needed(dense: Path, tmp_path: Path, words: str, fix: str) -> None:
    """Of a text model, and of one whose family here is its text part."""
    text_alone = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    text_alone |= {"audio_config": {}, "text_config": {}}
    for model in (dense, write_model(tmp_path / "text", text_alone)):
        with pytest.raises(UsageError) as error:
            check(model, words)
        assert str(error.value).startswith(f"{words}".replace("1e-5", "1e-05"))
        assert str(error.value).endswith(f": the model has no vision tower that is supported. {fix}")


def test_a_tower_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of a model whose tower has no mapping can be read, and its tower cannot be trained."""
    text = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    monkeypatch.setitem(FAMILIES, "gemma2", FAMILIES["gemma3"])
    assert not has_tower(text | {"vision_config": {"num_hidden_layers": 1}})
    assert has_tower(stand_ins.config("Qwen3-VL-8B-Instruct"))


def test_flags_without_a_tower_that_ask_for_nothing(dense: Path) -> None:
    reason = "has no effect: the model has no vision tower that is supported."
    assert vision_notes(dense, "--freeze_llm false --freeze_vit true --freeze_aligner true") == []
    assert vision_notes(dense, "--freeze_vit false --language_model_only true") == [
        f"--freeze_vit false {reason}",
        f"--language_model_only true {reason}",
    ]
    options = compose(SftOptions, freeze_vit=False)
    for source, count in (("command line", 1), ("verl's default of actor_rollout_ref.actor.freeze_vision_tower", 0)):
        assert len([*check_vision(options, {"model_type": "qwen3"}, {"freeze_vit": source})]) == count


def test_flags_with_a_tower(seeing: Path) -> None:
    words = "--freeze_vit false --freeze_aligner false --vit_lr 1e-5 --aligner_lr 1e-6 --freeze_llm true"
    assert vision_notes(seeing, words) == []
    assert vision_notes(seeing, "--tuner_type lora_llm --freeze_vit false") == []
    assert vision_notes(seeing, "--vit_lr 1e-5 --aligner_lr 1e-6") == [
        "--vit_lr 1e-05 has no effect: --freeze_vit true freezes what it is for.",
        "--aligner_lr 1e-06 has no effect: --freeze_aligner true freezes what it is for.",
    ]
    assert vision_notes(seeing, "--fp8_format e4m3 --freeze_vit false", gpus=1) == [
        "--fp8_format e4m3: the vision tower computes in bfloat16."
    ]
    assert vision_notes(seeing, "--fp8_format e4m3", gpus=1) == []
    assert vision_notes(seeing, "--torch_dtype float16 --language_model_only true") == []
    assert vision_notes(seeing, "--freeze_llm true --freeze_parameters_ratio 1 --trainable_parameters model.") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--freeze_llm true", "--freeze_llm true with --freeze_vit true and --freeze_aligner true: leaves nothing to"),
        ("--freeze_llm true --tuner_type lora", "--freeze_llm true with .*: leaves nothing to train. Set"),
        ("--torch_dtype float16 --freeze_vit false", "--torch_dtype float16 cannot be used with --freeze_vit false"),
        ("--torch_dtype float16 --freeze_aligner false", "cannot be used with --freeze_aligner false in this version"),
        ("--optimizer dist_muon --freeze_vit false", "--optimizer dist_muon cannot be used with --freeze_vit false"),
        ("--language_model_only true --vit_lr 1e-5", "--vit_lr 1e-05 cannot be used with --language_model_only true"),
        ("--language_model_only true --freeze_vit false", "--freeze_vit false cannot be used with --language_model"),
        ("--language_model_only true --tuner_type lora_llm", "--tuner_type lora_llm cannot be used with --language"),
    ],
)
def test_flags_that_cannot_go_together(seeing: Path, monkeypatch, words: str, message: str) -> None:
    monkeypatch.setattr("megaswift.cli.checks.muon.importlib.util.find_spec", lambda name: name)
    with pytest.raises(UsageError, match=message):
        check(seeing, words)
