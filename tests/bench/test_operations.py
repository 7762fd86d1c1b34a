"""What a training step asks of the device stays what it is: operations of a layer, and numbers that the host reads.

A CPU runs the plain functions, of which a GPU's kernels replace some, so that counts are bounds on the code around
those. Tests with a GPU hold the host's waits there (tests/layouts/test_gpu.py).
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
pytestmark = pytest.mark.slow
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ADAPTERS = {"tuner_type": "lora", "lora_dropout": 0.0}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# name: (changes of the config, flags, operations of a layer and micro batch, and of the rest of a step)
CASES = {
    "dense": ({}, {}, 138, 232),
    "recomputed": ({}, RECOMPUTED, 183, 232),
    "adapters": ({}, ADAPTERS, 168, 175),
    "experts": (EXPERTS, {}, 203, 242),
    "experts, adapters": (EXPERTS, ADAPTERS, 271, 185),
}
READS = 8  # host reads of a step, whatever its number of layers
MARGIN = 1.05


@pytest.fixture(scope="module")
def count():
    """Return a function from a case to the operations of its step with two and with four layers, in this process."""
    import overhead
    import torch.distributed as dist

    from tests.layouts.worker import close

    def count(name: str) -> tuple[Counter, Counter]:
        changes, flags, *_ = CASES[name]
        counts = []
        for layers in (2, 4):
            config = overhead.CONFIG | changes | {"num_hidden_layers": layers}
            counts.append(overhead.operations(overhead.ours(config, **flags)))
            close()
        return counts[0], counts[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
            patch.delenv(name)
        yield count
        dist.destroy_process_group()


def sizes(counts: tuple[Counter, Counter]) -> tuple[float, float, int, int]:
    """Return the operations of a layer and micro batch, of the rest, and the reads with two and with four layers."""
    from overhead import MICRO_BATCHES, READS

    two, four = (count.total() for count in counts)
    layer = (four - two) / 2
    reads = [sum(count[name] for name in READS) for count in counts]
    return layer / MICRO_BATCHES, two - 2 * layer, reads[0], reads[1]


@pytest.mark.parametrize("name", CASES)
def test_operations_of_a_step(name, count):
    layer, rest, reads, reads_of_four = sizes(count(name))
    *_, layer_bound, rest_bound = CASES[name]
    assert layer <= MARGIN * layer_bound
    assert rest <= MARGIN * rest_bound
    assert reads <= READS
    assert reads_of_four == reads, "a layer reads"


def test_more_are_seen(count, monkeypatch):
    from megaswift.bridge.layers.attention import CoreAttention

    rotate = CoreAttention._rotate

    def slower(attention, x, documents):
        x = rotate(attention, x, documents)
        x.detach().sum().item()
        for _ in range(2):
            x = x * 1.0
        return x

    monkeypatch.setattr(CoreAttention, "_rotate", slower)
    layer, _, reads, reads_of_four = sizes(count("dense"))
    assert layer > MARGIN * CASES["dense"][2]
    assert READS < reads < reads_of_four
