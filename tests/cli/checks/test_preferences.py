"""Usable and unusable options of `megatron rlhf` with preference pairs and a reference."""

import json
from pathlib import Path

import pytest
from megaswift.tasks.options import KtoOptions

from tests.cli.conftest import DENSE, write_model
from tests.cli.kinds import HEADED, LORA, check, refusal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beta 0", "--beta 0.0: must be above 0."),
        ("--beta -1", "--beta -1.0: must be above 0."),
        ("--rpo_alpha -0.1", "--rpo_alpha -0.1: must be at least 0."),
        (
            "--loss_type sigmoid sft --loss_weights 1",
            "--loss_weights 1.0: 1 weights for the 2 of --loss_type sigmoid sft. Set",
        ),
        (
            "--loss_weights 1 2",
            "--loss_weights 1.0 2.0: 2 weights for the 1 of --loss_type sigmoid. Set one for each.",
        ),
        ("--loss_type sigmoid sigmoid", "--loss_type sigmoid sigmoid: a loss is missing or"),
        ("--loss_type robust --label_smoothing 0.5", "--label_smoothing 0.5: must be at least 0 and below 0.5"),
        ("--label_smoothing -0.1", "--label_smoothing -0.1: must be at least 0 and below 0.5"),
        (
            "--loss_type exo_pair",
            "--loss_type exo_pair needs --label_smoothing above 0. Set it, as in --label_smoothing",
        ),
        (
            "--loss_type hinge --label_smoothing 0.1",
            "--label_smoothing 0.1: only for --loss_type sigmoid, robust, exo_pair, aot, aot_unpaired, not "
            "--loss_type hi",
        ),
        (
            "--loss_type sigmoid bco_pair --f_divergence_type forward_kl",
            "--f_divergence_type forward_kl cannot be used with --loss_type bco_pair",
        ),
        (
            "--f_alpha_divergence_coef 0.7",
            "--f_alpha_divergence_coef 0.7: only for --f_divergence_type alpha_divergence, not reverse_kl. Remove it.",
        ),
        ("--discopop_tau 0.1", "--discopop_tau 0.1: only for --loss_type discopop, not sigmoid. Remove it."),
        ("--loss_type discopop --discopop_tau 0", "--discopop_tau 0.0: must be above 0."),
        (
            "--reference_free true --ref_model r",
            "--ref_model r cannot be used with --reference_free true, which has none.",
        ),
        (
            "--reference_free true --precompute_ref_log_probs true",
            "--precompute_ref_log_probs true cannot be used with --reference_free true",
        ),
        ("--ref_model r --mcore_ref_model s", "--ref_model r cannot be used with --mcore_ref_model s."),
        (
            "--ref_model r --ref_adapters a",
            "--ref_model r cannot be used with --ref_adapters a. Remove one of them.",
        ),
        (
            "--precompute_ref_log_probs true --sync_ref_model true",
            "--sync_ref_model true cannot be used with --precompute_ref_log_probs true, which releases the reference "
            "before",
        ),
        (
            "--reference_free true --sync_ref_model true",
            "--sync_ref_model true cannot be used with --reference_free true, which has none. Remove one of them.",
        ),
        (
            "--precompute_ref_log_probs true --streaming true",
            "--precompute_ref_log_probs true cannot be used with --streaming true: it passes over all data first.",
        ),
        ("--ref_model ./none", "--ref_model ./none: no such model folder. Set a folder, or a hub id as OWNER/NAME."),
        ("--mcore_ref_model /none", "--mcore_ref_model /none: "),
        ("--ref_adapters ./none", "--ref_adapters ./none: no such folder. Set the folder of an"),
        ("--ref_adapters a/b c/d", "--ref_adapters a/b c/d: only one adapter is"),
        (
            "--metric_for_best_model accuracy",
            "--metric_for_best_model accuracy: evaluations have loss, rewards/chosen,",
        ),
    ],
)
def test_what_dpo_cannot_be(words: str, message: str, dense: Path) -> None:
    assert message in refusal("dpo", dense, words)


@pytest.mark.parametrize(
    "words",
    [
        "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0 --label_smoothing 0.1",
        "--loss_type exo_pair --label_smoothing 1e-3 --f_divergence_type js_divergence",
        "--f_divergence_type alpha_divergence --f_alpha_divergence_coef 0.7",
        "--loss_type discopop --discopop_tau 0.1 --rpo_alpha 0",
        "--reference_free true",
        "--ref_model owner/name",
        "--ref_adapters owner/name",
        "--precompute_ref_log_probs true",
        "--offload_ref_model true --streaming true",
        f"{LORA} --ref_model owner/name --offload_ref_model true",
        f"{LORA} --precompute_ref_log_probs true",
        "--val_dataset v --metric_for_best_model eval_rewards/accuracies --cross_entropy_loss_fusion true",
    ],
)
def test_what_dpo_can_be(words: str, dense: Path) -> None:
    assert check("dpo", dense, words)[1] == []


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("orpo", "--ref_model r", "--ref_model: only for --rlhf_type dpo|kto|grpo|ppo, not orpo. Remove it."),
        ("orpo", "--beta -1", "--beta -1.0: must be at least 0."),
        ("simpo", "--beta 0", "--beta 0.0: must be above 0."),
        ("cpo", "--simpo_gamma 0.5", "--simpo_gamma 0.5: only for --loss_type simpo, not sigmoid. Remove it."),
        ("cpo", "--cpo_alpha -1", "--cpo_alpha -1.0: must be at least 0."),
        (
            "cpo",
            "--loss_type hinge --label_smoothing 0.1",
            "--label_smoothing 0.1: only for --loss_type sigmoid or simpo, not hinge. Remove it.",
        ),
    ],
)
def test_what_pairs_without_a_reference_cannot_be(kind: str, words: str, message: str, dense: Path) -> None:
    assert message in refusal(kind, dense, words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("orpo", "--beta 0.2 --loss_scale all"),
        ("simpo", "--simpo_gamma 0.5 --cpo_alpha 0 --label_smoothing 0.1"),
        ("cpo", "--loss_type simpo --simpo_gamma 0.5"),
        ("cpo", f"{LORA} --val_dataset v --metric_for_best_model rewards/accuracies"),
    ],
)
def test_what_pairs_without_a_reference_can_be(kind: str, words: str, dense: Path) -> None:
    assert check(kind, dense, words)[1] == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (LORA, "it is the model without its adapters"),
        ("--precompute_ref_log_probs true", "it is released before training"),
    ],
)
def test_a_reference_that_is_not_there_to_be_offloaded(words: str, why: str, dense: Path) -> None:
    options, notes = check("kto", dense, f"{words} --offload_ref_model true")
    assert isinstance(options, KtoOptions)
    assert options.reference.offload_ref_model is False
    assert notes == [f"--offload_ref_model true is not needed: {why}."]


def test_the_reference_is_a_model_for_the_same_layout(dense: Path, tmp_path: Path) -> None:
    same = write_model(tmp_path / "same", DENSE | {"hidden_size": 128, "vocab_size": 320})  # padded otherwise
    assert check("dpo", dense, f"--ref_model {same}")[1] == []
    unknown = write_model(tmp_path / "unknown", DENSE | {"architectures": ["OtherForCausalLM"]})
    assert f"--ref_model {unknown}: config.json names" in refusal("dpo", dense, f"--ref_model {unknown}")
    heads = write_model(tmp_path / "heads", DENSE | {"num_attention_heads": 6, "num_key_value_heads": 2})
    words = "--tensor_model_parallel_size 4 --ref_model"
    assert f"--ref_model {heads}: --tensor_model_parallel_size 4: does not divide the model's 6 attention" in refusal(
        "dpo", dense, f"{words} {heads}", world=4
    )
    head = write_model(tmp_path / "head", HEADED)
    assert f"--ref_model {head}: has a head of 3 outputs" in refusal("dpo", dense, f"--ref_model {head}")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert f"--ref_model {adapter}: is an adapter. Set it as --ref_adapters." in refusal(
        "dpo", dense, f"--ref_model {adapter}"
    )
    assert f"--mcore_ref_model {dense}: " in refusal("dpo", dense, f"--mcore_ref_model {dense}")


def test_the_reference_s_adapter(dense: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(written | {"base_model_name_or_path": str(dense)}))
    tensors = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight": {} for n in range(4)}
    header = json.dumps(tensors).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert check("dpo", dense, f"--ref_adapters {folder}")[1] == []
    assert check("kto", dense, f"{LORA} --ref_adapters {folder}")[1] == []
    wide = write_model(tmp_path / "wide", DENSE | {"hidden_size": 128})
    assert f"--ref_adapters {folder}: made for another model, {dense}, with hidden_size 64" in refusal(
        "dpo", wide, f"--ref_adapters {folder}"
    )
    other = write_model(tmp_path / "other", DENSE)
    (note,) = check("dpo", other, f"--ref_adapters {folder}")[1]
    assert note == f"--ref_adapters {folder}: made for another model, {dense}. It is applied to --model {other}."
