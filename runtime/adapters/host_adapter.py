"""An adapter in the form of the states on the device: for each state, the contents of one slot."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from ingot.ir.adapters.folder import Adapter, Factors, read_adapter
from ingot.ir.adapters.low_rank import LowRank, change_of
from ingot.ir.adapters.names import match_modules
from ingot.ir.artifact.adapters import ADAPTERS_FILE, AdaptedLinear, AdapterSites
from ingot.ir.artifact.plan import State
from ingot.ir.errors import AdapterError, ArtifactError, IngotError
from ingot.ir.parse import parse_recipe, parse_type
from ingot.ir.recipe import Recipe
from ingot.ir.types import TensorType
from ingot.runtime.loading.artifact import Artifact, malformed


@dataclass(frozen=True)
class Places:
    """The linears of an artifact that adapters change, and the types of the states for their factors.

    linears   the linears, with the recipe of each segment
    types     state name -> type; its first axis are the slots
    """

    linears: tuple[tuple[AdaptedLinear, tuple[Recipe, ...]], ...]
    types: Mapping[str, TensorType]

    @property
    def num_slots(self) -> int:
        return _size(next(iter(self.types.values())), 0)

    @property
    def rank(self) -> int:
        """The largest rank of an adapter."""
        return min(_size(self.types[one.b], 2) for one, _ in self.linears)

    def zeros(self, *, pinned: bool = False) -> torch.Tensor:
        """Return zeros for the contents of a slot, in one dimension. `pinned` allocates page-locked memory."""
        dtype = next(iter(self.types.values())).dtype  # of the activations, equal in all
        return torch.zeros(sum(map(math.prod, self._shapes.values())), dtype=dtype, pin_memory=pinned)

    def split(self, contents: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the contents of a slot by state, as views."""
        parts = contents.split([math.prod(shape) for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    @property
    def _shapes(self) -> dict[str, list[int]]:
        return {name: [_size(one, 1), _size(one, 2)] for name, one in self.types.items()}


@dataclass(eq=False)
class HostAdapter:
    """An adapter that requests can use.

    name      its name
    folder    the PEFT folder that it was read from
    digest    the SHA-256 of its files, in hex
    factors   the contents of a slot, on the host; `Places.split` returns its tensors
    users     the sequences' requests that the scheduler has and that use it
    slot      its slot on the device; -1: none
    removed   whether new requests may no longer use it
    """

    name: str
    folder: Path
    digest: str
    factors: torch.Tensor = field(repr=False)
    users: int = 0
    slot: int = -1
    removed: bool = False

    @property
    def key(self) -> bytes:
        """The bytes that separate its cached prefixes from those of other adapters."""
        return hashlib.sha256(self.digest.encode() + self.name.encode("utf-8", "surrogatepass")).digest()


def read_places(artifact: Artifact, states: Mapping[str, State]) -> Places:
    """Read adapters.json of an artifact. `states` are the states of its plans, by name.

    Raises ArtifactError if the file is malformed, or does not fit the states.
    """
    try:
        sites = AdapterSites.model_validate_json(artifact.read_text(ADAPTERS_FILE))
    except ValidationError as error:
        raise malformed(ADAPTERS_FILE, error) from None
    types = {name: parse_type(state.type) for name, state in states.items() if state.kind == "lora"}
    try:
        linears = tuple((one, tuple(parse_recipe(part.recipe) for part in one.segments)) for one in sites.linears)
    except IngotError as error:
        raise ArtifactError(f"a recipe is malformed: {error.what}", where=ADAPTERS_FILE) from None
    named = [name for one in sites.linears for name in (one.a, one.b)]
    if not named or sorted(named) != sorted(types):
        odd = sorted(set(named) ^ types.keys())
        raise ArtifactError(
            f"it names other states than plan.json: {', '.join(odd)[:200] or 'a state twice, or none'}",
            where=ADAPTERS_FILE,
            hint="compile the model again",
        )
    if len({one.dtype for one in types.values()}) > 1:
        raise ArtifactError("the states of adapters have several dtypes", where="plan.json, states")
    for one, _ in linears:
        a, b = types[one.a].shape, types[one.b].shape
        if sum(part.rows for part in one.segments) != b[1] or a[1] != _size(types[one.b], 2) * len(one.segments):
            raise ArtifactError(f"the segments do not fit the state '{one.b}'", where=ADAPTERS_FILE)
    return Places(linears, types)


def host_adapter(name: str, folder: str | Path, places: Places) -> HostAdapter:
    """Read a PEFT folder, and convert its factors to the contents of a slot. Takes some seconds for a large adapter.

    Raises AdapterError if the adapter cannot be used with the artifact.
    """
    adapter = read_adapter(folder)
    if adapter.rank > places.rank:
        raise AdapterError(
            f"the adapter has rank {adapter.rank}",
            where=str(adapter.folder),
            expected=f"at most {places.rank}, which the artifact was compiled for",
            hint=f"compile with --max-lora-rank {adapter.rank}",
        )
    shapes = {part.tensor: part.shape for one, _ in places.linears for part in one.segments}
    factors = match_modules(adapter, shapes)
    contents = places.zeros()
    tensors = places.split(contents)
    for linear, recipes in places.linears:
        _fill(tensors[linear.a], tensors[linear.b], linear, recipes, factors, adapter)
    _check_finite(contents, tensors, adapter)
    return HostAdapter(name, adapter.folder, adapter.digest, contents)


def _fill(
    a: torch.Tensor,
    b: torch.Tensor,
    linear: AdaptedLinear,
    recipes: tuple[Recipe, ...],
    factors: Mapping[str, Factors],
    adapter: Adapter,
) -> None:
    """Write the factors of one linear into the contents of a slot, `a` [parts * R, K] and `b` [N, R].

    The scale goes into `b`. Ranks below R leave zeros.
    """
    most, begin = b.shape[1], 0
    for part, (segment, recipe) in enumerate(zip(linear.segments, recipes, strict=True)):
        if (one := factors.get(segment.tensor)) is not None:
            left, right = one.b.float() * one.scale, one.a.float()
            change = change_of(recipe, LowRank(right.T, left.T) if adapter.transposed else LowRank(left, right))
            expected = (segment.rows, a.shape[1])
            if (found := (change.left.shape[0], change.right.shape[1])) != expected:
                raise AdapterError(
                    f"the change of a part of {segment.tensor} is {list(found)}",
                    where=str(adapter.folder),
                    expected=str(list(expected)),
                )
            a[part * most : part * most + one.rank] = change.right
            b[begin : begin + segment.rows, : one.rank] = change.left
        begin += segment.rows


def _check_finite(contents: torch.Tensor, tensors: Mapping[str, torch.Tensor], adapter: Adapter) -> None:
    """Raise AdapterError if a number is not finite, because it exceeds the range of the model's dtype. `tensors` are
    views of `contents`."""
    if not contents.isfinite().all():
        name = next(name for name, tensor in tensors.items() if not tensor.isfinite().all())
        raise AdapterError(
            f"the factors for '{name}' exceed the range of {str(contents.dtype).removeprefix('torch.')}",
            where=str(adapter.folder),
        )


def _size(of: TensorType, axis: int) -> int:
    size = of.shape[axis]
    assert isinstance(size, int)
    return size
