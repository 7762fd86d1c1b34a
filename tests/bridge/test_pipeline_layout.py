"""The division of layers over pipeline stages is megatron-core's, and so is what cannot be divided."""

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
from megaswift.bridge.options import ParallelOptions
from megaswift.bridge.pipeline_layout import (
    check_prediction_layers,
    decoder_layout,
    divide_layers,
    merged_layout,
    parse_layout,
    virtual_pipeline_size,
)
from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

LETTERS = {"embedding": "E", "decoder": "t", "loss": "L"}
STRINGS = [
    "Et|tL",
    "E|tt|L",
    "Ettt|(tt|)*3t,L",
    "Et*3|(t*2|)*2,L",
    "(E)*1t|(t|t)*2,t|L",
    "E|(t|)*4L",
]


@pytest.fixture
def stage() -> Iterator:
    """Sets megatron-core's pipeline rank and VPP, without process groups."""

    def enter(rank: int, virtual: int | None) -> None:
        parallel_state.set_pipeline_model_parallel_rank(rank)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)

    yield enter
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def megatron_division(options: ParallelOptions, layers: int, enter) -> list[tuple[int, int]]:
    """(first layer, number of layers) of each chunk as megatron-core builds it."""
    stages, virtual = options.pipeline_model_parallel_size, options.virtual_pipeline_model_parallel_size
    last = options.decoder_last_pipeline_num_layers
    if stages == 2 and options.decoder_first_pipeline_num_layers is not None and last is not None:
        # megatron-core divides by the number of stages between; both sizes say the same.
        assert options.decoder_first_pipeline_num_layers + last == layers
        last = None
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=options.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=options.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=options.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=options.pipeline_model_parallel_layout,
        pipeline_dtype=torch.float32,
    )
    virtual = config.virtual_pipeline_model_parallel_size
    virtual = virtual if (virtual or 1) > 1 else None
    divided = []
    for number in range(stages * (virtual or 1)):
        enter(number % stages, virtual)
        vp_stage = number // stages if virtual else None
        divided.append((get_transformer_layer_offset(config, vp_stage), get_num_layers_to_build(config, vp_stage)))
    return divided


def division(options: ParallelOptions, layers: int) -> list[tuple[int, int]]:
    sizes = divide_layers(options, layers)
    return [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]


SPLITS = [
    {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    for first, last in itertools.product((None, 1, 2, 4), (None, 2, 3))
] + [
    {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
    for embedding, loss in ((True, False), (False, True), (True, True))
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_layers_are_divided_as_by_megatron_core(split: dict, stage) -> None:
    divided = refused = 0
    for stages, virtual, layers in itertools.product((2, 3, 4), (None, 2, 3), range(1, 23)):
        options = ParallelOptions(
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual, **split
        )
        try:
            expected = megatron_division(options, layers, stage)
            assert sum(size for _, size in expected) == layers
            # megatron-core takes no layers at all, and fewer than none, for a division.
            assert all(size >= 0 for _, size in expected)
            assert "account_for_loss_in_pipeline_split" in split or all(size for _, size in expected)
        except (AssertionError, ValueError):
            with pytest.raises(
                ValueError, match=f"--pipeline_model_parallel_size {stages}|not a multiple of --virtual"
            ):
                divide_layers(options, layers)
            refused += 1
        else:
            assert division(options, layers) == expected
            divided += 1
    assert divided > 5
    assert refused > 5


@pytest.mark.parametrize("text", STRINGS)
def test_a_layout_is_read_and_built_as_by_megatron_core(text: str, stage) -> None:
    chunks = parse_layout(text)
    expected = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert chunks == ["".join(LETTERS[kind.name] for kind in chunk) for chunk in expected]
    layers = "".join(chunks).count("t")
    for stages in (size for size in (2, 3, 4) if len(chunks) % size == 0):
        options = ParallelOptions(pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text)
        assert virtual_pipeline_size(options) == (len(chunks) // stages if len(chunks) > stages else None)
        divided = megatron_division(options, layers, stage)
        assert division(options, layers) == divided
        # One chunk per stage, with as many layers.
        merged = ParallelOptions(
            pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=merged_layout(options)
        )
        sizes = [sum(size for _, size in divided[stage::stages]) for stage in range(stages)]
        assert [size for _, size in megatron_division(merged, layers, stage)] == sizes


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|xL", "has 'x'. Set E (embedding), t (layer), m (layer of multi-token prediction) and L (loss)"),
        ("Et|(tL", "has '('. Set"),
        ("Et | tL", "has ' '. Set"),
        ("Et|tm|L", "layers of multi-token prediction (m) are on the last stage, beside the output layer"),
        ("Et|mtmL", "layers of multi-token prediction (m) are on the last stage, beside the output layer"),
        ("tt|tL", "has E 0 times. Set it once, as the first letter."),
        ("tE|tL", "has E 1 times. Set it once, as the first letter."),
        ("|Et|tL|tt", "has E 1 times. Set it once, as the first letter."),
        ("Et|Et|L", "has E 2 times."),
        ("Et|tt", "has L 0 times. Set it once, as the last letter."),
        ("Et|Lt", "has L 1 times. Set it once, as the last letter."),
        ("Et|(tt|)*2|L", "stage 4 of 5 is empty. Remove its |."),
    ],
)
def test_a_wrong_layout_is_named(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--pipeline_model_parallel_layout {layout}: {message}")):
        parse_layout(layout)


def test_prediction_layers_are_counted_and_left_to_our_own_builder() -> None:
    options = ParallelOptions(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|(t|)*2t,m*2L")
    assert divide_layers(options, 4) == [1, 1, 1, 1]
    assert decoder_layout(options) == "Et|t|t|tL"
    assert merged_layout(options) == "Ett|ttL"
    check_prediction_layers(options, 2)
    with pytest.raises(ValueError, match=r"has 2 layers of .* \(m\), and --mtp_num_layers is 1. Set m right"):
        check_prediction_layers(options, 1)
    with pytest.raises(ValueError, match=r"and --mtp_num_layers is 0\. Set --mtp_num_layers 2"):
        check_prediction_layers(options, 0)
    without = ParallelOptions(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|ttL")
    check_prediction_layers(without, 0)
    with pytest.raises(ValueError, match=r"has 0 layers .* Set mm right before L"):
        check_prediction_layers(without, 2)
    check_prediction_layers(ParallelOptions(pipeline_model_parallel_size=2), 2)


def test_a_layout_that_does_not_fit() -> None:
    options = ParallelOptions(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|L")
    with pytest.raises(ValueError, match="has 3 stages, not a multiple of --pipeline_model_parallel_size 2"):
        virtual_pipeline_size(options)
    options = ParallelOptions(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="Et|t|L")
    with pytest.raises(ValueError, match=r"has 2 layers \(t\), and the model has 4. Set 4."):
        divide_layers(options, 4)
