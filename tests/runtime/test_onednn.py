"""oneDNN keeps code for so many shapes and no more."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.loading.onednn import bound_code_caches

pytestmark = pytest.mark.xdist_group("parity-llama-plain")  # with the tests whose artifact this is

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# Products of as many shapes as a served model meets in some minutes; prints the bytes that are resident afterwards.
PRODUCTS = """
import torch
from ingot.bench.holdings import anonymous_memory
from ingot.runtime.loading.onednn import bound_code_caches
{bound}
weights = [torch.ones(width, 64, dtype=torch.bfloat16) for width in (64, 96, 128, 192)]
before = anonymous_memory()
for tokens in range(1, 129):
    for weight in weights:
        torch.nn.functional.linear(torch.ones(tokens, 64, dtype=torch.bfloat16), weight)
print(anonymous_memory() - before)
"""


def test_loading_bounds_what_is_kept(artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "7")  # somebody has said it
    monkeypatch.delenv(NAMES[1], raising=False)
    load_artifact(artifact("llama-plain", backend="reference"), num_pages=1)
    assert [os.environ[name] for name in NAMES] == ["7", "128"]


@pytest.mark.slow
def test_what_is_kept_does_not_grow() -> None:
    """Where oneDNN multiplies in bfloat16; elsewhere neither grows."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}

    def growth(bound: str) -> int:
        command = [sys.executable, "-c", PRODUCTS.format(bound=bound)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return int(done.stdout)

    free, bounded = growth(""), growth(f"{bound_code_caches.__name__}()")
    print(f"{free} bytes, {bounded} bounded")
    assert free < 50e6 or bounded < free / 2
