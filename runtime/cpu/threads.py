"""How many threads torch's own ops run on."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Run torch's own ops on `count` threads inside the `with` block; None: change nothing. Kernels of backend
    libraries have other threads."""
    before = torch.get_num_threads()
    if count is None or before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
