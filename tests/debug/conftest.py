"""A small artifact of the cpu kernels, and asking who is to blame in its execution."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Compiled = Callable[..., Path]
Blame = Callable[..., Any]


@pytest.fixture(scope="module")
def kernels(artifact: Compiled) -> Iterator[Compiled]:
    """Artifacts of the cpu kernels alone, `kernels(name, dtype=...)`: nothing waits for the region compiler."""
    from backend_table import without_inductor

    with pytest.MonkeyPatch.context() as patch:
        without_inductor(patch)
        yield lambda name, **options: artifact(name, **{"max_batch": 4, "max_tokens": 256, **options})


@pytest.fixture(scope="session")
def blame(checkpoint: Callable[[str], Path]) -> Blame:
    """`blame(folder, model, ...)`: the verdict on the execution of an artifact of the tiny checkpoint `model`, which is
    a name or a folder."""

    def ask(folder: Path, model: str | Path, **options: Any) -> Any:
        from ingot.debug.bisect.execution.blame_execution import blame_execution
        from ingot.frontend.checkpoint import Checkpoint
        from ingot.ir.parse import parse_programs
        from ingot.runtime.loading.artifact import open_artifact

        artifact = open_artifact(folder)
        programs = parse_programs(artifact.read_text("program.ir"))
        requests = [[(seed * 31 + place * 7) % 300 for place in range(9 + 13 * seed)] for seed in range(3)]
        return blame_execution(
            artifact,
            programs,
            Checkpoint.open(model if isinstance(model, Path) else checkpoint(model)).read,
            requests,
            **options,
        )

    return ask


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trace the programs are made again, by the passes as they are: no compile for each fault."""
    from ingot.debug.bisect.programs import chain

    monkeypatch.setattr(chain, "texts_of", lambda artifact: {})
