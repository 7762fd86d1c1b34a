"""Checks of the loss of lightning indexers."""

from pathlib import Path

import pytest

from tests import tiny
from tests.cli.checks.test_lora import check, refusal
from tests.cli.conftest import write_model


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    config = tiny.config("deepseek_v32").to_dict() | {"architectures": ["DeepseekV32ForCausalLM"]}
    return write_model(tmp_path / "sparse", config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--dsa_indexer_use_sparse_loss true",
            "needs a weight of the loss. Set --dsa_indexer_loss_coeff, as in 0.001.",
        ),
        (
            "--dsa_indexer_loss_coeff 0.1 --tuner_type lora",
            "--dsa_indexer_loss_coeff 0.1 cannot be used with --tuner_type lora in this version: indexers support no",
        ),
    ],
)
def test_what_is_not_computed_is_refused(words: str, message: str, sparse: Path) -> None:
    assert message in refusal(words, sparse)


def test_a_model_needs_an_indexer(sparse: Path, dense: Path) -> None:
    check("--dsa_indexer_loss_coeff 0.1", sparse)
    message = "--dsa_indexer_loss_coeff 0.1: Qwen3ForCausalLM has no lightning indexer. Remove it."
    assert message in refusal("--dsa_indexer_loss_coeff 0.1", dense)
