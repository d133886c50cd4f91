"""Lowerings of the first and last ops of a step (feed, page_slots, advance) and of lookups (embedding, select_rows)."""

from math import prod

import torch
import triton

from ingot.backends.triton.kernels import step
from ingot.backends.triton.launches import Expr, Term, cdiv
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import block_of
from ingot.backends.triton.schedule import Schedule, Value

_BLOCK = 128  # tokens, or sequences, per program: one per thread
_INTS = (torch.int32, torch.int64)


def _feed(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    table = call.optional("page_table")
    call.want_dense_rows(*call.values)
    call.want(table is None or table.type.strides is None, f"page_table is strided: {table and table.type}")
    tokens, seqs = call.value("tokens").type.shape[0], call.value("rows").type.shape[0]
    results = tuple(schedule.output(result) for result in call.results)
    names = ("ids", "positions", "slots", "kv_lens")
    schedule.launch(
        step.feed,
        (cdiv(Term(op="max", left=tokens, right=seqs), _BLOCK),),
        {
            **call.values,
            "page_table": table,
            **dict(zip(names, results, strict=True)),
            "num_tokens": tokens,
            "num_seqs": seqs,
            "max_pages": 0 if table is None else table.type.shape[1],
        },
        {"PAGE_SIZE": call.attributes["page_size"], "BLOCK": _BLOCK, "DEPENDENT": schedule.dependent},
        dependent=schedule.dependent,
    )
    return results


def _page_slots(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    table = call.value("page_table")
    call.want_dense_rows(*call.values)
    call.want(table.type.strides is None, f"page_table is strided: {table.type}")
    tokens = call.value("positions").type.shape[0]
    slots = schedule.output(call.results[0])
    schedule.launch(
        step.page_slots,
        (cdiv(tokens, _BLOCK),),
        {**call.values, "slots": slots, "num_tokens": tokens, "max_pages": table.type.shape[1]},
        {"PAGE_SIZE": call.attributes["page_size"], "BLOCK": _BLOCK, "DEPENDENT": schedule.dependent},
        dependent=schedule.dependent,
    )
    return (slots,)


def _advance(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    call.want_dense_rows(*call.values)
    seqs = call.value("rows").type.shape[0]
    schedule.launch(
        step.advance,
        (cdiv(seqs, _BLOCK),),
        {"rejected": None, **call.values, "num_seqs": seqs},
        {"BLOCK": _BLOCK, "DEPENDENT": schedule.dependent},
        dependent=schedule.dependent,
    )
    return ()


def _gather(call: Call, schedule: Schedule, table: Value, indices: Value) -> tuple[Value, ...]:
    """Add the launch that copies the rows `indices` of `table` to a new tensor, and return that tensor.

    Raises Refused if a row of the table is not contiguous.
    """
    inner = [size for size in table.type.shape[1:] if isinstance(size, int)]
    width, step_by_axis = prod(inner), table.strides[1:]
    call.want(len(inner) == len(step_by_axis), f"a symbol after the first axis: {table.type}")
    dense = all(step_by_axis[axis] == prod(inner[axis + 1 :]) for axis in range(len(inner)))
    call.want(dense, f"rows that are not contiguous: {table.type}")
    call.want(
        indices.type.dtype in _INTS and indices.strides == (1,),
        f"indices are not a dense vector of i32 or i64: {indices.type}",
    )
    block, warps = block_of(width)
    rows = 1
    if width <= _BLOCK // 2:  # narrow rows: several per program
        block = triton.next_power_of_2(width)
        rows, warps = _BLOCK // block, 4
    count: Expr = indices.type.shape[0]
    result = schedule.output(call.results[0])
    schedule.launch(
        step.gather,
        (cdiv(count, rows), cdiv(width, block)),
        {
            "table": table,
            "indices": indices,
            "result": result,
            "num_indices": count,
            "table_rows": table.type.shape[0],
        },
        {
            "TABLE_ROW": table.strides[0],
            "WIDTH": width,
            "BLOCK_ROWS": rows,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=warps,
        dependent=schedule.dependent,
    )
    return (result,)


def _embedding(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    return _gather(call, schedule, call.value("weight"), call.value("tokens"))


def _select_rows(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    return _gather(call, schedule, call.value("x"), call.value("rows"))


LOWERINGS: dict[str, Lowering] = {
    "feed": _feed,
    "page_slots": _page_slots,
    "advance": _advance,
    "embedding": _embedding,
    "select_rows": _select_rows,
}
