"""The collectives of CPU processes, over gloo: the values of the ops, bit by bit. The ranks are threads."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_seed import run_seed

from ingot.backends.gloo.load import GlooCommunicator, collectives
from ingot.ir.machine.meeting import MeetingPlace
from ingot.ir.ops import OPS

RANKS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[GlooCommunicator]:
    folder = tmp_path_factory.mktemp("gloo")
    return on_ranks(lambda place: GlooCommunicator(MeetingPlace(folder), "tp-0", place, RANKS))


def on_ranks(work: Callable[[int], Any]) -> list[Any]:
    """What each rank returns, in their order."""
    found: list[Any] = [None] * RANKS

    def run(place: int) -> None:
        found[place] = work(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 12])
def test_collectives_are_the_ops(rows: int, dtype: torch.dtype, ranks: list[GlooCommunicator]) -> None:
    """With values whose sum depends on the order, and rows that do not divide."""
    draw = torch.Generator().manual_seed(int(run_seed(), 16))
    wide = [torch.randn(rows, 12, generator=draw) * 10.0 ** (3 - 3 * place) for place in range(RANKS)]
    values = [one.to(dtype)[:, :6] for one in wide]  # not row-major
    contexts: list[Any] = [SimpleNamespace(communicators={"tp": one}) for one in ranks]

    def called(name: str, each: list[tuple[torch.Tensor, ...]], **attributes: Any) -> list[torch.Tensor]:
        return on_ranks(
            lambda place: collectives(contexts[place])[f"ingot.{name}"](*each[place], axis="tp", **attributes)
        )

    for name, attributes in (
        ("all_reduce", {}),
        ("all_gather", {"dim": 0, "parts": RANKS}),
        ("all_gather", {"dim": 1, "parts": RANKS}),
        ("reduce_scatter", {"dim": 0, "parts": RANKS}),
        ("reduce_scatter", {"dim": 1, "parts": RANKS}),
        ("take_part", {"dim": 0, "parts": RANKS}),
    ):
        op = OPS[name]
        assert op.across is not None
        found = called(name, [(one,) for one in values], **attributes)
        for mine, theirs in zip(found, op.across(values, axis="tp", **attributes), strict=True):
            assert torch.equal(mine, theirs) and mine.is_contiguous()
    total = called("all_reduce", [(one,) for one in values])[0]
    parts = called("reduce_scatter", [(one,) for one in values], dim=0, parts=RANKS)
    joined = called("all_gather", [(part, values[0]) for part in parts], dim=0, parts=RANKS)
    assert all(torch.equal(one, total) for one in joined)
