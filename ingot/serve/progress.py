"""The progress bar of `LLM.generate` and `LLM.beam_search`, as their argument `use_tqdm` chooses it."""

from collections.abc import Callable
from typing import Any, Protocol

from ingot.ir.errors import RequestError


class Progress(Protocol):
    """The methods of a `tqdm` bar that are called."""

    def update(self, n: int) -> object: ...

    def close(self) -> object: ...


UseTqdm = bool | Callable[..., Progress]


class _Bar:
    """A bar on stderr, by rich, which Ingot's commands use too."""

    def __init__(self, total: int, desc: str) -> None:
        from rich.console import Console
        from rich.progress import Progress as Rich

        self._rich = Rich(console=Console(stderr=True), transient=False)
        self._task = self._rich.add_task(desc, total=total)
        self._rich.start()

    def update(self, n: int) -> None:
        self._rich.update(self._task, advance=n)

    def close(self) -> None:
        self._rich.stop()


class _Nothing:
    def update(self, n: int) -> None:
        pass

    def close(self) -> None:
        pass


def progress(use_tqdm: Any, total: int, desc: str) -> Progress:
    """Return a bar of `total` units with the description `desc`.

    `use_tqdm` True shows a bar on stderr, False none. A callable makes the bar, with the arguments `total` and `desc`,
    as the class `tqdm` does. Raises RequestError for any other value.
    """
    if use_tqdm is False:
        return _Nothing()
    if use_tqdm is True:
        return _Bar(total, desc)
    if not callable(use_tqdm):
        raise RequestError(f"use_tqdm is {use_tqdm!r:.80}", where="use_tqdm", expected="True, False or a callable")
    made: Progress = use_tqdm(total=total, desc=desc)
    return made
