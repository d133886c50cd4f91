"""Attention in two parts that are merged by their log-sum-exp: backends that lose it, and others, are named.

The pass that caches keys and values is made to read the page of each token apart from the pages before it.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from harmed_pass import Fault, calls, check_named, planted
from tiny import TINY
from torch import fx
from toy_ops import toy_ops

from ingot import compile_model
from ingot.backends.reference import load as reference_load
from ingot.debug.bisect import bisect
from ingot.debug.bisect.verdict import Kind
from ingot.ir import build, ops
from ingot.ir.artifact.record import Rewrite
from ingot.ir.ops import OPS, Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.program import Program
from ingot.passes.insert_paged_kv import InsertPagedKV

pytestmark = [pytest.mark.xdist_group("bisect-parts"), pytest.mark.one_in_file(3)]

PAGE = 16
Kernel = Callable[..., Any]
OPTIONS: dict[str, Any] = {"backend": "reference", "max_batch": 4, "max_tokens": 256, "max_seq_len": 96}


def split_op() -> dict[str, Op]:
    samples = lambda g, dtype: [  # noqa: E731
        Sample((torch.tensor([17, 3]), torch.tensor([0, 1]), torch.tensor([[4, 5], [6, 7]], dtype=torch.int32)))
    ]

    def fake(positions: torch.Tensor, token_seqs: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tokens, make = positions.shape[0], positions.new_empty
        shapes = [(tokens,), (tokens,), (tokens, table.shape[1]), (tokens,), (tokens, 1), (tokens,)]
        return tuple(make(shape, dtype=torch.int32) for shape in shapes)

    @define(placement=whole, flops=1, samples=samples, fake=fake, fusible=False)
    def toy_split_pages(
        positions: torch.Tensor, token_seqs: torch.Tensor, page_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each token as a sequence of its own: q_starts, q_lens, then pages and positions before its page and in it."""
        tables, place = page_table[token_seqs.long()], positions.long()
        starts = torch.arange(len(place), dtype=torch.int32)
        before = (place // PAGE * PAGE).int()
        own = tables.gather(1, (place // PAGE)[:, None])
        return starts, torch.ones_like(starts), tables, before, own, (place % PAGE + 1).int()

    return {"toy_split_pages": toy_split_pages}


def split(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    """One `paged_attention` becomes two `partial_attention` and a `merge_attention`."""
    (whole,) = calls(nodes, ops.paged_attention.overload)
    q, kv, table, *_ = whole.args

    def results(target: Any, *args: Any, **kwargs: Any) -> list[fx.Node]:
        made = build.call(program, target, args, kwargs, origin=whole.meta["origin"])
        count = len(made.meta["type"].items)
        return [build.call(program, operator.getitem, (made, index)) for index in range(count)]

    with program.graph.inserting_before(whole):
        positions, token_seqs = program.find("positions"), program.find("token_seqs")
        starts, ones, *parts = results(OPS["toy_split_pages"].overload, positions, token_seqs, table)
        masks = ("bidirectional", "causal")
        found = []
        for pages, lengths, mask in zip(parts[::2], parts[1::2], masks, strict=True):
            options = {"scale": whole.kwargs["scale"], "mask": mask}
            found += results(ops.partial_attention.overload, q, kv, pages, starts, ones, lengths, **options)
        merged, _ = results(ops.merge_attention.overload, *found)
    whole.replace_all_uses_with(merged)
    program.graph.erase_node(whole)


@pytest.fixture(scope="module", autouse=True)
def splitting() -> Iterator[None]:
    """Layer 0 of all that this module compiles, and compiles again, is split."""
    with toy_ops(split_op), planted(InsertPagedKV, 0, split):
        yield


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    compile_model(TINY["llama-plain"].write(folder / "checkpoint"), folder / "a.ingot", **OPTIONS)
    return folder / "a.ingot"


def _zero_sums(kernel: Kernel) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        attended, sums = kernel(*args, **kwargs)
        return attended, torch.zeros_like(sums)

    return run


def _without_sums(kernel: Kernel) -> Kernel:
    """Both parts count the same."""

    def run(one: torch.Tensor, one_sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor) -> Any:
        return (one + other) / 2, kernel(one, one_sums, other, other_sums)[1]

    return run


def _other_mask(mask: str) -> Callable[[Kernel], Kernel]:
    return lambda kernel: lambda *args, **kwargs: kernel(*args, **{**kwargs, "mask": mask})


# The op, what its backend does, and the result that is wrong first.
FAULTS: dict[str, tuple[str, Callable[[Kernel], Kernel], str]] = {
    "a log-sum-exp of 0": ("partial_attention", _zero_sums, "item_"),
    "a merge without log-sum-exp": ("merge_attention", _without_sums, "item_"),
    "a part that misses a position": ("partial_attention", _other_mask("window_9"), "item_"),
    "a window in place of all": ("paged_attention", _other_mask("window_20"), "paged_attention"),
}


def test_parts_are_healthy(parts: Path) -> None:
    assert "ingot.partial_attention" in (parts / "program.ir").read_text()
    assert bisect(parts).kind is Kind.HEALTHY


@pytest.mark.parametrize("name", drawn(1, list(FAULTS)))
def test_a_backend_of_a_part_is_named(name: str, parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op, wrap, tensor = FAULTS[name]
    faulty = replace(OPS[op], reference=wrap(OPS[op].reference))
    monkeypatch.setattr(reference_load, "OPS", {**OPS, op: faulty})
    verdict = bisect(parts)
    assert (verdict.kind, verdict.blamed, verdict.op) == (Kind.BACKEND, "reference", f"ingot.{op}"), verdict
    assert verdict.tensor.startswith(tensor) and verdict.layer == (1 if op == "paged_attention" else 0)


def _swapped_sums(program: Program, nodes: list[fx.Node], rewrite: Rewrite) -> None:
    """Each part counts as much as the other should."""
    (node,) = [one for one in program.calls(ops.paged_attention.overload) if one in nodes]
    split(program, [node], rewrite)
    (*_, merge) = program.calls(ops.merge_attention.overload)
    one, one_sums, other, other_sums = merge.args
    merge.args = (one, other_sums, other, one_sums)


@pytest.mark.slow
def test_a_pass_that_mixes_up_parts_is_named(parts: Path, again: None) -> None:
    fault = Fault(
        InsertPagedKV, 1, _swapped_sums, "toy_split_pages_1"
    )  # the first call of what stands for the attention
    with planted(fault.whose, fault.index, fault.harm):
        check_named(bisect(parts), fault)
