"""A plugin of a run: in the place of its servers an engine in a thread of the run, which writes down what it is asked.

`events.jsonl` has, in order, generations and weights as they begin and end, and the steps of training. In the
environment: ASIDE_WAITS: what is generated while training goes on waits until a step has been made: it would wait in
vain otherwise. ASIDE_END N: its folder says that token N ends a completion. ASIDE_LOST N: the N-th time that
completions are asked for the server was started anew meanwhile; ASIDE_GONE N: it is gone.
"""

import json
import os
import sys
import threading
from pathlib import Path

from megaswift.tasks.rollout import factory as opening
from megaswift.tasks.rollout.server_connection import ServerLost, WeightsLost
from megaswift.tasks.rollout.transformers_engine import TransformersEngine
from megaswift.tasks.train import trainer

step, train_step = threading.Event(), trainer.train_step


def note(what, **more):
    thread = threading.current_thread().name
    with Path("events.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "thread": thread} | more) + "\n")


def noted_step(training, batches, loss, number, *more, **settings):
    found = train_step(training, batches, loss, number, *more, **settings)
    note("step", number=number)
    step.set()
    return found


class Aside(TransformersEngine):
    def __init__(self, urls, settings):
        import torch

        super().__init__(sys.argv[sys.argv.index("--model") + 1], dtype=torch.float32, load=False)
        self.asked = 0
        if end := os.environ.get("ASIDE_END"):
            self.eos_ids = {int(end)}

    def generate(self, requests, sampling):
        self.asked += 1
        note("generate begins", requests=len(requests))
        if os.environ.get("ASIDE_LOST") == str(self.asked):
            raise WeightsLost("the server was started again, without the weights of this run")
        if os.environ.get("ASIDE_GONE") == str(self.asked):
            raise ServerLost("The rollout server http://aside is gone: killed, during /generate.")
        step.clear()
        if os.environ.get("ASIDE_WAITS") and threading.current_thread().name == "async rollout" and not step.wait(60):
            raise TimeoutError("no step was made while completions were generated")
        found = super().generate(requests, sampling)
        note("generate ends")
        return found

    def release(self):
        note("released")

    def update(self, weights):
        note("weights begin")
        super().update(weights)
        note("weights end")


opening.ServerEngine = Aside
if int(os.environ.get("RANK", "0")) == 0:
    trainer.train_step = noted_step
