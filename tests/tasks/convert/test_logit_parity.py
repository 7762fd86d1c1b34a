"""`--test_convert_precision`: that equal models pass in every layout, and that one wrong tensor does not."""

import json

import pytest

from tests import tiny
from tests.torchrun import torchrun


@pytest.mark.slow
def test_equal_models_pass_and_a_wrong_tensor_fails(tmp_path):
    for name in ("qwen3", "qwen3_moe"):
        tiny.save_tokenizer(tiny.save(tmp_path / name, name))
    run = torchrun("tests.tasks.convert.logit_parity_worker", tmp_path, processes=2)
    assert run.returncode == 0, run.stderr[-5000:]
    results = json.loads((tmp_path / "precision.json").read_text())
    fault = results.pop("fault")
    assert len(results) == 3
    for case, comparisons in results.items():
        assert [one["dtype"] for one in comparisons] == ["float32", "bfloat16"], case
        assert comparisons[0]["largest"] < 1e-4, case
        assert comparisons[0]["agreement"] == 1.0, case
        assert comparisons[1]["mean"] > 1e-4, case  # it was bf16 indeed
        assert all(one["passed"] for one in comparisons), case
    assert "--test_convert_precision: logits in float32: largest difference" in fault
    assert "FAILED" in fault
    in_fp32 = fault[: fault.index("logits in bfloat16")].splitlines()
    apart = {line.split(":")[0].strip(): float(line.split()[-5]) for line in in_fp32 if "after layer" in line}
    assert apart["after layer 1"] < 1e-4 < 1e-2 < apart["after layer 2"]
