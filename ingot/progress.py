"""Live progress of a compile on stderr, by phase."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

OnProgress = Callable[[str, int, int], None]


@contextlib.contextmanager
def live_progress() -> Iterator[OnProgress]:
    """A callback for `compile_model(progress=…)` that draws a line a phase; plain lines without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def say(phase: str, done: int, total: int) -> None:
            if phase not in seen:
                seen.add(phase)
                console.print(f"ingot: {phase}", highlight=False)

        yield say
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, int] = {}

        def draw(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                for task in tasks.values():
                    bars.stop_task(task)  # type: ignore[arg-type]  # rich's TaskID is an int
                tasks[phase] = bars.add_task(phase, total=total or None)
            bars.update(tasks[phase], completed=done, total=total or None)  # type: ignore[arg-type]

        yield draw
