"""The loss of lightning indexers against its formula (DeepSeek-V3.2, section 2.1) in plain torch.

transformers computes no such loss: the scores that its indexers rank, and the attention of its layers, are caught.
"""

import json
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.bridge import families
from tests.bridge.families import deepseek_v32, glm_moe_dsa
from tests.bridge.families.test_families import one_process  # noqa: F401
from tests.torchrun import torchrun

pytestmark = pytest.mark.slow
COEFF, BOUND = 0.7, 1e-4
SPARSE = {"dsa_indexer_use_sparse_loss": True}
CASES = {
    "all keys": (deepseek_v32.config, {}, ("TP2 SP", "CP2", "TP2 SP recompute")),
    "selected keys": (deepseek_v32.config, SPARSE, ("TP2 SP", "PP2", "CP2 recompute", "EP2")),
    # megatron-core trains experts under TP with SP only
    "no experts": (partial(deepseek_v32.config, first_k_dense_replace=4), {}, ("TP2", "PP2 recompute latents")),
    "sharing": (partial(glm_moe_dsa.config, **glm_moe_dsa.SHARING), SPARSE, ("PP2",)),
}


def make(folder: Path, name: str) -> dict:
    """Write a tiny checkpoint, and return the formula's loss, summed over layers, and gradients by file names."""
    import torch

    from tests.bridge.families import reference

    config, flags, _ = CASES[name]
    for seed in range(20):
        model = reference.random_model(families.Tiny(config), seed)
        with reference.routing_margins() as margins:
            expected = formula(model, is_sparse=bool(flags))
        if min(margins) > reference.SMALLEST_MARGIN:
            break
    model.save_pretrained(folder / "fp32")
    torch.save(expected, folder / "reference.pt")
    (folder / "flags.json").write_text(json.dumps(flags | {"dsa_indexer_loss_coeff": COEFF}))
    return expected


def formula(model, *, is_sparse: bool) -> dict:
    """Mean over the tokens of each pack, then over packs; a document at a time, with plain masks."""
    import torch

    from tests.bridge.families import reference

    code, family = sys.modules[type(model).__module__], type(model).__name__.removesuffix("ForCausalLM")
    indexer, attend = getattr(code, f"{family}Indexer"), code.eager_attention_forward
    topk, divergences = model.config.index_topk, []
    method, with_gradients, latest = torch.Tensor.topk, indexer.forward.__wrapped__, {}

    def index(module, hidden, latent, *arguments, **settings):
        def keep(scores, k, dim=-1, **more):
            latest["scores"] = scores
            return method(scores.detach(), k, dim=dim, **more)

        with torch.enable_grad(), mock.patch.object(torch.Tensor, "topk", keep):
            chosen = with_gradients(module, hidden.detach(), latent.detach(), *arguments, **settings)
        latest["chosen"] = chosen
        return chosen

    def attention(module, query, key, value, mask, scaling, **settings):
        output, shares = attend(module, query, key, value, mask, scaling, **settings)
        if module.indexer is not None:
            length = query.shape[2]
            visible = torch.ones(length, length, dtype=torch.bool).tril()[None]
            if is_sparse and length > topk:
                visible = visible & torch.zeros_like(visible).scatter(-1, latest["chosen"].long(), True)
            else:
                scores = query.detach() @ key.detach().mT * scaling
                shares = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
            target = shares.detach().sum(1) / shares.shape[1]
            logs = latest["scores"].masked_fill(~visible, -torch.inf).log_softmax(-1)
            terms = target * (target.log() - logs)
            divergences.append(terms[visible & (target > 0)].sum())
        return output, shares

    packs, loss = reference.documents(), torch.zeros(())
    with mock.patch.object(indexer, "forward", index), mock.patch.object(code, "eager_attention_forward", attention):
        for pack in packs:
            divergences.clear()
            for ids, _ in pack:
                model(torch.from_numpy(ids)[None], use_cache=False)
            loss = loss + torch.stack(divergences).sum() / sum(len(ids) for ids, _ in pack) / len(packs)
    (COEFF * loss).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients
    assert all(".indexer." in name for name in gradients)
    return {"loss": loss.item(), "gradients": gradients}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a case, and what the formula gives."""
    import torch

    torch.set_num_threads(1)
    root, done = tmp_path_factory.mktemp("indexers"), {}

    def case(name: str) -> tuple[Path, dict]:
        if name not in done:
            done[name] = root / name.replace(" ", "-"), make(root / name.replace(" ", "-"), name)
        return done[name]

    return case


def compare(result: dict, expected: dict) -> None:
    assert result["losses"] == pytest.approx([expected["loss"]] * 2, rel=BOUND)
    assert result["gradients"] < BOUND, result["worst gradient"]
    assert not result["changed"]


def compute(folder: Path) -> dict:
    from tests.bridge.families import worker_indexer

    return worker_indexer.compute(folder, worker_indexer.options_of(folder, {}))


@pytest.mark.parametrize("name", CASES)
def test_one_process(name, made, one_process):  # noqa: F811
    folder, expected = made(name)
    compare(compute(folder), expected)


def test_in_chunks(made, one_process, monkeypatch):  # noqa: F811
    from megaswift.bridge.layers import indexer_loss

    folder, expected = made("selected keys")
    monkeypatch.setattr(indexer_loss, "MAX_CHUNK", 11)
    compare(compute(folder), expected)


@pytest.mark.parametrize("fault", ["gradients of the input", "padding", "scale of attention"])
def test_a_planted_fault_is_seen(fault, made, one_process, monkeypatch):  # noqa: F811
    import torch
    from megaswift.bridge.layers import indexer_loss
    from megaswift.bridge.layers.sparse_attention import SparseLatentAttention
    from megaswift.templates.batching.collator import BatchLayout

    folder, expected = made("selected keys")
    select, target = SparseLatentAttention._select, indexer_loss._target

    def undetached(self, hidden, latent, documents):
        hidden.detach = lambda: hidden
        return select(self, hidden, latent, documents)

    plant = monkeypatch.setattr
    if fault == "gradients of the input":
        plant(SparseLatentAttention, "_select", undetached)
    elif fault == "padding":
        plant(BatchLayout, "_token_shares", lambda _, rows, n: torch.full((len(rows), n), 1 / n / len(rows)).numpy())
    else:
        plant(indexer_loss, "_target", lambda states, chunk: target(states._replace(scale=states.scale * 1.1), chunk))
    with pytest.raises(AssertionError):
        compare(compute(folder), expected)


@pytest.mark.long
def test_two_processes(made, tmp_path):
    jobs = {str(made(name)[0]): layouts for name, (_, _, layouts) in CASES.items()}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    ended = torchrun("tests.bridge.families.worker_indexer", tmp_path / "jobs.json", processes=2)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for name, (_, _, layouts) in CASES.items():
        folder, expected = made(name)
        results = json.loads((folder / "results.json").read_text())
        assert tuple(results) == layouts
        for result in results.values():
            compare(result, expected)
