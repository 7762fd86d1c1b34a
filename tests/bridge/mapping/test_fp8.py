"""FP8: what megatron-core is told, what is refused, and weights held in it. On GPUs: tests/layouts/test_gpu_fp8.py."""

import json

import pytest
import torch
from megaswift.bridge.mapping import fp8
from megaswift.bridge.mapping.local_params import collect_params
from megaswift.bridge.model.kernel_selection import Kernels
from megaswift.bridge.options import BuildOptions
from megatron.core import fp8_utils
from megatron.core.enums import Fp8Recipe
from megatron.core.transformer.transformer_config import TransformerConfig

from tests import tiny
from tests.torchrun import torchrun

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def config(**flags) -> TransformerConfig:
    arguments = fp8.transformer_args(BuildOptions(**flags))
    return TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **arguments)


def test_without_the_flag_nothing_is_in_fp8():
    assert not config().fp8
    assert not config().fp8_param
    assert BuildOptions().fp8_token_multiple == 1
    assert "FP8" not in str(Kernels(True, "transformer_engine"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatron_core_is_told_of_format_and_recipe(recipe):
    told = config(fp8_format="hybrid", fp8_recipe=recipe, fp8_amax_history_len=7, fp8_amax_compute_algo="most_recent")
    assert told.fp8 == "hybrid"
    assert told.fp8_recipe == Fp8Recipe[recipe]
    assert (told.fp8_amax_history_len, told.fp8_amax_compute_algo) == (7, "most_recent")
    assert not told.fp8_param


def test_megatron_core_is_told_of_layers_in_bf16_and_weights_in_fp8():
    told = config(
        fp8_format="e4m3",
        fp8_recipe="tensorwise",
        fp8_param_gather=True,
        first_last_layers_bf16=True,
        num_layers_at_end_in_bf16=2,
    )
    kept = [fp8_utils.is_first_last_bf16_layer(told, layer) for layer in range(4)]
    assert (told.fp8, told.fp8_param, kept) == ("e4m3", True, [True, False, True, True])


@pytest.mark.parametrize(
    ("dtype", "engine", "message"),
    [
        (torch.float32, True, "needs weights in bf16. Set --torch_dtype bfloat16"),
        (torch.float16, True, "needs weights in bf16. Set --torch_dtype bfloat16"),
        (torch.bfloat16, False, "needs a GPU and Transformer Engine's layers. Run pip install"),
    ],
)
def test_what_cannot_compute_in_fp8_says_so(dtype, engine, message):
    fp8.check(BuildOptions(), dtype, transformer_engine=engine)
    with pytest.raises(ValueError, match=f"--fp8_format e4m3: it {message}"):
        fp8.check(BuildOptions(fp8_format="e4m3"), dtype, transformer_engine=engine)


def test_sizes_are_multiples_of_sixteen(monkeypatch):
    monkeypatch.setattr(fp8_utils, "TE_LINEAR_TYPES", (torch.nn.Linear,))
    fits, odd = torch.nn.Linear(48, 32), torch.nn.Linear(48, 40)
    fp8.check_sizes(torch.nn.ModuleList([fits, torch.nn.LayerNorm(9)]))
    with pytest.raises(ValueError, match=r"multiples of 16, and 1 of the model is 40 x 48 on each process"):
        fp8.check_sizes(torch.nn.ModuleList([fits, odd]))


def test_a_weight_in_fp8_is_not_read_or_written_by_itself(monkeypatch):
    class InFp8(torch.nn.Linear):
        pass

    monkeypatch.setattr(fp8_utils, "is_float8tensor", lambda tensor: True)
    with pytest.raises(RuntimeError, match="read or written outside of load_as_bf16"):
        collect_params([InFp8(2, 2)])


def test_weights_in_fp8_are_read_and_written_in_bf16(tmp_path):
    """In two processes that share the masters (ZeRO-1)."""
    tiny.model("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    done = torchrun("tests.bridge.mapping.fp8_worker", tmp_path / "model", tmp_path / "results.json", processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["held"] == 16  # four matrices of four layers
    assert found["filled"], "parameters in FP8 are not what was read"
    assert found["few values"]
    assert found["still"], "a step of rate 0 is saved as it was read, with all digits"
    assert found["again"], "and so it is in megatron-core's format"
    assert found["largest step"] < 1.1, "Adam's first step is its rate at most (and bf16's rounding)"
    assert found["mean step"] > 0.3
