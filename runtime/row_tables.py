"""What the steps need per device row, kept as arrays so that a step gathers it instead of rebuilding it."""

from collections.abc import Sequence

import numpy as np

from ingot.ir.features import RowTable
from ingot.ir.features.asking import Array
from ingot.ir.features.step_input import NUMPY_DTYPES
from ingot.runtime.request import Request


class RowTables:
    """By device row: the pages of its sequence in each group of caches, and what the sequence asks for (`tables`).

    `num_pages` are those of the first group, which has the most. `state_read` and `state_write` are the slots that the
    next step of each row reads and writes; None for a model without states that stand once per sequence. `asking` are
    the rows that ask for anything, by table. `version` is another object after every change of anything but the pages.
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
        self.asked: dict[str, Array] = {
            one.name: np.full(
                max_batch if one.width is None else (max_batch, one.width), one.nothing, NUMPY_DTYPES[one.dtype]
            )
            for one in tables
        }
        self.asking: dict[str, set[int]] = {one.name: set() for one in tables}

    def set_request(self, row: int, request: Request) -> None:
        """Keep what the request asks for, which has got the row."""
        self.version = object()
        for one in self._declared:
            value, table = one.of(request), self.asked[one.name]
            if value is None:
                table[row] = one.nothing
                self.asking[one.name].discard(row)
                continue
            self.asking[one.name].add(row)
            if one.width is None:
                table[row] = value
            else:
                assert isinstance(value, Sequence)
                table[row] = one.nothing
                table[row, : len(value)] = value

    def add_pages(self, group: int, row: int, pages: Sequence[int], held: int) -> None:
        """Put pages after those that the sequence of a row holds in a group, by its place."""
        self.pages[group][row, held : held + len(pages)] = pages
        if group == 0:
            self.num_pages[row] = held + len(pages)

    def clear_pages(self, group: int, row: int, places: range) -> None:
        """Let page 0 stand at some places of a group with a window."""
        self.pages[group][row, places.start : places.stop] = 0

    def cut_pages(self, group: int, row: int, held: int) -> None:
        """Forget the pages of a row in a group after the first `held`."""
        self.pages[group][row, held:] = 0
        if group == 0:
            self.num_pages[row] = held

    def set_page(self, group: int, row: int, place: int, page: int) -> None:
        self.pages[group][row, place] = page

    def set_slots(self, row: int, read: int, write: int) -> None:
        """The slots that the next steps of a row read and write."""
        assert self.state_read is not None and self.state_write is not None
        self.state_read[row], self.state_write[row] = read, write
        self.version = object()

    def clear(self, row: int) -> None:
        for table in self.pages:
            table[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        for rows in self.asking.values():
            rows.discard(row)
