"""The handle of a GPU's step: no result is returned that another rank did not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot.ir.errors import RankError
from ingot.runtime.cuda.handle import CudaStepHandle


class Done:
    """An event: what happened to it, in order."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    def record(self) -> None:
        self.happened.append("record")

    def synchronize(self) -> None:
        self.happened.append("synchronize")


@pytest.mark.parametrize("read", [CudaStepHandle.tokens, CudaStepHandle.rejected, CudaStepHandle.outputs.fget])  # type: ignore[attr-defined]
def test_results_are_checked_after_the_wait(read: Callable[[CudaStepHandle], Any]) -> None:
    done: Any = Done()
    outputs = {"tokens": torch.tensor([3])}

    def check() -> None:
        done.happened.append("check")
        if failed:
            raise RankError("an all-reduce waited too long")

    handle = CudaStepHandle("b", outputs, lambda name: [3], done, returns_logprobs=False, check=check)
    failed = False
    assert read(handle) in ([3], outputs)
    assert done.happened == ["record", "synchronize", "check"]
    failed = True
    with pytest.raises(RankError, match="waited too long"):
        read(handle)
