"""A step in shared memory is read as it was written: sizes, inputs, orders and masks."""

import os
import random
from types import SimpleNamespace

import numpy as np
import torch
from run_seed import again, run_seed

from ingot.runtime.loading.limits import Limits
from ingot.runtime.loading.phases import Span
from ingot.runtime.ranks.reports import RankState
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.step_slots import StepSlots
from ingot.runtime.scheduling.edited_rows import MaskedRow, MaskRows, RowEdit
from ingot.runtime.steps.step import StepBuffer, StepLayout, StepSizes
from ingot.runtime.steps.token_counts import Recount

LIMITS = Limits(vocab_size=70, max_seq_len=33, max_batch=3, max_tokens=20, page_size=16)
EDIT_WORDS = 9


def test_any_step_is_read_as_written() -> None:
    draw = random.Random(run_seed())
    layout = StepLayout.usual()
    slots = StepSlots(layout, LIMITS, EDIT_WORDS)
    area = SharedArea(2)
    shared = SharedArea(2, os.dup(area.fd))
    copied = SharedArea(2)  # as on another host, which gets the words that were written
    for one in (area, shared, copied):
        one.add_slots(slots.words, 1)
    buffer = StepBuffer(layout, StepSizes(20, 3, 20, 3, 3))
    for step in range(200):
        sizes = StepSizes(
            draw.randint(1, 20), draw.randint(1, 3), draw.randint(1, 20), draw.randint(1, 3), draw.choice((1, 3))
        )
        inputs = buffer.views(sizes)
        inputs.flat.copy_(torch.randint(-5, 2**31 - 1, inputs.flat.shape, dtype=torch.int32))
        inputs.recounts = tuple(
            Recount(
                row, [draw.randrange(70) for _ in range(draw.randint(0, 33))], [draw.randrange(70)] * draw.randint(0, 2)
            )
            for row in range(draw.randint(0, 2))
        )
        edits = np.array([[draw.randrange(-9, 9) for _ in range(EDIT_WORDS)] for _ in range(3)], np.int32)
        inputs.edits = tuple(RowEdit(row, edits[row]) for row in range(draw.randint(0, 3)))
        inputs.masked = tuple(MaskedRow(SimpleNamespace(), row) for row in range(draw.randint(0, 3)))  # type: ignore[arg-type]
        inputs.masks = None
        other = draw.choice((shared, copied))
        written = slots.write(area.slot(step), inputs)
        copied.slot(step)[written] = area.slot(step)[written]
        found = slots.read(other.slot(step))
        assert found.sizes == sizes and found.ends_late is bool(inputs.masked), again(step)
        assert found.waits_for_masks is inputs.waits_for_masks is bool(inputs.masked), again(step)
        assert torch.equal(found.flat, inputs.flat) and found.keys() == inputs.keys(), again(step)
        assert all(found[name].shape == inputs[name].shape for name in layout.names), again(step)
        assert found.recounts == inputs.recounts, again(step)
        assert [(one.row, one.values.tolist()) for one in found.edits] == [
            (one.row, one.values.tolist()) for one in inputs.edits
        ], again(step)
        if inputs.masked:
            rows = torch.tensor([one.row for one in inputs.masked])
            inputs.masks = MaskRows(rows, torch.randint(-9, 9, (len(rows), 3), dtype=torch.int32))
            for late in slots.write_late(area.slot(step), inputs):
                copied.slot(step)[late] = area.slot(step)[late]
            slots.read_late(other.slot(step), found)
            assert found.masks is not None
            assert torch.equal(found.masks.rows, rows) and torch.equal(found.masks.words, inputs.masks.words)


def test_reports_and_slots_share_no_bytes() -> None:
    area = SharedArea(3)
    other = SharedArea(3, os.dup(area.fd))
    area.tell_free(2, 1 << 40)
    for one in (area, other):
        one.add_slots(10, 2)
    for step in range(area.slots):
        area.slot(step).fill_(-1)
    assert [area.state(rank) for rank in range(3)] == [RankState.LOADING] * 3 and not area.done.any()
    area.fail(1, RankState.FAILED, {"what": "w" * 5000, "where": "ü", "expected": "", "hint": ""})
    assert area.state(1) is RankState.FAILED and area.state(2) is RankState.LOADING
    assert area.failure(1) == {"what": "w" * 1000, "where": "ü", "expected": "", "hint": ""}
    area.fail(1, RankState.LOST, {"what": "short"})
    assert area.failure(1) == {"what": "short"}
    spans = [Span("a" * 20, 1e6 + place, 1e6 + place + 0.25) for place in range(200)]
    area.ready(0, spans)
    assert area.state(0) is RankState.READY and list(other.spans(0)) == spans[: len(other.spans(0))]
    assert len(other.spans(0)) >= 40
    assert [other.free(rank) for rank in range(3)] == [0, 0, 1 << 40]
    assert area.slots == other.slots == 5 and all((other.slot(step) == -1).all() for step in range(5))
