"""Hunyuan, and families of one or two models each."""

from tests.bridge.families.published.model import Published


def _hunyuan(alpha, **changes):
    return {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.1,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "model_type": "hunyuan_v1_dense",
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "alpha": alpha,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cla": False,
        "use_qk_norm": True,
        **changes,
    }


HUNYUAN_A13B = _hunyuan(
    1000.0,
    architectures=["HunYuanMoEV1ForCausalLM"],
    hidden_size=4096,
    intermediate_size=3072,
    model_type="hunyuan_v1_moe",
    moe_intermediate_size=[3072] * 32,
    moe_topk=[8] * 32,
    num_attention_heads=32,
    num_experts=64,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_shared_expert=[1] * 32,
    vocab_size=128167,
)

MODELS = {
    "Hunyuan-1.8B-Instruct": Published(
        "hunyuan_v1_dense",
        "1.79",
        _hunyuan(
            1000.0,
            hidden_size=2048,
            intermediate_size=6144,
            num_attention_heads=16,
            num_hidden_layers=32,
            num_key_value_heads=4,
            vocab_size=120818,
        ),
    ),
    "Hunyuan-7B-Instruct": Published(
        "hunyuan_v1_dense",
        "7.50",
        _hunyuan(
            1000.0,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            vocab_size=128167,
        ),
    ),
    "Hunyuan-A13B-Instruct": Published("hunyuan_v1_moe", "80.4", HUNYUAN_A13B),
}
