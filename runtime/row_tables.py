"""Pages and sampling values of running requests, in arrays by device row, from which each step's inputs are
gathered."""

from collections.abc import Sequence

import numpy as np

from ingot.ir.features import RowTable
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import NUMPY_DTYPES
from ingot.runtime.request import Request


class RowTables:
    """Arrays by device row: the pages of the row's sequence, and its request's values such as the temperature.

    tables        (argument) the declarations of the request values to keep
    groups        (argument) the number of cache groups
    slots         (argument) whether the model has per-sequence states
    pages         for each cache group an array of page numbers, [max_batch, max_pages]
    num_pages     the number of pages in the first group, which has the most
    state_read    the slot that the row's next step reads; None for a model without per-sequence states
    state_write   the slot that the row's next step writes; None for a model without per-sequence states
    values        the array of each request value, by its name
    rows_using    the device rows whose requests set this value, by its name
    version       another object after every change except to pages
    """

    def __init__(
        self, tables: Sequence[RowTable], max_batch: int, max_pages: int, groups: int = 1, *, slots: bool = False
    ) -> None:
        self.pages = [np.zeros((max_batch, max_pages), np.int32) for _ in range(groups)]
        self.num_pages = np.zeros(max_batch, np.int32)
        self.state_read = np.full(max_batch, -1, np.int32) if slots else None
        self.state_write = np.full(max_batch, -1, np.int32) if slots else None
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
        """Store the values of the request that has been assigned this device row."""
        self.version = object()
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

    def add_pages(self, group: int, row: int, pages: Sequence[int], held: int) -> None:
        """Append `pages` to the page table of a device row, in cache group number `group`. The row has `held` pages so
        far."""
        self.pages[group][row, held : held + len(pages)] = pages
        if group == 0:
            self.num_pages[row] = held + len(pages)

    def clear_pages(self, group: int, row: int, places: range) -> None:
        """Set the pages at the indices `places` of a device row's page table to page 0, in cache group number `group`,
        which has a window."""
        self.pages[group][row, places.start : places.stop] = 0

    def cut_pages(self, group: int, row: int, held: int) -> None:
        """Remove all but the first `held` pages from the page table of a device row, in cache group number `group`."""
        self.pages[group][row, held:] = 0
        if group == 0:
            self.num_pages[row] = held

    def set_page(self, group: int, row: int, place: int, page: int) -> None:
        self.pages[group][row, place] = page

    def set_slots(self, row: int, read: int, write: int) -> None:
        """Set the state slots that the next step of a device row reads and writes."""
        assert self.state_read is not None and self.state_write is not None
        self.state_read[row], self.state_write[row] = read, write
        self.version = object()

    def clear(self, row: int) -> None:
        for table in self.pages:
            table[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        for rows in self.rows_using.values():
            rows.discard(row)
