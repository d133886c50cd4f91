"""Two backends of one op for a CPU whose claims lie: the slow one says that it is the cheaper one."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backend_kinds import HasLibrary
from backend_table import patch_entry
from torch import fx

from ingot.backends.entry import BackendEntry
from ingot.backends.table import BACKENDS
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.ops import op_of, silu_mul

OP = "ingot.silu_mul"
SLOW_SECONDS = 2e-3  # that a call of the slow one takes more


class _Claims(HasLibrary):
    """Takes every `silu_mul`, by a library without a function in it: the loader has it."""

    cost = 0.0
    batch_invariant = True

    def claim(self, nodes: Sequence[fx.Node], target: Target, bucket: BucketClass) -> Yes | No:
        if any(op_of(node.target) is not silu_mul for node in nodes):
            return No("it has one op")
        return Yes(self.cost, batch_invariant=self.batch_invariant)

    def dry_run(self, node: fx.Node) -> Callable[..., Any]:
        return silu_mul.costliest

    def toolchain(self) -> dict[str, str]:
        return {"compiler": self.name}


class Slow(_Claims):
    name, cost, batch_invariant = "slow", 0.1, False


class Swift(_Claims):
    name, cost = "swift", 0.2


def _slowly(*args: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW_SECONDS)
    result: torch.Tensor = silu_mul.reference(*args)
    return result


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"slow": _slowly, "swift": silu_mul.reference}


@contextmanager
def lying_backends() -> Iterator[None]:
    """They compete in this process where `backend="reference"` is asked for on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for made in (Slow, Swift):
            entry = BackendEntry(
                emit={"cpu": lambda _, made=made: made()},
                library=lambda *_, function=_FUNCTIONS[made.name]: {OP: function},
            )
            patch.setitem(BACKENDS, made.name, entry)
        patch_entry(patch, "reference", competing={"cpu": ("slow", "swift", "rowwise")})
        yield
