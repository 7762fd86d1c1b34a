"""Distillation on questions with images, with answers of the data and generated ones: TRL's divergence of
transformers' logits, in several layouts."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny_vision
from tests.tasks.distillation.test_apart import teacher
from tests.tasks.vision_oracle import ALL, BATCH, COUNTED, PICTURES, STEPS, Oracle, Place, encoded_patches, log

pytestmark = pytest.mark.slow
BETA, TEMPERATURE, ALPHA = 0.3, 0.7, 0.4
LENGTH = 8  # tokens of a generated answer at most
NAMES = "loss", "grad_norm", "jsd", "nll_loss"
FLAGS = f"--lmbda 0 --beta {BETA} --temperature {TEMPERATURE} --sft_alpha {ALPHA}"
LAYOUTS = {
    "TP2": "--tensor_model_parallel_size 2",
    "TP2 SP": "--tensor_model_parallel_size 2 --sequence_parallel true",
    "CP2": "--context_parallel_size 2",
    "PP2": "--pipeline_model_parallel_size 2",
    "DP2": "--micro_batch_size 1",
}


def question(number: int) -> dict[str, Any]:
    """A row with no to three images, one of them twice in some."""
    count = number * 7 % 4
    content = "what <image>" * count + "colour?"
    answer = {"role": "assistant", "content": "a red circle " * (1 + number % 3)}
    names = [f"{(number + i % 2) % PICTURES}.png" for i in range(count)]
    return {"messages": [{"role": "user", "content": content}, answer], "images": names}


ROWS = [question(number) for number in range(STEPS * BATCH)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("images"))
    folder = place.folder
    tiny_vision.qwen3_vl(folder / "other", seed=1)
    tiny_vision.qwen3_vl(folder / "teacher", seed=1)
    weights = load_file(folder / "teacher" / "model.safetensors")
    student = load_file(folder / "qwen3" / "model.safetensors")
    weights |= {name: tensor for name, tensor in student.items() if "visual" in name}
    save_file(weights, folder / "teacher" / "model.safetensors", metadata={"format": "pt"})
    tiny_vision.qwen3_vl(folder / "moe", moe=True)
    tiny_vision.qwen3_vl(folder / "teacher_moe", moe=True, seed=1)
    place.write("rows.jsonl", ROWS)
    return place


def distil(place: Place, flags: str = "", processes: int = 1, model: str = "qwen3", **more: Any) -> Any:
    micro = "" if "micro_batch_size" in flags else "--micro_batch_size 2"
    named = "" if "--teacher_model" in flags else "--teacher_model teacher"
    data = "" if "--dataset" in flags else "--dataset rows.jsonl"
    return place.run(f"rlhf --rlhf_type gkd --model {model} {FLAGS} {data} {micro} {named} {flags}", processes, **more)


def by_hand(
    place: Place, name: str, *, trains_tower: bool = False, alpha: float = ALPHA, writer: str = ""
) -> list[list[float]]:
    """The log of a run. writer: of the answers, by greedy decoding: student or teacher; "": the data's"""
    from trl.experimental.gkd import GKDTrainer

    student, frozen = (Oracle(place.folder / folder, place.folder) for folder in ("qwen3", name))
    student.model.model.visual.requires_grad_(trains_tower)
    writers = {"student": student, "teacher": frozen}

    def answers(row: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of student and teacher at the tokens of an answer, and these."""
        if writer:
            prompt = student.conversation(row["messages"][:1], row["images"], prompt=True)
            ids = greedy(writers[writer].model, prompt)
            logits, taught = (oracle.completion(prompt, ids) for oracle in (student, frozen))
        else:
            logits, ids = student.answer(row["messages"], row["images"])
            taught, _ = frozen.answer(row["messages"], row["images"])
        return logits, taught.detach(), ids

    def loss(rows: Any) -> tuple[Tensor, list[float]]:
        jsd, nll, tokens = torch.zeros(()), torch.zeros(()), 0
        for row in rows:
            logits, taught, ids = answers(row)
            settings = {"beta": BETA, "temperature": TEMPERATURE, "reduction": "sum"}
            jsd = jsd + GKDTrainer.generalized_jsd_loss(logits, taught, **settings)
            nll = nll + torch.nn.functional.cross_entropy(logits, ids, reduction="sum")
            tokens += len(ids)
        metrics = [(jsd / tokens).item(), *([(nll / tokens).item()] if alpha else [])]
        return (jsd + alpha * nll) / tokens, metrics

    return student.steps(ROWS, loss)


def greedy(model: Any, prompt: dict[str, Tensor]) -> Tensor:
    """The likeliest tokens after a prompt, by transformers."""
    settings = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": model.config.text_config.eos_token_id}
    return model.generate(**prompt, **settings, pad_token_id=0)[0, prompt["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    ("name", "flags"),
    [("teacher", ""), ("other", ALL), pytest.param("other", "", marks=pytest.mark.long)],
    ids=["its tower", "another tower, a trained one", "another tower"],
)
def test_steps_are_those_of_transformers(name: str, flags: str, place: Place) -> None:
    run = distil(place, f"--teacher_model {name} {flags}")
    expected = by_hand(place, name, trains_tower=bool(flags))
    torch.testing.assert_close(log(run, *NAMES), expected, rtol=2e-4, atol=1e-6)


GREEDY = f"--use_vllm false --top_k 1 --max_completion_length {LENGTH} --teacher_model other"
BY_STUDENT, BY_TEACHER = f"{GREEDY} --lmbda 1 --sft_alpha 0 {ALL}", f"{GREEDY} --seq_kd true"


def test_answers_of_the_student(place: Place) -> None:
    """With the weights of each step, those of its tower among them."""
    run = distil(place, BY_STUDENT)
    expected = by_hand(place, "other", trains_tower=True, alpha=0, writer="student")
    torch.testing.assert_close(log(run, *NAMES[:3]), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.long
def test_answers_of_the_teacher(place: Place) -> None:
    expected = by_hand(place, "other", writer="teacher")
    torch.testing.assert_close(log(distil(place, BY_TEACHER), *NAMES), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "flags", "names"),
    [
        pytest.param("TP2 SP", BY_STUDENT, NAMES[:3], id="student, TP2 SP"),
        pytest.param("PP2", BY_STUDENT, NAMES[:3], id="student, PP2", marks=pytest.mark.long),
        pytest.param("DP2", BY_TEACHER, NAMES, id="teacher, DP2", marks=pytest.mark.long),
        pytest.param("CP2", BY_TEACHER, NAMES, id="teacher, CP2", marks=pytest.mark.long),
    ],
)
def test_generated_answers_in_a_layout(layout: str, flags: str, names: tuple[str, ...], place: Place) -> None:
    divided = log(distil(place, f"{LAYOUTS[layout]} {flags}", 2), *names)
    torch.testing.assert_close(divided, log(distil(place, flags), *names), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("layout", "apart"),
    [
        pytest.param("TP2 SP", "", id="TP2 SP"),
        pytest.param("CP2", "", id="CP2", marks=pytest.mark.long),
        pytest.param("TP2", "", id="TP2", marks=pytest.mark.long),
        pytest.param("PP2", "", id="PP2", marks=pytest.mark.long),
        pytest.param("DP2", "", id="DP2", marks=pytest.mark.long),
        pytest.param("PP2", teacher(TP=2, PP=1), id="PP2, TP2"),
        pytest.param("DP2", teacher(CP=2), id="DP2, CP2", marks=pytest.mark.long),
        pytest.param("TP2 SP", teacher(TP=1, PP=2), id="TP2 SP, PP2", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("tower", ["", pytest.param(f"--teacher_model other {ALL}", marks=pytest.mark.long)])
def test_a_layout_gives_the_numbers_of_one_process(layout: str, apart: str, tower: str, place: Place) -> None:
    divided = log(distil(place, f"{LAYOUTS[layout]} {apart} {tower}", 2), *NAMES, "images")
    torch.testing.assert_close(divided, log(distil(place, tower), *NAMES, "images"), rtol=1e-4, atol=0)


def patches(place: Place, flags: str, processes: int) -> int:
    return encoded_patches(distil(place, flags, processes, program=COUNTED))


@pytest.mark.parametrize("flags", ["", pytest.param(LAYOUTS["PP2"], marks=pytest.mark.long)])
def test_a_teacher_with_the_same_tower_reads_the_student_s_features(flags: str, place: Place) -> None:
    processes = 2 if flags else 1
    shared, apart = (patches(place, f"--teacher_model {name} {flags}", processes) for name in ("teacher", "other"))
    assert 0 < 2 * shared == apart


@pytest.mark.long
@pytest.mark.parametrize("name", ["teacher", "other"])
def test_features_on_disk_are_the_student_s(name: str, place: Place, monkeypatch) -> None:
    """A teacher with another tower encodes by itself."""
    monkeypatch.setenv("MODELSCOPE_CACHE", str(place.folder / name / "cache"))
    flags = f"--teacher_model {name}"
    plain = distil(place, flags, program=COUNTED)
    distil(place, f"{flags} --precompute_features true --seed 1")
    encoded = patches(place, f"{flags} --precompute_features true", 1)
    assert encoded == (patches(place, flags, 1) // 2 if name == "other" else 0)
    cached = distil(place, f"{flags} --precompute_features true", program=COUNTED)
    assert log(cached, *NAMES) == log(plain, *NAMES)


@pytest.mark.long
@pytest.mark.parametrize("apart", ["", teacher(EP=1, TP=2)])
def test_experts(apart: str, place: Place) -> None:
    flags = "--teacher_model teacher_moe --moe_aux_loss_coeff 0"
    divided = distil(place, f"{flags} --expert_model_parallel_size 2 {apart}", 2, model="moe")
    torch.testing.assert_close(log(divided, *NAMES), log(distil(place, flags, model="moe"), *NAMES), rtol=1e-4, atol=0)


@pytest.mark.long
def test_packed_and_with_the_likeliest_tokens(place: Place) -> None:
    whole = "--gkd_logits_topk 9 --teacher_model other"
    packed = f"{whole} --micro_batch_size 1 --packing true --packing_length 1024"
    torch.testing.assert_close(log(distil(place, packed), *NAMES), log(distil(place, whole), *NAMES), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--teacher_model text", "--teacher_model text"),
        ("--teacher_model qwen2_5", "--teacher_model qwen2_5: takes images in another form"),
    ],
)
def test_refusals(flags: str, problem: str, place: Place) -> None:
    from tests import tiny

    if not (place.folder / "text").is_dir():
        tiny.save_tokenizer(tiny.save(place.folder / "text", "qwen3", 0))
        tiny_vision.qwen2_5_vl(place.folder / "qwen2_5")
    assert problem in distil(place, flags, fails=True)
