"""Views of the elements that a growing list has now, so that each streamed output need not copy the list."""

from collections.abc import Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class SoFar(Sequence[T], Generic[T]):
    """A read-only view of the elements that the list `growing` has now, without a copy. Elements that are appended
    later are not in the view.

    A view equals a list with equal elements. A slice of a view, or a view plus a list, is a list.
    """

    __slots__ = ("_count", "_list")
    __hash__ = None  # type: ignore[assignment]  # as that of a list

    def __init__(self, growing: list[T]) -> None:
        self._list = growing
        self._count = len(growing)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            return self._list[start:stop] if step == 1 else [self._list[place] for place in range(start, stop, step)]
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(f"index {index} of {self._count} elements")
        return self._list[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SoFar | list):
            return NotImplemented
        return len(self) == len(other) and self[:] == other[:]

    def __add__(self, other: Sequence[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Sequence[T]) -> list[T]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self[:])
