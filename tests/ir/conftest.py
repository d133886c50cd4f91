"""What the tests of the IR share: one thread, and the golden programs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: more threads only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], str]:
    """The text of a golden program by its name."""
    folder = Path(__file__).parent / "goldens"
    return lambda name: (folder / f"{name}.ir").read_text(encoding="utf-8")
