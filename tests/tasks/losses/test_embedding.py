"""Losses of embeddings, against sentence-transformers'."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaswift.tasks.losses import embedding
from megaswift.tasks.losses.embedding import infonce_losses

anything = settings(max_examples=25, deadline=None, database=None, derandomize=True)


def agree(mine, theirs, bound: float = 1e-6):
    torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def vectors(*counts: int, dimensions: int = 12, seed: int = 0) -> list[torch.Tensor]:
    """Embeddings of lengths far from 1, not far apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, dimensions, generator=generator) * 3 + 2).requires_grad_() for n in counts]


def same(mine: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Losses and gradients."""
    agree(mine, theirs)
    agree(torch.autograd.grad(mine, inputs), torch.autograd.grad(theirs, inputs))


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.02, 0.1, 1.0])
def test_infonce_is_sentence_transformers(negatives, temperature):
    """MultipleNegativesRankingLoss: candidates are all positives, then all negatives."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    columns = vectors(*[5] * (2 + negatives))
    theirs = MultipleNegativesRankingLoss(None, scale=1 / temperature).compute_loss_from_embeddings(columns, None)
    mine = infonce_losses(columns[0], torch.cat(columns[1:]), torch.arange(5), temperature)
    assert mine.shape == (5,)
    same(mine.mean(), theirs, columns)


def test_infonce_of_each_anchors_own_candidates():
    """With a mask, as with the other anchors' candidates left out; the target takes part whatever the mask says."""
    anchors, candidates = vectors(3, 7)
    own = [[0, 1], [2, 3, 4], [5, 6]]
    mask = torch.zeros(3, 7, dtype=torch.bool)
    for row, columns in enumerate(own):
        mask[row, columns] = True
    target = torch.tensor([0, 3, 6])
    expected = [
        infonce_losses(anchors[i : i + 1], candidates[own[i]], torch.tensor([own[i].index(int(target[i]))]), 0.1)
        for i in range(3)
    ]
    agree(infonce_losses(anchors, candidates, target, 0.1, mask), torch.cat(expected))
    mask[torch.arange(3), target] = False
    agree(infonce_losses(anchors, candidates, target, 0.1, mask), torch.cat(expected))


@anything
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    scale=st.floats(0.01, 100),
    temperature=st.floats(0.01, 2),
)
def test_properties_of_infonce(sizes, seed, scale, temperature):
    """Groups of different sizes: neither the candidates' order nor lengths of vectors change a loss, another candidate
    makes it no smaller, and an anchor alone with its positive has none."""
    anchors, candidates = vectors(len(sizes), sum(sizes), seed=seed)
    target = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
    losses = infonce_losses(anchors, candidates, target, temperature)
    assert (losses >= -1e-5).all()
    agree(infonce_losses(scale * anchors, candidates / scale, target, temperature), losses, 1e-3)
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    agree(infonce_losses(anchors, candidates[order], order.argsort()[target], temperature), losses, 1e-3)
    more = torch.cat([candidates, vectors(1, seed=seed + 1)[0]])
    assert (infonce_losses(anchors, more, target, temperature) >= losses - 1e-5).all()
    alone = torch.zeros(len(sizes), sum(sizes), dtype=torch.bool)
    agree(infonce_losses(anchors, candidates, target, temperature, alone), torch.zeros(len(sizes)))


PAIRED = [
    ("contrastive_losses", "ContrastiveLoss"),
    ("online_contrastive_losses", "OnlineContrastiveLoss"),
    ("cosine_similarity_losses", "CosineSimilarityLoss"),
]


@pytest.mark.parametrize(("mine", "theirs"), PAIRED)
@pytest.mark.parametrize("labels", [[1, 0, 1, 0, 0, 1, 1, 0], [1] * 8, [0] * 8, [1] + [0] * 7])
@pytest.mark.parametrize("margin", [0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_sentence_transformers(mine, theirs, labels, margin, seed):
    from sentence_transformers.sentence_transformer import losses

    loss = getattr(losses, theirs)(None)
    loss.margin = margin
    inputs, labels = vectors(8, 8, seed=seed), torch.tensor(labels, dtype=torch.float32)
    arguments = () if mine == "cosine_similarity_losses" else (margin,)
    found = getattr(embedding, mine)(*inputs, labels, *arguments)
    assert found.shape == (8,)
    expected = loss.compute_loss_from_embeddings(inputs, labels)
    same(found.sum() if mine == "online_contrastive_losses" else found.mean(), expected, inputs)


def test_cosines_have_scores_between():
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    inputs, scores = vectors(8, 8), torch.linspace(-1, 1, 8)
    expected = CosineSimilarityLoss(None).compute_loss_from_embeddings(inputs, scores)
    same(embedding.cosine_similarity_losses(*inputs, scores).mean(), expected, inputs)


def test_some_pairs_are_hard_and_some_are_not():
    inputs, labels = vectors(8, 8), torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0])
    losses = embedding.online_contrastive_losses(*inputs, labels)
    plain = 2 * embedding.contrastive_losses(*inputs, labels)
    hard = losses != 0
    assert 0 < hard.sum() < 8
    agree(losses[hard], plain[hard])


@pytest.mark.parametrize(("name", "_"), PAIRED)
@anything
@given(labels=st.lists(st.sampled_from([0.0, 1.0]), max_size=8), seed=st.integers(0, 10**6))
def test_properties_of_pairs(name, _, labels, seed):
    """Order and sides do not matter; no pairs have no losses; gradients are finite, of vectors of no length too."""
    first, second = vectors(len(labels), len(labels), seed=seed)
    labels = torch.tensor(labels)
    loss = getattr(embedding, name)
    losses = loss(first, second, labels)
    assert losses.shape == labels.shape
    assert (losses >= 0).all()
    agree(loss(second, first, labels), losses)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    agree(loss(first[order], second[order], labels[order]), losses[order])
    zero = torch.zeros_like(first, requires_grad=True)
    assert torch.autograd.grad(loss(zero, second, labels).sum(), zero)[0].isfinite().all()


def test_matryoshka_is_sentence_transformers():
    """MatryoshkaLoss around MultipleNegativesRankingLoss, with weights."""
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    class Model(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["embeddings"]}

        def get_embedding_dimension(self):
            return 12

    model, columns = Model(), vectors(5, 5, 5)
    dims, weights = [4, 12, 8], [0.3, 1.0, 0.6]
    theirs = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, scale=10.0), dims, weights)
    expected = theirs([{"embeddings": column} for column in columns], torch.zeros(5))
    anchors, candidates = embedding.matryoshka(columns[0], dims), embedding.matryoshka(torch.cat(columns[1:]), dims)
    assert [cut.shape[1] for cut in anchors] == dims
    losses = [infonce_losses(*cut, torch.arange(5), 0.1).mean() for cut in zip(anchors, candidates, strict=True)]
    same(sum(weight * loss for weight, loss in zip(weights, losses, strict=True)), expected, columns)


def test_matryoshka_gives_vectors_of_length_one():
    for cut in embedding.matryoshka(vectors(5)[0], [1, 3, 12]):
        agree(cut.norm(dim=-1), torch.ones(5))


@pytest.mark.parametrize("dim", [0, 13])
def test_matryoshka_has_bounds(dim):
    with pytest.raises(ValueError, match=f"--mrl_dims {dim}: the model's embeddings have 12 entries. Set 1 to 12."):
        embedding.matryoshka(vectors(2)[0], [4, dim])


@pytest.mark.parametrize("candidates", [0, 4])
def test_no_anchors_have_no_losses(candidates):
    """As in a micro batch that only fills up a step: gradients are there, and 0."""
    inputs = vectors(0, candidates)
    for mask in (None, torch.zeros(0, candidates, dtype=torch.bool)):
        losses = infonce_losses(*inputs, torch.zeros(0, dtype=torch.int64), 0.1, mask)
        assert losses.shape == (0,)
        assert not any(gradient.any() for gradient in torch.autograd.grad(losses.sum(), inputs))
