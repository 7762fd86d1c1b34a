"""Trials of `megatron tune`: short runs that are measured, and save nothing."""

import os

VARIABLE = "MEGASWIFT_TRIAL"  # environment variable of their processes


def is_trial() -> bool:
    return bool(os.environ.get(VARIABLE))
