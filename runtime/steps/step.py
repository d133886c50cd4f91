"""The inputs of a step on the host: views of one flat buffer, so that one copy brings all of them to the device."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from ingot.ir.errors import InternalError
from ingot.ir.features import Fed, RowTable, StepInput, find_input, row_tables, step_inputs
from ingot.ir.features.adapters import SLOTS_INPUT
from ingot.ir.types import Size
from ingot.runtime.scheduling.edited_rows import MaskedRow, MaskRows, RowEdit
from ingot.runtime.steps.token_counts import Recount


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step, each at least 1.

    T   tokens
    B   sequences
    L   rows of logits
    P   page-table entries per sequence
    G   rows in the table of shared prefixes for cascade attention; 1: the step does not use it
    """

    T: int
    B: int
    L: int
    P: int
    G: int = 1

    @property
    def shares(self) -> bool:
        """Whether this step uses cascade attention: it reads a shared prefix once for all its sequences."""
        return self.G > 1


@dataclass(frozen=True)
class StepLayout:
    """Which inputs a step has, and their order in one flat i32 buffer."""

    inputs: tuple[StepInput, ...]

    @staticmethod
    @cache
    def of(names: frozenset[str]) -> "StepLayout":
        """Return the layout of the inputs with these names. Raises InternalError for a name that Ingot does not define.

        Inputs of 8-byte elements come first, so that they are aligned. Late inputs come last. The host fills these only
        after the forward pass has begun.
        """
        known = step_inputs()
        if unknown := sorted(name for name in names if find_input(name) is None):
            raise InternalError(f"no feature declares the step input '{unknown[0]}'", expected=", ".join(known))
        order = [*(name for name in known if name in names), *sorted(names - known.keys())]
        declared = [one for name in order if (one := find_input(name)) is not None]
        return StepLayout(tuple(sorted(declared, key=lambda one: (one.late, -one.type.dtype.itemsize))))

    @staticmethod
    def usual() -> "StepLayout":
        """Return the layout of all inputs whose values the host knows when it builds a step."""
        return StepLayout.of(frozenset(name for name, one in step_inputs().items() if one.known))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.inputs)

    @cached_property
    def varying(self) -> tuple[StepInput, ...]:
        """The inputs that change in every step, even while the same sequences decode."""
        return tuple(one for one in self.inputs if one.varies)

    @cached_property
    def late(self) -> tuple[StepInput, ...]:
        """The late inputs. The host fills them while the forward pass runs, because only the ending (such as sampling)
        reads them."""
        return tuple(one for one in self.inputs if one.late)

    @property
    def tables(self) -> tuple[RowTable, ...]:
        """The declarations of the host's tables for these inputs. A table has one row per running sequence, with a
        value of its request such as the temperature."""
        return row_tables(self.names)

    def views(self, flat: torch.Tensor, sizes: StepSizes) -> dict[str, torch.Tensor]:
        """Return the inputs of a step, by name, as views of `flat`. One copy of `flat` moves all inputs to the GPU,
        because host and GPU use one layout.

        flat    a one-dimensional i32 tensor, 8-byte aligned, with at least `words(sizes)` elements
        sizes   the sizes of the step
        """
        views: dict[str, torch.Tensor] = {}
        offset = 0
        for one, dtype, shape, words in self._parts(sizes):
            views[one.name] = flat[offset : offset + words].view(dtype).view(shape)
            offset += words
        return views

    def words(self, sizes: StepSizes) -> int:
        """Return how many 4-byte words the inputs of a step of these sizes take in the flat buffer."""
        return sum(words for *_, words in self._parts(sizes))

    def early_words(self, sizes: StepSizes) -> int:
        """Return how many 4-byte words of the flat buffer come before the late inputs. The host fills late inputs only
        after the forward pass has begun."""
        return sum(words for one, *_, words in self._parts(sizes) if not one.late)

    def _parts(self, sizes: StepSizes) -> Iterator[tuple[StepInput, torch.dtype, list[int], int]]:
        """Yield (input, dtype, shape, number of 4-byte words) for each input of a step of these sizes."""
        named = {"T": sizes.T, "B": sizes.B, "L": sizes.L, "P": sizes.P, "G": sizes.G}
        for one, dtype, dims in self._types:
            shape = [named[dim] if isinstance(dim, str) else dim for dim in dims]
            yield one, dtype, shape, math.prod(shape) * dtype.itemsize // 4

    @cached_property
    def _types(self) -> tuple[tuple[StepInput, torch.dtype, tuple[Size, ...]], ...]:
        return tuple((one, one.type.dtype, tuple(one.type.shape)) for one in self.inputs)


class StepInputs(dict[str, torch.Tensor]):
    """The inputs of one step on the host, by name. They are views of one i32 tensor `flat`, so that one copy moves all
    of them. They are valid until the step is complete; then another step uses the buffer.

    layout     where each input is in `flat`
    sizes      the sizes of the step
    arrays     the inputs as numpy arrays over the same memory, by name
    recounts   the sequences whose token counts, for penalties, must be recomputed on the device before the step
    edits      the rows of logit edits to write on the device before the step
    masked     the sequences with grammars that the step samples for
    masks      the tokens that their grammars allow; set before the ending runs, and None before
    prepared   whether the late inputs and masks are there already, so that the ending need not wait for them
    stamp      identifies the running sequences, or None. Steps with equal stamps differ only in the inputs that change
               in every step
    """

    def __init__(self, layout: StepLayout, flat: torch.Tensor, sizes: StepSizes) -> None:
        super().__init__(layout.views(flat, sizes))
        self.layout = layout
        self.flat = flat
        self.sizes = sizes
        self.arrays = {name: view.numpy() for name, view in self.items()}
        self.recounts: tuple[Recount, ...] = ()
        self.edits: tuple[RowEdit, ...] = ()
        self.masked: tuple[MaskedRow, ...] = ()
        self.masks: MaskRows | None = None
        self.prepared = False
        self.stamp: tuple[bytes, object] | None = None
        self._fed: Fed | None = None

    def fill(self, fed: Fed) -> None:
        """Write the inputs of a step from its description `fed`. Late inputs are left out: the host fills them only
        after the forward pass has begun."""
        self._fed = fed
        for one in self.layout.inputs:
            if not one.late:
                one.fill(self.arrays[one.name], fed)

    def fill_late(self) -> None:
        """Write the late inputs. Only the ending of the step (such as sampling) reads them. They depend on the tokens
        that the step before has sampled."""
        for one in self.layout.late:
            one.fill(self.arrays[one.name], self.fed)

    def fill_varying(self, fed: Fed, rows_using: Mapping[str, set[int]]) -> None:
        """Write only the inputs that change in every step. The buffer must hold an earlier step of the same sequences.

        fed          the description of the step
        rows_using   name of a sampling value, such as "temperature" -> the device rows whose requests set it. Inputs
                     for a value that no request sets are not written
        """
        for one in self.layout.varying:
            if one.table is None or rows_using[one.table.name]:
                one.fill(self.arrays[one.name], fed)

    def copied(self) -> "StepInputs":
        """Return these inputs in memory of their own, which no later step uses."""
        copy = StepInputs(self.layout, self.flat.clone(), self.sizes)
        copy.recounts, copy.edits, copy.masked, copy.masks = self.recounts, self.edits, self.masked, self.masks
        copy.prepared = self.prepared
        return copy

    def drop_requests(self) -> None:
        """Drop all references to requests. The buffer is used again, and would keep the requests alive."""
        self.recounts = ()
        self.edits = ()
        self.masked, self.masks, self.prepared = (), None, False
        self.fed.drop_requests()

    @property
    def fed(self) -> Fed:
        """The step that `fill` was called with."""
        assert self._fed is not None, "nothing was filled in"
        return self._fed

    @property
    def ends_late(self) -> bool:
        """Whether the ending of the step (such as sampling) must wait for the tokens of the step before: for late
        inputs, or for masks of grammars."""
        return bool(self.waits_for_masks or self.layout.late) and not self.prepared

    @property
    def waits_for_masks(self) -> bool:
        """Whether the ending of the step takes masks of grammars, which the host writes before it."""
        return bool(self.masked)

    @property
    def uses_adapters(self) -> bool:
        """Whether a sequence of this step uses a LoRA adapter."""
        slots = self.arrays.get(SLOTS_INPUT)
        return slots is not None and bool((slots >= 0).any())

    @property
    def returns_logprobs(self) -> bool:
        """Whether a request needs log-probabilities from this step."""
        counts = self.arrays.get("num_logprobs")
        return counts is not None and bool((counts >= 0).any())


class StepBuffer:
    """A flat i32 buffer for step inputs, allocated once. Steps use it one after another.

    layout       which inputs there are, and their order in the buffer
    largest      the sizes of the largest step
    pin_memory   allocate page-locked memory, for non-blocking copies to a GPU
    """

    def __init__(self, layout: StepLayout, largest: StepSizes, pin_memory: bool = False) -> None:
        self._layout = layout
        self._flat = torch.zeros(layout.words(largest), dtype=torch.int32, pin_memory=pin_memory)
        self.last: StepInputs | None = None  # the inputs of the step that used this buffer before

    def views(self, sizes: StepSizes) -> StepInputs:
        """Return inputs of these sizes in the buffer, for the caller to fill. Until then, they hold the values of an
        earlier step."""
        if self.last is None or self.last.sizes != sizes:  # decode steps mostly repeat their sizes
            self.last = StepInputs(self._layout, self._flat[: self._layout.words(sizes)], sizes)
        return self.last


def filled(layout: StepLayout, fed: Fed, sizes: StepSizes) -> StepInputs:
    """Return the inputs of a step in newly allocated memory. `fed` is the step's description."""
    inputs = StepBuffer(layout, sizes).views(sizes)
    inputs.fill(fed)
    return inputs


def layout_of(plans: Iterable[Iterable[str]]) -> StepLayout:
    """Return a layout with every input of any of the plans. `plans` has the input names of each plan."""
    return StepLayout.of(frozenset(name for names in plans for name in names))
