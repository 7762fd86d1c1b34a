"""The transformers engine beside transformers' own forward pass, warpers and loading; weights into it, checksums."""

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megaswift.bridge.checkpoint.stream import stream_weights
from megaswift.tasks.rollout import weight_sync
from megaswift.tasks.rollout.engine import Request, Sampling
from megaswift.tasks.rollout.eos import eos_token_ids
from megaswift.tasks.rollout.hf_replica import Replica
from megaswift.tasks.rollout.transformers_engine import TransformersEngine, filter_logits, sample_tokens
from safetensors.torch import load_file

from tests import tiny
from tests.bridge.families import reference, tinies
from tests.bridge.families.test_families import one_process  # noqa: F401  (a fixture)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices are so small that threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tiny.save(tmp_path_factory.mktemp("model"), "qwen3")
    tiny.save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def engine(folder) -> TransformersEngine:
    made = TransformersEngine(folder, dtype=torch.float32, batch_size=4)
    made.eos_ids = set()  # by chance any token would come; the tests of stopping give their own
    return made


def requests(count: int = 6) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 23, 4, 11, 2, 7][:count]
    prompts = [torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(prompt, seed=100 + number) for number, prompt in enumerate(prompts)]


@torch.no_grad()
def logits_of(engine, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], by one forward pass of all, with no cache and no padding."""
    return engine.replica.model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_those_of_the_model_at_the_temperature(engine, temperature):
    sampling = Sampling(temperature=temperature, top_k=20, top_p=0.9, repetition_penalty=1.3, max_new_tokens=12)
    for request, found in zip(requests(), engine.generate(requests(), sampling), strict=True):
        assert len(found.tokens) == len(found.log_probs) == 12
        every = (logits_of(engine, request.tokens, found.tokens) / (temperature or 1.0)).log_softmax(-1)
        expected = every.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=2e-5, rtol=0)


def send(engine, model, config, source, **settings):
    weights = stream_weights(model.chunks, config, source, dtype=torch.float32)
    return weight_sync.sync(engine, weights, dtype=torch.float32, **settings)


def test_temperature_zero_is_transformers_greedy_search(engine):
    (request,) = requests(1)
    (found,) = engine.generate([request], Sampling(temperature=0, max_new_tokens=20))
    prompt = torch.tensor([request.tokens])
    model = engine.replica.model
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, pad_token_id=0
    )
    assert found.tokens == expected[0, len(request.tokens) :].tolist()


def test_a_completion_does_not_depend_on_what_is_beside_it(engine):
    sampling = Sampling(max_new_tokens=30, temperature=0.9)
    together = engine.generate(requests(), sampling)
    for request, beside in zip(requests(), together, strict=True):
        (alone,) = engine.generate([request], sampling)
        assert alone.tokens == beside.tokens
        torch.testing.assert_close(torch.tensor(alone.log_probs), torch.tensor(beside.log_probs), atol=2e-5, rtol=0)
    others = engine.generate([replace(request, seed=request.seed + 50) for request in requests()], sampling)
    assert all(one.tokens != other.tokens for one, other in zip(together, others, strict=True))


def test_shorter_limits_of_a_request(engine):
    sampling = Sampling(max_new_tokens=9)
    whole = engine.generate(requests(3), sampling)
    limits = [None, 4, 20]
    cut = engine.generate([replace(r, max_new_tokens=n) for r, n in zip(requests(3), limits, strict=True)], sampling)
    assert [one.tokens for one in cut] == [whole[0].tokens, whole[1].tokens[:4], whole[2].tokens]
    assert {one.finish for one in cut} == {"length"}


def test_end_tokens_and_stop_texts_stay_in_the_completion(engine):
    sampling = Sampling(max_new_tokens=30)
    whole = [one.tokens for one in engine.generate(requests(), sampling)]
    end = whole[1][5]
    engine.eos_ids = {end}
    ended = engine.generate(requests(), sampling)
    engine.eos_ids = {whole[0][3]}
    told = engine.generate(requests(), replace(sampling, ends=(end,)))  # by who asks, whatever the folder says
    endless = engine.generate(requests(), replace(sampling, ends=()))
    engine.eos_ids = set()
    assert told == ended
    assert [one.tokens for one in endless] == whole
    for tokens, found in zip(whole, ended, strict=True):
        at = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert (found.tokens, found.finish) == (tokens[:at], "stop" if end in tokens else "length")
    # A text over two tokens, of which the second goes on.
    texts = [engine.tokenizer.decode(tokens) for tokens in whole]
    text = engine.tokenizer.decode(whole[2][6:8])[:-1] or engine.tokenizer.decode(whole[2][6:8])
    stopped = engine.generate(requests(), replace(sampling, stop=("never said", text)))
    for tokens, said, found in zip(whole, texts, stopped, strict=True):
        assert found.tokens == tokens[: len(found.tokens)]
        assert (found.finish == "stop") == (text in said)
        if text in said:
            assert text in engine.tokenizer.decode(found.tokens)
            assert text not in engine.tokenizer.decode(found.tokens[:-1])


def test_which_tokens_end(tmp_path):
    tokenizer = SimpleNamespace(eos_token_id=7)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 3}}')
    assert eos_token_ids(tmp_path, tokenizer) == {7}
    assert eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=None)) == {3}
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat", "llm_config": {"eos_token_id": 4}}')
    assert eos_token_ids(tmp_path, SimpleNamespace(eos_token_id=None)) == {4}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert eos_token_ids(tmp_path, tokenizer) == {2, 5, 7}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (-1, 0.7, 0.0), (20, 0.8, 0.0), (1, 1.0, 0.0), (-1, 1e-6, 0.0), (0, 1.0, 0.1), (9, 0.9, 0.3)],
)
def test_filters_are_transformers(top_k, top_p, min_p):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(8, 97, generator=torch.Generator().manual_seed(0)) * 2
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k > 0 else logits  # type: ignore[arg-type]
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected  # type: ignore[arg-type]
    expected = MinPLogitsWarper(min_p)(None, expected) if min_p else expected  # type: ignore[arg-type]
    assert torch.equal(filter_logits(logits, Sampling(top_k=top_k, top_p=top_p, min_p=min_p)), expected)


def test_penalty_is_transformers(engine):
    """The likeliest token under a strong penalty of what the prompt and the completion have."""
    from transformers import RepetitionPenaltyLogitsProcessor

    sampling = Sampling(temperature=0, repetition_penalty=3.0, max_new_tokens=15)
    for request, found in zip(requests(), engine.generate(requests(), sampling), strict=True):
        logits = logits_of(engine, request.tokens, found.tokens)
        for at, token in enumerate(found.tokens):
            so_far = torch.tensor([request.tokens + found.tokens[:at]])
            assert RepetitionPenaltyLogitsProcessor(3.0)(so_far, logits[at : at + 1]).argmax() == token


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([0.0, 2.0, -torch.inf, 1.0, -1.0, -torch.inf])
    count = 200_000
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = sample_tokens(logits.expand(count, -1), numbers).bincount(minlength=6) / count
    torch.testing.assert_close(shares, logits.softmax(-1), atol=4e-3, rtol=0)
    assert shares[2] == shares[5] == 0
    edges = sample_tokens(logits.expand(2, -1), torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert edges.tolist() == [0, 4]


# Weights

FEW = ("qwen3", "qwen2", "qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3")


def in_one_buffer(tensors: dict[str, torch.Tensor]):
    """Each gone when the next one comes, as from a server's shared memory."""
    buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))
    for name, tensor in tensors.items():
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("family", FEW)
def test_a_replica_takes_a_checkpoints_tensors_as_from_pretrained_does(family, tmp_path):
    check_replica(tiny.save(tmp_path, family))


UNSEEN = (
    *("gemma3_text within", "gemma3_text within, renamed", "gemma4_text within", "llama4_text within"),
    *("llava_onevision", "llava_onevision tied", "ministral3 within", "mistral within", "mistral4 within"),
)
BUFFERS = ("minimax",)
ALONE = ("mistral4",)  # transformers makes this text model within a vision-language model only


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in tinies() if name not in FEW])
def test_replicas_of_every_family(name, tmp_path):
    reference.make(tmp_path, tinies()[name])
    if name in ALONE:
        pytest.skip("transformers' AutoModelForCausalLM does not make it")
    if name in BUFFERS:
        pytest.skip("the buffers of this folder do not have the shapes of transformers")
    if name in UNSEEN:
        pytest.skip("the other tensors of this folder are no vision tower's")
    check_replica(tmp_path / "fp32")


def check_replica(folder: Path) -> None:
    """All of a checkpoint's tensors, by the names that the files have: none loaded before, in any order."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    loaded = Replica(folder, dtype=torch.float32, device=CPU, load=True)
    empty = Replica(folder, dtype=torch.float32, device=CPU, load=False)
    wanted = set(empty.missing(for_images=False))
    names = sorted(tensors)
    random.Random(5).shuffle(names)
    norms = [name for name in names if re.fullmatch(r"\D*(norm|ln)\D*\.weight", name)]
    last = min(norms, key=lambda name: name.count("."))  # the language model's own, rather than a tower's
    empty.update(in_one_buffer({name: tensors[name] for name in names if name != last}))
    assert [name.endswith(("norm.weight", "norm_f.weight")) for name in empty.missing(for_images=False)] == [True]
    empty.update([(last, tensors[last])])
    assert not empty.missing(for_images=False)
    expected, found = loaded.model.state_dict(), empty.model.state_dict()
    assert found.keys() == expected.keys() >= wanted
    assert [name for name in wanted if not torch.equal(found[name], expected[name])] == []
    told = loaded.checksums(names)
    assert told == {name: weight_sync.checksum(tensors[name]) for name in told}
    assert len(told) > len(wanted) // 3


def test_new_weights_change_what_is_generated(folder, tmp_path, one_process):  # noqa: F811
    from tests.bridge.families import worker

    other = tiny.save(tmp_path / "other", "qwen3", seed=9)
    names = load_file(folder / "model.safetensors")
    kinds = {"".join(letter for letter in name if not letter.isdigit()) for name in names}
    assert 10 < len(kinds) < len(names)
    tiny.save_tokenizer(other)
    engine = TransformersEngine(folder, dtype=torch.float32, load=False)
    with pytest.raises(RuntimeError, match="weights of the engine have not arrived yet"):
        engine.generate(requests(), Sampling())
    sampling = Sampling(max_new_tokens=10)
    for source in (folder, other, folder):
        model = worker.open_model(source, one_process, torch.float32)
        config = worker.read_config(source)
        done = send(engine, model, config, source, seed=1)
        assert (done.compared, done.bytes) == (len(kinds), sum(p.nbytes for p in engine.replica.model.parameters()))
        assert done.gigabytes_per_second > 0
        fresh = TransformersEngine(source, dtype=torch.float32)
        assert engine.generate(requests(), sampling) == fresh.generate(requests(), sampling)


def test_a_tensor_that_came_otherwise_is_named(folder, one_process):  # noqa: F811
    from tests.bridge.families import worker

    class Forgetful(TransformersEngine):
        def update(self, weights):
            super().update((name, value * 2 if "k_norm" in name else value) for name, value in weights)

    model, config = worker.open_model(folder, one_process, torch.float32), worker.read_config(folder)
    engine = Forgetful(folder, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"rank 0 .*layers\.\d\.self_attn\.k_norm\.weight is not what was sent"):
        send(engine, model, config, folder, compare=1000)
    other = TransformersEngine(folder, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="Set the same --torch_dtype for `swift rollout` and the run"):
        send(other, model, config, folder, compare=1000)


def test_an_engine_that_stops_reading_leaves_no_rank_waiting(folder, one_process):  # noqa: F811
    from tests.bridge.families import worker

    class Broken(TransformersEngine):
        def update(self, weights):
            next(iter(weights))
            raise ValueError("no room")

    model, config = worker.open_model(folder, one_process, torch.float32), worker.read_config(folder)
    with pytest.raises(RuntimeError, match="rank 0 did not load the weights: ValueError: no room"):
        send(Broken(folder, dtype=torch.float32), model, config, folder)


def test_what_a_replica_refuses(folder):
    replica = Replica(folder, dtype=torch.float32, device=CPU, load=True)
    with pytest.raises(ValueError, match=r"model\.layers\.9\.mlp\.up\.weight: .* has no such tensor"):
        replica.update([("model.layers.9.mlp.up.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[3\], and model\.norm\.weight of the engine"):
        replica.update([("model.norm.weight", torch.zeros(3))])


def test_checksums_tell_of_bytes_dtype_and_shape():
    tensor = torch.arange(6.0)
    others = [tensor.view(2, 3), tensor.bfloat16(), tensor.roll(1), -tensor]
    found = [weight_sync.checksum(one) for one in (tensor, *others)]
    assert len(set(found)) == 5
    assert weight_sync.checksum(torch.arange(12.0).view(6, 2)[:, 0] / 2) == found[0]  # not contiguous
    assert found[2].startswith("bfloat16 [6] ")


def test_checksums_are_what_their_formula_says():
    """The same integers in Python: so a GPU's and a CPU's are the same."""
    data = torch.randint(0, 256, (1003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = data.numpy().tobytes() + bytes(5)
    total = 0
    for place in range(1, len(padded) // 8 + 1):
        signed = place * 0x9E3779B97F4A7C15 % 2**64
        signed -= (signed >> 63) * 2**64
        factor = ((signed ^ signed >> 29) * 0xBF58476D1CE4E5B9 | 1) % 2**64
        total += factor * int.from_bytes(padded[place * 8 - 8 : place * 8], "little")
    assert weight_sync.checksum(data) == f"uint8 [1003] {total % 2**64:016x}"
    changed = data.clone()
    changed[500] ^= 1
    assert weight_sync.checksum(changed) != weight_sync.checksum(data)


def test_checksums_of_more_than_is_taken_at_once(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = weight_sync.checksum(tensor)
    monkeypatch.setattr(weight_sync, "WORDS", 64)
    assert weight_sync.checksum(tensor) == whole


def test_a_sample_is_the_same_for_a_seed_and_any_tensor_can_be_in_it():
    stream = [(f"layers.{number}.weight", torch.tensor(float(number))) for number in range(20)]
    stream.insert(7, ("norm", torch.ones(2)))

    def drawn_names(seed: int) -> set[str]:
        asked = []

        class Asked:
            def checksums(self, names):
                asked.extend(names)
                return {}

        sample = weight_sync.ChecksumSample(stream, 3, seed, torch.float32)
        assert [name for name, _ in sample] == [name for name, _ in stream]
        assert sample.compare(Asked()) == 0
        return set(asked)

    assert drawn_names(4) == drawn_names(4)
    assert all(len(drawn_names(seed)) == 4 and "norm" in drawn_names(seed) for seed in range(10))
    assert set.union(*map(drawn_names, range(60))) == {name for name, _ in stream}
