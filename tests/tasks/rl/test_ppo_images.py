"""PPO on prompts with images: the numbers of transformers and torch, in several layouts."""

import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.preference.runs import assert_close, assert_same_weights
from tests.tasks.rl.images import FLAGS, SeenPpo
from tests.tasks.rl.ppo_reference import Settings
from tests.tasks.rl.runs import Place, Trained, assert_same_steps
from tests.tasks.rl.test_ppo import critic_of
from tests.tasks.vision_oracle import ALL

pytestmark = pytest.mark.slow
PPO = f"{FLAGS} --rlhf_type ppo --ref_model vision-other --critic_model vision-critic --critic_lr 1e-3"
TP = "--tensor_model_parallel_size 2 --sequence_parallel true"


@pytest.mark.parametrize(
    "tower", [pytest.param("", id="frozen", marks=pytest.mark.long), pytest.param(ALL, id="trained")]
)
def test_updates_of_both_models(tower: str, images: Place) -> None:
    """The critic has another tower than the policy, frozen or trained as that is."""
    run = images.run(f"{PPO} {tower}")
    reference = SeenPpo(images, run, Settings(), trains_tower=bool(tower))
    start = reference.critic.weights()
    log = reference.steps()
    assert len(run.steps) == len(log) == 3
    for row, expected in zip(run.steps, log, strict=True):
        norms = {name: expected.pop(name) for name in ("grad_norm", "critic/grad_norm")}
        assert_close(row, expected)
        assert {name: row[name] for name in norms} == pytest.approx(norms, rel=2e-4)
    weights = critic_of(run)
    changed = {name for name, tensor in start.items() if tower or "visual" not in name}
    assert_same_weights(
        {name: weights[name] for name in changed},
        {name: tensor for name, tensor in reference.critic.weights().items() if name in changed},
        start,
    )
    source = load_file(images.folder / "vision-critic" / "model.safetensors")
    assert weights.keys() == source.keys()
    assert all(torch.equal(weights[name], source[name]) for name in weights.keys() - changed)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(f"{TP} --critic_tensor_model_parallel_size 1", id="TP2, critic DP2", marks=pytest.mark.long),
        pytest.param(f"{TP} --offload_critic true", id="TP2, offloaded", marks=pytest.mark.long),
        pytest.param("--context_parallel_size 2", id="CP2", marks=pytest.mark.long),
        pytest.param("--critic_pipeline_model_parallel_size 2", id="DP2, critic PP2", marks=pytest.mark.long),
    ],
)
def test_layouts_agree(layout: str, images: Place) -> None:
    run, expected = images.run(f"{PPO} {ALL} {layout}", 2), images.run(f"{PPO} {ALL}")
    assert_same_steps(run, expected)
    start = load_file(images.folder / "vision-critic" / "model.safetensors")
    assert_same_weights(critic_of(run), critic_of(expected), start)


@pytest.mark.long
def test_resumed_steps_are_the_same(images: Place) -> None:
    flags = f"{PPO} {ALL} --no_save_optim false --no_save_rng false --save_steps 1"
    whole = images.run(flags)
    line = images.line(f"{flags} --resume_from_checkpoint {whole.folder}/checkpoint-1", "resumed-ppo")
    printed = images.megatron(line.replace("--no_save_optim true --no_save_rng true", ""))
    resumed = critic_of(Trained(images.folder / "resumed-ppo", printed))
    expected = critic_of(whole)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.items())
