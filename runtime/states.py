"""The states of a model on the device: what every entry reads and updates in place, and what moves their contents.

Copy-on-write, preemption and rewind copy, clear and move pages or slots between steps. The runtime cannot compile, so
each state kind gets its three ops from here, along the axis that its type names.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence

import torch

from ingot.backends.reference.load import load_op
from ingot.ir.errors import InternalError, OptionError
from ingot.ir.parse import parse_type
from ingot.ir.plan import State
from ingot.ir.types import TensorType

# The dim that counts what a group hands out: pages of tokens, or one slot per sequence.
_UNIT_DIMS: Mapping[str, str] = {"token": "pages", "sequence": "S"}


class States(Mapping[str, torch.Tensor]):
    """Every state by name on `device`, zero at first. `sizes`: load-time dims (`pages`, `S`).

    On a GPU the operations below run on torch's current stream. Raises OptionError when there is no memory for them.
    """

    def __init__(
        self, specs: Mapping[str, State], sizes: Mapping[str, int], device: torch.device | None = None
    ) -> None:
        self.specs = dict(specs)
        self.device = device or torch.device("cpu")
        types = {name: parse_type(spec.type) for name, spec in specs.items()}
        self._tensors = {
            name: _host_zeros(name, state_type, sizes)
            if self.device.type == "cpu"
            else _device_zeros(name, state_type, sizes, self.device)
            for name, state_type in types.items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def copy(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """In every state of `group`, let page or slot `targets[i]` hold what `sources[i]` holds.

        All sources are read before a target is written, so the two may overlap. Raises InternalError for an unknown
        group, indices out of range, or a target that is named twice.
        """
        self._apply("state_copy", group, sources, targets)

    def move(self, group: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As `copy`; then sources that are no targets are zero."""
        self._apply("state_move", group, sources, targets)

    def zero(self, group: str, targets: Sequence[int]) -> None:
        """Clear pages or slots in every state of `group`. Raises InternalError as `copy` does."""
        self._apply("state_zero", group, targets)

    def _apply(self, op: str, group: str, *places: Sequence[int]) -> None:
        members = [name for name, spec in self.specs.items() if spec.group == group]
        if not members:
            known = dict.fromkeys(spec.group for spec in self.specs.values())
            raise InternalError(f"no state is of the group '{group}'", expected=", ".join(known) or "there is none")
        if len({len(part) for part in places}) != 1:
            raise InternalError(f"{len(places[0])} sources for {len(places[-1])} targets", where=f"{op} of '{group}'")
        if len(set(places[-1])) != len(places[-1]):
            raise InternalError(f"a target is named twice in {list(places[-1])}", where=f"{op} of '{group}'")
        run = load_op(f"ingot.{op}")
        for name in members:
            axis = _unit_axis(name, self.specs[name])
            size = self[name].shape[axis]
            if odd := [place for part in places for place in part if not 0 <= place < size]:
                raise InternalError(f"{odd[0]} is no place in '{name}'", where=op, expected=f"0 to {size - 1}")
            indices = (torch.tensor(list(part), dtype=torch.int64, device=self.device) for part in places)
            run(self[name], *indices, axis=axis)


def _unit_axis(name: str, spec: State) -> int:
    """The axis that counts the pages or slots of a state."""
    shape = parse_type(spec.type).shape
    dim = _UNIT_DIMS[spec.unit]
    if dim not in shape:
        raise InternalError(f"the state '{name}' is {spec.type}", expected=f"an axis {dim}, as unit {spec.unit} has")
    return shape.index(dim)


def _host_zeros(name: str, state_type: TensorType, sizes: Mapping[str, int]) -> torch.Tensor:
    """Zeros that take no memory before they are written: a KV pool is rarely full."""
    shape = state_type.bind(sizes)
    count = math.prod(shape) * state_type.dtype.itemsize
    if count == 0:
        return torch.zeros(shape, dtype=state_type.dtype)
    try:
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise _no_memory(name, str(error), count) from error
    return torch.frombuffer(memory, dtype=state_type.dtype).view(shape)


def _device_zeros(name: str, state_type: TensorType, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
    shape = state_type.bind(sizes)
    try:
        return torch.zeros(shape, dtype=state_type.dtype, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        count = math.prod(shape) * state_type.dtype.itemsize
        raise _no_memory(name, f"of {total} bytes on the GPU {free} are free", count) from error


def _no_memory(name: str, why: str, count: int) -> OptionError:
    return OptionError(
        f"there is no memory for the state '{name}': {why}", expected=f"{count} bytes", hint="ask for fewer KV pages"
    )
