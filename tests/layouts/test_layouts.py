"""Every parallel layout trains as plain transformers and torch's AdamW do: loss, gradient norm, every parameter."""

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny
from tests.layouts import reference
from tests.layouts.launch import launch
from tests.selection import selected_params

BOUND = 1e-5  # relative to the largest value
TP, SP, PP, CP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
LAYOUT = "pipeline_model_parallel_layout"
ACCOUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}

LAYOUTS = {
    1: {
        "one process": {},
        "end to end": {"packing": False, "micro_batch_size": 2},
        "padded": {"packing": False, "padding_free": False, "micro_batch_size": 3},
        "packs of a micro batch": {"micro_batch_size": 2},
        "recompute uniform": FULL | {"recompute_method": "uniform"},
        "recompute block": FULL | {"recompute_method": "block"},
        "recompute modules": {"recompute_modules": ["core_attn", "mlp", "layernorm"]},
        "recompute MLPs": {"recompute_modules": ["core_attn", "mlp"]},
    },
    2: {
        "TP2": {TP: 2, SP: False},
        "TP2 SP": {TP: 2, SP: True},
        "TP2 SP recompute MLPs": {TP: 2, SP: True, "recompute_modules": ["mlp"]},
        "TP2 SP padded": {TP: 2, SP: True, "packing": False, "padding_free": False, "micro_batch_size": 3},
        "PP2": {PP: 2},
        "PP2 uneven": {PP: 2, FIRST: 1},
        "PP2 VPP2": {PP: 2, VPP: 2},
        "PP2 VPP2 first and last": {PP: 2, VPP: 2, FIRST: 2, LAST: 2},
        "PP2 VPP3 embedding and loss as layers": {PP: 2, VPP: 3} | ACCOUNTED,  # first and last chunks without layers
        "PP2 embedding apart": {PP: 2, LAYOUT: "E|ttttL"},
        "PP2 loss apart": {PP: 2, LAYOUT: "Et*4|L"},
        "PP2 VPP2 layout": {PP: 2, LAYOUT: "E|tt|t|tL"},
        "CP2": {CP: 2},
        "CP2 padded": {CP: 2, "packing": False, "padding_free": False, "micro_batch_size": 3},
        "DP2": {},
        "DP2 ZeRO-1": ZERO,
        "DP2 ZeRO-1 overlapped": OVERLAP,
        "DP2 ZeRO-1 overlapped in small buckets": OVERLAP | {"bucket_size": 8000},
    },
    4: {
        "TP2 SP PP2": {TP: 2, SP: True, PP: 2},
        "TP2 CP2 SP": {TP: 2, CP: 2, SP: True},
        "PP2 VPP2 ZeRO-1": ZERO | {PP: 2, VPP: 2},
        "PP2 VPP2 ZeRO-1 overlapped": OVERLAP | {PP: 2, VPP: 2},
        "PP2 VPP3 ZeRO-1 overlapped, embedding and loss as layers": OVERLAP | {PP: 2, VPP: 3} | ACCOUNTED,
        "PP2 ZeRO-1 overlapped": OVERLAP | {PP: 2},
        "PP4 embedding and loss apart": ZERO | {PP: 4, LAYOUT: "E|tt|tt|L"},
        "TP2 SP PP2 VPP2 layout": {TP: 2, SP: True, PP: 2, LAYOUT: "Et|(t|)*2tL"},
        "TP4 SP, 2 KV heads": {TP: 4, SP: True},
        "CP4": {CP: 4},
    },
}
MOE_LAYOUTS = {
    1: {
        "recompute experts": {"recompute_modules": ["moe"]},
        "recompute activation": {"recompute_modules": ["moe_act"]},
        "all-gather dispatcher": {"moe_token_dispatcher_type": "allgather"},
    },
    2: {
        "EP2": {EP: 2},
        "EP2 ZeRO-1": ZERO | {EP: 2},
        "EP2 all-gather": {EP: 2, "moe_token_dispatcher_type": "allgather"},
        "ETP2": {ETP: 2},
        "TP2 SP ETP2": {TP: 2, SP: True, ETP: 2},
        "TP2 SP EP2 ETP1": {TP: 2, SP: True, EP: 2},
    },
    4: {
        "EP4": {EP: 4},
        "EP2 PP2": {EP: 2, PP: 2},
        "EP2 ETP2": {EP: 2, ETP: 2},
        "TP2 SP EP2 ETP1 ZeRO-1": ZERO | {TP: 2, SP: True, EP: 2},
    },
}


# Families that run one layout of each kind: the others differ in nothing that a family decides. tests/bridge/families
# compares log-probabilities and gradients of all families in the layouts that depend on the family.
FEW = ("qwen2", "llama")
KINDS = ("one process", "padded", "TP2 SP", "PP2 VPP2", "CP2", "DP2 ZeRO-1 overlapped", "TP2 CP2 SP")
KINDS += ("PP2 VPP3 embedding and loss as layers", "PP2 loss apart")  # with tied embeddings


def layouts(world: int, family: str) -> dict[str, dict]:
    """The layouts of a family that the tests run. MoE layers under TP need SP."""
    if family in FEW:
        return {name: flags for name, flags in LAYOUTS[world].items() if name in KINDS}
    if family != "qwen3_moe":
        return LAYOUTS[world]
    dense = {name: flags for name, flags in LAYOUTS[world].items() if not (flags.get(TP) and not flags[SP])}
    return dense | MOE_LAYOUTS[world]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def references(folder):
    """family -> what transformers' model gave; its checkpoint before training is in folder/family."""
    found = {}
    torch.set_num_threads(1)
    for family in tiny.FAMILIES:
        model = tiny.model(family)
        model.save_pretrained(folder / family)
        found[family] = reference.train(model)
    return found


# Left to the long part: four processes, and layouts that combine or repeat what another one has.
LONG = ("TP2 SP padded", "PP2", "DP2", "DP2 ZeRO-1", "DP2 ZeRO-1 overlapped", "EP2 ZeRO-1", "EP2 all-gather", "ETP2")


def is_long(world: int, family: str, name: str) -> bool:
    if family in FEW:
        return name not in ("one process", "TP2 SP", "PP2 VPP3 embedding and loss as layers")
    if family == "qwen3_moe" and world == 2:
        return name not in MOE_LAYOUTS[2] or name in LONG
    return world == 4 or name in LONG


CASES = [(world, family, name) for world in LAYOUTS for family in tiny.FAMILIES for name in layouts(world, family)]


@pytest.fixture(scope="module")
def launched(request, folder, references):
    """Results by world size; one launch each, of the cases that this session has selected."""
    done = {}
    selected = [tuple(params[name] for name in ("world", "family", "name")) for params in selected_params(request)]

    def results(world: int) -> dict[str, dict]:
        if world not in done:
            jobs = []
            for family, name in (case[1:] for case in CASES if case[0] == world and case in selected):
                flags = layouts(world, family)[name]
                jobs.append(
                    {
                        "name": f"{family}: {name}",
                        "model": str(folder / family),
                        "options": {"packing": True} | {flag: v for flag, v in flags.items() if flag != "bucket_size"},
                        "bucket_size": flags.get("bucket_size"),
                        "save": str(folder / f"{world}-{family}-{name}"),
                    }
                )
            done[world] = launch(world, jobs, folder / f"world-{world}")
        return done[world]

    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "family", "name"),
    [
        pytest.param(*case, marks=pytest.mark.long if is_long(*case) else (), id="{} {}: {}".format(*case))
        for case in CASES
    ],
)
def test_trains_as_transformers_does(world, family, name, launched, references, folder):
    result, expected = launched(world).get(f"{family}: {name}"), references[family]
    assert result is not None, "the launch stopped before this layout"
    assert "error" not in result, result.get("error")
    assert result["losses"] == pytest.approx(expected.losses, rel=BOUND)
    assert result["grad_norms"] == pytest.approx(expected.grad_norms, rel=BOUND)
    saved = {}
    for file in (folder / f"{world}-{family}-{name}").glob("*.safetensors"):
        saved |= load_file(file)
    tied = {"lm_head.weight"} if "lm_head.weight" not in saved else set()
    assert saved.keys() == expected.parameters.keys() - tied
    for key, tensor in saved.items():
        wanted = expected.parameters[key]
        difference = (tensor - wanted).abs().max() / wanted.abs().max()
        assert difference < BOUND, f"{key}: {difference:.1e}"
