"""A plugin of a run: an engine that at times has nothing to say, not even an end token.

In the environment: EMPTY, of how many requests every first one is answered so (1: all).
"""

import os

from megaswift.tasks.rollout.engine import Completion
from megaswift.tasks.rollout.transformers_engine import TransformersEngine

generate = TransformersEngine.generate


def at_times(self, requests, sampling):
    every = int(os.environ["EMPTY"])
    found = generate(self, requests, sampling)
    nothing = Completion([], [], "stop")
    return [nothing if asked.seed % every == 0 else each for asked, each in zip(requests, found, strict=True)]


TransformersEngine.generate = at_times
