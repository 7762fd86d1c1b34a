"""What is saved is PEFT's: it gives the trained model's log-probabilities; so do merged weights; the base stays."""

import json
import math
import warnings

import pytest
import torch
from megaswift.bridge.checkpoint.adapter_files import adapter_config
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.families import family_of
from megaswift.bridge.lora.adapter_mapping import adapted_modules, plan_adapters
from megaswift.bridge.lora.attach import Lora
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.mapping.param_mapping import expand_mappings
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Gemma3Config

from tests.bridge.families import gemma3_text, qwen2_5_vl_text
from tests.bridge.lora.launched import FAMILIES, KEPT, KEPT_LONG, TRAINED, TRAINED_LONG, pairs
from tests.bridge.lora.reference import ALPHA, CASES, RANK, adapt_by_hand, distance, load_base, log_probs_of

EMBEDDING_OF_BASE = "base_model.model.model.embed_tokens.base_layer.weight"  # which PEFT writes too
BOUND = 1e-4  # of log-probabilities, relative to the largest

pytestmark = pytest.mark.slow

SAVED_IN = ("one process", "TP2 SP EP2", "PP2")
PLACES: list = [(case, layout, "trained") for case, layout in TRAINED if layout in SAVED_IN]
PLACES += [("some projections", "TP2 SP", "trained"), ("qwen3", "TP2 SP", "dropout")]
PLACES += [(case, "one process", "kept") for case in FAMILIES]
STACKED = ("stacked experts and MLPs", "TP2 SP EP2"), ("stacked experts of Granite", "one process")
STACKED += (("stacked experts of Llama 4", "TP2 SP EP2"),)
PLACES += [pytest.param(*place, "kept", marks=pytest.mark.long) for place in STACKED]
PLACES += [
    pytest.param(case, layout, "trained", marks=pytest.mark.long) for case, layout in TRAINED_LONG if layout in SAVED_IN
]


@pytest.mark.parametrize(("case", "layout", "way"), PLACES)
def test_peft_gives_our_log_probabilities(case, layout, way, launched):
    folder = launched.saved(case, layout, way) / "adapter"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern")  # PEFT says so though they are in use
        model = PeftModel.from_pretrained(load_base(launched.base(case)), folder)
    assert distance(log_probs_of(model), launched.result(case, layout, way)["log_probs"]) < BOUND


@pytest.mark.parametrize(("case", "layout", "way"), PLACES)
def test_merged_weights_give_our_log_probabilities(case, layout, way, launched):
    model = load_base(launched.saved(case, layout, way) / "merged")
    assert distance(log_probs_of(model), launched.result(case, layout, way)["log_probs"]) < BOUND


@pytest.mark.parametrize("case", FAMILIES)
def test_every_kind_of_matrix_gives_what_its_adapter_says(case, launched):
    model = load_base(launched.base(case))
    adapt_by_hand(model, load_file(launched.adapter(case) / "adapter_model.safetensors"), ALPHA / RANK)
    assert distance(launched.result(case, "one process", "kept")["log_probs"], log_probs_of(model)) < BOUND


@pytest.mark.parametrize(
    ("case", "layout"), [*pairs(KEPT), *(pytest.param(*case, marks=pytest.mark.long) for case in pairs(KEPT_LONG))]
)
def test_an_adapter_comes_back_as_it_was(case, layout, launched):
    begun = load_file(launched.adapter(case) / "adapter_model.safetensors")
    begun.pop(EMBEDDING_OF_BASE, None)
    saved = launched.tensors(case, layout, "kept")
    assert saved.keys() == begun.keys()
    assert all(torch.equal(tensor, begun[name]) for name, tensor in saved.items())


@pytest.mark.parametrize("case", [case for case, layouts in KEPT.items() if len(layouts) > 1])
def test_a_new_adapter_is_the_same_in_every_layout(case, launched):
    assert_new_adapters_are_the_same(launched, case, KEPT[case])


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        ("qwen3", ("one process", "PP2 VPP2")),
        ("experts", ("one process", "TP2 SP ETP2")),
        ("experts and routers", ("one process", "TP2 SP EP2")),
    ],
)
def test_a_new_adapter_is_the_same_in_other_layouts(case, layouts, launched):
    assert_new_adapters_are_the_same(launched, case, layouts)


def assert_new_adapters_are_the_same(launched, case, layouts):
    first, *others = (launched.saved(case, layout, "new") / "adapter" for layout in layouts)
    tensors = load_file(first / "adapter_model.safetensors")
    settings = json.loads((first / "adapter_config.json").read_text())
    for other in others:
        assert json.loads((other / "adapter_config.json").read_text()) == settings
        found = load_file(other / "adapter_model.safetensors")
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            if name.endswith("lora_magnitude_vector"):  # a sum over the ranks
                torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0)
            else:
                assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", ["qwen3", "embedding", "DoRA", "experts"])
def test_a_new_adapter_begins_as_pefts(case, launched):
    """A uniform to the root of 1 / inputs, B 0; an embedding's A 0, B normal; DoRA's magnitude the lengths of rows."""
    tensors, weights = (
        launched.tensors(case, "one process", "new"),
        load_file(launched.base(case) / "model.safetensors"),
    )
    spreads = []
    for name, tensor in tensors.items():
        module, _, leaf = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if leaf in ("lora_B", "lora_embedding_A"):
            assert not tensor.any(), name
        elif leaf == "lora_embedding_B":
            assert tensor.std().item() == pytest.approx(1, abs=0.2)
        elif leaf == "lora_magnitude_vector":
            torch.testing.assert_close(tensor, weights[f"{module}.weight"].norm(dim=1))
        elif leaf == "lora_A":
            spread = tensor * math.sqrt(tensor.shape[1])
            assert tensor.shape[0] == RANK
            assert spread.abs().max() <= 1
            spreads.append(spread.flatten())
    assert len({tuple(spread.tolist()) for spread in spreads}) == len(spreads)  # no two are alike
    together = torch.cat(spreads)
    assert together.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.03)
    found, base = launched.result(case, "one process", "new")["log_probs"], load_base(launched.base(case))
    assert distance(found, log_probs_of(base)) < 1e-5


def test_stacked_experts_begin_with_different_adapters(launched):
    for name, tensor in launched.tensors("stacked experts", "one process", "new").items():
        if ".experts." in name and name.endswith("lora_A.weight"):
            assert len({tuple(each.flatten().tolist()) for each in tensor.split(RANK)}) == len(tensor) // RANK


def test_a_hundred_merges_leave_the_base(launched):
    """All layouts of test_training.py look whether one does."""
    case, layout = "some projections", "TP2"
    way = "merged a hundred times"
    assert launched.result(case, layout, way)["base"]
    merged = {}
    for once in ("kept", way):
        files = (launched.saved(case, layout, once) / "merged").glob("*.safetensors")
        merged[once] = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert merged["kept"].keys() == merged[way].keys()
    assert all(torch.equal(tensor, merged["kept"][name]) for name, tensor in merged[way].items())


@pytest.mark.parametrize("case", CASES)
def test_settings_are_read_from_an_adapter(case, launched):
    """Whoever goes on from an adapter need not say what it is like."""
    _check_settings(case, launched.base(case), launched.adapter(case))


@pytest.mark.parametrize(("case", "layout", "way"), PLACES)
def test_settings_are_read_from_what_is_saved(case, layout, way, launched):
    _check_settings(case, launched.base(case), launched.saved(case, layout, way) / "adapter")


def _check_settings(case, base, folder):
    tensors = load_file(folder / "adapter_model.safetensors").keys() - {EMBEDDING_OF_BASE}
    config = json.loads((folder / "adapter_config.json").read_text())
    settings = LoraSettings.from_adapter_config(config, adapted_modules(folder, tensors))
    family = family_of(raw := read_config(base))
    architecture = family.describe(raw)
    plan = plan_adapters(expand_mappings(family, raw, architecture), settings, architecture)
    wanted = {name for entry in (plan.all_entries).values() for name in entry.hf} | plan.copies.keys()
    assert wanted == tensors
    assert settings.scaling == pytest.approx(ALPHA / (math.sqrt(RANK) if "use_rslora" in CASES[case].peft else RANK))


def test_what_sees_has_no_adapters():
    """Within a vision-language model the vision tower has a q_proj, k_proj and v_proj, too."""
    text = gemma3_text.config()
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text.to_dict(), vision_config=sizes)
    check_language_model(gemma3_text.nested(text.to_dict()), config, "language_model.model.")


def test_adapters_have_the_names_of_modules():
    """Qwen2.5-VL's files name the text model as Qwen2.5 does, and transformers' modules are elsewhere."""
    config = qwen2_5_vl_text.config()
    check_language_model(config.to_dict() | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, config, "model.")


def check_language_model(raw, config, prefix):
    """Compare what is saved with the modules in which PEFT puts adapters by the saved adapter_config.json."""
    family = family_of(raw)
    architecture = family.describe(raw)
    settings = LoraSettings.from_adapter_config(
        {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    )
    names = {f"{prefix}layers.{layer}.self_attn.q_proj.weight" for layer in range(4)}
    plan = plan_adapters(expand_mappings(family, raw, architecture, names), settings, architecture)
    written = adapter_config(Lora(settings, plan), architecture, "base")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
        adapted = get_peft_model(model, LoraConfig(**written))
    modules = {name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert modules == {"base_model.model." + name for name in plan.modules}
    assert all(".language_model." in name for name in modules)
