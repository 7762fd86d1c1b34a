"""Logit parity of a conversion (`--test_convert_precision`), in fp32 and in the export's dtype.

Both sides' logits on real texts are compared. This project's model runs in its layout on all ranks, and is freed before
rank 0 opens transformers' model, which must fit into that rank's memory once in fp32. Both sides' weights are rounded
to the export's dtype first.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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
from ...templates.json_types import JsonObject
from ..distributed.collectives import broadcast_from_rank0
from ..train.step import run_schedule
from .peft_model import attach_adapter, merge_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Build = Callable[[torch.dtype], Model]  # returns this project's loaded model, computing in a dtype

MAX_TOKENS = 64  # tokens of each text
HIDDEN_STRIDE = 8  # hidden states are compared at every 8th token
# Bounds of the largest and mean difference of a logit in fp32, over the logits' standard deviation, without and with
# experts: where two experts' scores are almost equal, rounding decides between them, and a few tokens differ more.
BOUNDS_FP32 = {False: (1e-3, 1e-4), True: (0.1, 1e-3)}
# In another dtype: factors over the errors of transformers itself against its own fp32 logits.
MAX_FACTOR, MEAN_FACTOR = 4.0, 2.0
AGREEMENT = 0.98  # share of equal top tokens, in fp32

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
    """Raised when the two sides of a conversion compute different logits."""


@dataclass(frozen=True)
class LogitComparison:
    """Differences of the logits from transformers', divided by the standard deviation of the latter."""

    dtype: str
    largest: float
    mean: float
    agreement: float  # share of positions with the same top token
    largest_allowed: float
    mean_allowed: float

    @property
    def passed(self) -> bool:  # False for NaN
        within = self.largest <= self.largest_allowed and self.mean <= self.mean_allowed
        return within and (self.dtype != "float32" or self.agreement >= AGREEMENT)

    def __str__(self) -> str:
        return (
            f"logits in {self.dtype}: largest difference {self.largest:.2e} of their standard deviation (allowed "
            f"{self.largest_allowed:.1e}), mean {self.mean:.2e} (allowed {self.mean_allowed:.1e}), the top token "
            f"agrees at {self.agreement:.1%}: {'passed' if self.passed else 'FAILED'}"
        )


@dataclass
class _Outputs:
    """Outputs of a model on the texts, on the CPU in fp32."""

    logits: Tensor  # [tokens, vocab_size]
    hidden: dict[int, Tensor]  # the states after each layer, of some tokens [tokens / SAMPLED, hidden_size]


def check_precision(
    folder: Path, hf_config: JsonObject, build: Build, dtype: torch.dtype, *, adapter: Path | None = None
) -> list[LogitComparison]:
    """Compare the Hugging Face checkpoint in `folder`, with a merged adapter, with the model of `build`.

    Every rank calls this; prints a line per dtype. Returns the comparisons. Raises PrecisionError on every rank where
    one exceeds its bound, with the differences per layer.
    """
    documents = broadcast_from_rank0(lambda: _documents(folder))
    dtypes = list(dict.fromkeys([torch.float32, dtype]))
    tested_outputs = []
    for computed in dtypes:
        tested_outputs.append(_run_tested(hf_config, build, documents, computed, dtype))
        _free()

    def compare() -> tuple[list[LogitComparison], list[str]]:
        tested = [run for run in tested_outputs if run is not None]
        experts = bool(family_of(hf_config).describe(hf_config).transformer.get("num_moe_experts"))
        reference = _run_reference(folder, adapter, hf_config, documents, dtypes, dtype)
        return _compare(tested, reference, dtypes, experts)

    comparisons, report = broadcast_from_rank0(compare)
    if dist.get_rank() == 0:
        print("\n".join(report), flush=True)
    if not all(comparison.passed for comparison in comparisons):
        raise PrecisionError("--test_convert_precision: " + "\n".join(report))
    return comparisons


def as_json(comparisons: list[LogitComparison]) -> list[JsonObject]:
    return [asdict(comparison) | {"passed": comparison.passed} for comparison in comparisons]


def _documents(folder: Path) -> list[list[int]]:
    """Return the texts' token ids."""
    tokenizer = load_tokenizer(folder)
    return [tokenizer(text)["input_ids"][:MAX_TOKENS] for text in TEXTS]


@torch.no_grad()
def _run_tested(
    hf_config: JsonObject, build: Build, documents: list[list[int]], computed: torch.dtype, dtype: torch.dtype
) -> _Outputs | None:
    """Run this project's model on the packed texts: weights of `dtype`, computing in `computed`; returns on rank 0."""
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
    outputs: JsonObject = {"hidden": {}}

    def sample(states: Tensor) -> Tensor:
        """[length (/ TP under sequence parallelism), 1, hidden_size] -> of some tokens [some, hidden_size]"""
        if split:
            states = gather_from_sequence_parallel_region(states)
        return states[:tokens:HIDDEN_STRIDE, 0]

    def keep(_, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        outputs["logits"] = logits[0, :tokens].float().cpu()
        return logits.sum() * 0, {}

    with ExitStack() as hooks:
        for chunk in model.chunks:
            chunk.eval()
            for layer in cast(Any, chunk.decoder.layers):
                hooks.enter_context(_store_outputs(layer, outputs["hidden"], layer.layer_number - 1, sample))
        run_schedule(
            model,
            model.chunks,  # pyright: ignore[reportArgumentType]
            [batch],
            keep,
            forward_only=True,
            output=lambda batch: Logits(),
        )
    first_copy = model.groups.dp.rank() == 0 and model.groups.tp.rank() == 0
    parts: list[JsonObject] = [{}] * dist.get_world_size()
    dist.gather_object(outputs if first_copy else {}, parts if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return None
    logits = next(part["logits"] for part in parts if "logits" in part)
    return _Outputs(logits, {layer: states for part in parts for layer, states in part.get("hidden", {}).items()})


@torch.no_grad()
def round_weights(model: Model, hf_config: JsonObject, dtype: torch.dtype) -> None:
    """Round every tensor to its values in a checkpoint of `dtype`."""
    entries = expand_mappings(family_of(hf_config), hf_config, model.architecture)
    for key, tensor in collect_params(model.chunks).items():
        if not entries[key].fp32:
            tensor.copy_(tensor.to(dtype))


@torch.no_grad()
def _run_reference(
    folder: Path,
    adapter: Path | None,
    hf_config: JsonObject,
    documents: list[list[int]],
    dtypes: list[torch.dtype],
    dtype: torch.dtype,
) -> list[_Outputs]:
    """Run transformers' model on each text, with weights of `dtype`, computing in each of `dtypes`."""
    options: JsonObject = {"dtype": dtype, "attn_implementation": "eager"}
    if quantization := hf_config.get("quantization_config"):
        from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

        config = Mxfp4Config if quantization.get("quant_method") == "mxfp4" else FineGrainedFP8Config
        options["quantization_config"] = config(dequantize=True)
    try:
        model: Any = load_model(folder, **options).eval()
    except ValueError as error:
        raise PrecisionError(f"--test_convert_precision: {error}") from error
    if adapter:
        model = merge_adapter(attach_adapter(model, adapter, folder))
    needed = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    device = runtime.device()
    if device.type == "cuda" and needed > 0.8 * torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")  # slow, but it fits
    runs = {}
    for computed in sorted(
        dtypes, key=lambda computed_dtype: computed_dtype == torch.float32
    ):  # the stored dtype first, since parts may be fp32
        model = (model if computed == dtype else model.to(computed)).to(device)
        logits, parts = [], []
        for ids in documents:
            hidden: dict[int, Tensor] = {}
            with ExitStack() as hooks:
                for number, layer in enumerate(_layers_of(model)):
                    hooks.enter_context(_store_outputs(layer, hidden, number))
                logits.append(model(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu())
            parts.append(hidden)
        states = {layer: torch.cat([part[layer][0] for part in parts])[::HIDDEN_STRIDE].clone() for layer in parts[0]}
        runs[computed] = _Outputs(torch.cat(logits), states)
    return [runs[computed] for computed in dtypes]


def _layers_of(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the decoder layers of a transformers model."""
    number = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    return list(lists[0]) if lists else []


@contextmanager
def _store_outputs(
    layer: nn.Module, states_by_layer: dict[int, Tensor], number: int, change: Callable[[Tensor], Tensor] | None = None
):
    """Store the layer's outputs within the context in `states_by_layer`, on the CPU in fp32."""

    def keep(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        states_by_layer[number] = (states if change is None else change(states)).float().cpu()

    handle = layer.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _compare(
    tested: list[_Outputs], reference: list[_Outputs], dtypes: list[torch.dtype], experts: bool
) -> tuple[list[LogitComparison], list[str]]:
    """Return the comparisons and their report, which includes the layers of a failed one."""
    exact = reference[0].logits  # fp32 comes first
    spread = exact.std().item()
    comparisons, report = [], []
    for dtype, tested_run, reference_run in zip(dtypes, tested, reference, strict=True):
        difference = (tested_run.logits - reference_run.logits).abs()
        allowed = BOUNDS_FP32[experts]
        if dtype != torch.float32:
            difference = (tested_run.logits - exact).abs()
            error = (reference_run.logits - exact).abs()
            allowed = (
                max(MAX_FACTOR * error.max().item() / spread, allowed[0]),
                max(MEAN_FACTOR * error.mean().item() / spread, allowed[1]),
            )
        comparison = LogitComparison(
            dtype=str(dtype).removeprefix("torch."),
            largest=difference.max().item() / spread,
            mean=difference.mean().item() / spread,
            agreement=(tested_run.logits.argmax(-1) == reference_run.logits.argmax(-1)).float().mean().item(),
            largest_allowed=allowed[0],
            mean_allowed=allowed[1],
        )
        comparisons.append(comparison)
        report.append(str(comparison))
        if not comparison.passed:
            report += _layer_differences(tested_run, reference_run)
    return comparisons, report


def _layer_differences(tested: _Outputs, reference: _Outputs) -> list[str]:
    """Return for each layer the difference of the hidden states after it, over their standard deviation."""
    lines = []
    for layer in sorted(tested.hidden.keys() & reference.hidden.keys()):
        tested_states, reference_states = tested.hidden[layer], reference.hidden[layer]
        difference = ((tested_states - reference_states).abs().max() / reference_states.std()).item()
        lines.append(
            f"  after layer {layer}: hidden states differ by at most {difference:.2e} of their standard deviation"
        )
    return lines


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
