"""FLOP counts against PyTorch's own counter on transformers' models, and against the arithmetic by hand."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from megaswift.bridge.mapping.architecture import Architecture, Layer
from megaswift.tasks.observability.flops import Flops, peak_flops

ARCHITECTURE = Architecture(
    transformer={}, vocab_size=53, tied=False, max_positions=64, ropes=(), layers=(Layer(),) * 3
)
SIZES = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 10,
    "gated_linear_unit": True,
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "attention_output_gate": False,
    "multi_latent_attention": False,
    "architecture": ARCHITECTURE,
}
MOE = SIZES | {"num_moe_experts": 5, "moe_ffn_hidden_size": 14, "moe_layer_freq": [0, 1, 1]}


def counted(model, length):
    """FLOPs of transformers' forward and backward pass, each linear layer and attention by eager matrix products."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.arange(length)[None] % model.config.vocab_size
    with FlopCounterMode(display=False) as counter:
        # The first layer's input needs a gradient too, as our count of two products a backward pass has it.
        embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
        model(inputs_embeds=embeddings, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def rotary(model, length):
    """FLOPs that the counter has for the rotary embedding's frequencies: a matrix product before transformers 5.20."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model.model.rotary_emb(torch.zeros(1, length, 1), torch.arange(length)[None])
    return counter.get_total_flops()


def hugging_face(sizes, vocab):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": vocab,
        "num_hidden_layers": sizes["num_layers"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["ffn_hidden_size"],
        "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_query_groups"],
        "head_dim": sizes["kv_channels"],
        "attn_implementation": "eager",
    }
    if not sizes["num_moe_experts"]:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    moe = {
        "num_experts": sizes["num_moe_experts"],
        "num_experts_per_tok": sizes["moe_router_topk"],
        "moe_intermediate_size": sizes["moe_ffn_hidden_size"],
        "mlp_only_layers": [0],
        "experts_implementation": "eager",
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **moe))


@pytest.mark.parametrize("sizes", [SIZES, MOE], ids=["dense", "moe"])
def test_agrees_with_pytorchs_counter(sizes):
    length, vocab = 17, 53
    flops = Flops.of(SimpleNamespace(**sizes), vocab)
    full_attention = 3 * flops.pair * length**2  # eager attention computes the pairs above the diagonal too
    causal_attention = 3 * flops.pair * length * (length + 1) // 2
    model = hugging_face(sizes, vocab)
    expected = counted(model, length) - rotary(model, length)
    assert flops.training([length]) - causal_attention + full_attention == expected


def test_frozen_weights_have_no_gradients_to_count():
    length, vocab = 17, 53
    model = hugging_face(SIZES, vocab).requires_grad_(False)
    flops = Flops.of(SimpleNamespace(**SIZES), vocab, trained=0.0)
    full_attention = 3 * flops.pair * length**2
    causal_attention = 3 * flops.pair * length * (length + 1) // 2
    expected = counted(model, length) - rotary(model, length)
    assert flops.training([length]) - causal_attention + full_attention == expected


@pytest.mark.parametrize("rank", [None, 7])
def test_multi_latent_attention_agrees_with_pytorchs_counter(rank):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {"q_lora_rank": rank, "kv_lora_rank": 9, "v_head_dim": 5}
    sizes = SIZES | latent | {"multi_latent_attention": True, "qk_head_dim": 11, "qk_pos_emb_head_dim": 4}
    config = DeepseekV3Config(
        **latent,
        vocab_size=31,
        num_hidden_layers=3,
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=6,
        num_key_value_heads=6,
        qk_nope_head_dim=11,
        qk_rope_head_dim=4,
        first_k_dense_replace=3,
        attn_implementation="eager",
    )
    flops = Flops.of(SimpleNamespace(**sizes), 31)  # type: ignore[arg-type]
    model = DeepseekV3ForCausalLM(config)
    ours = 3 * (2 * flops.matrix_parameters * 13 + flops.pair * 13 * 13)  # with the pairs above the diagonal
    assert ours == counted(model, 13) - rotary(model, 13)


def test_the_output_layer_is_for_what_is_trained_on():
    flops = Flops.of(SimpleNamespace(**SIZES), 53)
    assert flops.training([8]) - flops.training([8], scored=5) == 6 * 53 * SIZES["hidden_size"] * 3


def test_documents_attend_only_to_themselves():
    flops = Flops.of(SimpleNamespace(**SIZES), 53)
    one, two = flops.training([8]), flops.training([4, 4])
    assert one - two == 3 * flops.pair * (8 * 9 // 2 - 2 * (4 * 5 // 2))


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 5), (30, 30)])
def test_windows_and_chunks(window, chunk):
    layers = (Layer(), Layer(window=window, chunk=chunk), Layer(window=window, chunk=chunk))
    sizes = SIZES | {"architecture": replace(ARCHITECTURE, layers=layers)}
    full, near = Flops.of(SimpleNamespace(**SIZES), 53), Flops.of(SimpleNamespace(**sizes), 53)
    lengths = [17, 4, 12]
    unseen = sum(
        (window is not None and query - key >= window) or (chunk is not None and query // chunk != key // chunk)
        for length in lengths
        for query in range(length)
        for key in range(query + 1)
    )
    assert full.training(lengths) - near.training(lengths) == 3 * unseen * full.pair * 2 // 3


def test_queries_with_selected_keys_see_as_many_as_in_a_window():
    selected, windowed = (
        SIZES | {"architecture": replace(ARCHITECTURE, **changes)}
        for changes in ({"sparse": SimpleNamespace(topk=5)}, {"layers": (Layer(window=5),) * 3})
    )
    lengths = [17, 4, 12]
    expected = Flops.of(SimpleNamespace(**windowed), 53).training(lengths)
    assert Flops.of(SimpleNamespace(**selected), 53).training(lengths) == expected
    assert expected < Flops.of(SimpleNamespace(**SIZES), 53).training(lengths)


def test_layer_patterns_and_shared_experts():
    plain = Flops.of(SimpleNamespace(**MOE), 53).matrix_parameters
    every_other = Flops.of(SimpleNamespace(**MOE | {"moe_layer_freq": 2}), 53).matrix_parameters  # layers 0 and 2
    assert every_other == plain
    shared = Flops.of(SimpleNamespace(**MOE | {"moe_shared_expert_intermediate_size": 7}), 53).matrix_parameters
    assert shared - plain == 2 * 3 * 24 * 7
    architecture = replace(ARCHITECTURE, expert_latent=10)
    latent = Flops.of(SimpleNamespace(**MOE | {"architecture": architecture}), 53).matrix_parameters
    # Two experts of a token have inputs and outputs of 10, between two projections.
    assert latent - plain == 2 * (3 * (10 - 24) * MOE["moe_router_topk"] * 14 + 2 * 24 * 10)


def test_six_n_d_counts_the_parameters_of_matrix_products():
    """N is the model's parameters but for embedding and norms."""
    model = hugging_face(SIZES, 53)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert Flops.of(SimpleNamespace(**SIZES), 53).six_n_d(10) == 6 * matrices * 10


def test_gated_delta_nets_have_states_and_no_pairs():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    layers = tuple(Layer("gated_delta_net" if kind == "linear_attention" else "attention") for kind in kinds)
    mixed = {
        "attention_output_gate": True,
        "architecture": replace(ARCHITECTURE, layers=layers),
    }
    found = Flops.of(SimpleNamespace(**SIZES | delta | mixed), 53)
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=53,
            num_hidden_layers=3,
            hidden_size=24,
            intermediate_size=40,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=10,
            layer_types=kinds,
            **delta,
        )
    )
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert found.matrix_parameters == matrices + 2 * 6 * 3 * 8 * 12
    assert found.pair == Flops.of(SimpleNamespace(**SIZES), 53).pair // 3


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("Tesla T4", None),
    ],
)
def test_peaks(name, peak):
    assert peak_flops(name) == peak


def test_layers_of_one_part():
    """Mamba-2 layers, attention and MLPs of their own: N is what transformers multiplies by, and the states."""
    import torch
    from megaswift.bridge.families import family_of
    from transformers import AutoModelForCausalLM

    from tests.bridge.families.nemotron_h import DENSE, config

    settings = config(**DENSE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    about = family_of(settings.to_dict()).describe(settings.to_dict() | {"time_step_limit": [0.0, 1.0]})
    sizes = SIZES | about.transformer | {"architecture": about, "num_moe_experts": None}
    states = 2 * settings.mamba_num_heads * settings.mamba_head_dim * settings.ssm_state_size
    flops = Flops.of(SimpleNamespace(**sizes), settings.vocab_size)
    assert flops.matrix_parameters == matrices + states
    assert flops.pair == 4 * settings.num_attention_heads * settings.head_dim


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("minimax", 3 * 2 * 4 * 16**2),
        ("granitemoehybrid", 3 * 2 * 96 * 20),
        ("falcon_h1", 4 * 2 * 96 * 20),
        ("lfm2", 0),
        ("kimi_linear", 3 * 3 * 4 * 10**2),
    ],
)
def test_layers_with_a_state(name, state):
    """N is what transformers multiplies by, of the experts those of a token, and the states."""
    import torch
    from megaswift.bridge.families import family_of
    from transformers import AutoModelForCausalLM

    settings = importlib.import_module(f"tests.bridge.families.{name}").config(tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    experts = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 3 and "experts" in name)
    chosen = settings.num_experts_per_tok / settings.num_local_experts if experts else 0
    raw = settings.to_dict() | {"time_step_limit": [0.0, 1.0]}
    about = family_of(raw).describe(raw)
    sizes = SIZES | {"num_moe_experts": None} | about.transformer | {"architecture": about}
    flops = Flops.of(SimpleNamespace(**sizes), settings.vocab_size)
    assert flops.matrix_parameters == matrices + experts * chosen + state
    layers = sum(layer.has_attention for layer in about.layers)
    key = about.transformer["kv_channels"]
    assert flops.pair == layers * 2 * settings.num_attention_heads * (key + about.transformer.get("v_head_dim", key))
