"""Tasks that generate: the guide's GRPO examples, and unusable options of completions, rewards and engines."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from megaswift.cli.checks.common import check_rollout, check_training
from megaswift.cli.flags import UsageError
from megaswift.cli.main import main, read_options
from megaswift.tasks.options import GrpoOptions
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.checks.checking import check, refusal
from tests.cli.conftest import DENSE, write_model, write_tokenizer

# As the guide has them: environment and flags.
EXAMPLES = {
    "Megatron GRPO": r"""
        PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
        NPROC_PER_NODE=4 \
        CUDA_VISIBLE_DEVICES=0,1,2,3 \
        megatron rlhf \
            --rlhf_type grpo \
            --model Qwen/Qwen2.5-7B-Instruct \
            --use_hf \
            --save_safetensors true \
            --dataset /path/to/grpo_data.jsonl \
            --reward_funcs accuracy format \
            --num_generations 8 \
            --max_completion_length 2048 \
            --tensor_model_parallel_size 2 \
            --sequence_parallel true \
            --micro_batch_size 1 \
            --global_batch_size 8 \
            --recompute_granularity full \
            --recompute_method uniform \
            --recompute_num_layers 1 \
            --finetune true \
            --cross_entropy_loss_fusion true \
            --lr 5e-7 \
            --beta 0.04 \
            --num_train_epochs 1 \
            --output_dir megatron_output/grpo \
            --no_save_optim true \
            --no_save_rng true
    """,
    "Megatron GRPO with vLLM (Server Mode)": r"""
        NPROC_PER_NODE=4 \
        CUDA_VISIBLE_DEVICES=0,1,2,3 \
        megatron rlhf \
            --rlhf_type grpo \
            --model Qwen/Qwen2.5-7B-Instruct \
            --use_hf \
            --save_safetensors true \
            --vllm_mode server \
            --dataset /path/to/data.jsonl \
            --reward_funcs accuracy format \
            --num_generations 8 \
            --tensor_model_parallel_size 2 \
            --sequence_parallel true \
            --micro_batch_size 1 \
            --global_batch_size 8 \
            --output_dir megatron_output/grpo \
            --no_save_optim true \
            --no_save_rng true
    """,
}
QWEN = DENSE | {  # the sizes of the model of the examples
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def words_of(example: str) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments."""
    words = shlex.split(EXAMPLES[example].replace("\\\n", " "))
    start = words.index("megatron")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples(example: str, tmp_path: Path, rows: Path) -> None:
    """With a model of the size that they name, on four GPUs."""
    environment, words = words_of(example)
    assert environment["NPROC_PER_NODE"] == "4"
    words[words.index("--dataset") + 1] = str(rows)
    words[words.index("--model") + 1] = str(write_model(tmp_path / "model", QWEN))
    options, sources, notes = read_options("megatron", words)
    layout = ProcessLayout.of(options.build, 4)
    notes += check_training(options, layout, gpus=4, processes=4, sources=sources)
    assert isinstance(options, GrpoOptions)
    assert notes == []
    assert str(layout) == "4 processes = TP 2 x PP 1 x CP 1 x DP 2"
    assert (options.sampling.generation_batch_size, options.sampling.steps_per_generation) == (8, 1)
    assert (options.sampling.num_generations, options.beta, options.policy.epsilon_high) == (8, 0.04, 0.2)
    assert (options.training.train_iters, options.training.num_train_epochs) == (
        None,
        1,
    )  # which the second does not say
    served = example.endswith("(Server Mode)")
    assert options.sampling.max_completion_length == options.rewards.cosine_max_len == (512 if served else 2048)
    assert (options.engine.vllm_mode, options.engine.vllm_server_port) == ("server" if served else None, [8000])
    assert (options.schedule.lr, sources["lr"]) == ((1e-5, "derived") if served else (5e-7, "command line"))


@pytest.mark.parametrize("example", EXAMPLES)
def test_dry_run(example: str, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """40 prompts x 8 completions, 8 to a step."""
    environment, words = words_of(example)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", DENSE)
    write_tokenizer(model)
    words[words.index("--model") + 1] = str(model)
    words[words.index("--dataset") + 1] = str(rows)
    rows.write_text("".join(json.dumps(json.loads(row) | {"solution": "7"}) + "\n" for row in rows.open()))
    code = main("megatron", [*words, "--dry_run", "true"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "steps per epoch   40\n" in printed.out
    assert "4 processes = TP 2 x PP 1 x CP 1 x DP 2" in printed.out
    assert not (tmp_path / "megatron_output").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_generations_eval 0", "--num_generations_eval 0: must be at least 1."),
        ("--max_completion_length 0", "--max_completion_length 0: must be at least 1."),
        ("--steps_per_generation 0", "--steps_per_generation 0: must be at least 1."),
        ("--num_iterations 0", "--num_iterations 0: must be at least 1."),
        ("--max_resample_times 0 --dynamic_sample true", "--max_resample_times 0: must be at least 1."),
        ("--num_generations 0", "--num_generations 0: must be at least 1."),
        ("--num_generations 1", "--num_generations 1: --advantage_estimator grpo compares completions of one prompt"),
        (
            "--num_generations 1 --advantage_estimator reinforce_plus_plus --dynamic_sample true",
            "--num_generations 1 cannot be used with --dynamic_sample true",
        ),
        (
            "--global_batch_size 8 --generation_batch_size 24 --steps_per_generation 2",
            "--generation_batch_size 24: not --global_batch_size 8 x --steps_per_generation 2 = 16. Remove one of "
            "them.",
        ),
        (
            "--global_batch_size 8 --generation_batch_size 12",
            "--generation_batch_size 12: not a multiple of --global_batch_size 8. Set a",
        ),
        (
            "--global_batch_size 8 --num_generations 3",
            "--num_generations 3: does not divide the 8 completions of a rollout (--global_batch_size x "
            "--steps_per_generation).",
        ),
        (
            "--global_batch_size 4",
            "--num_generations 8: does not divide the 4 completions of a rollout",
        ),
        (
            "--streaming true",
            "--streaming true cannot be used with --rlhf_type grpo: prompts are few and short. Remove it.",
        ),
        (
            "--packing true --max_length 100",
            "--packing true with --rlhf_type grpo needs --packing_length, at least the longest prompt (--max_length"
            ") and completion (--max_completion_length) together. Set 612 or more.",
        ),
        (
            "--packing true --max_length 100 --packing_length 300 --max_completion_length 201",
            "--packing true with --rlhf_type",
        ),
        (
            "--max_length 30 --truncation_strategy right",
            "--truncation_strategy right cannot be used with --rlhf_type grpo: it cuts off the end of the question, "
            "and the",
        ),
        ("--temperature 0", "--temperature 0.0: must be at least 0.001"),
        ("--top_p 0", "--top_p 0.0: must be above 0 and at most 1."),
        ("--top_p 1.1", "--top_p 1.1: must be above 0 and at most 1."),
        ("--min_p 1.1", "--min_p 1.1: must be at least 0 and at most 1."),
        ("--repetition_penalty 0", "--repetition_penalty 0.0: must be above 0."),
    ],
)
def test_completions(words: str, message: str, dense: Path) -> None:
    if "--global_batch_size" not in words:
        words += " --global_batch_size 8"
    assert message in refusal(dense, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--beta -0.1", "--beta -0.1: must be at least 0."),
        (
            "--beta 0 --ref_model r",
            "--ref_model r cannot be used with --beta 0, which has no reference. Remove one of them.",
        ),
        ("--beta 0 --mcore_ref_model r", "--mcore_ref_model r cannot be used with --beta 0, which has no reference."),
        ("--beta 0 --ref_adapters r", "--ref_adapters r cannot be used with --beta 0, which has no reference."),
        ("--beta 0 --offload_ref_model true", "--offload_ref_model true cannot be used with --beta 0, which has no"),
        ("--beta 0 --kl_in_reward true", "--kl_in_reward true cannot be used with --beta 0, which has no reference."),
        (
            "--beta 0 --sync_ref_model true",
            "--sync_ref_model true cannot be used with --beta 0, which has no reference.",
        ),
        (
            "--sync_ref_model true --tuner_type lora",
            "--sync_ref_model true cannot be used with --tuner_type lora without --ref_model: the reference is the "
            "frozen",
        ),
        ("--sync_ref_model true --ref_model_mixup_alpha 0", "--ref_model_mixup_alpha 0.0: must be above 0 and at most"),
        ("--sync_ref_model true --ref_model_mixup_alpha 1.1", "--ref_model_mixup_alpha 1.1: must be above 0 and at"),
        ("--sync_ref_model true --ref_model_sync_steps 0", "--ref_model_sync_steps 0: must be at least 1."),
        ("--ref_model_sync_steps 8", "--ref_model_sync_steps 8: only for --sync_ref_model true, not false. Remove it."),
        ("--ref_model r --mcore_ref_model s", "--ref_model r cannot be used with --mcore_ref_model s."),
        ("--delta 1.2", "--delta 1.2: bounds nothing. Set a value above 1 + --epsilon 0.2."),
        ("--epsilon -0.1", "--epsilon -0.1: must be at least 0."),
        ("--epsilon_high -0.1", "--epsilon_high -0.1: must be at least 0."),
        ("--loss_type sapo --tau_pos 0", "--tau_pos 0.0: must be above 0."),
        ("--loss_type sapo --tau_neg -1", "--tau_neg -1.0: must be above 0."),
        ("--top_entropy_quantile 0", "--top_entropy_quantile 0.0: must be above 0 and at most 1."),
        ("--top_entropy_quantile 1.5", "--top_entropy_quantile 1.5: must be above 0 and at most 1."),
        (
            "--rollout_importance_sampling_mode token_mask --rollout_importance_sampling_threshold 0",
            "--rollout_importance_sampling_threshold 0.0: must be above 0.",
        ),
        ("--off_policy_sequence_mask_delta 0", "--off_policy_sequence_mask_delta 0.0: must be above 0."),
        (
            "--rollout_importance_sampling_threshold 3",
            "--rollout_importance_sampling_threshold 3.0: only for --rollout_importance_sampling_mode token_truncate "
            "or token_mask or sequence_truncate or sequence_mask, not",
        ),
        ("--tau_pos 0.8", "--tau_pos 0.8: only for --loss_type sapo, not grpo. Remove it."),
        ("--tau_neg 0.8", "--tau_neg 0.8: only for --loss_type sapo, not grpo. Remove it."),
        (
            "--loss_type cispo --delta 2",
            "--delta 2.0: only for --loss_type grpo or bnpo or dr_grpo or dapo or fipo, not cispo.",
        ),
        ("--fipo_clip_range 0.1", "--fipo_clip_range 0.1: only for --loss_type fipo, not grpo. Remove it."),
        ("--loss_type fipo --real_tau 0.1", "--real_tau 0.1: only for --loss_type real, not fipo. Remove it."),
        (
            "--loss_type real --importance_sampling_level sequence",
            "--importance_sampling_level sequence cannot be used with --loss_type real, whose loss is of a prompt's",
        ),
        (
            "--loss_type real --top_entropy_quantile 0.5",
            "--top_entropy_quantile 0.5 cannot be used with --loss_type real",
        ),
        (
            "--loss_type real --steps_per_generation 2 --num_generations 16",
            "--num_generations 16: does not divide --global_batch_size 8, and --loss_type real compares a prompt's",
        ),
        ("--loss_type dpo", "--loss_type dpo: choose one of grpo, bnpo, dr_grpo, dapo, cispo, sapo, real, fipo."),
        ("--scale_rewards std", "--scale_rewards std: choose one of group, batch, none."),
        ("--importance_sampling_level word", "--importance_sampling_level word: choose one of token, sequence, seq"),
        (
            "--advantage_estimator ppo",
            "--advantage_estimator ppo: choose one of grpo, rloo, reinforce_plus_plus, reinforce.",
        ),
        (
            "--async_generate true --use_vllm false",
            "--async_generate true: only for --vllm_mode server, since engines in the training processes generate "
            "while nothing",
        ),
        (
            "--async_generate true --vllm_mode server --sleep_level 1",
            "--sleep_level 1 cannot be used with --async_generate",
        ),
        ("--metric_for_best_model loss", "--metric_for_best_model loss: evaluations have reward"),
    ],
)
def test_policies(words: str, message: str, dense: Path) -> None:
    assert message in refusal(dense, f"{words} --global_batch_size 8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--loss_agg_mode token_mean",
            "--loss_agg_mode token_mean: choose one of token-mean, seq-mean-token-mean, seq",
        ),
        (
            "--loss_type real --loss_agg_mode token-mean",
            "--loss_agg_mode token-mean cannot be used with --loss_type re",
        ),
        ("--loss_type real --whiten_advantages true", "--whiten_advantages true cannot be used with --loss_type real"),
        ("--loss_type real --advantage_clip 2", "--advantage_clip 2.0 cannot be used with --loss_type real"),
        ("--kl_estimator k4", "--kl_estimator k4: choose one of k1, k2, k3, abs."),
        ("--beta 0 --kl_estimator k2", "--kl_estimator k2 cannot be used with --beta 0, which has no reference."),
        ("--entropy_coef -0.1", "--entropy_coef -0.1: must be at least 0."),
        (
            "--entropy_coef 0.1 --top_entropy_quantile 0.5",
            "--entropy_coef 0.1 cannot be used with --top_entropy_quantile 0.5: its bonus is of all tokens. Remove one",
        ),
        ("--dual_clip 1", "--dual_clip 1.0: must be above 1."),
        ("--dual_clip 3 --delta 2", "--dual_clip 3.0 cannot be used with --delta 2.0: both bound the loss of a token"),
        ("--loss_type cispo --dual_clip 3", "--dual_clip 3.0: only for --loss_type grpo or bnpo or dr_grpo or dapo or"),
        ("--advantage_clip 0", "--advantage_clip 0.0: must be above 0."),
        ("--reward_clip 0", "--reward_clip 0.0: must be above 0."),
        ("--target_kl 0.1", "--target_kl 0.1: only for --kl_in_reward true with --beta above 0, whose coefficient it"),
        ("--kl_in_reward true --target_kl 0", "--target_kl 0.0: must be above 0."),
        ("--kl_in_reward true --kl_horizon 10", "--kl_horizon 10: only for --target_kl. Set it, or remove this."),
        ("--kl_in_reward true --target_kl 0.1 --kl_horizon 0", "--kl_horizon 0: must be at least 1."),
        (
            "--difficulty_range 0.1",
            "--difficulty_range 0.1: not a lower and an upper bound. Set two, as in --difficulty",
        ),
        ("--judge_server http://localhost:1", "--judge_server http://localhost:1: only for --reward_funcs by_source."),
        ('--source_rules {"a":"math"}', "only for --reward_funcs by_source. Add it, or remove this."),
        ("--reward_funcs by_source --judge_model a", "--judge_model a: only for --judge_server. Set it, or remove"),
        ("--difficulty_range 0.9 0.1", "--difficulty_range 0.9 0.1: not a lower and an upper bound."),
        (
            "--difficulty_range 0.1 0.9 --num_generations 1 --advantage_estimator reinforce",
            "--difficulty_range 0.1 0.9 cannot be used with --num_generations 1: the mean reward of a prompt is of",
        ),
        (
            "--advantage_estimator reinforce --scale_rewards batch",
            "--scale_rewards batch cannot be used with --advantage_estimator reinforce, whose rewards have no",
        ),
        ("--advantage_estimator reinforce --loss_type real", "--loss_type real cannot be used with --advantage_estim"),
        (
            "--advantage_estimator reinforce --kl_in_reward true --loss_type fipo",
            "--loss_type fipo cannot be used with --advantage_estimator reinforce and --kl_in_reward true: it needs",
        ),
        (
            "--advantage_estimator reinforce --kl_in_reward true --off_policy_sequence_mask_delta 1",
            "--off_policy_sequence_mask_delta 1.0 cannot be used with --advantage_estimator reinforce and --kl_in_re",
        ),
        (
            "--eval_temperature 0.5",
            "--eval_temperature 0.5: nothing is evaluated. Set --val_dataset or --split_dataset",
        ),
        ("--eval_top_p 0", "--eval_top_p 0.0: must be above 0 and at most 1."),
        ("--eval_top_k -2", "--eval_top_k -2: must be at least -1."),
        (
            "--split_dataset_ratio 0.1 --eval_temperature 1e-4",
            "--eval_temperature 0.0001: must be 0, or at least 0.001.",
        ),
        (
            "--eval_on_start true",
            "--eval_on_start true: nothing is evaluated. Set --val_dataset or --split_dataset_rat",
        ),
        (
            "--eval_on_start true --split_dataset_ratio 0.1 --eval_iters 0",
            "--eval_on_start true: nothing is evaluated.",
        ),
    ],
)
def test_switches(words: str, message: str, dense: Path) -> None:
    assert message in refusal(dense, f"{words} --global_batch_size 8")


@pytest.mark.parametrize("name", ["whiten_advantages true", "reward_clip 1", "difficulty_range 0 1"])
def test_switches_of_rewards_without_rewards(name: str, dense: Path) -> None:
    with pytest.raises(UsageError) as error:
        check(dense, f"--teacher_model t/t --global_batch_size 8 --{name}")
    assert f"--{name.split()[0]} " in str(error.value)
    assert "there are no rewards. Set --reward_funcs, or remove it." in str(error.value)


def test_switches_that_go_together(dense: Path) -> None:
    words = (
        "--reward_funcs accuracy --global_batch_size 8 --num_generations 1 --advantage_estimator reinforce "
        "--kl_in_reward true --kl_estimator k2 --target_kl 0.1 --kl_horizon 100 --whiten_advantages true "
        "--advantage_clip 2 --normalize_rewards true --reward_clip 10 --loss_agg_mode seq-mean-token-sum --dual_clip 3 "
        "--entropy_coef 0.001 --split_dataset_ratio 0.1 --eval_on_start true --eval_temperature 0 --eval_top_k 5"
    )
    options, notes, *_ = check(dense, words)
    assert notes == []
    assert options.scale_rewards == "none"


def test_router_replay(dense: Path, mixture: Path) -> None:
    words = "--global_batch_size 8 --router_replay_mode"
    for mode in ("R2", "R3"):
        assert refusal(dense, f"{words} {mode}") == f"--router_replay_mode {mode}: the model has no experts. Remove it."
        assert check(mixture, f"--reward_funcs accuracy {words} {mode}")[0].router_replay_mode == mode
        assert (
            f"--router_replay_mode {mode} cannot be used with --moe_router_load_balancing_type sinkhorn, which routes"
        ) in refusal(mixture, f"{words} {mode} --moe_router_load_balancing_type sinkhorn")
    check(dense, f"--reward_funcs accuracy {words} disabled")
    assert "--router_replay_mode R4: choose one of disabled, R2, R3." in refusal(mixture, f"{words} R4")
    line = ["rollout", "--vllm_enable_return_routed_experts", "true", "--model"]
    check_rollout(read_options("swift", [*line, str(mixture)])[0])
    with pytest.raises(
        UsageError, match=r"--vllm_enable_return_routed_experts true: the model has no experts\. Remove it"
    ):
        check_rollout(read_options("swift", [*line, str(dense)])[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--reward_funcs: completions need a reward. Set some, a --reward_model, or a --gym_env"),
        ("--reward_funcs acuracy", "--reward_funcs acuracy: no such reward. The nearest is accuracy."),
        ("--reward_funcs reward_model", "--reward_funcs reward_model: set --reward_model"),
        ("--reward_funcs format format", "--reward_funcs format format: format occurs twice. Set its weight"),
        (
            "--reward_funcs accuracy format --reward_weights 1",
            "--reward_weights 1.0: set 2, one for each of accuracy, format",
        ),
        ("--reward_funcs accuracy --reward_timeout 0", "--reward_timeout 0.0: must be above 0"),
        ("--reward_funcs accuracy --external_plugins no.py", "--external_plugins no.py: no such Python file"),
        (
            "--reward_funcs accuracy --external_plugins {bad}",
            "bad.py: importing it raises ZeroDivisionError: division by",
        ),
    ],
)
def test_rewards(words: str, message: str, dense: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("1 / 0\n")
    with pytest.raises(UsageError) as error:
        check(dense, f"{words} --global_batch_size 8".format(bad=bad))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "words",
    ["--loss_type sapo --epsilon 0.2", "--loss_type real --epsilon_high 0.3", "--loss_type cispo --epsilon 0.1"],
)
def test_clipping_of_a_loss_that_does_not_clip(words: str, dense: Path) -> None:
    _, loss, *flag = words.split()
    notes = check(dense, f"{words} --global_batch_size 8 --reward_funcs accuracy")[1]
    assert notes == [f"{' '.join(flag)} has no effect with --loss_type {loss}."]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--teacher_kl_coef 0.5", "--teacher_kl_coef 0.5: no teacher. Set --teacher_model, or remove it."),
        (
            "--offload_teacher_model true",
            "--offload_teacher_model true: no teacher. Set --teacher_model, or remove it.",
        ),
        (
            "--teacher_model t/t --mcore_teacher_model /m",
            "--teacher_model t/t and --mcore_teacher_model /m: set one",
        ),
        (
            "--teacher_model t/t --loss_type fipo",
            "--loss_type fipo cannot be used with --teacher_model t/t: it needs one",
        ),
        (
            "--teacher_model t/t --off_policy_sequence_mask_delta 1",
            "--off_policy_sequence_mask_delta 1.0 cannot be used with --teacher_model t/t",
        ),
        ("--teacher_model ./none", "--teacher_model ./none: no such model folder."),
        ("--teacher_model t/t --teacher_tensor_model_parallel_size 2", "--teacher_tensor_model_parallel_size"),
        ("--teacher_model_server http://h:1", "--teacher_model_server: only for --rlhf_type gkd, not grpo. Remove it."),
    ],
)
def test_unusable_teachers(words: str, message: str, dense: Path) -> None:
    assert message in refusal(dense, f"{words} --global_batch_size 8")


def test_a_teacher_needs_no_rewards_and_no_groups(dense: Path) -> None:
    assert check(dense, "--teacher_model t/t --global_batch_size 8 --num_generations 1")[1] == []
    with pytest.raises(UsageError, match="--dynamic_sample true: compares rewards"):
        check(dense, "--teacher_model t/t --global_batch_size 8 --dynamic_sample true")


def test_what_follows_from_other_options(dense: Path) -> None:
    def read(words: str) -> Any:
        return check(dense, f"--reward_funcs accuracy --global_batch_size 8 {words}")[0]

    assert read("--generation_batch_size 24").sampling.steps_per_generation == 3
    assert read("--steps_per_generation 2").sampling.generation_batch_size == 16
    assert read("--epsilon 0.1").policy.epsilon_high == 0.1
    assert read("--loss_type cispo").policy.epsilon_high == 5.0
    assert read("--advantage_estimator rloo").scale_rewards == "none"
    assert read("--advantage_estimator rloo --scale_rewards group").scale_rewards == "group"
    assert read("--advantage_estimator reinforce_plus_plus").scale_rewards == "batch"
    assert (
        read("--num_generations 4 --global_batch_size 2 --steps_per_generation 2").sampling.generation_batch_size == 4
    )


def test_prompts_keep_their_ends(dense: Path) -> None:
    """Where a GKD's steps are on the data's answers alone, nothing is generated behind them."""
    words = f"--teacher_model {dense} --global_batch_size 8 --max_length 30 --truncation_strategy"
    message = "--truncation_strategy right cannot be used with --rlhf_type gkd: it cuts off the end of the question"
    for more in ("right", "right --lmbda 0 --seq_kd true"):
        with pytest.raises(UsageError, match=message):
            check(dense, f"{words} {more}", kind="gkd")
    check(dense, f"{words} right --lmbda 0", kind="gkd")
    check(dense, f"{words} left", kind="gkd")
