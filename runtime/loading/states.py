"""The states of a model on the device, which entries read and update in place, and operations that copy, move and clear
their pages or slots.

Copy-on-write, preemption and rewind copy, clear and move pages or slots between steps. The runtime cannot compile, so
this module runs three reference ops for each state, along the axis that the state's type names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ingot.backends.reference.load import load_op
from ingot.ir.artifact.plan import State
from ingot.ir.cache.groups import CacheGroup
from ingot.ir.cache.scratch_pages import Scratch
from ingot.ir.errors import InternalError, OptionError
from ingot.ir.machine.load_context import Allocator
from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType
from ingot.runtime.cpu.allocator import HostAllocator
from ingot.runtime.loading.scratch_states import caches_with_scratch

# The dims that count a group's units: pages of tokens, or device rows or slots of sequences.
_UNIT_DIMS: Mapping[str, tuple[str, ...]] = {"token": ("pages",), "sequence": ("R", "S")}


class States(Mapping[str, torch.Tensor]):
    """The states of a model, by name: tensors that stay on the device between steps, such as KV caches. The constructor
    allocates them as zeros.

    specs           name -> declaration of each state
    sizes           the symbolic dims that are known at load time: `pages`, `R` (maximum running sequences), `S` (slots
                    of convolution and scan states)
    allocator       allocates the memory; default: on the CPU
    pages           cache group -> its number of pages; groups that are left out have `sizes["pages"]`. A cache group is
                    KV caches that share one page table
    scratch         cache group -> its scratch pages: extra pages that are one memory in all caches of the group
    scratch_pages   (attribute) cache group -> the page numbers of its scratch pages

    On a GPU, the methods run on torch's current stream. The constructor raises OptionError if there is no memory.
    """

    def __init__(
        self,
        specs: Mapping[str, State],
        sizes: Mapping[str, int],
        allocator: Allocator | None = None,
        pages: Mapping[str, int] | None = None,
        scratch: Mapping[str, Scratch] | None = None,
    ) -> None:
        self.specs = dict(specs)
        self.scratch_pages: dict[str, range] = {}
        places, pages = allocator or HostAllocator(), pages or {}
        self._tensors: dict[str, torch.Tensor] = {}
        for group, area in (scratch or {}).items():
            if area.pages:
                members = {name: spec for name, spec in specs.items() if CacheGroup.named(spec.group).name == group}
                made, self.scratch_pages[group] = caches_with_scratch(members, pages[group], area, places)
                self._tensors |= made
        for name, spec in specs.items():
            if name not in self._tensors:
                own = pages.get(CacheGroup.named(spec.group).name)
                dims = sizes if own is None else {**sizes, "pages": own}
                self._tensors[name] = _zeros(name, parse_type(spec.type), dims, places)
        self._tensors = {name: self._tensors[name] for name in specs}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def copy(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page or slot `sources[i]` to `targets[i]`, in every state of a group. The states of a group have common
        page or slot numbers.

        All sources are read before any target is written, so the two may overlap. Raises InternalError for an unknown
        group, an index out of range, or a repeated target.
        """
        self._apply("state_copy", group, sources, targets)

    def move(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy page or slot `sources[i]` to `targets[i]`, in every state of a group. Then zero the sources that are no
        targets. The states of a group have common page or slot numbers.

        Raises InternalError for an unknown group, an index out of range, or a repeated target.
        """
        self._apply("state_move", group, sources, targets)

    def zero(self, group: str, targets: Sequence[int]) -> None:
        """Zero the pages or slots `targets` in every state of a group. The states of a group have common page or slot
        numbers. Raises InternalError for an unknown group, an index out of range, or a repeated target."""
        self._apply("state_zero", group, targets)

    def _apply(self, op: str, group: str, *places: Sequence[int]) -> None:
        members = [name for name, spec in self.specs.items() if spec.group == group]
        if not members:
            known = dict.fromkeys(spec.group for spec in self.specs.values())
            raise InternalError(f"no state is in the group '{group}'", expected=", ".join(known) or "there is none")
        if len({len(part) for part in places}) != 1:
            raise InternalError(f"{len(places[0])} sources for {len(places[-1])} targets", where=f"{op} of '{group}'")
        if len(set(places[-1])) != len(places[-1]):
            raise InternalError(f"a target is repeated in {list(places[-1])}", where=f"{op} of '{group}'")
        run = load_op(f"ingot.{op}")
        for name in members:
            axis = _unit_axis(name, self.specs[name])
            size = self[name].shape[axis]
            if odd := [place for part in places for place in part if not 0 <= place < size]:
                raise InternalError(f"page or slot {odd[0]} is not in '{name}'", where=op, expected=f"0 to {size - 1}")
            indices = (torch.tensor(list(part), dtype=torch.int64, device=self[name].device) for part in places)
            run(self[name], *indices, axis=axis)


def _unit_axis(name: str, spec: State) -> int:
    """Return the axis of a state that counts its pages, its rows of running sequences, or its slots of Mamba states.
    `name` is the state's name, for the error."""
    shape = parse_type(spec.type).shape
    dims = _UNIT_DIMS[spec.unit]
    for axis, size in enumerate(shape):
        if size in dims:
            return axis
    raise InternalError(
        f"the state '{name}' is {spec.type}", expected=f"an axis {' or '.join(dims)}, as unit {spec.unit} has"
    )


def _zeros(name: str, state_type: TensorType, sizes: Mapping[str, int], allocator: Allocator) -> torch.Tensor:
    shape = state_type.bind(sizes)
    try:
        return allocator.zeros(shape, state_type.dtype)
    except MemoryError as error:
        raise OptionError(
            f"there is no memory for the state '{name}': {error}",
            expected=f"{math.prod(shape) * state_type.dtype.itemsize} bytes",
            hint="serve with fewer KV pages",
        ) from error
