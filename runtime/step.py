"""One step's inputs on the host: views of one flat buffer, so that a device needs one copy."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from ingot.ir.errors import InternalError
from ingot.ir.features import Fed, RowTable, StepInput, find_input, row_tables, step_inputs
from ingot.ir.types import Size
from ingot.runtime.token_counts import Recount


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step, each at least 1: T tokens, B sequences, L logit rows, P page-table entries per sequence, G
    rows of the shared-prefix table."""

    T: int
    B: int
    L: int
    P: int
    G: int = 1

    @property
    def shares(self) -> bool:
        """Whether the step reads shared prefixes once for all of their sequences."""
        return self.G > 1


@dataclass(frozen=True)
class StepLayout:
    """The inputs of a step, in their order in a flat buffer of i32."""

    inputs: tuple[StepInput, ...]

    @staticmethod
    @cache
    def of(names: frozenset[str]) -> "StepLayout":
        """Return the layout of these inputs. Raises InternalError for an input that no feature declares.

        Inputs of 8 bytes come first, so that they are aligned. The others follow as declared, late inputs last.
        """
        known = step_inputs()
        if unknown := sorted(name for name in names if find_input(name) is None):
            raise InternalError(f"no feature declares the step input '{unknown[0]}'", expected=", ".join(known))
        order = [*(name for name in known if name in names), *sorted(names - known.keys())]
        declared = [one for name in order if (one := find_input(name)) is not None]
        return StepLayout(tuple(sorted(declared, key=lambda one: (one.late, -one.type.dtype.itemsize))))

    @staticmethod
    def usual() -> "StepLayout":
        """Return the layout of every input that the host knows."""
        return StepLayout.of(frozenset(name for name, one in step_inputs().items() if one.known))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.inputs)

    @cached_property
    def varying(self) -> tuple[StepInput, ...]:
        """The inputs that change from step to step even while the same sequences decode."""
        return tuple(one for one in self.inputs if one.varies)

    @cached_property
    def late(self) -> tuple[StepInput, ...]:
        """The inputs that the host fills while the forward segment runs."""
        return tuple(one for one in self.inputs if one.late)

    @property
    def tables(self) -> tuple[RowTable, ...]:
        """The tables by device row that the host keeps for these inputs."""
        return row_tables(self.names)

    def views(self, flat: torch.Tensor, sizes: StepSizes) -> dict[str, torch.Tensor]:
        """Return the inputs as views of `flat` (i32, one-dimensional, 8-byte aligned, at least `words(sizes)` long).

        Host and device use the same layout, so a device needs only a copy of `flat`.
        """
        views: dict[str, torch.Tensor] = {}
        offset = 0
        for one, dtype, shape, words in self._parts(sizes):
            views[one.name] = flat[offset : offset + words].view(dtype).view(shape)
            offset += words
        return views

    def words(self, sizes: StepSizes) -> int:
        """Return the number of 4-byte words that `views` needs."""
        return sum(words for *_, words in self._parts(sizes))

    def early_words(self, sizes: StepSizes) -> int:
        """Return the number of 4-byte words before the late inputs."""
        return sum(words for one, *_, words in self._parts(sizes) if not one.late)

    def _parts(self, sizes: StepSizes) -> Iterator[tuple[StepInput, torch.dtype, list[int], int]]:
        """Yield each input with its dtype, its shape and its number of 4-byte words."""
        named = {"T": sizes.T, "B": sizes.B, "L": sizes.L, "P": sizes.P, "G": sizes.G}
        for one, dtype, dims in self._types:
            shape = [named[dim] if isinstance(dim, str) else dim for dim in dims]
            yield one, dtype, shape, math.prod(shape) * dtype.itemsize // 4

    @cached_property
    def _types(self) -> tuple[tuple[StepInput, torch.dtype, tuple[Size, ...]], ...]:
        return tuple((one, one.type.dtype, tuple(one.type.shape)) for one in self.inputs)


class StepInputs(dict[str, torch.Tensor]):
    """The inputs of `layout` by name, on the host: views of `flat` (i32), so that one copy moves all.

    arrays     the same memory as numpy arrays
    recounts   rows of token counts to recompute before the step
    stamp      inputs with equal stamps, other than None, differ only in the layout's `varying` inputs

    Valid until the step retires; then another step uses the buffer.
    """

    def __init__(self, layout: StepLayout, flat: torch.Tensor, sizes: StepSizes) -> None:
        super().__init__(layout.views(flat, sizes))
        self.layout = layout
        self.flat = flat
        self.sizes = sizes
        self.arrays = {name: view.numpy() for name, view in self.items()}
        self.recounts: tuple[Recount, ...] = ()
        self.stamp: tuple[bytes, object] | None = None
        self._fed: Fed | None = None

    def fill(self, fed: Fed) -> None:
        """Write the values of a step, except late ones."""
        self._fed = fed
        for one in self.layout.inputs:
            if not one.late:
                one.fill(self.arrays[one.name], fed)

    def fill_late(self) -> None:
        """Write the late values. The tokens of the step before must be known."""
        for one in self.layout.late:
            one.fill(self.arrays[one.name], self.fed)

    def fill_varying(self, fed: Fed, rows_using: Mapping[str, set[int]]) -> None:
        """Write the inputs that vary from step to step. `rows_using`: device rows that use a table, by its name."""
        for one in self.layout.varying:
            if one.table is None or rows_using[one.table.name]:
                one.fill(self.arrays[one.name], fed)

    def drop_requests(self) -> None:
        """Drop references to sequences: sequences end, and the buffer stays."""
        self.recounts = ()
        self.fed.drop_requests()

    @property
    def fed(self) -> Fed:
        """The values that were filled in last."""
        assert self._fed is not None, "nothing was filled in"
        return self._fed

    @property
    def returns_logprobs(self) -> bool:
        """Whether any row of logits needs log-probabilities."""
        counts = self.arrays.get("num_logprobs")
        return counts is not None and bool((counts >= 0).any())


class StepBuffer:
    """A flat i32 buffer, allocated once, for the inputs of `layout` of steps up to the sizes `largest`."""

    def __init__(self, layout: StepLayout, largest: StepSizes, pin_memory: bool = False) -> None:
        self._layout = layout
        self._flat = torch.zeros(layout.words(largest), dtype=torch.int32, pin_memory=pin_memory)
        self.last: StepInputs | None = None  # the inputs of the step that used this buffer before

    def views(self, sizes: StepSizes) -> StepInputs:
        """Return inputs of these sizes, to be filled. They still hold the values of an older step."""
        if self.last is None or self.last.sizes != sizes:  # decode steps mostly repeat their sizes
            self.last = StepInputs(self._layout, self._flat[: self._layout.words(sizes)], sizes)
        return self.last


def filled(layout: StepLayout, fed: Fed, sizes: StepSizes) -> StepInputs:
    """Return the inputs of one step, in their own memory."""
    inputs = StepBuffer(layout, sizes).views(sizes)
    inputs.fill(fed)
    return inputs


def layout_of(plans: Iterable[Iterable[str]]) -> StepLayout:
    """Return the layout of all inputs of the plans."""
    return StepLayout.of(frozenset(name for names in plans for name in names))
