"""Building blocks of the audio towers of families: settings and mappings of Whisper's form."""

from ..mapping.architecture import Architecture, Audio, HfConfig
from ..mapping.param_mapping import AUDIO_TOWER, ParamMapping, ShardingKind, Span
from .decoder import check_supported
from .vision_tower import ACTIVATIONS, TowerTable

EPS = 1e-5  # epsilon of the tower's norms; config.json has none
SUPPORTED = {
    "dropout": (0,),
    "attention_dropout": (0,),
    "activation_dropout": (0,),
    "scale_embedding": (False,),
    "activation_function": ACTIVATIONS,
}
# Of Qwen3-Omni's class, where three convolutions are over time and frequency.
DEFAULTS_2D: HfConfig = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "n_window": 50,
    "output_dim": 3584,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
}
# Of Qwen2.5-Omni's class, where two convolutions are over time.
DEFAULTS_1D: HfConfig = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "n_window": 100,
    "output_dim": 3584,
}


def _separate_heads_together(length: int, ranks: int, architecture: Architecture, parts: int = 3) -> list[Span]:
    """Lay out the query, key and value of each head together, from `parts` tensors."""
    assert architecture.audio is not None
    heads = architecture.audio.num_heads
    size = length // (parts * heads)
    return [Span(part, head * size, (head + 1) * size) for head in range(heads) for part in range(parts)]


def _query_and_value(length: int, ranks: int, architecture: Architecture) -> list[Span]:
    return _separate_heads_together(length, ranks, architecture, parts=2)


REPLICATED_Q_K_V = ShardingKind(None, _separate_heads_together, ("q", "k", "v"))
REPLICATED_Q_V = ShardingKind(None, _query_and_value, ("q", "v"))


def audio_config(config: HfConfig, defaults: HfConfig) -> HfConfig:
    """Return the audio tower's part of a config.json, with defaults for missing and null keys.

    Raises ValueError for unsupported settings.
    """
    audio = config.get("audio_config") or {}
    audio = audio | {key: default for key, default in defaults.items() if audio.get(key) is None}
    check_supported(audio, SUPPORTED)
    return audio


def audio_with_2d_convolutions(config: HfConfig, *, masks: str) -> Audio:
    """Return the tower of Qwen3-ASR's or Qwen3-Omni's audio_config. masks: see `Audio`"""
    chunk = 2 * config["n_window"]
    if config["n_window_infer"] % chunk:
        raise ValueError(
            f"config.json has n_window_infer {config['n_window_infer']}: expected is a multiple of 2 n_window, {chunk}"
        )
    return Audio(
        num_layers=config["encoder_layers"],
        hidden_size=config["d_model"],
        ffn_hidden_size=config["encoder_ffn_dim"],
        num_heads=config["encoder_attention_heads"],
        output_size=config["output_dim"],
        eps=EPS,
        activation=config["activation_function"],
        mel_bins=config["num_mel_bins"],
        chunk=chunk,
        block_chunks=config["n_window_infer"] // chunk,
        channels=config["downsample_hidden_size"],
        masks=masks,
    )


def audio_with_1d_convolutions(config: HfConfig) -> Audio:
    """Return the tower of Qwen2.5-Omni's audio_config, where a chunk attends to itself."""
    return Audio(
        num_layers=config["encoder_layers"],
        hidden_size=config["d_model"],
        ffn_hidden_size=config["encoder_ffn_dim"],
        num_heads=config["encoder_attention_heads"],
        output_size=config["output_dim"],
        eps=EPS,
        activation=config["activation_function"],
        key_bias=False,
        mel_bins=config["num_mel_bins"],
        chunk=2 * config["n_window"],
        block_chunks=1,
        masks="always",
        pools=True,
        projector_hidden=False,
    )


def audio_mappings(audio: Audio, tower: str, projector: str, layers: tuple[str, ...]) -> list[ParamMapping]:
    """Map a tower by its names in the checkpoint.

    tower, projector: beginnings of names. layers: names of the projector's linear layers
    """
    table, head = TowerTable(audio, AUDIO_TOWER), TowerTable(audio, AUDIO_TOWER)
    convs = [f"conv2d{n}" for n in (1, 2, 3)] if audio.channels else ["conv1", "conv2"]
    for number, name in enumerate(convs):
        table.linear(name, f"convs.{number}", bias=True)
    if audio.channels:
        table.linear("conv_out", "linear_conv", bias=False)
    hf, mcore, numbers = "layers.{layer}.", "layers.{layer}.", table.layers
    table.norm(hf + "self_attn_layer_norm", mcore + "norm1", numbers)
    table.norm(hf + "final_layer_norm", mcore + "norm2", numbers)
    qkv = hf + "self_attn.{part}_proj"
    table.linear(qkv, mcore + "linear_qkv", REPLICATED_Q_K_V, numbers, bias=audio.key_bias)
    if not audio.key_bias:
        table.add(qkv + ".bias", mcore + "query_value_bias", REPLICATED_Q_V, numbers)
    table.linear(hf + "self_attn.out_proj", mcore + "linear_proj", layers=numbers, bias=True)
    table.linear(hf + "fc1", mcore + "linear_fc1", layers=numbers, bias=True)
    table.linear(hf + "fc2", mcore + "linear_fc2", layers=numbers, bias=True)
    table.norm("ln_post", "final_norm")
    for name, module in zip(layers, ("merger.linear_fc1", "merger.linear_fc2")[-len(layers) :], strict=True):
        head.linear(name, module, bias=True)
    return table.under(tower) + head.under(projector)
