"""tests.layouts.worker with small buckets, and offload of activations of every size: tiny models then use several.

"loses_bucket" of a job: the first bucket whose states are on the host is not updated. A result also has
"copies": number of tensors that went to the host in forward passes
"built", "peak": bytes of the GPU's memory that this job has after the optimizer was built, and at most until then
"elements": number of trained parameters
"""

import gc

import torch
from megaswift.bridge.layers import activation_offload
from megaswift.tasks.train import device_visits, hybrid_adamw

from tests.layouts import worker

device_visits.BUCKET = hybrid_adamw.DEVICE_BUCKET = 2**18 if torch.cuda.is_available() else 2**10
activation_offload.MIN_BYTES = 0


def run(job: dict) -> dict:
    visit, begin, open_training = (
        device_visits.DeviceVisits._visit,
        activation_offload.SavedTensor.__init__,
        worker.open_training,
    )
    counts = {"copies": 0}

    def count(self, *args) -> None:
        begin(self, *args)
        counts["copies"] += 1

    def measure(*args):
        training = open_training(*args)
        if torch.cuda.is_available():
            allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            counts.update(built=allocated - earlier, peak=peak - earlier)
        counts["elements"] = sum(parameter.numel() for parameter in training.model.chunks[0].parameters())
        return training

    if job.get("loses_bucket"):
        device_visits.DeviceVisits._visit = lambda self, number, bucket: visit(self, number, bucket) if number else None
    activation_offload.SavedTensor.__init__, worker.open_training = count, measure
    gc.collect()
    earlier = 0  # bytes of earlier jobs of this process
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        earlier = torch.cuda.memory_allocated()
    try:
        return worker.run(job) | counts
    finally:
        device_visits.DeviceVisits._visit = visit
        activation_offload.SavedTensor.__init__, worker.open_training = begin, open_training


if __name__ == "__main__":
    worker.main(run)
