"""StarCoder2: LayerNorms and biases everywhere, a window in every layer; or neither biases nor windows."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny
from tests.bridge.families.faults import zeroed


def config(**changes):
    from transformers import Starcoder2Config

    settings = {"norm_epsilon": 1e-3, "sliding_window": 13, "rope_parameters": ROPE}
    return Starcoder2Config(**SHARED | settings | changes)


FAULTS = {
    f"{name} without biases": zeroed(pattern)
    for name, pattern in (("norms", r"norm\.bias"), ("MLPs", r"mlp\..*bias"), ("attention", r"attn\..*bias"))
}
PLAIN = {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}
TINY = {
    "": Tiny(config, faults=FAULTS),
    "no biases": Tiny(partial(config, **PLAIN), layouts=()),
}
