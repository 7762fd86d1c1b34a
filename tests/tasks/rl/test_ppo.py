"""PPO beside transformers and torch, in several layouts, and the critic that it saves."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tasks.preference.runs import Tensors, assert_close, assert_same_weights
from tests.tasks.rl.ppo_reference import Ppo, Settings
from tests.tasks.rl.runs import Place, Trained, assert_same_steps
from tests.tasks.rl.test_async import ASIDE, ONE, SERVED, beside
from tests.tasks.rl.test_turns import DUMPED, PLUGIN, ROOM
from tests.tasks.rl.upstream import models

pytestmark = pytest.mark.slow
later = pytest.mark.long
# Values of a critic with a random head, so far from the returns that many are clipped.
PPO = "--rlhf_type ppo --ref_model other --critic_model critic --critic_lr 1e-3 --cliprange_value 0.05"
SETTINGS = Settings(cliprange_value=0.05)
TP = "--tensor_model_parallel_size 2 --sequence_parallel true"
CP = "--context_parallel_size 2"
PACKED = "--packing true --packing_length 160 --micro_batch_size 1"
APART = "--pipeline_model_parallel_size 2 --pipeline_model_parallel_layout Et*4|L"
DP = "--use_distributed_optimizer true --overlap_grad_reduce true --overlap_param_gather true"
THREE_LAYOUTS = (
    f"{TP} --critic_tensor_model_parallel_size 1 --critic_pipeline_model_parallel_size 2 "
    "--ref_tensor_model_parallel_size 1"
)


def classifier(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", num_labels=1
    )


@pytest.fixture(scope="module")
def ppo(place: Place) -> Place:
    """With a critic: the model `other` with a head, as --rlhf_type rm saves it; and others, which do not fit."""
    for name, family, labels in (("critic", "other", 1), ("critic-2", "other", 2), ("critic-moe", "qwen3_moe", 1)):
        if (place.folder / name).exists():
            continue
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        source = place.folder / family
        model = AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32, num_labels=labels)
        with torch.no_grad():
            model.score.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(7))
        model.config.pad_token_id = 0
        model.save_pretrained(place.folder / name)
        AutoTokenizer.from_pretrained(source).save_pretrained(place.folder / name)
    other_vocabulary = place.folder / "critic-vocabulary"
    if not other_vocabulary.exists():
        shutil.copytree(place.folder / "critic", other_vocabulary)
        config = json.loads((other_vocabulary / "config.json").read_text())
        (other_vocabulary / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    return place


def critic_of(run: Trained) -> Tensors:
    files = (run.checkpoint / "training_state" / "critic").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def start_of(place: Place, name: str) -> Tensors:
    return load_file(place.folder / name / "model.safetensors")


def reference_of(place: Place, run: Trained, flags: str, settings: Settings) -> Ppo:
    folder = place.folder / "qwen3"
    critic = classifier(place.folder / "critic" if "--critic_model" in flags else folder)
    if "--critic_model" not in flags:
        torch.nn.init.zeros_(critic.score.weight)
    return Ppo(folder, run, *models(folder, place.folder / "other"), critic, settings)


def states(reference: Ppo) -> list[Tensors]:
    """Weights of policy and critic."""
    return [{n: t.clone() for n, t in model.state_dict().items()} for model in (reference.policy, reference.critic)]


def agree(place: Place, flags: str, settings: Settings) -> Trained:
    """Logs and weights of both models."""
    run = place.run(flags)
    reference = reference_of(place, run, flags, settings)
    starts = states(reference)
    log = reference.steps()
    assert len(run.steps) == len(log) == 3
    for row, expected in zip(run.steps, log, strict=True):
        norms = {name: expected.pop(name) for name in ("grad_norm", "critic/grad_norm")}
        assert_close(row, expected)
        # Rounding in the weights of the step before is larger in gradients.
        assert {name: row[name] for name in norms} == pytest.approx(norms, rel=1e-4)
    for weights, expected, start in zip((run.weights, critic_of(run)), states(reference), starts, strict=True):
        assert_same_weights(weights, expected, start)
    return run


def test_three_updates_of_both_models(ppo: Place) -> None:
    run = agree(ppo, PPO, SETTINGS)
    assert max(row["clip_ratio/region_mean"] for row in run.steps) > 0.02
    assert max(row["critic/clip_ratio"] for row in run.steps) > 0.05
    assert {"timing_s/values", "timing_s/update_critic", "timing_s/ref"} <= run.steps[0].keys()
    assert "critic: critic" in run.printed


def test_an_update_by_gradient_descent(ppo: Place) -> None:
    """Within 1e-6, as test_ppo_trl.py has it beside TRL."""
    flags = f"{PPO} --optimizer sgd --sgd_momentum 0 --clip_grad 0 --lr 0.05 --critic_lr 0.02 --train_iters 1"
    run = ppo.run(flags)
    reference = reference_of(ppo, run, flags, SETTINGS._replace(descent_rate=0.05, critic_rate=0.02))
    starts = states(reference)
    reference.steps()
    for weights, expected, start in zip((run.weights, critic_of(run)), states(reference), starts, strict=True):
        assert max(float((tensor - start[name]).abs().max()) for name, tensor in expected.items()) > 1e-3
        assert max(float((weights[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-6


@later
@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--gamma 0.9 --lam 0.7", {"gamma": 0.9, "lam": 0.7}),
        ("--whiten_advantages false --beta 0.2", {"whitens": False, "beta": 0.2}),
        ("--kl_in_reward false", {"kl_in_reward": False}),
        ("--cliprange 0.02 --cliprange_value 10", {"cliprange": 0.02, "cliprange_value": 10.0}),
        ("--critic_warmup 2", {"warmup": 2}),
        ("--offload_critic true --offload_ref_model true", {}),
        ("--cpu_offloading true --cpu_offloading_num_layers 2", {}),
        ("--optimizer_cpu_offload true --exp_avg_dtype fp32", {}),
    ],
)
def test_options(flags: str, changes: dict[str, Any], ppo: Place) -> None:
    agree(ppo, f"{PPO} {flags}", SETTINGS._replace(**changes))


@later
def test_a_critic_that_begins_with_the_policy(ppo: Place) -> None:
    run = agree(ppo, PPO.replace("--critic_model critic ", ""), SETTINGS)
    assert run.steps[0]["values/mean"] == 0
    assert "critic: the initial model with a head of zeros" in run.printed


def test_the_warmup_leaves_the_policy_as_it_was(ppo: Place) -> None:
    """Its steps are logged, and the critic learns."""
    run = ppo.run(f"{PPO} --critic_warmup 3")
    assert all(torch.equal(tensor, run.weights[name]) for name, tensor in ppo.start().items())
    assert [row["grad_norm"] for row in run.steps] == [0, 0, 0]
    assert [row["learning_rate"] for row in run.steps] == [run.steps[0]["learning_rate"]] * 3
    start, trained = start_of(ppo, "critic"), critic_of(run)
    assert all(torch.norm(trained[name] - tensor) > 0 for name, tensor in start.items())


def test_transformers_load_the_critic(ppo: Place) -> None:
    """As a sequence classifier, also with its tokenizer."""
    from transformers import AutoTokenizer

    run = ppo.run(PPO)
    folder = run.checkpoint / "training_state" / "critic"
    model, weights = classifier(folder), critic_of(run)
    assert model.config.num_labels == 1
    assert torch.equal(model.score.weight, weights["score.weight"])
    assert not torch.equal(model.score.weight, start_of(ppo, "critic")["score.weight"])
    assert AutoTokenizer.from_pretrained(folder)("red").input_ids


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        pytest.param(THREE_LAYOUTS, 4, id="policy TP2, critic PP2, reference TP1"),
        pytest.param(TP, 2, id="TP2 SP", marks=later),
        pytest.param(CP, 2, id="CP2", marks=later),
        pytest.param(f"{CP} {PACKED} --critic_context_parallel_size 1", 2, id="CP2 packed, critic DP2", marks=later),
        pytest.param(DP, 2, id="DP2 overlapped", marks=later),
        pytest.param(f"{DP} --offload_critic true", 2, id="DP2 overlapped, offloaded", marks=later),
        pytest.param(f"{DP} --critic_tensor_model_parallel_size 2", 2, id="DP2, critic TP2", marks=later),
        pytest.param("--pipeline_model_parallel_size 2", 2, id="PP2", marks=later),
        pytest.param(APART, 2, id="PP2, loss and head apart", marks=later),
        pytest.param(f"{APART} --ref_tensor_model_parallel_size 2", 4, id="PP2, reference TP2 PP2", marks=later),
    ],
)
def test_layouts(layout: str, processes: int, ppo: Place) -> None:
    """The numbers of one process."""
    run, expected = ppo.run(f"{PPO} {layout}", processes), ppo.run(PPO)
    assert_same_steps(run, expected)
    assert_same_weights(run.weights, expected.weights, ppo.start())
    assert_same_weights(critic_of(run), critic_of(expected), start_of(ppo, "critic"))


class Turns(Ppo):
    """Episodes of several turns, whose prompts and messages in between were not drawn. rows: episodes.jsonl's too."""

    def _completion(self, model: Any, row: dict) -> tuple[Tensor, Tensor]:
        is_drawn = torch.tensor(row["trained"])[1:] > 0
        tokens = torch.tensor([row["tokens"]])
        log_probs = (model(tokens).logits[0, :-1].float() / self.temperature).log_softmax(-1)[is_drawn]
        chosen = log_probs.gather(1, tokens[0, 1:][is_drawn][:, None])[:, 0]
        return chosen, torch.zeros_like(chosen)

    def values(self, rows: list[dict]) -> Tensor:
        values = []
        for row in rows:
            hidden = self.critic.model(torch.tensor([row["tokens"]])).last_hidden_state
            values.append(self.critic.score(hidden)[0, :-1, 0][torch.tensor(row["trained"])[1:] > 0])
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


TURNS = (
    f"{PPO} --external_plugins turns.py rewards.py --multi_turn_scheduler asks --max_completion_length {ROOM} "
    "--reward_funcs waves short --reward_weights 1 0.5"
)


def test_episodes_of_several_turns(ppo: Place) -> None:
    """Tokens that were not drawn have no value, advantage or reward. Sums over time skip them."""
    (ppo.folder / "turns.py").write_text(PLUGIN)
    run = ppo.run(TURNS, script=DUMPED)
    episodes = [json.loads(line) for line in (run.folder / "episodes.jsonl").read_text().splitlines()]
    for row, episode in zip(run.completions, episodes, strict=True):
        row |= episode
    assert sum(-1 in np.diff(episode["trained"]) for episode in episodes) > 5  # drawn, and later not
    critic = classifier(ppo.folder / "critic")
    reference = Turns(ppo.folder / "qwen3", run, *models(ppo.folder / "qwen3", ppo.folder / "other"), critic, SETTINGS)
    starts, log = states(reference), reference.steps()
    names = "loss", "critic/loss", "values/mean", "returns/mean", "critic/explained_variance", "critic/clip_ratio"
    for row, expected in zip(run.steps, log, strict=True):
        assert_close(row, {name: expected[name] for name in names if name in expected})
    for weights, expected, start in zip((run.weights, critic_of(run)), states(reference), starts, strict=True):
        assert_same_weights(weights, expected, start)


@later
@pytest.mark.parametrize("layout", [TP, f"{CP} --critic_context_parallel_size 1", f"{CP} {PACKED}"])
def test_episodes_of_several_turns_in_layouts(layout: str, ppo: Place) -> None:
    (ppo.folder / "turns.py").write_text(PLUGIN)
    run, expected = ppo.run(f"{TURNS} {layout}", 2), ppo.run(TURNS, script=DUMPED)
    assert_same_steps(run, expected)
    assert_same_weights(critic_of(run), critic_of(expected), start_of(ppo, "critic"))


@later
def test_completions_of_a_server(ppo: Place) -> None:
    """The numbers of an engine in the process."""
    plugins = f"--external_plugins rewards.py {ASIDE}"
    run, expected = ppo.run(f"{PPO} {SERVED} {plugins}"), ppo.run(PPO)
    assert_same_steps(run, expected)
    assert_same_weights(critic_of(run), critic_of(expected), start_of(ppo, "critic"))


@later
def test_completions_that_are_drawn_meanwhile(ppo: Place) -> None:
    """By weights of a generation before. Old log-probabilities and values are those of the step that they train."""
    run = agree(ppo, beside(f"{PPO} {ONE}"), SETTINGS)
    assert all(row["timing_s/idle"] >= 0 < row["timing_s/gen"] for row in run.steps)
    assert run.steps[2]["sampling/sampling_logp_difference/mean"] > 1e-4


@later
def test_experts(ppo: Place) -> None:
    """Policy with expert parallelism, critic without."""
    flags = "--rlhf_type ppo --model qwen3_moe --lr 5e-5 --critic_model critic-moe --critic_lr 1e-4"
    layout = "--expert_model_parallel_size 2 --critic_expert_model_parallel_size 1"
    run, expected = ppo.run(f"{flags} {layout}", 2), ppo.run(flags)
    assert_same_steps(run, expected)
    assert_same_weights(run.weights, expected.weights, ppo.start("qwen3_moe"))
    assert_same_weights(critic_of(run), critic_of(expected), start_of(ppo, "critic-moe"))


@later
def test_a_reference_of_grpo_in_its_own_layout(place: Place) -> None:
    flags = "--ref_model other --log_entropy true"
    run, expected = place.run(f"{flags} --ref_pipeline_model_parallel_size 2", 2), place.run(flags)
    assert "reference: other, 2 processes = TP 1 x PP 2" in run.printed
    assert_same_steps(run, expected)
    assert_same_weights(run.weights, expected.weights, place.start())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--critic_model critic-2", "--critic_model critic-2: has a head of 2 outputs, and a critic has 1"),
        ("--critic_model critic-vocabulary", "has a vocabulary of 50 tokens, and the policy one of"),
        ("--critic_pipeline_model_parallel_size 3", "= 3: does not divide the number of processes, 1"),
        ("--critic_tensor_model_parallel_size 2", "--critic_tensor_model_parallel_size"),
        ("--ref_context_parallel_size 3 --ref_model other", "--ref_context_parallel_size = 3: does not divide"),
        ("--ref_tensor_model_parallel_size 2 --beta 0", "cannot be used with --beta 0, which has no reference"),
        ("--advantage_estimator rloo", "--advantage_estimator rloo: only for --rlhf_type grpo, not ppo. Remove it."),
        ("--teacher_model other", "only for --rlhf_type grpo, not ppo"),
        ("--loss_type real", "--loss_type real cannot be used with --rlhf_type ppo"),
        ("--kl_in_reward true --beta 0", "--kl_in_reward true cannot be used with --beta 0"),
        ("--critic_model critic --mcore_critic_model other", "set one of them"),
    ],
)
def test_bad_input(flags: str, message: str, ppo: Place) -> None:
    """One error, before anything is loaded."""
    printed = ppo.megatron(ppo.line(f"--rlhf_type ppo {flags}", "refused"), code=2)
    assert message in printed
    assert "Traceback" not in printed
    assert "Loading" not in printed
