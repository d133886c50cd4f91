"""Kernels run by Triton's interpreter, with less of its overhead and its own faults."""

from collections.abc import Iterator

import pytest
from triton_interpreter import eight_bits_converted, language_patched_once


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    with language_patched_once(), eight_bits_converted():
        yield
