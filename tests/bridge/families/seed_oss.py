"""Seed-OSS: biases on queries, keys and values; or on all matrices."""

from functools import partial

from tests.bridge.families import ROPE, SHARED, Tiny


def config(**changes):
    from transformers import SeedOssConfig

    return SeedOssConfig(**SHARED | {"rope_parameters": ROPE, "head_dim": 16} | changes)


BIASES = {"attention_out_bias": True, "mlp_bias": True}
TINY = {"": Tiny(config), "all biases": Tiny(partial(config, **BIASES), layouts=("TP2 SP",))}
