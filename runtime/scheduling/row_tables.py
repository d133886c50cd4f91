"""Pages and sampling values of running requests, in arrays by device row, from which each step's inputs are
gathered."""

from collections.abc import Sequence

import numpy as np

from ingot.ir.features import RowTable
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import NUMPY_DTYPES
from ingot.runtime.scheduling.edited_rows import EditedRow
from ingot.runtime.scheduling.request import Request


class RowTables:
    """Host arrays with one row per running sequence: its page tables, and its sampling values such as the temperature.
    Sequences have the same row number here as in per-sequence tensors on the device (the device row).

    tables        (argument) the declarations of the sampling values to keep
    max_batch     (argument) the number of rows
    max_pages     (argument) the most pages of a sequence in one cache group
    groups        (argument) the number of cache groups; a cache group is KV caches that share one page table
    slots         (argument) whether the model has per-sequence states, such as Mamba's
    pages         for each cache group an array of page numbers, [max_batch, max_pages]
    num_pages     for each row the number of pages in the first group; no group has more
    state_read    for each row the state slot that its next step reads; None without per-sequence states
    state_write   for each row the state slot that its next step writes; None without per-sequence states
    values        name of a sampling value -> its array
    rows_using    name of a sampling value -> the rows whose requests set it
    edited        the rows whose requests have logit edits, such as biases
    num_masked    the number of rows whose requests have grammars
    version       an object that is replaced when sampling values or state slots change
    """

    def __init__(
        self, tables: Sequence[RowTable], max_batch: int, max_pages: int, groups: int = 1, *, slots: bool = False
    ) -> None:
        self.pages = [np.zeros((max_batch, max_pages), np.int32) for _ in range(groups)]
        self.num_pages = np.zeros(max_batch, np.int32)
        self.state_read = np.full(max_batch, -1, np.int32) if slots else None
        self.state_write = np.full(max_batch, -1, np.int32) if slots else None
        self.edited: dict[int, EditedRow] = {}
        self.num_masked = 0
        self.version = object()
        self._declared = tables
        self.values: dict[str, Array] = {
            one.name: np.full(
                max_batch if one.width is None else (max_batch, one.width), one.nothing, NUMPY_DTYPES[one.dtype]
            )
            for one in tables
        }
        self.rows_using: dict[str, set[int]] = {one.name: set() for one in tables}

    def set_request(self, row: int, request: Request) -> None:
        """Store the sampling values of `request`, which has just got this row."""
        self.version = object()
        if request.edits is not None:
            self.edited[row] = EditedRow(request)
            self.num_masked += request.matcher is not None
        for one in self._declared:
            value, table = one.of(request), self.values[one.name]
            if value is None:
                table[row] = one.nothing
                self.rows_using[one.name].discard(row)
                continue
            self.rows_using[one.name].add(row)
            if one.width is None:
                table[row] = value
            else:
                assert isinstance(value, Sequence)
                table[row] = one.nothing
                table[row, : len(value)] = value

    def rewrite_edits(self, row: int) -> None:
        """Write the logit edits of a row again before the next step: the last step, which would have, did not run."""
        if row in self.edited:
            self.edited[row].bans = None

    def add_pages(self, group: int, row: int, pages: Sequence[int], held: int) -> None:
        """Append pages to the page table of a row.

        group   the number of the cache group; a cache group is KV caches that share one page table
        row     the number of the row
        pages   the page numbers to append
        held    how many pages the page table has so far
        """
        self.pages[group][row, held : held + len(pages)] = pages
        if group == 0:
            self.num_pages[row] = held + len(pages)

    def clear_pages(self, group: int, row: int, places: range) -> None:
        """Set entries of a row's page table to page 0, because the sequence has freed their pages.

        group    the number of the cache group, one with a sliding window; a cache group is KV caches that share one
                 page table
        row      the number of the row
        places   the indices of the entries
        """
        self.pages[group][row, places.start : places.stop] = 0

    def cut_pages(self, group: int, row: int, held: int) -> None:
        """Keep only the first `held` pages in the page table of a row. `group` is the number of the cache group. A
        cache group is KV caches that share one page table."""
        self.pages[group][row, held:] = 0
        if group == 0:
            self.num_pages[row] = held

    def set_page(self, group: int, row: int, place: int, page: int) -> None:
        self.pages[group][row, place] = page

    def set_slots(self, row: int, read: int, write: int) -> None:
        """Set the state slots that the next step of a row's sequence reads and writes. A state slot has the convolution
        and scan states of one sequence, as in Mamba."""
        assert self.state_read is not None and self.state_write is not None
        self.state_read[row], self.state_write[row] = read, write
        self.version = object()

    def clear(self, row: int) -> None:
        for table in self.pages:
            table[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        if (edited := self.edited.pop(row, None)) is not None:
            self.num_masked -= edited.request.matcher is not None
        for rows in self.rows_using.values():
            rows.discard(row)
