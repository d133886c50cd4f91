"""Models with windows, for tests that have WINDOW, the tokens that a layer sees, and LIMITS, of the compiles."""

from pathlib import Path

import pytest
from window_artifacts import with_and_without


# One model whose layers take turns, and one whose layers all have the window.
@pytest.fixture(scope="module", params=["gemma3_text-new", "mistral-window"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def both(model: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An artifact with windows, and one of the same checkpoint whose caches keep every token."""
    module = request.module
    return with_and_without(model, tmp_path_factory.mktemp(model), module.WINDOW, target=request.param, **module.LIMITS)
