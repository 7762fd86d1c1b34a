"""Ministral 3: YaRN, and queries that grow within the documents; alone, or within a vision-language checkpoint."""

from tests.bridge.families import SHARED, YARN, Tiny
from tests.bridge.families.faults import changed
from tests.bridge.families.gemma3_text import whole
from tests.bridge.families.mistral import nested, unseen

GROWTH = {"llama_4_scaling_beta": 0.6, "mscale": 0.9, "mscale_all_dim": 0.6}


def config(**changes):
    from transformers import Ministral3Config

    return Ministral3Config(**SHARED | {"rope_parameters": YARN | GROWTH, "head_dim": 16} | changes)


def window(**changes):
    return config(sliding_window=13, tie_word_embeddings=True, **changes)


FAULTS = {"growth of queries": changed(query_growth=None)}
TINY = {
    "": Tiny(config, faults=FAULTS),
    "window": Tiny(window, (), faults=FAULTS),
    "within": Tiny(config, ("PP2",), files=whole, raw=nested, extra=unseen),
}
