"""Ops that only tests have, each defined once a process and known to the registry only where a test asks for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ingot.ir.ops import OPS, Op

_DEFINED: dict[Callable[[], dict[str, Op]], dict[str, Op]] = {}


@contextmanager
def toy_ops(define_them: Callable[[], dict[str, Op]]) -> Iterator[None]:
    """Let the registry hold the ops that `define_them` defines; other tests count and list the dialect's own."""
    if define_them not in _DEFINED:
        _DEFINED[define_them] = define_them()
    else:
        OPS.update(_DEFINED[define_them])
    try:
        yield
    finally:
        for name in _DEFINED[define_them]:
            del OPS[name]
