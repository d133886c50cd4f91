"""Faults planted into the passes as they are in this process: what a rewrite made is harmed, and bisect names it."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import fx

from ingot.debug.bisect.verdict import Kind, Verdict
from ingot.ir.artifact.record import Rewrite
from ingot.ir.program import Program
from ingot.passes.base import Pass
from ingot.passes.rewrite import Rewriter

Harm = Callable[[Program, list[fx.Node], Rewrite], None]


@contextmanager
def planted(whose: type[Pass], index: int, harm: Harm) -> Iterator[None]:
    """While open, the pass does harm to what its rewrite `index` made."""
    run = whose.run

    def harmful(self: Pass, rewriter: Rewriter, context: Any) -> None:
        run(self, rewriter, context)
        for rewrite in rewriter.rewrites()[index : index + 1]:
            nodes = list(rewriter.program.graph.nodes)
            harm(rewriter.program, [n for n in nodes if {n.name, str(n.target)} & set(rewrite.made)], rewrite)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whose, "run", harmful)
        yield


def calls(nodes: list[fx.Node], target: Any) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function" and node.target is target]


@dataclasses.dataclass(frozen=True)
class Fault:
    whose: type[Pass]
    index: int
    harm: Harm
    node: str  # the one to be named

    def __str__(self) -> str:
        return self.harm.__name__.strip("_")


def check_named(verdict: Verdict, fault: Fault) -> None:
    assert (verdict.kind, verdict.blamed) == (Kind.PASS, fault.whose.name)
    assert verdict.rewrite is not None and verdict.rewrite.index == fault.index
    assert verdict.node == fault.node, verdict
    assert verdict.tensor and verdict.found and verdict
