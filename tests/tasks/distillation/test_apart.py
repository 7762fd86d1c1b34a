"""A teacher in a layout of its own teaches what it does in one process, whatever the student's layout is."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)
from tests.tasks.distillation.runs import ON_POLICY, PACKED, Distilled, assert_same_run
from tests.tasks.distillation.test_layouts import BASE, CP, EP, EXPERTS, PP, TOP, TP
from tests.tasks.preference.runs import assert_same_weights

later = pytest.mark.long
SIZES = "tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"
LETTERS = dict(zip(("TP", "PP", "CP", "EP", "ETP"), SIZES, strict=True))


def teacher(**sizes: int) -> str:
    return " ".join(f"--teacher_{LETTERS[name]}_parallel_size {size}" for name, size in sizes.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "student", "apart", "said"),
    [
        pytest.param(ON_POLICY, "", teacher(TP=2), "TP 2 x PP 1 x CP 1 x DP 1", id="DP2, TP2 on policy", marks=later),
        pytest.param(BASE, "", teacher(TP=2), "TP 2 x PP 1 x CP 1 x DP 1", id="DP2, TP2", marks=later),
        pytest.param(f"{BASE} {TOP}", "", teacher(TP=2), "TP 2 x PP 1", id="DP2, TP2 top", marks=later),
        pytest.param(BASE, TP, teacher(TP=1, PP=2), "TP 1 x PP 2", id="TP2 SP, PP2"),
        pytest.param(f"{ON_POLICY} {TOP}", PP, teacher(TP=2, PP=1), "TP 2 x PP 1", id="PP2, TP2 top", marks=later),
        pytest.param(
            f"{BASE} --teacher_model teacher_moe", TP, teacher(TP=1, EP=2), "EP 2 x ETP 1", id="TP2, EP2", marks=later
        ),
        pytest.param(f"{BASE} {EXPERTS}", EP, teacher(TP=2, EP=1, ETP=2), "EP 1 x ETP 2", id="EP2, ETP2", marks=later),
        pytest.param(BASE, f"{CP} {PACKED}", teacher(CP=1), "CP 1 x DP 2", id="CP2 packed, DP2", marks=later),
        pytest.param(f"{BASE} {TOP}", "", teacher(CP=2), "CP 2 x DP 1", id="DP2, CP2 top", marks=later),
        pytest.param(
            BASE,
            f"{PP} --virtual_pipeline_model_parallel_size 2",
            teacher(PP=1),
            "PP 1 x CP 1 x DP 2",
            id="PP2 VPP2, DP2",
            marks=later,
        ),
        pytest.param(BASE, f"{PP} --tuner_type lora", teacher(TP=2, PP=1), "TP 2 x PP 1", id="LoRA", marks=later),
    ],
)
def test_two_processes(base: str, student: str, apart: str, said: str, place: Distilled) -> None:
    lora = "--tuner_type lora --lora_dropout 0 --lora_rank 4" if "lora" in student else ""
    student = student.replace("--tuner_type lora", "")
    found, wanted = place.run(f"{base} {lora} {student} {apart}", 2), place.run(f"{base} {lora}")
    assert said in next(line for line in found.printed.splitlines() if line.startswith("teacher: "))
    assert_same_run(found, wanted)
    if lora:
        return
    model = "qwen3_moe" if "--model qwen3_moe" in base else "qwen3"
    assert_same_weights(found.weights, wanted.weights, load_file(place.folder / model / "model.safetensors"))


@pytest.mark.long
def test_four_processes(place: Distilled) -> None:
    found = place.run(f"{BASE} {TP} {teacher(TP=1, PP=2)}", 4)
    assert_same_run(found, place.run(BASE))


def test_layouts_that_cannot_be() -> None:
    from megaswift.bridge.option_groups import compose
    from megaswift.cli.checks.teacher import check_teacher
    from megaswift.cli.flags import UsageError
    from megaswift.tasks.options import GkdOptions

    for sizes, processes, said in (
        ({"tensor_model": 2}, 3, "--teacher_tensor_model_parallel_size x --teacher_pipeline_model_parallel_size x "
         "--teacher_context_parallel_size = 2: does not divide the number of processes, 3"),
        ({"expert_model": 4}, 2, "--teacher_expert_model_parallel_size x .* = 4: does not divide"),
        ({"context": 2}, 2, "--packing_length 30: not a multiple of 4"),
    ):  # fmt: skip
        named = {f"teacher_{size}_parallel_size": value for size, value in sizes.items()}
        options = compose(GkdOptions, model="m", teacher_model="t", packing=True, packing_length=30, **named)
        with pytest.raises(UsageError, match=said):
            check_teacher(options, processes)


@pytest.mark.slow
def test_layouts_that_the_teacher_cannot_have(place: Distilled) -> None:
    line = "--rlhf_type gkd --model qwen3 --teacher_model teacher --dataset train.jsonl --use_vllm false"
    said = place.megatron(f"{line} --global_batch_size 4 --train_iters 1 {teacher(PP=3)}", 3, fails=True)
    assert "--teacher_pipeline_model_parallel_size 3: 8 of the model's 8 layers cannot be split evenly" in said


def test_places_in_any_layout() -> None:
    """Each trained label of a step is in one place of the layout, that of its document and token."""
    from megaswift.tasks.distributed.redistribute import concat_indices, document_starts
    from megaswift.templates.batching.collator import BatchLayout
    from megaswift.templates.batching.episode_batches import BatchPlan, Sequences

    random = np.random.default_rng(0)
    tokens = [random.integers(3, 90, size) for size in (3, 9, 5, 14, 2)]
    weights = [(random.random(len(each)) < 0.6).astype(np.float32) for each in tokens]
    sequences, starts = Sequences(tokens, weights, [0.0] * 5), np.array([0, 3, 12, 17, 31])
    assert (document_starts(sequences) == starts).all()
    wanted = sorted(s + n for s, w in zip(starts, weights, strict=True) for n in np.flatnonzero(w[1:]))
    flat = np.concatenate(tokens)
    for ranks, context, pack in ((1, 1, None), (2, 1, None), (2, 2, None), (2, 2, 32), (3, 1, 16)):
        layout = BatchLayout(context_parallel_size=context, stage="prompts", length_multiple=2)
        plan = BatchPlan(layout, 1 if pack else 2, rank=0, ranks=ranks, pack_length=pack)
        found = []
        for rank in range(ranks):
            for context_rank in range(context):
                own = plan.for_rank(rank, context_rank)
                batches = own.batches(sequences)
                for batch, numbers in zip(batches, own.label_ids(batches, starts), strict=True):
                    here = numbers >= 0
                    assert (batch.tokens[0].numpy()[here] == flat[numbers[here]]).all()
                    assert (batch.labels[0].numpy()[here] == flat[numbers[here] + 1]).all()
                    found += concat_indices([numbers]).tolist()
        assert sorted(found) == wanted


def test_groups_of_another_layout(one_process) -> None:  # noqa: F811
    """What the run has is as it was, also where the other layout cannot be."""
    from megaswift.bridge.options import BuildOptions
    from megaswift.bridge.parallel import ProcessGroups
    from megatron.core import parallel_state

    before = dict(vars(parallel_state))
    with pytest.raises(ValueError, match="1 processes do not divide by TP x PP x CP = 2"):
        ProcessGroups(BuildOptions(tensor_model_parallel_size=2))
    groups, tensor = ProcessGroups(BuildOptions()), parallel_state.get_tensor_model_parallel_group()
    for _ in range(2):
        with groups.entered():
            assert parallel_state.get_tensor_model_parallel_group() is not tensor
        assert dict(vars(parallel_state)) == before


def test_an_exchange(one_process) -> None:  # noqa: F811
    from megaswift.tasks.distributed.redistribute import redistribute

    values = torch.randn(3, 5).bfloat16()
    assert redistribute([np.array([4, 2, 9])], [np.array([9, 4, 4])], values).equal(values[[2, 0, 0]])
    assert redistribute([np.arange(0)], [np.arange(0)], torch.from_numpy(np.concatenate([np.empty((0, 4))]))).shape == (
        0,
        4,
    )
    with pytest.raises(ValueError, match="2 requested tokens are on no rank"):
        redistribute([np.array([4, 2, 9])], [np.array([3, 10, 9])], values)
