"""`--test_convert_precision`: the logits of a conversion's two sides on real texts, in fp32 and in the export's dtype.

Our model runs in its layout, on all ranks, and is let go before the first rank opens transformers' model, which has to
fit into that rank's memory once in fp32. Both sides' weights are rounded to the export's dtype before either computes.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from ...bridge import runtime
from ...bridge.checkpoint.pretrained import load_model, load_tokenizer
from ...bridge.families import family_of
from ...bridge.mapping.local_params import collect_params
from ...bridge.mapping.param_mapping import expand_mappings
from ...bridge.model.model import Model
from ...bridge.model.outputs import Logits
from ...templates.batching.collator import BatchLayout
from ..distributed.collectives import on_first_rank
from ..train.step import run_schedule
from .peft_model import adapted, merged

Build = Callable[[torch.dtype], Model]  # our model, which computes in a type, with weights set

LONGEST = 64  # tokens of each text
SAMPLED = 8  # of so many tokens, the hidden states of one are compared
# Largest and mean difference of a logit in fp32, over the logits' standard deviation. Where two experts' scores are all
# but equal, rounding decides which of them a token is sent to: with experts a few tokens may differ by more.
BOUNDS_FP32 = {False: (1e-3, 1e-4), True: (0.1, 1e-3)}
# In another dtype: by how much our errors may exceed those that transformers has there against itself in fp32.
LARGEST_TIMES, MEAN_TIMES = 4.0, 2.0
AGREEMENT = 0.98  # of the most probable token, in fp32

TEXTS = (
    "The harbour was quiet when Maria unlocked the ferry office. She counted the tickets left over from Sunday, wrote "
    "the number on the back of an envelope, and waited for the first passengers to come down the hill with their "
    "bicycles, their dogs and their many questions about the weather.",
    "Im Jahr 1873 wurde der alte Bahnhof geschlossen. Wo früher Züge nach Prag hielten, verkauft heute eine Bäckerei "
    "Brot, Kuchen und starken Kaffee; nur die große Uhr über dem Eingang geht noch immer vier Minuten vor.",
    "清晨的市场里挤满了人。卖菜的老人把西红柿和黄瓜摆得整整齐齐，一边称重一边和邻居聊天，说今年的雨水比去年多了将近一倍。",  # noqa: RUF001
    "def running_mean(values, size):\n    total, result = 0.0, []\n    for i, value in enumerate(values):\n"
    "        total += value\n        if i >= size:\n            total -= values[i - size]\n"
    "        result.append(total / min(i + 1, size))\n    return result\n",
    "La profesora pidió a cada alumno que resolviera 3x + 7 = 22. Casi todos escribieron x = 5, pero Elena añadió un "
    "dibujo: una balanza con tres cajas y siete piedras en un lado, y veintidós piedras en el otro.",
    "Дождь шёл третий день. Инженер записывал уровень реки каждые два часа: 412, 418, 431 сантиметр. К вечеру мост "  # noqa: RUF001
    "закрыли, и почту пришлось везти в обход через лес.",
)


class PrecisionError(RuntimeError):
    """The two sides of a conversion do not compute the same."""


@dataclass(frozen=True)
class Comparison:
    """How far our logits are from transformers', over the standard deviation of these."""

    dtype: str
    largest: float
    mean: float
    agreement: float  # the share of positions at which the most probable token is the same
    largest_allowed: float
    mean_allowed: float

    @property
    def passed(self) -> bool:  # also where something is not a number
        within = self.largest <= self.largest_allowed and self.mean <= self.mean_allowed
        return within and (self.dtype != "float32" or self.agreement >= AGREEMENT)

    def __str__(self) -> str:
        return (
            f"logits in {self.dtype}: largest difference {self.largest:.2e} of their standard deviation (allowed "
            f"{self.largest_allowed:.1e}), mean {self.mean:.2e} (allowed {self.mean_allowed:.1e}), the top token "
            f"agrees at {self.agreement:.1%}: {'passed' if self.passed else 'FAILED'}"
        )


@dataclass
class _Run:
    """What a model makes of the texts: on the CPU, in fp32."""

    logits: Tensor  # [tokens, vocab_size]
    hidden: dict[int, Tensor]  # the states after each layer, of some tokens [tokens / SAMPLED, hidden_size]


def check_precision(
    folder: Path, hf_config: dict[str, Any], build: Build, dtype: torch.dtype, *, adapter: Path | None = None
) -> list[Comparison]:
    """Compare the Hugging Face checkpoint in `folder`, with an adapter merged into it by PEFT, with what `build` gives.

    To be called by every rank; prints a line for each dtype. Returns the comparisons. Raises PrecisionError on every
    rank where one of them is beyond its bound, with the layers that are furthest apart.
    """
    documents = on_first_rank(lambda: _documents(folder))
    dtypes = list(dict.fromkeys([torch.float32, dtype]))
    ours = []
    for computed in dtypes:
        ours.append(_run_ours(hf_config, build, documents, computed, dtype))
        _free()

    def compare() -> tuple[list[Comparison], list[str]]:
        mine = [run for run in ours if run is not None]
        experts = bool(family_of(hf_config).describe(hf_config).transformer.get("num_moe_experts"))
        theirs = _run_theirs(folder, adapter, hf_config, documents, dtypes, dtype)
        return _compare(mine, theirs, dtypes, experts)

    comparisons, report = on_first_rank(compare)
    if dist.get_rank() == 0:
        print("\n".join(report), flush=True)
    if not all(comparison.passed for comparison in comparisons):
        raise PrecisionError("--test_convert_precision: " + "\n".join(report))
    return comparisons


def as_json(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    return [asdict(comparison) | {"passed": comparison.passed} for comparison in comparisons]


def _documents(folder: Path) -> list[list[int]]:
    """The texts' token ids."""
    tokenizer = load_tokenizer(folder)
    return [tokenizer(text)["input_ids"][:LONGEST] for text in TEXTS]


@torch.no_grad()
def _run_ours(
    hf_config: dict[str, Any], build: Build, documents: list[list[int]], computed: torch.dtype, dtype: torch.dtype
) -> _Run | None:
    """Our model on the texts, packed, with weights of `dtype` and computing in `computed`; the result on rank 0."""
    model = build(computed)
    split = model.config.sequence_parallel
    round_weights(model, hf_config, dtype)
    batch = BatchLayout(
        padding_free=True,
        pack_length=None,
        length_multiple=model.config.tensor_model_parallel_size,
        context_parallel_rank=0,
        context_parallel_size=1,
    ).batch([[(np.array(ids), np.ones(len(ids), np.float32)) for ids in documents]], 1.0)
    tokens = sum(len(ids) for ids in documents)  # the rest is padding
    found: dict[str, Any] = {"hidden": {}}

    def some(states: Tensor) -> Tensor:
        """[length (/ TP under sequence parallelism), 1, hidden_size] -> of some tokens [some, hidden_size]"""
        if split:
            states = gather_from_sequence_parallel_region(states)
        return states[:tokens:SAMPLED, 0]

    def keep(_, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found["logits"] = logits[0, :tokens].float().cpu()
        return logits.sum() * 0, {}

    with ExitStack() as hooks:
        for chunk in model.chunks:
            chunk.eval()
            for layer in cast(Any, chunk.decoder.layers):
                hooks.enter_context(_kept(layer, found["hidden"], layer.layer_number - 1, some))
        run_schedule(
            model,
            model.chunks,  # pyright: ignore[reportArgumentType]
            [batch],
            keep,
            forward_only=True,
            output=lambda batch: Logits(),
        )
    first_copy = model.groups.dp.rank() == 0 and model.groups.tp.rank() == 0
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(found if first_copy else {}, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return None
    logits = next(one["logits"] for one in everyone if "logits" in one)
    return _Run(logits, {layer: states for one in everyone for layer, states in one.get("hidden", {}).items()})


@torch.no_grad()
def round_weights(model: Model, hf_config: dict[str, Any], dtype: torch.dtype) -> None:
    """Give every tensor the values that it has in a checkpoint of `dtype`."""
    entries = expand_mappings(family_of(hf_config), hf_config, model.architecture)
    for key, tensor in collect_params(model.chunks).items():
        if not entries[key].fp32:
            tensor.copy_(tensor.to(dtype))


@torch.no_grad()
def _run_theirs(
    folder: Path,
    adapter: Path | None,
    hf_config: dict[str, Any],
    documents: list[list[int]],
    dtypes: list[torch.dtype],
    dtype: torch.dtype,
) -> list[_Run]:
    """transformers' model on the texts, one by one, with weights of `dtype`: once computing in each of `dtypes`."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if quantization := hf_config.get("quantization_config"):
        from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

        config = Mxfp4Config if quantization.get("quant_method") == "mxfp4" else FineGrainedFP8Config
        options["quantization_config"] = config(dequantize=True)
    try:
        model: Any = load_model(folder, **options).eval()
    except ValueError as error:
        raise PrecisionError(f"--test_convert_precision: {error}") from error
    if adapter:
        model = merged(adapted(model, adapter, folder))
    needed = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    device = runtime.device()
    if device.type == "cuda" and needed > 0.8 * torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")  # slowly, but it fits
    runs = {}
    for computed in sorted(dtypes, key=lambda one: one == torch.float32):  # first as it was read: parts may be fp32
        model = (model if computed == dtype else model.to(computed)).to(device)
        logits, parts = [], []
        for ids in documents:
            hidden: dict[int, Tensor] = {}
            with ExitStack() as hooks:
                for number, layer in enumerate(_layers_of(model)):
                    hooks.enter_context(_kept(layer, hidden, number))
                logits.append(model(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu())
            parts.append(hidden)
        states = {layer: torch.cat([part[layer][0] for part in parts])[::SAMPLED].clone() for layer in parts[0]}
        runs[computed] = _Run(torch.cat(logits), states)
    return [runs[computed] for computed in dtypes]


def _layers_of(model: Any) -> list[nn.Module]:
    """The decoder layers of a transformers model."""
    number = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    return list(lists[0]) if lists else []


@contextmanager
def _kept(layer: nn.Module, found: dict[int, Tensor], number: int, change: Callable[[Tensor], Tensor] | None = None):
    """Within, what `layer` gives is put into `found` under its number, on the CPU in fp32."""

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        found[number] = (states if change is None else change(states)).float().cpu()

    handle = layer.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _compare(
    ours: list[_Run], theirs: list[_Run], dtypes: list[torch.dtype], experts: bool
) -> tuple[list[Comparison], list[str]]:
    """The comparisons, and lines for the user: of the layers too, where a comparison fails."""
    exact = theirs[0].logits  # fp32 comes first
    spread = exact.std().item()
    comparisons, report = [], []
    for dtype, mine, other in zip(dtypes, ours, theirs, strict=True):
        difference = (mine.logits - other.logits).abs()
        allowed = BOUNDS_FP32[experts]
        if dtype != torch.float32:
            difference = (mine.logits - exact).abs()
            error = (other.logits - exact).abs()
            allowed = (
                max(LARGEST_TIMES * error.max().item() / spread, allowed[0]),
                max(MEAN_TIMES * error.mean().item() / spread, allowed[1]),
            )
        comparison = Comparison(
            dtype=str(dtype).removeprefix("torch."),
            largest=difference.max().item() / spread,
            mean=difference.mean().item() / spread,
            agreement=(mine.logits.argmax(-1) == other.logits.argmax(-1)).float().mean().item(),
            largest_allowed=allowed[0],
            mean_allowed=allowed[1],
        )
        comparisons.append(comparison)
        report.append(str(comparison))
        if not comparison.passed:
            report += _layers_apart(mine, other)
    return comparisons, report


def _layers_apart(ours: _Run, theirs: _Run) -> list[str]:
    """For each layer how far the hidden states after it are apart, over their standard deviation."""
    lines = []
    for layer in sorted(ours.hidden.keys() & theirs.hidden.keys()):
        mine, other = ours.hidden[layer], theirs.hidden[layer]
        far = ((mine - other).abs().max() / other.std()).item()
        lines.append(f"  after layer {layer}: hidden states differ by at most {far:.2e} of their standard deviation")
    return lines


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
