"""What the steps need per device row, kept as arrays so that a step gathers it instead of rebuilding it."""

from collections.abc import Sequence

import numpy as np

from ingot.ir.features import RowTable
from ingot.ir.features.step_input import NUMPY_DTYPES, Array
from ingot.runtime.request import Request


class RowTables:
    """By device row: the pages of its sequence, and what the sequence asks for (`tables`).

    `asking` are the rows that ask for anything, by table. `version` is another object after every change of anything
    but the pages.
    """

    def __init__(self, tables: Sequence[RowTable], max_batch: int, max_pages: int) -> None:
        self.pages = np.zeros((max_batch, max_pages), np.int32)
        self.num_pages = np.zeros(max_batch, np.int32)
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

    def add_pages(self, row: int, pages: Sequence[int]) -> None:
        held = self.num_pages[row]
        self.pages[row, held : held + len(pages)] = pages
        self.num_pages[row] = held + len(pages)

    def set_page(self, row: int, place: int, page: int) -> None:
        self.pages[row, place] = page

    def clear(self, row: int) -> None:
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        for rows in self.asking.values():
            rows.discard(row)
