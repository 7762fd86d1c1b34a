"""Options of `megatron rlhf --rlhf_type` and `megatron sft --task_type`, and refusals of unusable ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from megaswift.cli.checks.common import check_training
from megaswift.cli.checks.resume import METRICS
from megaswift.cli.commands import PREFERENCES, TASKS
from megaswift.cli.flags import UsageError, flags_of
from megaswift.cli.main import main, read_options
from megaswift.tasks import options as option_sets
from megaswift.tasks.options import DpoOptions, KtoOptions
from megaswift.tasks.run.args_json import save_args
from megaswift.tasks.run.planning import ProcessLayout

from tests.cli.conftest import write_model, write_tokenizer
from tests.cli.kinds import CHOICE, HEADED, LORA, check, line, refusal


@pytest.fixture
def headed(tmp_path: Path) -> Path:
    return write_model(tmp_path / "headed", HEADED)


@pytest.mark.parametrize(
    ("words", "name", "stage", "loss_scale"),
    [
        (["sft"], "CausalLmOptions", "sft", "default"),
        (["sft", "--task_type", "causal_lm"], "CausalLmOptions", "sft", "default"),
        (["sft", "--task_type", "seq_cls"], "SeqClsOptions", "seq_cls", "default"),
        (["sft", "--task-type=embedding"], "EmbeddingOptions", "embedding", "default"),
        (["sft", "--task_type", "reranker"], "RerankerOptions", "reranker", "default"),
        (["sft", "--task_type", "generative_reranker"], "GenerativeRerankerOptions", "reranker", "default"),
        (["pt"], "PtOptions", "pt", "all"),
        (["rlhf"], "DpoOptions", "preference", "last_round"),
        (["rlhf", "--rlhf_type", "kto", "--rlhf_type", "dpo"], "DpoOptions", "preference", "last_round"),
        (["rlhf", "--rlhf_type", "orpo"], "OrpoOptions", "preference", "default"),
        (["rlhf", "--rlhf_type", "simpo"], "SimpoOptions", "preference", "last_round"),
        (["rlhf", "--rlhf_type", "cpo"], "CpoOptions", "preference", "last_round"),
        (["rlhf", "--rlhf_type", "kto"], "KtoOptions", "kto", "last_round"),
        (["rlhf", "--rlhf_type", "rm"], "RmOptions", "preference", "default"),
    ],
)
def test_the_type_chooses_the_options(words: list[str], name: str, stage: str, loss_scale: str) -> None:
    options, sources, notes = read_options("megatron", words)
    assert (type(options).__name__, options.stage, options.data.loss_scale, notes) == (name, stage, loss_scale, [])
    assert "stage" not in sources


def test_dpo() -> None:
    options, sources, _ = read_options(
        "megatron",
        line(
            "dpo",
            "--loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1 --beta 0.3 --ref_model r --tuner_type lora",
        ),
    )
    assert (options.loss_type, options.loss_weights) == (["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0])
    assert (options.beta, options.reference.ref_model, options.schedule.lr) == (0.3, "r", 1e-4)
    assert (sources["rlhf_type"], sources["lr"], sources["rpo_alpha"]) == ("command line", "derived", "default")


@pytest.mark.parametrize("kind", CHOICE)
def test_a_config_file_chooses_the_type(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{CHOICE[kind]}: {kind}\nmodel: m\n")
    command, by, *_ = line(kind)
    options, sources, _ = read_options("megatron", [command, str(file)])
    assert getattr(options, CHOICE[kind]) == kind
    assert sources["model"] == str(file)
    other = next(each for each in CHOICE if CHOICE[each] == CHOICE[kind] and each != kind)
    assert getattr(read_options("megatron", [command, str(file), by, other])[0], CHOICE[kind]) == other

    saved = tmp_path / "args.json"
    save_args(saved, options, sources)
    again, _, _ = read_options("megatron", [command, "--config", str(saved)])
    assert (type(again), vars(again)) == (type(options), vars(options))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rlhf --rlhf_type prm", "--rlhf_type prm: choose one of dpo, orpo, simpo, cpo, kto, rm, grpo, ppo, gkd."),
        ("rlhf --rlhf_type", "--rlhf_type: choose one of dpo, orpo, simpo, cpo, kto, rm, grpo, ppo, gkd."),
        ("rlhf --rlhf_type dpo kto", "--rlhf_type dpo kto: choose one of"),
        ("sft --task_type seq2seq", "--task_type seq2seq: choose one of causal_lm, seq_cls, embedding, reranker, gen"),
        ("rlhf --num_generations 8", "--num_generations: only for --rlhf_type grpo|ppo, not dpo. Remove it."),
        ("rlhf --lmbda 0.5", "--lmbda: only for --rlhf_type gkd, not dpo. Remove it."),
        ("sft --num_generations 8", "--num_generations: a flag of `megatron rlhf --rlhf_type grpo|ppo`, not of this"),
        ("rlhf --desirable_weight 2", "--desirable_weight: only for --rlhf_type kto, not dpo. Remove it."),
        ("rlhf --rlhf_type kto --rpo_alpha 1", "--rpo_alpha: only for --rlhf_type dpo, not kto. Remove it."),
        (
            "rlhf --rlhf_type rm --beta 1",
            "--beta: only for --rlhf_type dpo|orpo|simpo|cpo|kto|grpo|ppo|gkd, not rm. Remove it.",
        ),
        ("rlhf --rlhf_type rm --ref_model m", "--ref_model: only for --rlhf_type dpo|kto|grpo|ppo, not rm."),
        ("rlhf --task_type seq_cls", "--task_type: a flag of `megatron sft`, not of this command. Remove it."),
        ("sft --num_labels 2", "--num_labels: only for --task_type seq_cls, not causal_lm. Remove it."),
        (
            "sft --loss_type infonce",
            "--loss_type: only for --task_type embedding|reranker|generative_reranker, not",
        ),
        (
            "sft --task_type reranker --positive_token y",
            "--positive_token: only for --task_type generative_reranker, not",
        ),
        ("sft --task_type embedding --num_labels 2", "--num_labels: only for --task_type seq_cls, not embedding."),
        ("pt --task_type seq_cls", "--task_type: a flag of `megatron sft`, not of this command. Remove it."),
        ("pt --num_labels 2", "--num_labels: a flag of `megatron sft --task_type seq_cls`, not of this command."),
        ("sft --rlhf_type dpo", "--rlhf_type: a flag of `megatron rlhf`, not of this command. Remove it."),
        ("rlhf --betta 1", "--betta: no such flag. The nearest is --beta."),
        ("rlhf --loss_type sigmoid kto_pair", "--loss_type kto_pair: choose one of sigmoid, hinge, ipo, exo_pair,"),
        ("rlhf --rlhf_type kto --loss_type kto bco", "--loss_type kto bco: takes one value."),
        ("rlhf --ref_adapter_load a", "--ref_adapter_load a: no support for reference adapters in megatron-core's"),
        ("rlhf --mcore_ref_adapter a", "--mcore_ref_adapter a: no support for reference adapters in megatron-core's"),
    ],
)
def test_what_a_type_does_not_take(words: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_options("megatron", words.split())
    assert message in str(error.value)


def test_names_of_the_incumbent() -> None:
    words = "--ref_load r --calculate_KL true --sync_ref_model false --train_type lora --max_epochs 1"
    options, _, notes = read_options("megatron", line("kto", words))
    assert (options.reference.mcore_ref_model, options.tuner.tuner_type, options.training.num_train_epochs) == (
        "r",
        "lora",
        1.0,
    )
    assert [note.split()[0] for note in notes] == ["--ref_load", "--calculate_KL", "--train_type", "--max_epochs"]


@pytest.mark.parametrize("kind", CHOICE)
def test_help_of_a_type(kind: str, capsys) -> None:
    assert main("megatron", [*line(kind), "-h" if kind == "kto" else "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    kinds = {**PREFERENCES, **TASKS}
    flags = {each: flags_of(getattr(option_sets, command.options)) for each, command in kinds.items()}
    assert kinds[kind].summary in printed
    assert all(f" --{flag.name} {flag.metavar} " in printed for flag in flags[kind].values())
    assert not [name for name in set().union(*flags.values()) - set(flags[kind]) if f" --{name} " in printed]


def test_help_of_no_type(capsys) -> None:
    assert main("megatron", ["rlhf", "--rlhf_type", "x", "--help"]) == 2
    assert "--rlhf_type x: choose one of dpo, orpo, simpo, cpo, kto, rm, grpo, ppo, gkd." in capsys.readouterr().err


@pytest.mark.parametrize("kind", [kind for kind in CHOICE if kind not in ("causal_lm", "grpo", "ppo", "gkd")])
def test_what_documents_that_belong_together_cannot_be(kind: str, dense: Path) -> None:
    named = f"--{CHOICE[kind]} {kind}"
    padded, notes = check(kind, dense, "--padding_free false")
    assert padded == check(kind, dense)[0]  # tests/tasks/preference/test_trl.py compares its numbers with padded rows
    assert f"--padding_free false is ignored: {named} has packed rows only, and padding changes no number." in notes
    assert f"--mtp_num_layers 1 cannot be used with {named}" in refusal(kind, dense, "--mtp_num_layers 1")
    if kind in ("kto", "embedding"):
        assert f"--streaming true cannot be used with {named}" in refusal(kind, dense, "--streaming true")
    else:
        check(kind, dense, "--streaming true" + " --problem_type regression" * (kind == "seq_cls"))
    check(kind, dense, "--packing true --max_length 64")
    check(kind, dense, LORA)


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("kto", "--beta 0", "--beta 0.0: must be above 0."),
        ("kto", "--desirable_weight -1", "--desirable_weight -1.0: must be at least 0."),
        ("rm", "--center_rewards_coefficient -1", "--center_rewards_coefficient -1.0: must be at least 0."),
        ("seq_cls", "--num_labels 0", "--num_labels 0: must be above 0."),
        (
            "seq_cls",
            "--num_labels 1 --problem_type single_label_classification",
            "--num_labels 1 cannot be used with --problem_type single_label_classification: there is one class. Set 2 "
            "or",
        ),
        (
            "seq_cls",
            "--streaming true",
            "--streaming true needs --problem_type, because a stream's labels are unknown. Set it, as in",
        ),
        ("embedding", "--mrl_dims 32 65", "--mrl_dims 65: the model's vectors have 64"),
        ("embedding", "--mrl_dims 0", "--mrl_dims 0: must be at least 1."),
        ("embedding", "--mrl_dims 8 8", "--mrl_dims 8 8: a size is repeated."),
        (
            "embedding",
            "--mrl_dims 8 16 --mrl_weights 1",
            "--mrl_weights 1.0: 1 weights for 2 of --mrl_dims. Set one for each.",
        ),
        ("embedding", "--mrl_weights 1", "--mrl_weights 1.0: 1 weights for 0 of --mrl_dims. Set one"),
        ("embedding", "--infonce_temperature 0", "--infonce_temperature 0.0: must be above 0."),
        (
            "embedding",
            "--loss_type contrastive --infonce_use_batch false",
            "--infonce_use_batch false: only for --loss_type infonce, not contrastive. Remove it.",
        ),
        (
            "embedding",
            "--contrastive_margin 1",
            "--contrastive_margin 1.0: only for --loss_type contrastive or online_contrastive, not infonce. Remove it.",
        ),
        (
            "reranker",
            "--listwise_temperature 0.5",
            "--listwise_temperature 0.5: only for --loss_type listwise_reranker, not",
        ),
        ("generative_reranker", "--positive_token no", "--positive_token, --negative_token no: are equal. Set two"),
        ("generative_reranker", "--positive_token=", '--positive_token "": is empty. Set a token of the model,'),
    ],
)
def test_what_other_tasks_cannot_be(kind: str, words: str, message: str, dense: Path) -> None:
    assert message in refusal(kind, dense, words)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kto", "--loss_type apo_zero_unpaired --undesirable_weight 0"),
        ("rm", "--center_rewards_coefficient 0.01"),
        ("seq_cls", "--num_labels 1 --problem_type regression"),
        ("embedding", "--mrl_dims 64 32 --mrl_weights 1 0.5 --pooling mean --infonce_temperature 0.02"),
        ("embedding", "--loss_type online_contrastive --contrastive_margin 0.2"),
        ("reranker", "--loss_type listwise_reranker --listwise_temperature 0.5"),
        ("generative_reranker", "--positive_token true --negative_token false"),
    ],
)
def test_what_other_tasks_can_be(kind: str, words: str, dense: Path) -> None:
    assert check(kind, dense, words)[1] == []


def test_the_number_of_labels_is_needed_where_there_is_no_head(dense: Path, headed: Path, capsys) -> None:
    words = [*line("seq_cls"), "--dataset", "d", "--train_iters", "1", "--model"]
    assert main("megatron", [*words, str(dense)]) == 2
    assert "error: --num_labels: missing, and the model has no head" in capsys.readouterr().err
    options, sources, _ = read_options("megatron", [*words, str(headed)])
    assert check_training(options, ProcessLayout.of(options.build, 1), gpus=0, processes=1, sources=sources) == []


@pytest.mark.parametrize("kind", CHOICE)
def test_a_model_that_has_a_head(kind: str, headed: Path) -> None:
    if kind == "seq_cls":
        check(kind, headed)
        assert f"--model {headed}: has a head of 3 outputs, not that of --num_labels 2." in refusal(
            kind, headed, "--num_labels 2"
        )
    elif kind in ("rm", "reranker"):
        assert f"has a head of 3 outputs, not that of --{CHOICE[kind]} {kind}, of 1 output" in refusal(kind, headed)
        check(kind, write_model(headed, HEADED | {"id2label": {"0": "reward"}}))
    else:
        assert f"--model {headed}: has a head of 3 outputs instead of an output layer." in refusal(kind, headed)


def test_adapters_beside_a_head(dense: Path, tmp_path: Path) -> None:
    """An adapter that was saved with its head goes on; on a language model it is not for a language model."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["score"]}
    (folder / "adapter_config.json").write_text(json.dumps(written | {"base_model_name_or_path": str(dense)}))
    tensors = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight": {} for n in range(4)}
    header = json.dumps(tensors).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for kind in ("seq_cls", "rm", "reranker"):
        options, notes = check(kind, dense, f"{LORA} --adapters {folder}")
        assert (options.lora.lora_rank, notes) == (4, [])
    assert "score" in refusal("causal_lm", dense, f"{LORA} --adapters {folder}")
    assert "score" in refusal("seq_cls", dense, f"{LORA} --target_modules score")


def test_what_scores_does_not_speak(dense: Path, headed: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    written = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": str(dense)}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for words in (["--model", str(headed)], ["--adapters", str(folder)]):
        assert main("swift", ["infer", *words]) == 2
        assert f"{words[0]} {words[1]}: has a score head and cannot generate text" in capsys.readouterr().err


def test_what_is_not_read_is_said(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("rm", "seq_cls", "embedding", "reranker"):
        assert check(kind, dense, "--loss_scale all")[1] == [
            f"--loss_scale all is not needed: --{CHOICE[kind]} {kind} has no loss per token."
        ]
    assert check("dpo", dense, "--loss_scale all")[1] == []
    for kind, task in (("embedding", "--task_type embedding"), ("pt", "megatron pt")):
        assert check(kind, dense, "--add_non_thinking_prefix true")[1] == [
            f"--add_non_thinking_prefix true has no effect: {task} trains on no answers of the data."
        ]
    assert check("dpo", dense, "--add_non_thinking_prefix true")[1] == []
    assert check("pt", dense, "--loss_scale hermes")[1] == [
        "--loss_scale hermes is not needed: megatron pt trains on whole texts."
    ]
    monkeypatch.setenv("INFONCE_TEMPERATURE", "0.02")
    monkeypatch.setenv("INFONCE_HARD_NEGATIVES", "4")
    monkeypatch.setenv("GENERATIVE_RERANKER_POSITIVE_TOKEN", "true")
    assert check("embedding", dense)[1] == [
        "INFONCE_HARD_NEGATIVES=4: environment variable is not read. Unset it.",
        "INFONCE_TEMPERATURE=0.02: environment variable is not read. Set --infonce_temperature 0.02.",
    ]
    (note,) = check("generative_reranker", dense)[1]
    assert note.endswith(" is not read. Set --positive_token true.")
    assert check("reranker", dense)[1] == check("dpo", dense)[1] == []


def test_every_type_has_its_metrics() -> None:
    assert set(METRICS) == set(CHOICE)


def test_types_are_checked_without_torch(dense: Path) -> None:
    program = (
        "import sys; from megaswift.cli.main import main; code = main('megatron', sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'datasets', 'peft'} & set(sys.modules); sys.exit(code)"
    )
    words = line("dpo", f"--model {dense} --dataset d --train_iters 1 --ref_model {dense} --mtp_num_layers 1")
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "--mtp_num_layers 1 cannot be used with --rlhf_type dpo" in done.stderr


ROWS = {
    "dpo": {"rejected_response": "Nothing."},
    "kto": {"label": True},
    "rm": {"rejected_response": "Nothing.", "margin": 0.5},
    "seq_cls": {"label": 1},
    "embedding": {},
    "reranker": {},
    "generative_reranker": {},
}


def rows_of(kind: str) -> list[dict]:
    if kind in ("embedding", "reranker", "generative_reranker"):
        return [
            {
                "messages": [{"role": "user", "content": f"query {n}"}],
                "positive_messages": [[{"role": "user", "content": f"the answer to {n}"}]],
                "negative_messages": [[{"role": "user", "content": "another"}]],
            }
            for n in range(40)
        ]
    return [{"query": f"What is {n}?", "response": f"{n} is {n}."} | ROWS[kind] for n in range(40)]


@pytest.mark.parametrize("kind", ROWS)
def test_dry_run(kind: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_tokenizer(dense)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind)))
    words = f"--model {dense} --dataset {file} --num_train_epochs 1 --dry_run true"
    code = main("megatron", line(kind, words + " --num_labels 2" * (kind == "seq_cls")))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "steps             3\n" in printed.out
    assert f"  {CHOICE[kind]:<44}{kind}   (command line)" in printed.out
    assert f"-m megaswift.cli.main megatron {line(kind)[0]} --{CHOICE[kind]} {kind}" in printed.out


def test_defaults_of_the_losses() -> None:
    """Those of TRL 1.16."""
    dpo, kto = DpoOptions(), KtoOptions()
    assert (dpo.beta, dpo.loss_type, dpo.loss_weights, dpo.label_smoothing) == (0.1, ["sigmoid"], [], 0.0)
    assert (dpo.f_divergence_type, dpo.f_alpha_divergence_coef, dpo.discopop_tau) == ("reverse_kl", 0.5, 0.05)
    assert (kto.beta, kto.loss_type, kto.desirable_weight, kto.undesirable_weight) == (0.1, "kto", 1.0, 1.0)
