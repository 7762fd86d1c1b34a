"""Frozen weights: what is left trains as in transformers with the same parameters frozen, in every layout."""

import re

import pytest
import torch
from megaswift.bridge.lora.attach import attach_adapters
from megaswift.bridge.lora.settings import LoraSettings
from megaswift.bridge.model.build import build_model
from megaswift.bridge.model.model import ModelInputs
from megaswift.bridge.model.outputs import LogProbs
from megaswift.bridge.model.trainable import count_parameters, freeze
from megaswift.bridge.options import BuildOptions, LoraOptions, TrainableOptions
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from tests import tiny
from tests.layouts import reference
from tests.layouts.launch import launch
from tests.selection import selected_params

BOUND = 1e-5  # relative to the largest value
LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
TP, SP, PP, VPP, EP, ETP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
ZERO = {"use_distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


# What is frozen: family, options, whether transformers' parameter of a name is trained, and layouts by world size.
BOTTOM = ["model.embed_tokens", "decoder.layers.0.", "decoder.layers.1."]
FROZEN = {
    "the bottom": (
        "qwen3",
        {"freeze_parameters": BOTTOM},
        lambda name: not name.startswith(("model.embed", "model.layers.0.", "model.layers.1.")),
        {
            1: {"one process": {}, "recomputed": RECOMPUTE},
            2: {
                "TP2 SP": {TP: 2, SP: True},
                "a stage": {PP: 2},
                "a stage ZeRO-1 overlapped": OVERLAP | {PP: 2},
                "chunks": ZERO | {PP: 2, VPP: 2},
                "DP2 ZeRO-1 overlapped": OVERLAP,
            },
            4: {"chunks ZeRO-1 overlapped": OVERLAP | {PP: 2, VPP: 2}},
        },
    ),
    "the top": (  # tied: both ends are one
        "llama",
        {"freeze_parameters_regex": r"embed_tokens|layers\.[23]\.|final_layernorm"},
        lambda name: name.startswith(("model.layers.0.", "model.layers.1.")),
        {
            1: {"recomputed": RECOMPUTE, "modules": {"recompute_modules": ["core_attn", "mlp", "layernorm"]}},
            2: {"a stage": {PP: 2}, "chunks ZeRO-1": ZERO | {PP: 2, VPP: 2}, "TP2": {TP: 2, SP: False}},
        },
    ),
    "all but the embedding": (
        "llama",
        {"freeze_parameters_ratio": 1.0, "trainable_parameters": ["model.embed_tokens"]},
        lambda name: name.startswith("model.embed"),
        {2: {"both ends": {PP: 2}, "TP2 SP": {TP: 2, SP: True}}},
    ),
    "all but biases": (
        "qwen2",
        {"freeze_parameters_ratio": 1.0, "trainable_parameters_regex": r"\.bias$"},
        lambda name: name.endswith(".bias"),
        {1: {"one process": {}, "recomputed": RECOMPUTE}, 2: {"TP2 SP": {TP: 2, SP: True}, "DP2 ZeRO-1": OVERLAP}},
    ),
    "all but experts": (
        "qwen3_moe",
        {"freeze_parameters": ["model", "lm_head"], "trainable_parameters": ["model.layers.2.mlp.experts."]},
        lambda name: name.startswith("model.layers.2.mlp.experts."),
        {
            1: {"one process": {}, "recomputed": {"recompute_modules": ["moe", "moe_act"]}},
            2: {"EP2": {EP: 2}, "EP2 ZeRO-1": OVERLAP | {EP: 2}, "PP2": {PP: 2}, "ETP2": {TP: 2, SP: True, ETP: 2}},
            4: {"EP2 PP2 ZeRO-1": ZERO | {EP: 2, PP: 2}},
        },
    ),
    "experts and routers": (
        "qwen3_moe",
        {"freeze_parameters_regex": r"mlp\.experts|mlp\.router"},
        lambda name: "mlp.experts" not in name and "mlp.gate." not in name,
        {1: {"one process": {}}, 2: {"EP2": ZERO | {EP: 2}, "PP2 VPP2": {PP: 2, VPP: 2}}},
    ),
}  # fmt: skip
CASES = [(what, world, name) for what, (*_, worlds) in FROZEN.items() for world in worlds for name in worlds[world]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def references(folder):
    """What is frozen -> what transformers' model gave, and how many parameters it trains and has."""
    found = {}
    torch.set_num_threads(1)
    for what, (family, _, trained, _) in FROZEN.items():
        model = tiny.model(family)
        if not (folder / family).exists():
            model.save_pretrained(folder / family)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained(name))
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        counts = [sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)]
        assert 0 < counts[0] < counts[1]
        found[what] = (reference.train(model), counts)
    return found


# Every kind of layout once, and every choice of what is frozen; the other pairs are long.
DEFAULT = {
    ("the bottom", 1, "recomputed"), ("the bottom", 2, "TP2 SP"), ("the bottom", 2, "a stage ZeRO-1 overlapped"),
    ("the top", 2, "chunks ZeRO-1"), ("all but the embedding", 2, "both ends"), ("all but biases", 1, "one process"),
    ("all but experts", 1, "recomputed"), ("all but experts", 2, "EP2"), ("experts and routers", 2, "PP2 VPP2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def launched(request, folder, references):
    """Results by world size; one launch each, of the cases that this session has selected."""
    done = {}
    selected = {tuple(params.get(name) for name in ("what", "world", "name")) for params in selected_params(request)}

    def results(world: int) -> dict[str, dict]:
        if world not in done:
            jobs = [
                {
                    "name": f"{what}: {name}",
                    "model": str(folder / family),
                    "options": {"packing": True} | frozen | flags,
                    "counts": True,
                    "save": str(folder / f"{world}-{what}-{name}"),
                }
                for what, (family, frozen, _, worlds) in FROZEN.items()
                for name, flags in worlds.get(world, {}).items()
                if (what, world, name) in selected
            ]
            done[world] = launch(world, jobs, folder / f"world-{world}")
        return done[world]

    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "world", "name"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.long, id="{1} {0}: {2}".format(*case))
        for case in CASES
    ],
)
def test_trains_as_transformers_does(what, world, name, launched, references, folder):
    result, (expected, counts) = launched(world).get(f"{what}: {name}"), references[what]
    assert result is not None, "the launch stopped before this layout"
    assert "error" not in result, result.get("error")
    assert result["counts"] == counts
    assert result["losses"] == pytest.approx(expected.losses, rel=BOUND)
    assert result["grad_norms"] == pytest.approx(expected.grad_norms, rel=BOUND)
    saved = {}
    for file in (folder / f"{world}-{what}-{name}").glob("*.safetensors"):
        saved |= load_file(file)
    for key, tensor in saved.items():
        wanted = expected.parameters[key]
        difference = (tensor - wanted).abs().max() / wanted.abs().max()
        assert difference < BOUND, f"{key}: {difference:.1e}"


def built(family: str, **changes):
    """A family's tiny model in one process, with random weights, and its config.json."""
    config = tiny.config(family, **changes).to_dict()
    model = build_model(config, BuildOptions(), torch.float32)
    for parameter in model.chunks[0].parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model, config


def left(model, config, **options) -> set[str]:
    """megatron-core's names of what is trained with these options."""
    freeze(model, config, TrainableOptions(**options))
    return {name for name, parameter in model.chunks[0].named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("prefixes", "regex", "frozen"),
    [
        (["model.layers.3.self_attn"], None, r"layers\.3\.self_attention\.(linear|q_layernorm|k_layernorm)"),
        (["model.layers.2.mlp.experts"], None, r"layers\.2\.mlp\.experts"),
        (["decoder.layers.2.mlp.experts.linear_fc1"], None, r"layers\.2\.mlp\.experts\.linear_fc1"),
        ([f"model.layers.0.self_attn.{part}_proj" for part in "qkv"], None, r"layers\.0\.self_attention\.linear_qkv"),
        ([], r"mlp\.gate\.|^output_layer", r"router|output_layer"),
        (["lm_head"], r"\.(q|k|v)_proj", r"output_layer|linear_qkv"),
    ],
)
def test_names_in_both_spellings(prefixes, regex, frozen, alone):
    model, config = built("qwen3_moe")
    every = {name for name, _ in model.chunks[0].named_parameters()}
    found = left(model, config, freeze_parameters=prefixes, freeze_parameters_regex=regex)
    assert found == {name for name in every if not re.search(frozen, name)} != every


def test_a_share_is_counted_from_the_embedding(alone):
    model, config = built("qwen3_moe")
    sizes = {name: parameter.numel() for name, parameter in model.chunks[0].named_parameters()}
    total = sum(sizes.values())
    below = sum(size for name, size in sizes.items() if re.match(r"embedding|decoder\.layers\.[01]\.", name))
    found = left(model, config, freeze_parameters_ratio=below / total)
    assert found == {name for name in sizes if not re.match(r"embedding|decoder\.layers\.[01]\.", name)}
    for share in (0.1, 0.37, 0.9):
        model, config = built("qwen3_moe")
        found = left(model, config, freeze_parameters_ratio=share)
        frozen = total - sum(sizes[name] for name in found)
        assert share * total - max(sizes.values()) < frozen <= share * total
        assert count_parameters(model, config) == (total - frozen, total)


def test_what_is_trained_all_the_same(alone):
    found = left(
        *built("qwen3_moe"),
        freeze_parameters_ratio=1.0,
        trainable_parameters=["lm_head"],
        trainable_parameters_regex="q_norm",
    )
    assert found == {"output_layer.weight"} | {
        f"decoder.layers.{n}.self_attention.q_layernorm.weight" for n in range(4)
    }


def test_no_option_leaves_all_trained(alone):
    model, config = built("qwen3_moe")
    assert left(model, config) == {name for name, _ in model.chunks[0].named_parameters()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_parameters": ["model.", "layers.0"]}, "--freeze_parameters layers.0 is in no parameter's name"),
        ({"freeze_parameters_regex": "decoder/"}, "--freeze_parameters_regex decoder/ is in no parameter's name"),
        (
            {"freeze_parameters_ratio": 1.0, "trainable_parameters": ["model.layers.4."]},
            "--trainable_parameters model.layers.4. is in no parameter's name",
        ),
        (
            {"freeze_parameters_regex": r"layers\.1\..*q_proj"},
            "means model.layers.1.self_attn.q_proj.weight and not model.layers.1.self_attn.k_proj.weight, and both are "
            "in decoder.layers.1.self_attention.linear_qkv.weight",
        ),
        (
            {"freeze_parameters": ["model.layers.0.mlp.experts.3."]},
            "means model.layers.0.mlp.experts.3.gate_proj.weight and not model.layers.0.mlp.experts.0.gate_proj.weight",
        ),
        ({"freeze_parameters_regex": "weight"}, "leaves nothing to train"),
    ],
)
def test_names_that_mean_nothing_or_a_part(options, message, alone):
    model, config = built("qwen3_moe")
    with pytest.raises(ValueError, match=re.escape(message)):
        freeze(model, config, TrainableOptions(**options))


def test_weights_held_in_fp8_are_not_frozen(alone):
    model, config = built("qwen3")
    model.config.fp8_param = True
    with pytest.raises(ValueError, match="--fp8_param_gather true cannot be used with frozen weights"):
        freeze(model, config, TrainableOptions(freeze_parameters_ratio=0.5))


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": 4},
        {"lora_rank": 3, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True},
        {"lora_rank": 4, "target_modules": ["all-linear", "all-embedding"], "lora_bias": "all"},
    ],
)
def test_adapters_count_as_in_peft(options, alone):
    from peft import LoraConfig, get_peft_model

    model, config = built("qwen2", tie_word_embeddings=False)
    settings = LoraSettings.from_options(LoraOptions(**options))
    attach_adapters(model, config, settings, seed=0)
    every = [name for name in settings.targets if not name.startswith("all")]
    every += LINEAR if "all-linear" in settings.targets else []
    every += ["embed_tokens"] if "all-embedding" in settings.targets else []
    peft = LoraConfig(r=settings.rank, target_modules=every, use_dora=settings.dora, bias=settings.bias)  # type: ignore[arg-type]
    expected = get_peft_model(tiny.model("qwen2", tie_word_embeddings=False), peft).get_nb_trainable_parameters()
    assert count_parameters(model, config) == expected


def test_an_indexer_is_never_trained(alone):
    """No loss reaches it, so that weight decay alone would change it."""
    fresh, config = built("deepseek_v32")
    settings = LoraSettings.from_options(LoraOptions(lora_rank=2, target_modules=["q_b_proj"], lora_bias="all"))
    by_name = TrainableOptions(freeze_parameters=["model.embed_tokens"], trainable_parameters_regex="self_attn")
    lora, frozen = built("deepseek_v32")[0], built("deepseek_v32")[0]
    attach_adapters(lora, config, settings, seed=0)
    freeze(frozen, config, by_name)
    for model in (fresh, lora, frozen):
        names = {name for name, parameter in model.chunks[0].named_parameters() if parameter.requires_grad}
        assert names
        assert not [name for name in names if "indexer" in name]
    named = TrainableOptions(freeze_parameters_ratio=1.0, trainable_parameters_regex=r"indexer\.wk")
    with pytest.raises(ValueError, match=r"no loss reaches decoder.layers.0.self_attention.indexer.wk.weight, which"):
        freeze(built("deepseek_v32")[0], config, named)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_a_frozen_matrix_has_no_product_for_its_gradient(family, alone):
    """Backward, each matrix has one product as forward: for the gradient of what went in."""
    model, config = built(family)
    ids, places = torch.arange(48).view(2, 24) % 7, torch.arange(24).expand(2, -1)
    products = (torch.ops.aten.mm, torch.ops.aten.addmm)

    def count(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return sum(counter.get_flop_counts()["Global"].get(product, 0) for product in products)

    def forward():
        return model.forward(model.chunks[0], ModelInputs(ids, places, None, 24, labels=ids), LogProbs()).sum()

    def backward() -> int:
        loss = forward()
        return count(loss.backward)

    head = 2 * 48 * config["hidden_size"] * config["vocab_size"]  # its logits are computed again
    once = count(forward)
    assert backward() == 2 * once + head
    freeze(model, config, TrainableOptions(freeze_parameters_ratio=1.0, trainable_parameters=["model.embed_tokens"]))
    assert backward() == once + head


def test_an_indexer_with_a_loss_is_trained(alone):
    options = BuildOptions(dsa_indexer_loss_coeff=0.1)
    config = tiny.config("deepseek_v32").to_dict() | {"architectures": ["DeepseekV32ForCausalLM"]}
    model = build_model(config, options, torch.float32)
    freeze(model, config, TrainableOptions(freeze_parameters_ratio=1.0, trainable_parameters_regex=r"indexer\.wk"))
    names = {name for name, parameter in model.chunks[0].named_parameters() if parameter.requires_grad}
    assert names == {f"decoder.layers.{layer}.self_attention.indexer.wk.weight" for layer in range(4)}
    every = TrainableOptions(freeze_parameters_regex="indexer")
    with pytest.raises(ValueError, match=r"--dsa_indexer_loss_coeff 0.1: --freeze_parameters .* freezes all indexers"):
        freeze(build_model(config, options, torch.float32), config, every)
