"""Does preflight read a recipe as the warm start does?"""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.configuration.load import load_job
from nereus.runtime.preflight import model_shape

RECIPES = sorted((Path(__file__).parents[2] / "launchers" / "recipes").glob("*.toml"))


@pytest.mark.live
@pytest.mark.parametrize("recipe", [*RECIPES, None], ids=lambda path: path.stem if path else "defaults")
def test_shapes_agree(recipe: Path | None, tmp_path: Path) -> None:
    from nereus.backends.torch.warmstart import read_recipe

    if recipe is None:
        recipe = tmp_path / "empty.toml"
        recipe.touch()
    ours = model_shape(load_job([], [("model.recipe", str(recipe))]))
    theirs = read_recipe(recipe).model
    assert (ours.layers, ours.hidden, ours.heads, ours.kv_heads) == (
        theirs.layers,
        theirs.hidden,
        theirs.heads,
        theirs.kv_heads,
    )
    assert (ours.intermediate, ours.max_positions, ours.tied) == (
        theirs.intermediate,
        theirs.context,
        theirs.tie_embeddings,
    )
