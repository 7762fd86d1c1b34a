"""Plans of published configurations (docs/plan.md)."""

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"


@pytest.mark.parametrize(
    "has", [pytest.param("memory"), pytest.param("note"), pytest.param("model", marks=pytest.mark.long)]
)
def test_published_configurations_fit_or_say_why_not(has, bench, tmp_path) -> None:
    """The docs have the same table, and the models the parameters of their cards."""
    lines = set(PAGE.read_text().splitlines())
    recipes = [recipe for recipe in bench.published.RECIPES if getattr(recipe, has)]
    assert len(bench.published.RECIPES) >= 30
    for recipe in recipes:
        result = recipe.result(tmp_path)
        assert result.is_explained, result.cells
        assert f"| {' | '.join(result.cells)} |" in lines
        billions = result.plan.work.parameters.total / 1e9
        assert billions == pytest.approx(bench.configs.MODELS[recipe.model][1], rel=0.005)
