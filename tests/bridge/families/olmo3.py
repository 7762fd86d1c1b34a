"""OLMo 3: OLMo 2 with windows in some layers, and YaRN in the others."""

from tests.bridge.families import SHARED, YARN, Tiny
from tests.bridge.families.faults import layers_changed
from tests.bridge.families.olmo2 import FAULTS


def config(**changes):
    from transformers import Olmo3Config

    settings = {
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    return Olmo3Config(**SHARED | settings | changes)


TINY = Tiny(config, faults=FAULTS | {"rope of windows": layers_changed(rope=0)})
