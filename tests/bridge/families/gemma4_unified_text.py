"""Gemma 4 12B text: one key head in layers with full attention, which tensor-parallel ranks share."""

from tests.bridge.families import SHARED, Tiny
from tests.bridge.families.gemma4_text import FAULTS, MEANS, SETTINGS


def config(**changes):
    from transformers import Gemma4UnifiedTextConfig

    return Gemma4UnifiedTextConfig(**SHARED | SETTINGS | {"num_global_key_value_heads": 1} | changes)


TINY = Tiny(config, ("TP2", "TP2 SP"), means=MEANS, faults=FAULTS)
