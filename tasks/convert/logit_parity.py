"""Logit parity of a conversion (`--test_convert_precision`), in fp32 and in the export's dtype.

Compares the logits of both sides on real texts, after rounding the weights of both to the export's dtype. This
project's model runs in its parallel layout on all ranks, and is freed before rank 0 loads transformers' model, which
must fit into that rank's memory in fp32.
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
from ...bridge.checkpoint.answering_model import answering_model
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
# Bounds of the largest and mean logit difference in fp32, over the logits' standard deviation, by whether the model has
# experts: rounding decides between two experts with almost equal scores, so a few tokens differ more.
BOUNDS_FP32 = {False: (1e-3, 1e-4), True: (0.1, 1e-3)}
# Bounds in other dtypes, as multiples of transformers' own error against its fp32 logits.
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
    hidden: dict[int, Tensor]  # states after each layer, at every HIDDEN_STRIDE-th token [sampled, hidden_size]


def check_precision(
    folder: Path, hf_config: JsonObject, build: Build, dtype: torch.dtype, *, adapter: Path | None = None
) -> list[LogitComparison]:
    """Compare the Hugging Face checkpoint in `folder`, after merging `adapter`, with the model of `build`.

    Every rank calls this; rank 0 prints a line per dtype. Returns the comparisons. Raises PrecisionError on every rank,
    with the differences per layer, if one exceeds its bound.
    """
    documents = broadcast_from_rank0(lambda: _documents(folder))
    dtypes = list(dict.fromkeys([torch.float32, dtype]))
    tested_outputs = []
    for compute_dtype in dtypes:
        tested_outputs.append(_run_tested(hf_config, build, documents, compute_dtype, dtype))
        _free_memory()

    def compare() -> tuple[list[LogitComparison], list[str]]:
        tested = [run for run in tested_outputs if run is not None]
        has_experts = bool(family_of(hf_config).describe(hf_config).transformer.get("num_moe_experts"))
        reference = _run_reference(folder, adapter, hf_config, documents, dtypes, dtype)
        return _compare(tested, reference, dtypes, has_experts)

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
    hf_config: JsonObject, build: Build, documents: list[list[int]], compute_dtype: torch.dtype, dtype: torch.dtype
) -> _Outputs | None:
    """Run this project's model on the packed texts, with weights of `dtype`. Return its outputs on rank 0."""
    model = build(compute_dtype)
    is_sequence_parallel = model.config.sequence_parallel
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
        """Sample tokens: [length (/ TP with SP), 1, hidden_size] -> [sampled, hidden_size]"""
        if is_sequence_parallel:
            states = gather_from_sequence_parallel_region(states)
        return states[:tokens:HIDDEN_STRIDE, 0]

    def store(_, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
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
            store,
            forward_only=True,
            output=lambda batch: Logits(),
        )
    first_copy = model.groups.dp.rank() == 0 and model.groups.tp.rank() == 0
    rank_outputs: list[JsonObject] = [{}] * dist.get_world_size()
    dist.gather_object(outputs if first_copy else {}, rank_outputs if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return None
    logits = next(part["logits"] for part in rank_outputs if "logits" in part)
    return _Outputs(
        logits, {layer: states for part in rank_outputs for layer, states in part.get("hidden", {}).items()}
    )


@torch.no_grad()
def round_weights(model: Model, hf_config: JsonObject, dtype: torch.dtype) -> None:
    """Round every tensor to `dtype`, except those that checkpoints store in fp32."""
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
    """Run transformers' model on each text, with weights of `dtype`, and computation in each of `dtypes`."""
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
    model = answering_model(model)
    needed = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    device = runtime.device()
    if device.type == "cuda" and needed > 0.8 * torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")  # slow, but it fits
    runs = {}
    # The stored dtype comes first: its model may have fp32 parts, which converting back from fp32 would not restore.
    for compute_dtype in sorted(dtypes, key=lambda candidate: candidate == torch.float32):
        model = (model if compute_dtype == dtype else model.to(compute_dtype)).to(device)
        logits, document_states = [], []
        for ids in documents:
            hidden: dict[int, Tensor] = {}
            with ExitStack() as hooks:
                for layer_number, layer in enumerate(_layers_of(model)):
                    hooks.enter_context(_store_outputs(layer, hidden, layer_number))
                logits.append(model(torch.tensor([ids], device=device), use_cache=False).logits[0].float().cpu())
            document_states.append(hidden)
        states = {
            layer: torch.cat([states[layer][0] for states in document_states])[::HIDDEN_STRIDE].clone()
            for layer in document_states[0]
        }
        runs[compute_dtype] = _Outputs(torch.cat(logits), states)
    return [runs[compute_dtype] for compute_dtype in dtypes]


def _layers_of(model: "PreTrainedModel") -> list[nn.Module]:
    """Return the decoder layers of a transformers model."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    return list(lists[0]) if lists else []


@contextmanager
def _store_outputs(
    layer: nn.Module,
    states_by_layer: dict[int, Tensor],
    layer_number: int,
    transform: Callable[[Tensor], Tensor] | None = None,
):
    """Store the layer's outputs within the context in `states_by_layer`, on the CPU in fp32."""

    def store(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        states_by_layer[layer_number] = (states if transform is None else transform(states)).float().cpu()

    handle = layer.register_forward_hook(store)
    try:
        yield
    finally:
        handle.remove()


def _compare(
    tested: list[_Outputs], reference: list[_Outputs], dtypes: list[torch.dtype], has_experts: bool
) -> tuple[list[LogitComparison], list[str]]:
    """Return the comparisons, and report lines with per-layer differences of failed ones."""
    fp32_logits = reference[0].logits  # fp32 comes first
    spread = fp32_logits.std().item()
    comparisons, report = [], []
    for dtype, tested_run, reference_run in zip(dtypes, tested, reference, strict=True):
        difference = (tested_run.logits - reference_run.logits).abs()
        allowed = BOUNDS_FP32[has_experts]
        if dtype != torch.float32:
            difference = (tested_run.logits - fp32_logits).abs()
            error = (reference_run.logits - fp32_logits).abs()
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
    """Return a line for each layer: the largest difference of its output states, over their standard deviation."""
    lines = []
    for layer in sorted(tested.hidden.keys() & reference.hidden.keys()):
        tested_states, reference_states = tested.hidden[layer], reference.hidden[layer]
        difference = ((tested_states - reference_states).abs().max() / reference_states.std()).item()
        lines.append(
            f"  after layer {layer}: hidden states differ by at most {difference:.2e} of their standard deviation"
        )
    return lines


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
