"""Triton's interpreter, made faster for kernels of many device functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter patches Triton's language for a launch, and again in each call of a device function, which finds
    nothing left to patch: more than half of the time. Here a launch does so once for each module that it comes to."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, patch_once
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__, interpreter._patch_lang = launch, patch
