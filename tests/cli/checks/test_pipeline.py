"""How pipeline stages may divide layers: of the policy, of roles, of exports."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from megaswift.bridge.pipeline_layout import divide_layers, virtual_pipeline_size
from megaswift.cli.checks.export import check_export_layout
from megaswift.cli.flags import UsageError
from megaswift.cli.main import read_options
from megaswift.tasks.run.planning import ProcessLayout, build_options, role_layout

from tests.cli.checks import checking
from tests.cli.checks.test_checks import FIRST, LAST, PP, VPP, check
from tests.cli.conftest import DENSE, MIXTURE, write_model

EMBEDDING, LOSS = "--account_for_embedding_in_pipeline_split true", "--account_for_loss_in_pipeline_split true"
LAYOUT = "--pipeline_model_parallel_layout"
REF_PP, REF_TP = "--ref_pipeline_model_parallel_size", "--ref_tensor_model_parallel_size"


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (f"{PP} 2 {EMBEDDING}", 2, f"{PP} 2, {EMBEDDING}: the model's 4 layers, 5 with the embedding, cannot be split"),
        (
            f"{PP} 2 {VPP} 2 {EMBEDDING} {LOSS}",
            2,
            f"{PP} 2, {VPP} 2, {EMBEDDING}, {LOSS}: the model's 4 layers, 6 with the embedding and the loss, cannot be "
            "split evenly over 2 stages of 2 chunks.",
        ),
        (f"{PP} 2 {EMBEDDING} {FIRST} 1", 2, f"{FIRST} 1 cannot be used with {EMBEDDING}, which divides layers too."),
        (f"{PP} 2 {LOSS} {LAST} 1", 2, f"{LAST} 1 cannot be used with {LOSS}, which divides layers too."),
        (f"{PP} 2 {LAYOUT} Et|tttL {LOSS}", 2, f"{LAYOUT} Et|tttL cannot be used with {LOSS}, which divides"),
        (f"{PP} 2 {LAYOUT} Et|tttL {LAST} 3", 2, f"{LAYOUT} Et|tttL cannot be used with {LAST} 3, which divides"),
        (f"{LAYOUT} Et|tttL", 1, f"{LAYOUT} Et|tttL: there is one pipeline stage. Set {PP} 2 or more, or remove"),
        (f"{PP} 2 {LAYOUT} Et|tttt", 2, f"{LAYOUT} Et|tttt: has L 0 times. Set it once, as the last letter."),
        (f"{PP} 2 {LAYOUT} Et|t|ttL", 2, f"{LAYOUT} Et|t|ttL: has 3 stages, not a multiple of {PP} 2. Set a multiple."),
        (f"{PP} 2 {LAYOUT} Et|ttL", 2, f"{LAYOUT} Et|ttL: has 3 layers (t), and the model has 4. Set 4."),
        (f"{PP} 2 {LAYOUT} Et|(t|)*2tL {VPP} 3", 2, f"{VPP} 3: {LAYOUT} Et|(t|)*2tL has 4 stages, which are not"),
        (f"{PP} 2 {LAYOUT} Et|(t|)*2tL {VPP} 1", 2, f"{VPP} 1: {LAYOUT} Et|(t|)*2tL has 4 stages, which are not"),
        (
            f"{PP} 2 {LAYOUT} Et|(t|)*2tL --global_batch_size 1",
            2,
            f"{LAYOUT} Et|(t|)*2tL: 1 micro batch per data-parallel process and step cannot pass 2",
        ),
        (f"{PP} 2 {LAYOUT} Ett|ttL --mtp_num_layers 1", 2, "(m), and --mtp_num_layers is 1. Set m right"),
        (f"{PP} 2 {LAYOUT} Ett|ttmL", 2, "(m), and --mtp_num_layers is 0. Set --mtp_num_layers 1, or"),
        (f"{PP} 2 {LAYOUT} Ett|ttm|L --mtp_num_layers 1", 2, f"{LAYOUT} Ett|ttm|L: layers of multi-token prediction"),
    ],
)
def test_divisions_that_are_refused(words: str, world: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        check(write_model(tmp_path / "dense", DENSE), words, world=world)


@pytest.mark.parametrize(
    ("words", "world", "layers"),
    [
        (EMBEDDING, 1, [4]),  # holds of one stage as it is
        (f"{PP} 2 {EMBEDDING} {LOSS}", 2, [2, 2]),
        (f"{PP} 5 {EMBEDDING} --global_batch_size 5", 5, [0, 1, 1, 1, 1]),
        (f"{PP} 2 {VPP} 3 {EMBEDDING} {LOSS}", 2, [0, 1, 1, 1, 1, 0]),
        (f"{PP} 2 {LAYOUT} E|t*3,tL", 2, [0, 4]),
        (f"{PP} 2 {VPP} 2 {LAYOUT} Et|(t|)*2tL", 2, [1, 1, 1, 1]),
        (f"{PP} 2 {VPP} 1 {LAYOUT} Ettt|tL", 2, [3, 1]),
        (f"{PP} 2 {LAYOUT} Ettt|tmL --mtp_num_layers 1", 2, [3, 1]),
        (f"{PP} 2 --mtp_num_layers 1", 2, [2, 2]),
    ],
)
def test_divisions_that_can_run(words: str, world: int, layers: list[int], tmp_path: Path) -> None:
    options, notes = check(write_model(tmp_path / "dense", DENSE), words, world=world)
    assert notes == []
    assert divide_layers(options.build, 4) == layers


def test_published_divisions(tmp_path: Path) -> None:
    """Examples of verl and ROLL for Qwen3-235B-A22B (94 layers), of ROLL for Qwen3-30B-A3B (48)."""
    deep = write_model(tmp_path / "deep", MIXTURE | {"num_hidden_layers": 94})
    for words in (f"{EMBEDDING} {LOSS}", f"{FIRST} 11 {LAST} 11"):
        options, _ = check(deep, f"{PP} 8 {words} --global_batch_size 8", world=8)
        assert divide_layers(options.build, 94) == [11, 12, 12, 12, 12, 12, 12, 11]
    options, _ = check(deep, f"{PP} 8 {VPP} 6 {EMBEDDING} {LOSS} --global_batch_size 8", world=8)
    assert divide_layers(options.build, 94) == [1, *[2] * 46, 1]
    with pytest.raises(UsageError, match="94 of the model's 94 layers cannot be split evenly over 8 stages"):
        check(deep, f"{PP} 8 --global_batch_size 8", world=8)
    shallow = write_model(tmp_path / "shallow", MIXTURE)
    options, _ = check(shallow, f"{PP} 2 {VPP} 8 --global_batch_size 8", world=2)
    assert divide_layers(options.build, 48) == [3] * 16


@pytest.mark.parametrize(
    ("policy", "reference", "layers"),
    [
        (f"{PP} 2 {FIRST} 3", f"{REF_TP} 2", [3, 1]),
        (f"{PP} 2 {VPP} 3 {EMBEDDING} {LOSS}", f"{REF_TP} 2", [2, 2]),
        (f"{PP} 2 {LAYOUT} E|tt|t|tL", f"{REF_TP} 2", [1, 3]),
        (f"{PP} 2 {LAYOUT} E|tt|t|tL", f"{REF_PP} 4", [1, 1, 1, 1]),
        (f"{PP} 2 {FIRST} 3", f"{REF_PP} 4", [1, 1, 1, 1]),
        (f"{PP} 2 {VPP} 3 {EMBEDDING} {LOSS}", f"{REF_PP} 1", [4]),
    ],
)
def test_a_reference_in_its_own_layout(policy: str, reference: str, layers: list[int], tmp_path: Path) -> None:
    words = f"--reward_funcs accuracy --beta 0.1 {policy} {reference} --num_generations 4 --global_batch_size 8"
    options, _ = checking.check(write_model(tmp_path / "dense", DENSE), words, world=4)
    parallel = role_layout(options, "ref")
    assert parallel is not None
    assert virtual_pipeline_size(parallel.build) is None
    assert divide_layers(parallel.build, 4) == layers


def test_a_reference_that_cannot_be_divided(tmp_path: Path) -> None:
    words = f"--beta 0.1 {PP} 2 {EMBEDDING} {LOSS} {REF_PP} 4 --num_generations 4 --global_batch_size 8"
    said = checking.refusal(write_model(tmp_path / "dense", DENSE), words, world=4)
    assert f"{REF_PP} 4, {EMBEDDING}, {LOSS}: the model's 4 layers, 6 with the" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{LAYOUT} E|tt|t|tL", ""),
        (f"{EMBEDDING} {LOSS}", ""),
        (f"{LAYOUT} E|tt|t|tt", f"{LAYOUT} E|tt|t|tt: has L 0 times."),
        (f"{LAYOUT} E|tt|tL", f"{LAYOUT} E|tt|tL: has 3 stages, not a multiple of {PP} 2."),
        (EMBEDDING, "the model's 4 layers, 5 with the embedding, cannot be split evenly over 2 stages"),
    ],
)
def test_exports(words: str, message: str) -> None:
    options, _, _ = read_options("megatron", ["export", "--model", "m", "--to_mcore", "true", PP, "2", *words.split()])
    sizes = ProcessLayout.of(build_options(options), 2)
    with pytest.raises(UsageError, match=re.escape(message)) if message else nullcontext():
        check_export_layout(options, sizes, DENSE, gpus=0, processes=2)
