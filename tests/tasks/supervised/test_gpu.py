"""Heads, embeddings, choices and sums by a GPU's kernels, in bf16, and without the host's waiting for them."""

import dataclasses

import pytest
import torch
from megaswift.bridge import runtime
from megaswift.bridge.checkpoint.hub import read_config
from megaswift.bridge.checkpoint.load import load_weights
from megaswift.bridge.layers.pooling import sum_documents
from megaswift.bridge.model.build import build_model
from megaswift.bridge.options import BuildOptions
from megaswift.templates.batching.collator import Batch
from torch import Tensor

from tests.bridge.families.reference import documents
from tests.tasks.supervised import reference, worker

pytestmark = pytest.mark.gpu
ROUNDED = 0.1  # mean difference to transformers' in fp32, over the spread of its outputs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    reference.make(folder, "qwen3")
    return folder


@pytest.mark.parametrize("kind", reference.KINDS)
def test_by_kernels_of_a_gpu(kind, place, alone):
    options = BuildOptions(gradient_accumulation_fusion=False)  # whose buffers are data parallelism's
    source = place / ("scored" if kind == "scores" else "causal")
    model = build_model(read_config(source), options, torch.bfloat16)
    load_weights(model.chunks, read_config(source), source)
    batches = [on_device(worker.batch_of(pack)) for pack in worker.packs()]

    def outputs_of(batch: Batch) -> Tensor:
        found = worker.forward(model, kind, batch)
        if kind != "sums":
            return found
        about = worker.grouped(batch)
        return sum_documents(found * batch.loss_weights, about["spans"], about["segments"]).unsqueeze(1)

    outputs = torch.cat([outputs_of(batch) for batch in batches])
    outputs.sum().backward()  # kernels are compiled
    expected = torch.load(place / "reference.pt")[kind]["outputs"]
    assert (outputs.detach().cpu() - expected).abs().mean() / expected.std() < ROUNDED
    assert len(outputs) == sum(map(len, documents()))
    runtime.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs_of(batches[0]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_device(batch: Batch) -> Batch:
    """As tasks/train/step.py moves it: what is asked of documents stays on the CPU."""
    names = "tokens", "labels", "loss_weights", "position_ids"
    return dataclasses.replace(batch, **{name: getattr(batch, name).to(runtime.device()) for name in names})
