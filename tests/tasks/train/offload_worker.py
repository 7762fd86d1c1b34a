"""tests.layouts.worker with small buckets, and offload of activations of every size: tiny models then use several.

"loses_bucket" of a job: the weights of the first bucket do not return from the host. "copies" of a result: number of
tensors that went to the host.
"""

from megaswift.bridge.layers import activation_offload
from megaswift.tasks.train import hybrid_adamw

from tests.layouts import worker

hybrid_adamw.BUCKET = 1024
activation_offload.MIN_BYTES = 0


def run(job: dict) -> dict:
    send = hybrid_adamw.HostPipeline._send
    if job.pop("loses_bucket", False):
        hybrid_adamw.HostPipeline._send = lambda self, number: send(self, number) if number else None
    copies: list[activation_offload._SavedTensor] = []
    begin = activation_offload._SavedTensor.__init__

    def counted(self, *args) -> None:
        begin(self, *args)
        copies.append(self)

    activation_offload._SavedTensor.__init__ = counted
    try:
        return worker.run(job) | {"copies": len(copies)}
    finally:
        hybrid_adamw.HostPipeline._send, activation_offload._SavedTensor.__init__ = send, begin


if __name__ == "__main__":
    worker.main(run)
