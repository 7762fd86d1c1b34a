"""Multi-token prediction against a reference written from the paper (DeepSeek-V3, section 2.2): transformers has none.

The reference is plain torch around transformers' decoder layers, for each document by itself.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.bridge import families
from tests.bridge.families import deepseek_v3, deepseek_v32, glm4_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_next
from tests.bridge.families.test_families import one_process  # noqa: F401
from tests.torchrun import torchrun

pytestmark = pytest.mark.slow
SCALE, BOUND = 0.3, 1e-4
STEPS, LR, WEIGHT_DECAY, EPS, CLIP = 3, 1e-3, 0.1, 1e-4, 1.0  # settings of training


class Case(NamedTuple):
    """Model with further layers."""

    config: Callable[[], Any]
    depths: int
    alike: int  # layer of the model of whose kind they are
    prefix: str  # of a layer's tensors in the files
    names: dict[str, str]  # in the files of those beside the inner layer; the others are named as here
    weight: str  # one of the model's, whose gradient is compared
    output: str  # an output matrix of attention, likewise
    seed: int = 0  # leaves no tie among scores of experts or of keys, which few heads of an indexer would make at 0
    norm: float = 1.0  # mean of norms
    axes: tuple[int, ...] = ()  # of positions
    means: Mapping[str, float] = {}  # of the model's tensors, as in `Tiny`
    stds: Mapping[str, float] = {}


DEEPSEEK = Case(
    lambda: deepseek_v3.config(num_mtp_layers=2),
    depths=2,
    alike=-1,
    prefix="model.layers.{layer}.",
    names={"norm.weight": "model.layers.{layer}.shared_head.norm.weight"},
    weight="model.layers.0.self_attn.kv_b_proj.weight",
    output="model.layers.0.self_attn.o_proj.weight",
)
QWEN = Case(
    lambda: qwen3_next.config(),
    depths=1,
    alike=1,
    prefix="mtp.layers.0.",
    names={
        "norm.weight": "mtp.norm.weight",
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
    },
    weight="model.layers.1.self_attn.k_proj.weight",
    output="model.layers.1.self_attn.o_proj.weight",
    norm=0.0,
    means=qwen3_next.MEANS,
    stds=qwen3_next.STDS,
)
CASES = {
    "DeepseekV3": DEEPSEEK,
    "DeepseekV32": DEEPSEEK._replace(
        config=lambda: deepseek_v32.config(num_nextn_predict_layers=2, index_n_heads=16), seed=1
    ),
    "Glm4Moe": DEEPSEEK._replace(
        config=lambda: glm4_moe.config(num_nextn_predict_layers=2), weight="model.layers.0.self_attn.k_proj.weight"
    ),
    "Qwen3Next": QWEN,
    "Qwen3Next tied": QWEN._replace(config=lambda: qwen3_next.config(tie_word_embeddings=True)),
    "Qwen3_5": QWEN._replace(config=lambda: qwen3_5_text.config(), axes=(3,)),
    "Qwen3_5Moe": QWEN._replace(config=lambda: qwen3_5_moe_text.config(), axes=(3,)),
}
LONG = "DeepseekV32", "Glm4Moe", "Qwen3_5", "Qwen3_5Moe"


def make(folder: Path, name: str) -> dict:
    """Write a tiny checkpoint with further layers, and return the reference's losses and gradients by file names."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.bridge.families import reference

    case = CASES[name]
    settings, seed = case.config(), case.seed
    model = reference.random_model(families.Tiny(lambda: settings, means=case.means, stds=case.stds), seed)
    model.save_pretrained(folder)
    layers = further_layers(case, settings, sys.modules[type(model).__module__], name.split()[0])

    def in_files(tensors_of) -> dict:
        return names_in_files(case, settings, layers, tensors_of)

    tensors = load_file(folder / "model.safetensors")
    tensors |= in_files(lambda layer: [*layer.named_parameters(), *layer.named_buffers()])
    if case.prefix == DEEPSEEK.prefix:  # a copy, as on the hub
        first = f"model.layers.{settings.num_hidden_layers}."
        tensors[first + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    weights = [*model.named_parameters(), *((name, p) for layer in layers for name, p in layer.named_parameters())]
    groups = [
        {"params": [p for _, p in weights if (p.ndim > 1) == decays], "weight_decay": WEIGHT_DECAY * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    expected: dict[str, Any] = {"losses": [], "mtp_losses": [], "norms": [], "output": case.output}
    expected["parameters"] = sum(parameter.numel() for _, parameter in weights)
    for step in range(STEPS):
        main, further = losses_of(model, layers, case)
        optimizer.zero_grad()
        (main + SCALE * further).backward()
        if step == 0:
            gradients = in_files(lambda layer: [(name, reference.gradient(p)) for name, p in layer.named_parameters()])
            for name in ("model.embed_tokens.weight", "lm_head.weight", case.weight, case.output):
                if name in tensors:
                    gradients[name] = model.get_parameter(name).grad.clone()
            expected["gradients"] = gradients
        expected["losses"].append(main.item())
        expected["mtp_losses"].append(further.item())
        expected["norms"].append(float(torch.nn.utils.clip_grad_norm_([p for _, p in weights], CLIP)))
        optimizer.step()
    expected["trained"] = in_files(lambda layer: layer.named_parameters())
    for name in ("model.embed_tokens.weight", case.weight, case.output):
        expected["trained"][name] = model.get_parameter(name).detach().clone()
    return expected


def further_layers(case: Case, settings, code, kind: str) -> list:
    """Return the layers of each depth, random. settings: the text model's config. code: transformers' module"""
    import torch

    decoder_layer, rms_norm = getattr(code, f"{kind}DecoderLayer"), getattr(code, f"{kind}RMSNorm")
    layers = []
    for depth in range(case.depths):
        layer = torch.nn.Module()
        layer.block = decoder_layer(settings, case.alike % settings.num_hidden_layers)
        layer.block.self_attn.config._attn_implementation = "eager"
        layer.enorm, layer.hnorm, layer.norm = (rms_norm(settings.hidden_size, settings.rms_norm_eps) for _ in range(3))
        layer.eh_proj = torch.nn.Linear(2 * settings.hidden_size, settings.hidden_size, bias=False)
        generator = torch.Generator().manual_seed(10 * (case.seed + 1) + depth)
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.data.copy_(noise + case.norm if "norm" in name else noise)
        layers.append(layer)
    return layers


def names_in_files(case: Case, settings, layers, tensors_of) -> dict:
    """Return copies of the tensors that `tensors_of` yields of each layer, by their names in files."""
    tensors = {}
    for depth, layer in enumerate(layers):
        number = settings.num_hidden_layers + depth
        prefix = case.prefix.format(layer=number)
        for name, tensor in tensors_of(layer):
            if name in case.names:
                tensors[case.names[name].format(layer=number)] = tensor
                continue
            name = name.removeprefix("block.")
            if name.endswith("experts.gate_up_proj"):
                for expert, both in enumerate(tensor):
                    gate, up = both.chunk(2)
                    tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                    tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
            elif name.endswith("experts.down_proj"):
                tensors |= {f"{prefix}mlp.experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
            else:
                tensors[prefix + name] = tensor
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def losses_of(model, layers, case: Case):
    """Return the loss of the next tokens, and the mean of those of the further layers."""
    import torch

    from tests.bridge.families import reference

    main, further = torch.zeros(()), torch.zeros(())
    packs = reference.documents()
    count = sum(float(weights[1:].sum()) for pack in packs for _, weights in pack)
    for ids, weights in (document for pack in packs for document in pack):
        tokens, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        hidden = model.model(tokens[None]).last_hidden_state
        turns = model.model.rotary_emb(hidden, torch.arange(len(tokens)).expand(*case.axes, 1, -1))
        main = main + loss(model, hidden, tokens, weights, 1)
        further = further + further_loss(
            model, layers, hidden, model.model.embed_tokens(tokens[None]), turns, tokens, weights
        )
    return main / count, further / count / case.depths


def further_loss(model, layers, hidden, embeddings, turns, tokens, weights):
    """Return the sum of the losses of all depths of a document.

    hidden, embeddings: [1, length, hidden_size] of the model, behind its norm and before its layers. turns: of its rope
    """
    import torch

    further = torch.zeros(())
    for depth, layer in enumerate(layers, start=1):
        if len(tokens) - depth < 2:
            break
        # What position i knows, with the embedding of token i + depth: positions 0 to T - depth - 1.
        kept = len(tokens) - depth
        pairs = layer.enorm(embeddings[:, depth:]), layer.hnorm(hidden[:, :kept])
        mask = torch.full((kept, kept), -torch.inf).triu(1)[None, None]
        cos, sin = (turn[:, :kept] for turn in turns)
        hidden = layer.block(
            layer.eh_proj(torch.cat(pairs, dim=-1)), attention_mask=mask, position_embeddings=(cos, sin)
        )
        hidden = layer.norm(hidden)
        further = further + loss(model, hidden, tokens, weights, depth + 1)
    return further


def loss(model, hidden, tokens, weights, ahead):
    """Summed over the tokens that are `ahead` of each position."""
    import torch

    logits = model.lm_head(hidden)[0, : len(tokens) - ahead]
    losses = torch.nn.functional.cross_entropy(logits, tokens[ahead:], reduction="none")
    return (losses * weights[ahead:]).sum()


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES]
)
def made(request, tmp_path_factory):
    """The folder, and the reference's losses."""
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("prediction")
    expected = make(folder / "fp32", request.param)
    torch.save(expected, folder / "reference.pt")
    (folder / "flags.json").write_text(
        json.dumps({"mtp_num_layers": CASES[request.param].depths, "mtp_loss_scaling_factor": SCALE})
    )
    return folder, expected


def compare(result: dict, expected: dict) -> None:
    for rows in ("packed", "padded"):
        for name, losses in (("loss", "losses"), ("mtp_loss", "mtp_losses")):
            assert result[rows][name] == pytest.approx(expected[losses][0], rel=BOUND), f"{name} of {rows} documents"
    assert not result["changed"]
    assert result["parameters"] == expected["parameters"]
    assert result["gradients"] < BOUND, result["worst gradient"]
    for name in ("losses", "mtp_losses", "norms"):
        assert result["training"][name] == pytest.approx(expected[name], rel=BOUND), name
    assert result["training"]["largest change"] < BOUND, result["training"]["of"]
    assert result["training"]["copies are equal"]
    assert not result["training"]["stale"]
    assert all(distance < BOUND for distance in result["adapters"].values()), result["adapters"]


def test_one_process(made, one_process):  # noqa: F811
    from tests.bridge.families import worker_prediction

    folder, expected = made
    assert expected["mtp_losses"][0] > 1
    compare(worker_prediction.compute(folder, json.loads((folder / "flags.json").read_text())), expected)


@pytest.mark.parametrize("trains", [False, True])
def test_through_megatrons_format(made, one_process, tmp_path, trains):  # noqa: F811
    """As parts of the model, or beside it: what comes back is what was there."""
    import torch
    from megaswift.bridge.checkpoint.distributed import count_mtp_depths, load_distributed, save_distributed
    from megaswift.bridge.checkpoint.hub import read_config
    from megaswift.bridge.model.build import build_model

    from tests.bridge.families import worker

    source, (mcore, back) = made[0] / "fp32", (tmp_path / name for name in ("mcore", "back"))
    depths = json.loads((made[0] / "flags.json").read_text())["mtp_num_layers"] if trains else None
    config, options = read_config(source), worker.options_of({"mtp_num_layers": depths})
    model = worker.open_model(source, options, torch.float32)
    mcore.mkdir()
    save_distributed(model.chunks, config, source, mcore, dtype=torch.float32, converted=True)
    assert count_mtp_depths(mcore) == (depths or 0)
    model = build_model(config, options, torch.float32)
    load_distributed(model.chunks, config, mcore)
    saved = worker.save(model, mcore, back, torch.float32, 100_000)
    before = worker.tensors_of(source)
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    if depths:
        without = build_model(config, one_process, torch.float32)
        with pytest.raises(ValueError, match=f"give --mtp_num_layers {depths}"):
            load_distributed(without.chunks, config, mcore)


@pytest.mark.parametrize(
    "made",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in ("DeepseekV3", "Qwen3Next"))) for name in CASES],
    indirect=True,
)
def test_two_processes(made):
    compare_layouts(*made, processes=2, layouts=7)


@pytest.mark.parametrize(
    "made",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "Qwen3Next tied")) for name in CASES],
    indirect=True,
)
def test_four_processes(made):
    compare_layouts(*made, processes=4, layouts=4)


def compare_layouts(folder: Path, expected: dict, *, processes: int, layouts: int) -> None:
    done = torchrun("tests.bridge.families.worker_prediction", folder, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "results.json").read_text())
    assert len(results) == layouts
    for result in results.values():
        compare(result, expected)


def test_logits_are_those_of_the_model_alone(made, one_process):  # noqa: F811
    """As `--test_convert_precision` compares them."""
    import torch
    from megaswift.bridge.model.outputs import Logits
    from megaswift.tasks.train.step import run_schedule

    from tests.bridge.families import worker

    folder, by_depths = made[0], {}
    for depths in (0, json.loads((folder / "flags.json").read_text())["mtp_num_layers"]):
        options = worker.options_of({"mtp_num_layers": depths})
        model, logits = worker.open_model(folder / "fp32", options, torch.float32), []

        def store(_, values, logits=logits):
            logits.append(values)
            return values.sum() * 0, {}

        batches = worker.batches(options, packed=True)
        with torch.no_grad():
            run_schedule(model, model.chunks, batches, store, forward_only=True, output=lambda _: Logits())  # type: ignore[arg-type]
        by_depths[depths] = torch.stack(logits)
    assert by_depths[0].shape[1:3] == batches[0].tokens.shape
    torch.testing.assert_close(*by_depths.values())


def test_more_layers_than_there_are_are_refused(made, one_process):  # noqa: F811
    from tests.bridge.families import worker

    with pytest.raises(ValueError, match=r"--mtp_num_layers 3: config.json has (num_nextn_predict_layers 2|1 such)"):
        worker.open_model(made[0] / "fp32", worker.options_of({"mtp_num_layers": 3}), None)  # type: ignore[arg-type]
