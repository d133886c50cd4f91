"""The rotations of a compressed-tensors checkpoint: its `transform_config`.

A scheme multiplies inputs, results or weights by a matrix, in blocks of `head_dim` or as a whole. Weights are stored
already multiplied, so the locations `weight_input` and `weight_output` need nothing. The locations `input` and `output`
are part of each step. Their matrix is stored as MODULE.SCHEME_LOCATION.weight, and `perm` reorders its rows and
columns. Modules share a matrix, which is stored once. Read from compressed-tensors 0.20, `transform/`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ingot.frontend.quantized.fields import Fields
from ingot.frontend.quantized.stored import Logical, Stored, Weight
from ingot.ir.formats import find_format, named
from ingot.ir.recipe import Recipe, affine, cast, dequantize, matmul, permute, reshape, source, table
from ingot.ir.stored.recipes import gather

_STORED = ("weight_input", "weight_output")
_ONLINE = {"input": "rotation_in", "output": "rotation_out"}
# Kinds of matrices. Those of ±1 are stored unscaled.
_KINDS = ("hadamard", "random-hadamard", "random-matrix")
_SIGNS = ("hadamard", "random-hadamard")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Modules with a matrix that are no linears.
_EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)")
_HEAD = "lm_head"


@dataclass(frozen=True)
class Rotation:
    """A rotation of inputs or results, which each step computes.

    scheme     the name of its scheme
    kind       "hadamard", "random-hadamard" or "random-matrix"
    permuted   whether rows and columns of the matrix are reordered
    size       the size of blocks; 0: one block
    location   "input" or "output"
    inverse    whether the inverse of the matrix multiplies
    targets    names of modules, "re:" and patterns, or "Linear"
    ignored    the same, of modules that are left out
    """

    scheme: str
    kind: str
    permuted: bool
    size: int
    location: str
    inverse: bool
    targets: tuple[str, ...]
    ignored: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Return whether a linear is rotated. `module` is its name."""
        return _names(self.targets, module) and not _names(self.ignored, module)


def read_rotations(fields: Fields) -> tuple[Rotation, ...]:
    """Return the rotations of a transform_config that steps compute. Raises ConfigError for what cannot be read."""
    groups, found = fields.object("config_groups") or Fields({}, fields.where), []
    for name in groups.values:
        scheme = groups.object(name)
        if scheme is None:
            raise groups.error(name, "is null", "a scheme")
        kind = scheme.choice("type", _KINDS, "")
        permuted = scheme.get("randomize", bool, False) and kind in _SIGNS
        scheme.choice("requires_grad", (False,), False)
        size = scheme.get("head_dim", int, 0)
        if size < 0:
            raise scheme.error("head_dim", f"is {size}", "a positive number")
        scheme.skip("precision")  # Ingot rotates in float32
        for given in scheme.get("apply", list, []):
            if not isinstance(given, dict):
                raise scheme.error("apply", f"has {given!r:.80}", "objects")
            args = Fields(given, f"{scheme.where}.apply")
            location = args.choice("location", (*_STORED, *_ONLINE), "")
            inverse = args.get("inverse", bool, False)
            targets, ignored = (_listed(args, field) for field in ("targets", "ignore"))
            args.end()
            if location in _ONLINE:
                found.append(Rotation(name, kind, permuted, size, location, inverse, targets, ignored))
        scheme.end()
    fields.end()
    return tuple(found)


def _listed(fields: Fields, name: str) -> tuple[str, ...]:
    one = fields.values.get(name)
    return (fields.get(name, str, ""),) if isinstance(one, str) else fields.names(name)


def _names(targets: tuple[str, ...], module: str) -> bool:
    return any(
        re.match(one.removeprefix("re:"), module) if one.startswith("re:") else one in (module, "Linear")
        for one in targets
    )


@dataclass(frozen=True)
class _Matrices:
    """The stored matrices of rotations.

    `_first` maps digests of tensors to the first tensor with these bytes, and `_same` maps names of tensors to it.
    """

    stored: Stored
    rotations: tuple[Rotation, ...]
    _first: dict[bytes, str] = field(default_factory=dict)
    _same: dict[str, str] = field(default_factory=dict)

    def recipe(self, one: Rotation, module: str, size: int) -> Recipe:
        """Return the recipe of the matrix f32[size, size] by which a block of a module's input or result is multiplied.

        Raises CheckpointError if the checkpoint lacks it.
        """
        name = self._find(one, module, "weight", (size, size))
        if name is None:
            if one.kind != "hadamard" or one.permuted or size & (size - 1):
                raise self.stored.error(
                    f"{module} has no matrix of {size} x {size} of the transform {one.scheme}", "one"
                )
            made = table(kind="hadamard", size=size)
        else:
            self.stored.info(name, _FLOATS, [(size, size)])
            made = cast(source(name), torch.float32)
        if one.permuted:
            order = self._find(one, module, "perm", (size,))
            if order is None:
                raise self.stored.error(f"{module} has no order of {size} rows of the transform {one.scheme}", "one")
            self.stored.info(order, (torch.int64, torch.int32), [(size,)])
            made = gather(gather(made, source(order), 0), source(order), 1)
        if one.kind not in _SIGNS:
            return made  # the inverse of such a matrix is stored as it is
        return affine(permute(made, (1, 0)) if one.inverse else made, size**-0.5, 0.0)

    def _find(self, one: Rotation, module: str, part: str, shape: tuple[int, ...]) -> str | None:
        """Return the name of the stored tensor: the module's own, or else one that modules of the scheme share."""
        own = f"{module}.{one.scheme}_{one.location}.{part}"
        if own in self.stored.tensors:
            return self._shared(own)
        names = {
            self._shared(f"{other}.{one.scheme}_{location}.{part}")
            for other, location in self._owners(one.scheme, part)
            if tuple(self.stored.tensors[f"{other}.{one.scheme}_{location}.{part}"].shape) == shape
            and (one.kind in _SIGNS or self._inverse(one.scheme, other, location) == one.inverse)
        }
        if len(names) > 1:
            first = sorted(names)
            raise self.stored.error(f"{module} may share {first[0]} or {first[1]}, which differ", f"a tensor {own}")
        return next(iter(names), None)

    def _owners(self, scheme: str, part: str) -> Iterator[tuple[str, str]]:
        for location in _ONLINE:
            for module in self.stored.modules(f"{scheme}_{location}.{part}"):
                yield module, location

    def _inverse(self, scheme: str, module: str, location: str) -> bool | None:
        found = (one for one in self.rotations if (one.scheme, one.location) == (scheme, location))
        return next((one.inverse for one in found if one.covers(module)), None)

    def _shared(self, name: str) -> str:
        """Return the first tensor with the same shape and bytes, so that linears share its param."""
        if name not in self._same:
            tensor = self.stored.read(name).contiguous()
            digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
            self._same[name] = self._first.setdefault(digest.digest(), name)
        return self._same[name]


def with_rotations(stored: Stored, weights: Mapping[str, Weight], rotations: tuple[Rotation, ...]) -> Logical:
    """Return a checkpoint with its quantized `weights`, where linears rotate their inputs and results.

    A quantized weight gets a format that rotates. A weight of floats is multiplied by the matrices once, as a linear
    with it computes the same. Raises CheckpointError for a matrix that is missing, or does not fit.
    """
    if not rotations:
        return Logical.of(stored, weights)
    matrices, made = _Matrices(stored, rotations), dict(weights)
    floats = [
        name.removesuffix(".weight")
        for name, info in stored.tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2 and name not in weights and not _is_matrix(name, rotations)
    ]
    linears = [name.removesuffix(".weight") for name in weights] + [
        module for module in floats if not _EMBEDDING.fullmatch(module)
    ]
    if _HEAD not in linears and any(one.covers(_HEAD) for one in rotations):
        raise stored.error(
            f"a transform rotates {_HEAD}, which has no weight of its own", f"{_HEAD}.weight, or {_HEAD} ignored"
        )
    for module in linears:
        name, turns, uses = f"{module}.weight", {}, set()
        for one in (one for one in rotations if one.covers(module)):
            whole = (made[name].shape if name in made else stored.tensors[name].shape)[one.location == "input"]
            size = one.size or int(whole)
            if whole % size:
                raise stored.error(f"{whole} {one.location}s of {module} are no multiple of {size}", "whole blocks")
            if (part := _ONLINE[one.location]) in turns:
                raise stored.error(f"two transforms rotate the {one.location} of {module}", "one")
            turns[part] = matrices.recipe(one, module, size), size
            own = {f"{module}.{one.scheme}_{one.location}.{part}" for part in ("weight", "perm")}
            uses |= own & stored.tensors.keys()
        if not turns:
            continue
        made[name] = _quantized(made[name], turns) if name in made else _multiplied(stored, name, turns)
        made[name] = replace(made[name], uses=made[name].uses | uses)
        if "rotation_out" in turns and f"{module}.bias" in stored.tensors:
            made[f"{module}.bias"] = _bias(stored, f"{module}.bias", *turns["rotation_out"])
    return Logical.of(stored, made)


def _is_matrix(name: str, rotations: tuple[Rotation, ...]) -> bool:
    return any(name.endswith(f".{one.scheme}_{one.location}.weight") for one in rotations)


def _quantized(weight: Weight, turns: Mapping[str, tuple[Recipe, int]]) -> Weight:
    """Return a quantized weight whose linear rotates. `turns` has a matrix and the size of blocks by part name."""
    format = find_format(str(weight.recipe.attr("format")))
    parts = dict(zip(format.parts, weight.recipe.inputs, strict=True))
    parts |= {part: recipe for part, (recipe, _) in turns.items()}
    sizes = {part: size for part, (_, size) in turns.items()}
    format = named(replace(format, rotated_in=sizes.get("rotation_in", 0), rotated_out=sizes.get("rotation_out", 0)))
    recipe = dequantize({part: parts[part] for part in format.parts}, format.name)
    return Weight(weight.shape, recipe, weight.uses | recipe.sources())


def _multiplied(stored: Stored, name: str, turns: Mapping[str, tuple[Recipe, int]]) -> Weight:
    """Return a weight of floats, multiplied by the matrices of its linear."""
    rows, columns = stored.info(name, _FLOATS, []).shape
    made = cast(source(name), torch.float32)
    if "rotation_in" in turns:
        turn, size = turns["rotation_in"]
        blocks = matmul(reshape(made, (rows * columns // size, size)), permute(turn, (1, 0)))
        made = reshape(blocks, (rows, columns))
    if "rotation_out" in turns:
        turn, size = turns["rotation_out"]
        blocks = matmul(reshape(permute(made, (1, 0)), (rows * columns // size, size)), turn)
        made = permute(reshape(blocks, (columns, rows)), (1, 0))
    return Weight((rows, columns), made, made.sources())


def _bias(stored: Stored, name: str, turn: Recipe, size: int) -> Weight:
    """Return the bias that a linear adds after it rotates its result. The stored one is added before."""
    (count,) = stored.info(name, _FLOATS, []).shape
    made = reshape(matmul(reshape(cast(source(name), torch.float32), (count // size, size)), turn), (count,))
    return Weight((count,), made, made.sources())
