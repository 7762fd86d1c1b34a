"""What adapters have to do: PEFT's own on transformers' model, and for experts, which PEFT fuses, matrices by hand.

Both train in fp32 with torch's AdamW, one document at a time, from adapters whose B is not 0.
"""

import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from tests.bridge.families import tinies
from tests.bridge.families.reference import SMALLEST_MARGIN, random_model, routing_margins
from tests.layouts.reference import BETAS, CLIP, LR, STEPS, WEIGHT_DECAY, loss_of, samples

PREFIX = "base_model.model."
RANK, ALPHA = 3, 7.0
EPS = 1e-3  # of AdamW: where gradients are next to nothing their rounding errors would count as much as others
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")  # a module's name in files: {layer's experts}.{number}.{matrix}
GATE, DOWN, UP = ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")
AS_PARAMETERS = ("gate", *GATE, *DOWN, *UP)  # in models with experts: last names that PEFT takes for the experts'


@dataclass(frozen=True)
class Case:
    """A model, and which adapters it has."""

    tiny: str  # of tests.bridge.families
    modules: str  # pattern of the names in files of the modules with adapters
    options: dict[str, Any] = field(default_factory=dict)  # the same as flags
    peft: dict[str, Any] = field(default_factory=dict)  # further settings of PEFT's LoraConfig
    by_hand: bool = False


PROJECTIONS = r".+\.(q|k|v|o|gate|up|down)_proj"
LATENT = r"(q_a|q_b|kv_b|o)_proj|kv_a_proj_with_mqa"
KIMI = r".+self_attn.*\.([qkvbo]|[fg]_[ab]|kv_b)_proj|.+_with_mqa"
DENSE = rf".+\.self_attn\.({LATENT})|.+\.mlp\.(shared_experts\.)?(gate|up|down)_proj"
FEW = r"model\.layers\.[{}]\.(self_attn\.k_proj|mlp\.gate_proj)"
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
CASES = {
    "qwen3": Case("qwen3", PROJECTIONS),
    "llama": Case("llama", PROJECTIONS),
    # With more ranks than key heads: a rank's part of qkv has no keys, or no queries.
    "one KV head": Case("qwen3 one KV head", PROJECTIONS),
    "some projections": Case(
        "qwen3",
        r".+\.(q|v|up|down)_proj",
        {"target_modules": ["q_proj", "v_proj", "up_proj", "linear_fc2"], "use_rslora": True},
        {"use_rslora": True},
    ),
    **{
        f"{name} layers": Case("llama", pattern, {"target_regex": pattern, "target_modules": []})
        for name, pattern in {"first": FEW.format("01"), "last": FEW.format("23")}.items()
    },
    "embedding": Case(
        "qwen3",
        r".+\.(embed_tokens|o_proj)",
        {"target_modules": ["all-embedding", "linear_proj"], "modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head"]},
    ),
    "DoRA": Case("qwen3 biases", PROJECTIONS, {"use_dora": True}, {"use_dora": True}),
    "all biases": Case(
        "llama biases", r".+\.(q|o|gate|down)_proj",
        {"target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"], "lora_bias": "all"},
        {"bias": "all"},
    ),
    "some biases": Case(
        "llama biases", r".+\.(o|down)_proj",
        {"target_modules": ["o_proj", "down_proj"], "lora_bias": "lora_only"},
        {"bias": "lora_only"},
    ),
    "tied embeddings": Case(
        "llama",
        r".+\.(q|down)_proj",
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    "dense layers": Case("deepseek_v3", DENSE, {"target_regex": DENSE, "target_modules": []}),
    "experts": Case("deepseek_v3", rf"{DENSE}|.+\.experts\.\d+\.\w+_proj", by_hand=True),
    # Of these that they are loaded and saved is enough: names and layouts of their own.
    "phi3": Case("phi3", r".+_proj", by_hand=True),
    "glm4": Case("glm4", r".+_proj", by_hand=True),
    "gemma3": Case("gemma3_text", r".+_proj", by_hand=True),
    "Moonlight": Case("deepseek_v3 Moonlight", rf"{DENSE}|.+\.(q|\d+\.\w+)_proj", by_hand=True),
    "shared experts": Case("qwen2_moe", r".+_proj", by_hand=True),
    # All experts of a layer in one tensor: transposed with gates and ups by turns, or not.
    "stacked experts": Case("gpt_oss", r".+\.[qkvo]_proj", peft=EXPERTS),
    "stacked experts and MLPs": Case("gemma4_text experts", PROJECTIONS, peft=EXPERTS),
    # Matrices that are transposed, and transformers' class does not say so.
    "stacked experts of Llama 4": Case("llama4_text", PROJECTIONS, peft=EXPERTS),
    "stacked experts of Granite": Case("granitemoe", r".+\.[qkvo]_proj", peft=EXPERTS),
    "Mamba-2": Case("nemotron_h dense", r".+\.(in|q|k|v|o|up|down)_proj"),
    "Mamba-2 and experts": Case(
        "nemotron_h latent",
        r".+\.(in|q|k|v|o|fc[12]_latent)_proj|.+shared_experts\.(up|down)_proj",
        peft={"target_parameters": ["experts.up_proj", "experts.down_proj"]},
    ),
    "Kimi delta attention": Case("kimi_linear", KIMI, {"target_regex": KIMI, "target_modules": []}),
    "pieces of Mamba-2": Case("granitemoehybrid dense", r".+\.(in|q|k|v|o)_proj|.+put_linear"),
    "parallel mixers": Case("falcon_h1", r".+\.(in|q|k|v|o|gate|up|down)_proj"),
    "short convolutions": Case("lfm2", r".+\.(in|q|k|v|out)_proj|.+w[123]"),
    "hybrid": Case("qwen3_next", r".+_proj(_qkvz|_ba)?", by_hand=True),
    "experts and routers": Case(
        "mixtral",
        r".+\.(q|k|v|o)_proj|.+\.experts\.\d+\.w[123]|.+\.gate",
        {"target_modules": ["all-linear", "all-router"]},
        by_hand=True,
    ),
}  # fmt: skip


@dataclass
class Trained:
    """What three steps gave, and what was there before and behind them, by the names in PEFT's files."""

    losses: list[float]
    grad_norms: list[float]
    tensors: dict[str, Tensor]
    log_probs: list[float]  # of the trained tokens of the step that would follow


def options_of(case: Case) -> dict[str, Any]:
    """The flags of a case."""
    flags = {"tuner_type": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    return flags | {"target_modules": ["all-linear"]} | case.options


def make_base(folder: Path, tiny: str) -> Path:
    """Write the tiny checkpoint `folder`/`tiny`, where it is not there, and return it."""
    made = folder / tiny
    if not made.exists():
        random_model(tinies()[tiny], seed=0).save_pretrained(made)
    return made


def load_base(folder: Path) -> Any:
    """transformers' model of a folder, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def make_adapter(case: Case, base: Path, folder: Path) -> None:
    """Write the adapter that training starts from: by PEFT, or for experts as files name its matrices."""
    if not case.by_hand:
        _peft(case, base).save_pretrained(str(folder))
        return
    weights = load_file(base / "model.safetensors")
    modules = [name.removesuffix(".weight") for name in weights]
    names = [name for name in modules if re.fullmatch(case.modules, name)]
    tensors = {}
    noise = _noise()
    for name in sorted(names):
        outputs, inputs = weights[f"{name}.weight"].shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = noise(RANK, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = noise(outputs, RANK)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none"}
    settings |= {"target_modules": sorted({name.rpartition(".")[2] for name in names}), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def train(case: Case, base: Path, adapter: Path) -> Trained:
    """Train the adapter of a folder for STEPS steps."""
    if case.by_hand:
        model = load_base(base)
        trained = adapt_by_hand(model, load_file(adapter / "adapter_model.safetensors"), ALPHA / RANK)
        parameters: Iterable[nn.Parameter] = trained.values()
    else:
        model = PeftModel.from_pretrained(load_base(base), adapter, is_trainable=True)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = list(parameters)
    model.train()
    decayed = [p for p in parameters if p.ndim > 1]
    plain = [p for p in parameters if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    with routing_margins() as margins:
        for step in range(STEPS):
            loss = loss_of(model, samples(step))
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP)))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert min(margins, default=1.0) > SMALLEST_MARGIN, "rounding may choose other experts: take another seed"
    tensors = trained if case.by_hand else get_peft_model_state_dict(model, save_embedding_layers=False)
    return Trained(
        losses, norms, {name: tensor.detach().clone() for name, tensor in tensors.items()}, log_probs_of(model)
    )


@torch.no_grad()
def log_probs_of(model: Any) -> list[float]:
    """Log-probabilities of the trained tokens of the step after the last."""
    found: list[float] = []
    model.eval()
    loss_of(model, samples(STEPS), found)
    return found


def adapt_by_hand(model: Any, tensors: dict[str, Tensor], scaling: float) -> dict[str, nn.Parameter]:
    """Add scaling * B @ A to each matrix for which `tensors`, by names in files, have some; these as parameters."""
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    products = {
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): (parameters[name.replace("lora_A", "lora_B")], a)
        for name, a in parameters.items()
        if name.endswith(".lora_A.weight")
    }
    of_experts: dict[str, dict[tuple[int, str], tuple[Tensor, Tensor]]] = {}
    for name, product in products.items():
        module = name.replace("block_sparse_moe", "mlp")  # files of older models
        if expert := EXPERT.fullmatch(module):
            of_experts.setdefault(expert[1], {})[int(expert[2]), expert[3]] = product
        else:
            parametrize.register_parametrization(model.get_submodule(module), "weight", _Sum([[product]], scaling))
    for name, matrices in of_experts.items():
        numbers = sorted({number for number, _ in matrices})
        for parameter, leaves in (("gate_up_proj", (GATE, UP)), ("down_proj", (DOWN,))):
            found = [[next(matrices[n, x] for x in leaf if (n, x) in matrices) for leaf in leaves] for n in numbers]
            parametrize.register_parametrization(model.get_submodule(name), parameter, _Sum(found, scaling))
    return parameters


class _Sum(nn.Module):
    """A matrix, or a stack of them, and what adapters add to it: for each of the stack the products B @ A, by rows."""

    def __init__(self, products: list[list[tuple[Tensor, Tensor]]], scaling: float):
        super().__init__()
        self.products, self.scaling = products, scaling

    def forward(self, weight: Tensor) -> Tensor:
        added = torch.stack([torch.cat([b @ a for b, a in rows]) for rows in self.products])
        return weight + self.scaling * added.view(weight.shape)


def _peft(case: Case, base: Path) -> Any:
    """PEFT's model of a case, with random values wherever it trains."""
    model = load_base(base)
    names = {name for name, _ in model.named_modules() if re.fullmatch(case.modules, name)}
    # Of these PEFT makes the experts' where there are any; as parameters they stay what they are.
    experts = hasattr(model.config, "n_routed_experts") or "target_parameters" in case.peft
    named = {name for name in names if experts and name.rpartition(".")[2] in AS_PARAMETERS}
    parameters = [*(f"{name}.weight" for name in sorted(named)), *case.peft.get("target_parameters", ())]
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,  # type: ignore[arg-type]
        target_modules=sorted(names - named),
        **case.peft | {"target_parameters": parameters or None},
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(11)
        warnings.simplefilter("ignore")  # rank_pattern of experts that have no adapters
        adapted = get_peft_model(model, settings)
    noise = _noise()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(noise(*parameter.shape))
    return adapted


def _noise():
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    return noise


def distance(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value."""
    found, wanted = (torch.as_tensor(np.asarray(values)) for values in (found, wanted))
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
