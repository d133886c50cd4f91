"""Show the progress of a compile on stderr, phase by phase."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ingot.cli.console import ByteCount, console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Called with the name of a phase, the steps done and the total; the total is 0 where it is not known.
OnProgress = Callable[[str, int, int], None]

# Seconds between two log lines about one phase: often enough to show progress.
_SECONDS_BETWEEN_LINES = 5.0


def no_progress(phase: str, done: int, total: int) -> None:
    """Do nothing. This is the progress callback of callers that show no progress."""


@contextlib.contextmanager
def live_progress() -> Iterator[OnProgress]:
    """Yield a callback that shows progress on stderr. A terminal gets a live line for each phase, a pipe gets plain
    lines.

    The callback takes the name of a phase, the number of steps done, and the number of all steps. It is passed, for
    example, as the argument `progress` of `compile_model`.
    """
    screen = console(stderr=True)
    if screen.is_terminal:
        with _bars(screen) as draw:
            yield draw
    else:
        yield _lines(screen)


def _lines(screen: "Console") -> OnProgress:
    current, last = "", 0.0

    def say(phase: str, done: int, total: int) -> None:
        nonlocal current, last
        now = time.monotonic()
        if phase != current:
            current, last = phase, now
            screen.print(f"ingot: {phase}", markup=False)
        elif now - last >= _SECONDS_BETWEEN_LINES and not isinstance(total, ByteCount):  # its label has the size
            last = now
            screen.print(f"ingot: {phase}, {done} of {total}", markup=False)

    return say


@contextlib.contextmanager
def _bars(screen: "Console") -> Iterator[OnProgress]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen) as bars:
        tasks: dict[str, TaskID] = {}

        def finish() -> None:
            for task in tasks.values():
                if not bars.tasks[task].finished:
                    total = bars.tasks[task].total or 1
                    bars.update(task, completed=total, total=total)

        def draw(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                finish()  # one phase at a time: a new one ends the earlier ones
                tasks[phase] = bars.add_task(phase, total=None, steps="")
            if total:
                # Stay one short of the end when all steps are done: the phase ends when the next one begins.
                bars.update(tasks[phase], completed=done, total=total + 1, steps=f"{done}/{total}")

        yield draw
        finish()
