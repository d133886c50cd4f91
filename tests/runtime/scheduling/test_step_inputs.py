"""The inputs of a step, by hand."""

import torch
from small_scheduler import request_of, scheduler_of, values

from ingot.runtime.scheduling.batch import Chunk, build_step
from ingot.runtime.scheduling.row_tables import RowTables
from ingot.runtime.steps.step import StepBuffer, StepLayout, StepSizes

LAYOUT = StepLayout.usual()


def test_a_prompt_then_decodes_in_flight():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5, max_tokens=3))
    first = scheduler.schedule()
    got = values(first)
    assert got["tokens"] == [1, 2, 3, 4, 5] and got["token_seqs"] == [0] * 5
    assert (got["q_starts"], got["q_lens"], got["rows"], got["starts"]) == ([0], [5], [0], [0])
    assert (got["logit_rows"], got["sample_index"]) == ([4], [0]) and len(got["page_table"][0]) == 2
    second = scheduler.schedule()  # the first step's token is not known yet
    got = values(second)
    assert (got["tokens"], got["starts"], got["q_lens"], got["logit_rows"]) == ([-1], [-1], [1], [0])
    scheduler.retire(first, [50])
    third = scheduler.schedule()  # the second step's token is in flight: still -1
    assert values(third)["tokens"] == [-1]
    scheduler.retire(second, [51])
    assert scheduler.schedule() is None  # three tokens are known or in flight: no surplus step
    (request,) = scheduler.running
    scheduler.retire(third, [52])
    assert request.output_ids == [50, 51, 52] and request.end.reason == "length"
    assert scheduler.pages.pools[0].num_free == 64 and scheduler.rows.num_free == 4


def test_a_known_token_is_fed_with_its_position():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 5))
    scheduler.retire(scheduler.schedule(), [50])  # nothing in flight when the next step is scheduled
    got = values(scheduler.schedule())
    assert (got["tokens"], got["starts"]) == ([50], [5])


def test_decodes_first_then_prompts_within_the_budget():
    scheduler = scheduler_of(max_tokens=6)
    scheduler.add(request_of("a", 3))
    first = scheduler.schedule()
    scheduler.add(request_of("b", 9, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125))
    second = scheduler.schedule()
    got = values(second)
    assert got["tokens"] == [-1, 1, 2, 3, 4, 5] and got["token_seqs"] == [0, 1, 1, 1, 1, 1]
    assert (got["q_starts"], got["q_lens"], got["starts"]) == ([0, 1], [1, 5], [-1, 0])
    assert (got["sample_index"], got["logit_rows"]) == ([0, -1], [0])  # b's prompt goes on: it samples nothing
    scheduler.retire(first, [50])
    got = values(scheduler.schedule())
    assert got["tokens"] == [-1, 6, 7, 8, 9] and got["starts"] == [-1, 5]
    assert (got["sample_index"], got["logit_rows"]) == ([0, 1], [0, 4])
    assert got["temperature"] == [1.0, 0.5] and got["top_k"] == [0, 7] and got["seeds"] == [5, 5]
    assert got["top_p"] == [1.0, 0.25] and got["min_p"] == [0.0, 0.125]


def test_a_step_without_samples_has_one_dummy_logit_row():
    scheduler = scheduler_of(max_tokens=4)
    scheduler.add(request_of("a", 9))
    batch = scheduler.schedule()
    got = values(batch)
    assert (got["logit_rows"], got["sample_index"], got["temperature"]) == ([0], [-1], [0.0])
    assert batch.sampled == () and scheduler.retire(batch, [99]) == []


def test_greedy_switches_the_filters_off():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 2, temperature=0, top_k=5, top_p=0.5, min_p=0.5))
    got = values(scheduler.schedule())
    assert [got[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [[0.0], [0], [1.0], [0.0]]


def test_unused_page_table_entries_are_zero():
    scheduler = scheduler_of(max_tokens=32)
    scheduler.add(request_of("long", 13))
    scheduler.add(request_of("short", 2))
    table = values(scheduler.schedule())["page_table"]
    assert len(table[0]) == len(table[1]) == 4 and table[1][1:] == [0, 0, 0]
    scheduler.abort("long")
    scheduler.add(request_of("other", 2))
    scheduler.schedule()
    assert scheduler._tables.pages[0][scheduler.requests["other"].row][1:].tolist() == [0] * 15


def test_inputs_are_views_of_one_aligned_buffer_that_is_not_reallocated():
    scheduler = scheduler_of()
    pointers = set()
    scheduler.add(request_of("a", 7, max_tokens=20))
    for _ in range(10):
        batch = scheduler.schedule()
        flat, sizes = batch.inputs.flat, batch.inputs.sizes
        assert flat.dtype == torch.int32 and len(flat) == LAYOUT.words(sizes)
        assert sum(view.nbytes for view in batch.inputs.values()) == flat.nbytes
        assert batch.inputs["seeds"].data_ptr() % 8 == 0
        pointers.add(flat.data_ptr())
        scheduler.retire(batch, [1])
    assert len(pointers) == 2  # one is filled while the other may still be copied


def test_views_tile_the_buffer():
    sizes = StepSizes(T=7, B=3, L=2, P=5)
    views = LAYOUT.views(torch.arange(LAYOUT.words(sizes), dtype=torch.int32), sizes)
    tiles = [view.view(torch.int32).flatten() for view in views.values()]
    assert torch.cat(tiles).tolist() == list(range(LAYOUT.words(sizes)))
    assert views["page_table"].shape == (3, 5) and views["seeds"].dtype == torch.int64


def test_sequences_without_a_sample_may_stand_anywhere():
    tables, requests = RowTables(LAYOUT.tables, max_batch=4, max_pages=3), [request_of(name, 6) for name in "abc"]
    for row, request in enumerate(requests):
        request.seed = 100 + row
        tables.set_request(row, request)
        tables.add_pages(0, row, [row + 1], 0)
    chunks = [Chunk(request, row, 0, 2 + row, False, row != 1) for row, request in enumerate(requests)]
    got = values(build_step(0, [], chunks, tables, StepBuffer(LAYOUT, StepSizes(T=9, B=3, L=3, P=3)), 4))
    assert (got["sample_index"], got["logit_rows"], got["seeds"]) == ([0, -1, 1], [1, 8], [100, 102])
    assert got["page_table"] == [[1], [2], [3]] and got["token_seqs"] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
