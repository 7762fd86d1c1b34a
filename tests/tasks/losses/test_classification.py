"""Losses of scores, against transformers, sentence-transformers and scikit-learn."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaswift.tasks.losses import classification
from megaswift.tasks.losses.classification import classification_losses, listwise_losses, multi_hot, pointwise_losses

NAN = float("nan")
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
anything = settings(max_examples=25, deadline=None, database=None, derandomize=True)


def agree(mine, theirs, bound: float = 1e-6):
    torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def example(problem_type: str, outputs: int, samples: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and labels, as `classification_losses` takes them."""
    generator = torch.Generator().manual_seed(outputs)
    scores = 3 * torch.randn(samples, outputs, generator=generator)
    labels = {
        SINGLE: torch.randint(0, outputs, (samples,), generator=generator),
        MULTI: (torch.rand(samples, outputs, generator=generator) < 0.4).float(),
        REGRESSION: torch.randn(samples, outputs, generator=generator),
    }[problem_type]
    return scores.requires_grad_(), labels


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI, REGRESSION])
@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_losses_are_transformers(problem_type, outputs):
    """Of all samples, of each by itself, and the gradients."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    scores, labels = example(problem_type, outputs)
    config = SimpleNamespace(num_labels=outputs, problem_type=problem_type)
    mine, theirs = (
        classification_losses(scores, labels, problem_type),
        ForSequenceClassificationLoss(labels, scores, config),
    )
    agree(mine.mean(), theirs)
    agree(torch.autograd.grad(mine.mean(), scores), torch.autograd.grad(theirs, scores))
    alone = [ForSequenceClassificationLoss(labels[i : i + 1], scores[i : i + 1], config) for i in range(len(labels))]
    agree(mine, torch.stack(alone))


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI, REGRESSION])
def test_extreme_scores_stay_finite(problem_type):
    scores, labels = example(problem_type, 3)
    scores = (1e4 * scores.detach().sign()).requires_grad_()
    losses = classification_losses(scores, labels, problem_type)
    assert losses.isfinite().all()
    assert torch.autograd.grad(losses.sum(), scores)[0].isfinite().all()


@pytest.mark.parametrize(
    ("problem_type", "shape"),
    [(SINGLE, (7, 1)), (MULTI, (7, 2)), (REGRESSION, (7,)), (REGRESSION, (7, 1)), (MULTI, (3,))],
)
def test_labels_of_another_shape_are_no_broadcast(problem_type, shape):
    with pytest.raises(ValueError, match=f"--problem_type {problem_type}: labels of shape"):
        classification_losses(torch.zeros(7, 3), torch.zeros(shape), problem_type)


def test_problems_have_names():
    with pytest.raises(ValueError, match="--problem_type ranking: there are single_label"):
        classification_losses(torch.zeros(2, 3), torch.zeros(2, 3), "ranking")


def test_multi_hot():
    labels = torch.tensor([[0, 2, NAN], [NAN, NAN, NAN], [1, 1, 3]])
    expected = torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    assert torch.equal(multi_hot(labels, 4), expected)


@pytest.mark.parametrize("wrong", [4, -1, 1.5])
@pytest.mark.parametrize("read", [multi_hot, classification.class_indices])
def test_labels_that_are_no_classes(read, wrong):
    with pytest.raises(ValueError, match=rf"--num_labels 4: classes are 0 to 3, and a row's label is {wrong}\."):
        read(torch.tensor([[2.0], [wrong]]), 4)


def test_one_class_each():
    assert classification.class_indices(torch.tensor([[2.0], [0.0]]), 3).tolist() == [2, 0]
    with pytest.raises(
        ValueError, match="--problem_type single_label_classification: a row has 2 labels, and needs one"
    ):
        classification.class_indices(torch.tensor([[2.0, 1.0]]), 3)
    with pytest.raises(ValueError, match="a row's label is nan"):
        classification.class_indices(torch.tensor([[NAN]]), 3)


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI])
def test_accuracy_is_scikit_learns(problem_type):
    from sklearn.metrics import accuracy_score

    scores, labels = example(problem_type, 3, samples=40)
    scores = scores.detach()
    predictions = scores.argmax(1) if problem_type == SINGLE else (scores.sigmoid() > 0.5).float()
    found = classification.accuracy(scores, labels, problem_type)
    assert found.shape == (40,)
    assert found.mean().item() == pytest.approx(accuracy_score(labels, predictions))
    assert 0 < found.mean() < 1


def test_numbers_have_no_accuracy():
    with pytest.raises(ValueError, match="--problem_type regression has no accuracy"):
        classification.accuracy(torch.zeros(2, 1), torch.zeros(2, 1), REGRESSION)


@anything
@given(groups=st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=6))
def test_multi_hot_of_any_lists(groups):
    """Against plain Python: any order, repeats, rows without classes."""
    width = max(map(len, groups), default=0)
    labels = torch.tensor([group + [NAN] * (width - len(group)) for group in groups]).reshape(len(groups), width)
    assert multi_hot(labels, 6).tolist() == [[float(k in group) for k in range(6)] for group in groups]


def test_pointwise_losses_are_sentence_transformers():
    """Its BinaryCrossEntropyLoss, on a cross encoder that answers with given scores."""
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    scores, labels = 4 * torch.randn(9, generator=torch.Generator().manual_seed(0)), (torch.arange(9) % 3 == 0).float()
    theirs = _with_scores(BinaryCrossEntropyLoss, scores[:, None])
    theirs.activation_fn, theirs.bce_with_logits_loss = torch.nn.Identity(), torch.nn.BCEWithLogitsLoss()
    mine = pointwise_losses(scores, labels)
    assert mine.shape == (9,)
    agree(mine.mean(), theirs.forward([["query"] * 9, ["document"] * 9], labels))


def _with_scores(kind: type, scores: torch.Tensor):
    """A loss of cross encoders without its constructor, which asks for a real one."""

    class Encoder:
        device = torch.device("cpu")

        def preprocess(self, pairs, **_):
            return {"pairs": torch.zeros(len(pairs))}

        def __call__(self, _):
            return {"scores": scores}

    loss = kind.__new__(kind)
    torch.nn.Module.__init__(loss)
    loss.model = Encoder()
    return loss


@pytest.mark.parametrize("sizes", [[3, 1, 5], [4, 4]])
def test_listwise_losses_are_sentence_transformers(sizes):
    """Its ListNetLoss over groups, with the first document as the relevant one."""
    from sentence_transformers.cross_encoder.losses import ListNetLoss

    scores = 3 * torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    theirs = _with_scores(ListNetLoss, scores[:, None])
    theirs.activation_fn, theirs.mini_batch_size = torch.nn.Identity(), sum(sizes)
    theirs.cross_entropy_loss = torch.nn.CrossEntropyLoss()
    documents = [["document"] * size for size in sizes]
    # It makes a distribution of labels by a softmax: 0 and minus a lot are 1 and 0.
    relevant = [torch.tensor([0.0] + [-1e9] * (size - 1)) for size in sizes]
    samples = torch.repeat_interleave(torch.tensor(sizes))
    agree(listwise_losses(scores, samples).mean(), theirs.forward([["query"] * len(sizes), documents], relevant))


group_scores = st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=5), max_size=6)


@anything
@given(groups=group_scores, temperature=st.floats(0.05, 5), numbers=st.randoms(use_true_random=False))
def test_listwise_losses_of_any_groups(groups, temperature, numbers):
    """Against plain Python; samples without documents leave gaps in the numbers, and have no loss."""
    scores = torch.tensor([score for group in groups for score in group], dtype=torch.float64, requires_grad=True)
    names = sorted(numbers.sample(range(20), len(groups)))
    samples = torch.tensor([name for name, group in zip(names, groups, strict=True) for _ in group], dtype=torch.int64)
    found = listwise_losses(scores, samples, temperature)
    assert found.shape == (len(groups),)
    for loss, group in zip(found.tolist(), groups, strict=True):
        scaled = [score / temperature for score in group]
        exact = max(scaled) + math.log(sum(math.exp(score - max(scaled)) for score in scaled)) - scaled[0]
        assert loss == pytest.approx(exact, rel=1e-9, abs=1e-9)
    assert torch.autograd.grad(found.sum(), scores)[0].isfinite().all()


def test_one_document_alone_has_nothing_to_learn():
    assert listwise_losses(torch.tensor([3.0, -1.0]), torch.tensor([0, 1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("problem_type", [SINGLE, MULTI, REGRESSION])
def test_no_samples_have_no_losses(problem_type):
    """As in a micro batch that only fills up a step: gradients are there."""
    scores, labels = example(problem_type, 3, samples=0)
    losses = classification_losses(scores, labels, problem_type)
    assert losses.shape == (0,)
    torch.autograd.grad(losses.sum(), scores)
    documents = torch.zeros(0, requires_grad=True)
    for losses in (
        listwise_losses(documents, torch.zeros(0, dtype=torch.int64)),
        pointwise_losses(documents, documents),
    ):
        assert losses.shape == (0,)
        torch.autograd.grad(losses.sum(), documents)


@anything
@given(scores=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=6))
def test_properties_of_pointwise_losses(scores):
    """What is true of a document is false of its opposite; gradients are finite."""
    values = torch.tensor(scores, requires_grad=True)
    losses = pointwise_losses(values, torch.ones_like(values))
    agree(losses, pointwise_losses(-values, torch.zeros_like(values)))
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert gradient.isfinite().all()
    assert (gradient <= 0).all()
