"""Every family on GPUs, against transformers on a CPU in fp32.

pytest -m gpu tests/bridge/families/test_gpu.py -s      # prints what was measured; two GPUs for the layouts
"""

import pytest
import torch

from tests.bridge import families
from tests.bridge.families.test_families import BOUND, TINIES, folder_of, launch  # noqa: F401  (a fixture)

pytestmark = pytest.mark.gpu
LOCAL = {"transformer_impl": "local"}
ENGINE = {"transformer_impl": "transformer_engine"}
ROUNDED = 0.15  # of a mean difference in bf16, over the log-probabilities' standard deviation; most are at 0.03
CASES = [
    (name, layout)
    for layout in families.LAYOUTS[2]
    for name, tiny in TINIES.items()
    if layout in tiny.layouts and layout in ("TP2 SP", "PP2", "CP2", "TP2 SP EP2")
]


@pytest.fixture(scope="module")
def one_gpu():
    from tests.bridge.families import worker

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
            patch.delenv(name)
        worker.parallel.initialize(worker.options_of({}), seed=1)
        yield worker
        worker.close()
        worker.dist.destroy_process_group()


@pytest.mark.parametrize("name", TINIES)
def test_fp32(name, folder_of, one_gpu):  # noqa: F811
    result = one_gpu.check(folder_of(name), one_gpu.options_of(LOCAL))
    print(f"\n{name}: {result}")
    assert max(result["packed"], result["padded"], result["gradients"], result["gradient as a whole"]) < BOUND
    assert not result["fp32"]
    assert not result["bf16"]


@pytest.mark.parametrize("kernels", [LOCAL, ENGINE], ids=["local", "Transformer Engine"])
@pytest.mark.parametrize("name", TINIES)
def test_bf16(name, kernels, folder_of, one_gpu):  # noqa: F811
    check_rounded(one_gpu.check_rounded(folder_of(name), one_gpu.options_of(kernels)), name)


def check_rounded(result: dict, name: str) -> None:
    print(f"\n{name}: {result}")
    assert "error" not in result, result.get("error")
    assert max(result["packed"], result["padded"]) < ROUNDED
    assert max(result["packed"], result["padded"]) < 1.5 * min(result["packed"], result["padded"])


@pytest.fixture(scope="module")
def two_gpus(folder_of):  # noqa: F811
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return launch(2, CASES, folder_of, LOCAL), launch(2, CASES, folder_of, ENGINE, rounded=True)


two = pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}: {layout}" for name, layout in CASES])


@two
def test_two_gpus_fp32(name, layout, two_gpus):
    result = two_gpus[0][name, layout]
    print(f"\n{name}: {layout}: {result}")
    assert "error" not in result, result.get("error")
    assert max(result["packed"], result["padded"], result["gradients"], result["gradient as a whole"]) < BOUND
    assert not result["fp32"]
    assert not result["bf16"]


@two
def test_two_gpus_bf16(name, layout, two_gpus):
    check_rounded(two_gpus[1][name, layout], f"{name}: {layout}")
