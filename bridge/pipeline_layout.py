"""Division of a model's layers over pipeline stages, as megatron-core divides them. Imports no torch.

A stage (PP rank) has one chunk of consecutive layers, or VPP chunks. In the model's order, chunk i is on stage i % PP.
"""

import re

from .options import LayoutOptions, ParallelOptions

LAYOUT = "pipeline_model_parallel_layout"
UNEVEN = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
ACCOUNTED = {"account_for_embedding_in_pipeline_split": "embedding", "account_for_loss_in_pipeline_split": "loss"}
# Patterns of megatron-core's PipelineParallelLayerLayout, in its order: (tt|)*3, t*3.
REPETITIONS = r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"


def parse_layout(layout: str) -> list[str]:
    """Return the letters of each chunk of a `--pipeline_model_parallel_layout`, in the model's order.

    E is the embedding, t a layer, m a layer of multi-token prediction, L the loss. Raises ValueError for what
    megatron-core does not read, or reads as something else than is built.
    """
    flag, text = f"--{LAYOUT} {layout}", layout.replace(",", "")
    for pattern in REPETITIONS:
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    chunks = text.split("|")
    if wrong := sorted(set(text) - set("EtmL|")):
        raise ValueError(
            f"{flag}: has {wrong[0]!r}. Set E (embedding), t (layer), m (layer of multi-token prediction) and L "
            "(loss), with | between stages, and t*N or (...)*N to repeat."
        )
    # megatron-core builds the embedding on the first stage and the loss on the last, wherever their letters are.
    for letter, count, place, is_there in (
        ("E", text.count("E"), "first", text.startswith("E")),
        ("L", text.count("L"), "last", text.endswith("L")),
    ):
        if count != 1 or not is_there:
            raise ValueError(f"{flag}: has {letter} {count} times. Set it once, as the {place} letter.")
    if "m" in text.removesuffix("L").rstrip("m"):
        raise ValueError(
            f"{flag}: layers of multi-token prediction (m) are on the last stage, beside the output layer that they "
            "share. Set m right before L."
        )
    if "" in chunks:
        raise ValueError(f"{flag}: stage {chunks.index('') + 1} of {len(chunks)} is empty. Remove its |.")
    return chunks


def decoder_layout(options: LayoutOptions) -> str | None:
    """Return the layout without its layers of multi-token prediction, which megatron-core does not build here."""
    layout = options.pipeline_model_parallel_layout
    return None if layout is None else "|".join(parse_layout(layout)).replace("m", "")


def check_prediction_layers(options: LayoutOptions, depths: int) -> None:
    """Raise ValueError if a layout has another number of layers of multi-token prediction than are built."""
    layout = options.pipeline_model_parallel_layout
    count = 0 if layout is None else "".join(parse_layout(layout)).count("m")
    if layout is not None and count != depths:
        instead = f"Set {'m' * depths} right before L" if depths else f"Set --mtp_num_layers {count}, or remove m"
        raise ValueError(
            f"--{LAYOUT} {layout}: has {count} layers of multi-token prediction (m), and --mtp_num_layers is {depths}. "
            f"{instead}."
        )


def virtual_pipeline_size(options: ParallelOptions) -> int | None:
    """Return VPP, which a `--pipeline_model_parallel_layout` determines; None for one chunk per stage.

    Raises ValueError for a layout that PP does not divide, or as `parse_layout`.
    """
    if options.pipeline_model_parallel_layout is None:
        return options.virtual_pipeline_model_parallel_size
    chunks = len(_chunks(options, options.pipeline_model_parallel_layout)) // options.pipeline_model_parallel_size
    return chunks if chunks > 1 else None


def merged_layout(options: LayoutOptions) -> str | None:
    """Return the layout of one chunk per stage that has as many layers on each; None without a layout."""
    if options.pipeline_model_parallel_layout is None:
        return None
    chunks, stages = _chunks(options, options.pipeline_model_parallel_layout), options.pipeline_model_parallel_size
    layers = ["t" * "".join(chunks[stage::stages]).count("t") for stage in range(stages)]
    return f"E{'|'.join(layers)}L"


def _chunks(options: LayoutOptions, layout: str) -> list[str]:
    chunks, stages = parse_layout(layout), options.pipeline_model_parallel_size
    if len(chunks) % stages:
        raise ValueError(
            f"--{LAYOUT} {layout}: has {len(chunks)} stages, not a multiple of --pipeline_model_parallel_size "
            f"{stages}. Set a multiple."
        )
    return chunks


def divide_layers(options: ParallelOptions, layers: int) -> list[int]:
    """Return the number of layers of each chunk, in the model's order.

    layers: of the model. Raises ValueError if the options do not divide them.
    """
    if options.pipeline_model_parallel_layout is not None:
        layer_counts = [chunk.count("t") for chunk in _chunks(options, options.pipeline_model_parallel_layout)]
        if sum(layer_counts) != layers:
            raise ValueError(
                f"--{LAYOUT} {options.pipeline_model_parallel_layout}: has {sum(layer_counts)} layers (t), and the "
                f"model has {layers}. Set {layers}."
            )
        return layer_counts
    stages, chunks = options.pipeline_model_parallel_size, virtual_pipeline_size(options) or 1
    first, last = (getattr(options, name) for name in UNEVEN)
    flags = "".join(f", --{name} {value}" for name in UNEVEN if (value := getattr(options, name)) is not None)
    for name in UNEVEN:
        if (value := getattr(options, name)) is not None and value % chunks:
            raise ValueError(
                f"--{name} {value}: not a multiple of --virtual_pipeline_model_parallel_size {chunks}. Set a multiple."
            )
    accounted = [noun for name, noun in ACCOUNTED.items() if getattr(options, name)]
    flags += "".join(f", --{name} true" for name in ACCOUNTED if getattr(options, name))
    inner_stages, inner = stages - (first is not None) - (last is not None), layers - (first or 0) - (last or 0)
    inner += len(accounted)
    if inner < inner_stages * chunks or (inner % (inner_stages * chunks) if inner_stages else inner):
        chunk_flag = f", --virtual_pipeline_model_parallel_size {chunks}" if chunks > 1 else ""
        counted = f"{inner} of the model's {layers} layers"
        instead = "--decoder_first_pipeline_num_layers or --decoder_last_pipeline_num_layers"
        if accounted:
            counted = f"the model's {layers} layers, {inner} with the {' and the '.join(accounted)},"
            instead = f"--{LAYOUT} in their place"
        raise ValueError(
            f"--pipeline_model_parallel_size {stages}{chunk_flag}{flags}: {counted} cannot be split evenly over "
            f"{inner_stages} stages of {chunks} chunk{'s' * (chunks > 1)}. Set sizes that divide, or set {instead}."
        )
    middle = inner // inner_stages if inner_stages else 0
    sizes = [middle] * stages
    sizes[0], sizes[-1] = sizes[0] if first is None else first, sizes[-1] if last is None else last
    layer_counts = [size // chunks for size in sizes] * chunks
    layer_counts[0] -= "embedding" in accounted
    layer_counts[-1] -= "loss" in accounted
    return layer_counts
