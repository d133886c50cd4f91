"""Weight recipes: data that describe how to make a parameter from the tensors of a checkpoint.

A recipe is an immutable DAG of steps. It can be printed, hashed, compared and executed anywhere. Equal recipes make the
same tensor. Sharding or quantizing a weight adds a step, never a closure or a load hook.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ingot.ir.errors import CheckpointError, InternalError, VerifyError
from ingot.ir.formats import Format, find_format
from ingot.ir.formats import dequantize as dequantized
from ingot.ir.formats import quantize as quantized
from ingot.ir.formats.stacked import is_stack, quantize_stack, stack_shape
from ingot.ir.mesh import Rank
from ingot.ir.stored.elements import STORED_STEPS
from ingot.ir.tables import make_table
from ingot.ir.types import DTYPE_NAMES, DTYPES

Attr = int | float | str | bool | tuple["Attr", ...] | None
Attrs = tuple[tuple[str, Attr], ...]
# The result of a step: one tensor, or several by name.
Results = torch.Tensor | dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to make a tensor: a step that is applied to the tensors that other recipes make.

    `step` names the step, such as "concat". `inputs` are the recipes of its input tensors. `attrs` are its constants.
    `output` selects one result of a step that has several, such as "scales" of quantize. It is "" for a step with one
    result.
    """

    step: str
    inputs: tuple["Recipe", ...] = ()
    attrs: Attrs = ()
    output: str = ""

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise VerifyError(f"unknown recipe step '{self.step}'", expected=", ".join(sorted(STEPS)))

    def __str__(self) -> str:
        parts = [str(recipe) for recipe in self.inputs]
        parts += [f"{name}={json.dumps(value)}" for name, value in self.attrs]
        return f"{self.step}({', '.join(parts)})" + (f".{self.output}" if self.output else "")

    def attr(self, name: str) -> Attr:
        attrs = dict(self.attrs)
        if name not in attrs:
            raise VerifyError(f"recipe step '{self.step}' has no '{name}'", where=str(self))
        return attrs[name]

    def digest(self) -> str:
        """Return the SHA-256 of the recipe's text.

        Recipes with equal digests make equal tensors from one checkpoint.
        """
        return hashlib.sha256(str(self).encode()).hexdigest()

    def source_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes that checkpoint tensors must have, by name, so that the recipe makes a tensor of `shape`.

        Empty if they cannot be derived, as for a reshape. A slice does not determine the length of the sliced axis, so
        the least possible length is returned. A slice of each run of `every` elements does determine it.
        """
        if self.step == "source":
            return {str(self.attr("name")): shape}
        if self.step in ("cast", "affine", "normalize", "add"):
            return self.inputs[0].source_shapes(shape)
        if self.step == "quantize" and self.output == "weight":
            format = find_format(str(self.attr("format")))
            whole = stack_shape if is_stack("weight", len(shape), format) else _matrix_shape
            return self.inputs[0].source_shapes(whole(shape, format))
        if self.step == "slice":
            dim, end = _int(self.attr("dim")), _int(self.attr("end"))
            if every := _int(dict(self.attrs).get("every", 0)):
                end = shape[dim] // (end - _int(self.attr("begin"))) * every
            return self.inputs[0].source_shapes((*shape[:dim], end, *shape[dim + 1 :]))
        if self.step == "permute":
            of = dict(zip(_ints(self.attr("dims")), shape, strict=True))
            return self.inputs[0].source_shapes(tuple(of[dim] for dim in range(len(shape))))
        if self.step == "stack":
            dim = _int(self.attr("dim"))
            parts = [recipe.source_shapes((*shape[:dim], *shape[dim + 1 :])) for recipe in self.inputs]
            return {name: size for part in parts for name, size in part.items()}
        return {}

    def sources(self) -> frozenset[str]:
        """Return the names of the checkpoint tensors that the recipe reads."""
        if self.step == "source":
            return frozenset((str(self.attr("name")),))
        return frozenset().union(*(recipe.sources() for recipe in self.inputs))

    def renamed(self, rename: Callable[[str], str]) -> "Recipe":
        """Return the recipe with each checkpoint tensor name replaced by `rename(name)`."""
        return self.with_sources(lambda name: source(rename(name)))

    def with_sources(self, make: "Callable[[str], Recipe]") -> "Recipe":
        """Return the recipe with each step that reads a checkpoint tensor replaced by `make(name)`."""
        if self.step == "source":
            return make(str(self.attr("name")))
        return replace(self, inputs=tuple(recipe.with_sources(make) for recipe in self.inputs))

    def shared_steps(self) -> frozenset["Recipe"]:
        """Return the steps of this recipe that have several results, such as quantize.

        If another recipe uses a result of an equal step, the step need not be computed again.
        """
        own = frozenset((replace(self, output=""),)) if self.output else frozenset()
        return own.union(*(recipe.shared_steps() for recipe in self.inputs))

    def for_rank(self, rank: Rank) -> "Recipe":
        """Return the recipe that makes one rank's part of the tensor.

        Each shard step gets the rank's index on its mesh axis, and the size of that axis. Other steps stay as they are.
        """
        inputs = tuple(recipe.for_rank(rank) for recipe in self.inputs)
        if self.step != "shard":
            return self if inputs == self.inputs else replace(self, inputs=inputs)
        place = rank.on(str(self.attr("axis")))
        if place is None:
            raise VerifyError(f"rank {rank.index} has no place on axis '{self.attr('axis')}'", where=str(self))
        attrs = {**dict(self.attrs), "rank": place[0], "world": place[1]}
        return replace(self, inputs=inputs, attrs=tuple(sorted(attrs.items())))

    def execute(self, read: Callable[[str], torch.Tensor], memo: dict["Recipe", Results] | None = None) -> torch.Tensor:
        """Make the tensor and return it. `read` returns a checkpoint tensor by name.

        `memo` holds computed steps. Recipes executed with one `memo` compute equal steps once. If the recipe has shard
        steps, call `for_rank` first and execute its result. Raises CheckpointError if a step does not fit the tensors.
        """
        step = replace(self, output="")
        result = memo.get(step) if memo is not None else None
        if result is None:
            result = step._results(read, memo)
            if memo is not None:
                memo[step] = result
        if isinstance(result, torch.Tensor) != (self.output == "") or (self.output and self.output not in result):
            has = "one result" if isinstance(result, torch.Tensor) else f"the results {', '.join(result)}"
            raise VerifyError(f"recipe step '{self.step}' has {has}", where=str(self))
        return result if isinstance(result, torch.Tensor) else result[self.output]

    def _results(self, read: Callable[[str], torch.Tensor], memo: dict["Recipe", Results] | None) -> Results:
        if self.step == "source":
            return read(str(self.attr("name")))
        return self.apply(STEPS[self.step], [recipe.execute(read, memo) for recipe in self.inputs])

    def apply(self, function: "Step", args: list[torch.Tensor]) -> Results:
        """Return what `function`, the meaning of this recipe's last step, makes of the tensors of its inputs.

        Raises CheckpointError if the step does not fit the tensors.
        """
        try:
            if self.step == "shard":
                _check_shard_of_quantized(self, args[0])
            return function(args, dict(self.attrs))
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
            shapes = ", ".join(str(list(arg.shape)) for arg in args)
            problem = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"recipe step '{self.step}' cannot be applied to shapes ({shapes}): {problem}", where=str(self)
            ) from error


def _matrix_shape(packed: tuple[int, ...], format: Format) -> tuple[int, ...]:
    return format.shape_of(packed)


def _ints(value: Attr) -> list[int]:
    assert isinstance(value, tuple)
    return [int(item) for item in value if isinstance(item, int)]


def _int(value: Attr) -> int:
    assert isinstance(value, int)
    return value


def sliced(tensor: torch.Tensor, attrs: Mapping[str, Attr]) -> torch.Tensor:
    """Return the elements that a slice step with these `attrs` takes. Of runs of one element, it is a strided view."""
    dim, begin, end = _int(attrs["dim"]), _int(attrs["begin"]), _int(attrs["end"])
    if "every" not in attrs:
        return tensor.narrow(dim, begin, end - begin)
    dim += tensor.dim() if dim < 0 else 0
    runs: torch.Tensor = tensor.unflatten(dim, (-1, _int(attrs["every"])))
    return runs.narrow(dim + 1, begin, end - begin).flatten(dim, dim + 1)


def _slice(tensor: torch.Tensor, attrs: Mapping[str, Attr]) -> torch.Tensor:
    taken = sliced(tensor, attrs)
    return taken.contiguous() if "every" in attrs else taken


def _stack(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Stack tensors: as a view if they lie one after another in one storage, as experts of a stacked tensor do."""
    first = tensors[0]
    if dim == 0 and len(tensors) > 1 and all(_is_next(*pair) for pair in pairwise(tensors)):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(tensors, dim)


def _is_next(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two row-major tensors of one type are neighbours in memory."""
    return (
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        and one.is_contiguous()
        and other.is_contiguous()
        and int(other.storage_offset()) == int(one.storage_offset()) + one.numel()
    )


def _shard(tensor: torch.Tensor, attrs: Mapping[str, Attr]) -> torch.Tensor:
    """Return one rank's part of a tensor: part `rank` of `world` equal parts along the axis `dim`.

    `attrs` holds `rank`, `world`, `dim` and `segments`. `segments` are the sizes of the parts of a merged tensor, such
    as q, k and v. Each of these parts is split by itself. Empty means one part.
    """
    if "rank" not in attrs:
        raise ValueError("a shard step needs a rank: call for_rank before execute")
    dim, rank, world = _int(attrs["dim"]), _int(attrs["rank"]), _int(attrs["world"])
    segments = _ints(attrs["segments"]) or [tensor.shape[dim]]
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is none of {world}")
    if sum(segments) != tensor.shape[dim] or any(size % world for size in segments):
        raise ValueError(f"segments {segments} do not split {tensor.shape[dim]} over {world} ranks")
    parts = [part.chunk(world, dim)[rank] for part in tensor.split(segments, dim)]
    return torch.cat(parts, dim)


def _check_shard_of_quantized(recipe: Recipe, part: torch.Tensor) -> None:
    """Raise ValueError if a shard step would cut through a tile or a scale group of a quantized matrix.

    `recipe` is the shard step. `part` is the tensor to be sharded: packed elements, scales or zeros, of one matrix or
    of a stack. A scale group is the elements that share one scale.
    """
    quantizing, dim = recipe.inputs[0], _int(recipe.attr("dim"))
    if quantizing.step != "quantize":
        return
    format, world = find_format(str(quantizing.attr("format"))), _int(recipe.attr("world"))
    dim %= part.dim()
    first = int(is_stack(quantizing.output, part.dim(), format))  # the axis of rows
    if dim - first not in (0, 1):
        raise ValueError(f"a shard along axis {dim} cuts through the tiles of format {format.name}")
    elements, group = part.shape[dim] * format.block(quantizing.output)[dim - first], format.granule(dim - first)
    if elements % (group * world):
        raise ValueError(f"a shard of {elements} elements over {world} ranks is no multiple of the group of {group}")


def _affine(tensor: torch.Tensor, attrs: Mapping[str, Attr]) -> torch.Tensor:
    scale, offset = attrs["scale"], attrs["offset"]
    assert isinstance(scale, int | float) and isinstance(offset, int | float)
    return (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * scale + offset).to(tensor.dtype)


def _normalize(tensor: torch.Tensor) -> torch.Tensor:
    # Clamp lengths as torch.nn.functional.normalize does, so that a row of zeros stays zero.
    wide = tensor.double()
    lengths: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / lengths.clamp(min=1e-12)).to(tensor.dtype)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # float64, so that the result is rounded once. Its cost is small, because each weight is made once.
    return (left.double() @ right.double()).to(left.dtype)


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.shape != right.shape:
        raise ValueError("the shapes differ")  # torch would repeat the smaller tensor
    return left + right


def _pad(tensor: torch.Tensor, attrs: Mapping[str, Attr]) -> torch.Tensor:
    dim, size = _int(attrs["dim"]), _int(attrs["size"])
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _split(tensor: torch.Tensor, attrs: Mapping[str, Attr]) -> dict[str, torch.Tensor]:
    return {f"part{i}": part for i, part in enumerate(tensor.split(_ints(attrs["sizes"]), _int(attrs["dim"])))}


def _quantize(args: list[torch.Tensor], attrs: Mapping[str, Attr]) -> dict[str, torch.Tensor]:
    format = find_format(str(attrs["format"]))
    if len(args) == 1:
        return quantize_stack(args[0], format) if args[0].dim() == 3 else quantized(args[0], format)
    shape = args[0].shape
    types = format.types((shape[0], shape[1]), args[0].dtype)
    parts = dict(zip(format.parts, args[1:], strict=True))
    for part, tensor in parts.items():
        if problem := types[part].mismatch(tensor):
            raise ValueError(f"the stored {part} has {problem}")
    return parts


def _dequantize(args: list[torch.Tensor], attrs: Mapping[str, Attr]) -> torch.Tensor:
    format = find_format(str(attrs["format"]))
    return dequantized(dict(zip(format.parts, args, strict=True)), format)


Step = Callable[[list[torch.Tensor], Mapping[str, Attr]], Results]
STEPS: dict[str, Step] = {
    "source": lambda args, attrs: args[0],
    "slice": lambda args, attrs: _slice(args[0], attrs),
    "concat": lambda args, attrs: torch.cat(args, _int(attrs["dim"])),
    "stack": lambda args, attrs: _stack(args, _int(attrs["dim"])),
    "reshape": lambda args, attrs: args[0].reshape(_ints(attrs["shape"])),
    "permute": lambda args, attrs: args[0].permute(_ints(attrs["dims"])).contiguous(),
    "pad": lambda args, attrs: _pad(args[0], attrs),
    "repeat": lambda args, attrs: args[0].repeat_interleave(_int(attrs["times"]), _int(attrs["dim"])),
    "affine": lambda args, attrs: _affine(args[0], attrs),
    "normalize": lambda args, attrs: _normalize(args[0]),
    "matmul": lambda args, attrs: _matmul(args[0], args[1]),
    "add": lambda args, attrs: _add(args[0], args[1]),
    "table": lambda args, attrs: make_table(attrs),
    "shard": lambda args, attrs: _shard(args[0], attrs),
    "split": lambda args, attrs: _split(args[0], attrs),
    "quantize": _quantize,
    "dequantize": _dequantize,
    "cast": lambda args, attrs: args[0].to(DTYPES[str(attrs["dtype"])]),
    **STORED_STEPS,
}


def register_step(name: str, step: Step) -> None:
    """Register a step that recipes can use. `step` takes the input tensors and the attributes, and returns the result.

    A step with several results returns them by name. Raises InternalError if `name` is taken.
    """
    if name in STEPS:
        raise InternalError(f"the recipe step '{name}' is defined twice")
    STEPS[name] = step


def _recipe(step: str, *inputs: Recipe, **attrs: Attr) -> Recipe:
    return Recipe(step, inputs, tuple(sorted(attrs.items())))


def source(name: str) -> Recipe:
    """Return a recipe that reads the checkpoint tensor `name` unchanged."""
    return _recipe("source", name=name)


def concat(recipes: list[Recipe], dim: int = 0) -> Recipe:
    return _recipe("concat", *recipes, dim=dim)


def take_slice(recipe: Recipe, dim: int, begin: int, end: int, every: int | None = None) -> Recipe:
    """Return a recipe that takes elements `begin` to `end` (exclusive) along the axis `dim`.

    With `every`, it takes these elements from each run of `every` elements. Example: begin 0, end 2, every 4 takes
    elements 0, 1, 4, 5, 8, 9, …
    """
    runs: dict[str, Attr] = {} if every is None else {"every": every}
    return _recipe("slice", recipe, dim=dim, begin=begin, end=end, **runs)


def stack(recipes: list[Recipe], dim: int = 0) -> Recipe:
    return _recipe("stack", *recipes, dim=dim)


def reshape(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    return _recipe("reshape", recipe, shape=shape)


def permute(recipe: Recipe, dims: tuple[int, ...]) -> Recipe:
    return _recipe("permute", recipe, dims=dims)


def pad(recipe: Recipe, dim: int, size: int) -> Recipe:
    """Return a recipe that appends zeros along the axis `dim` until it has `size` elements."""
    return _recipe("pad", recipe, dim=dim, size=size)


def repeat(recipe: Recipe, dim: int, times: int) -> Recipe:
    """Return a recipe that repeats each element along the axis `dim`: a, b becomes a, a, b, b for `times` 2.

    It copies KV heads if there are more ranks than heads.
    """
    return _recipe("repeat", recipe, dim=dim, times=times)


def affine(recipe: Recipe, scale: float, offset: float) -> Recipe:
    """Return a recipe that computes `x * scale + offset`, in float32 or wider.

    Example: offset 1 for norm gains that the checkpoint stores minus one.
    """
    return _recipe("affine", recipe, scale=float(scale), offset=float(offset))


def normalize(recipe: Recipe) -> Recipe:
    """Return a recipe that divides each row by its Euclidean length. It computes in float64."""
    return _recipe("normalize", recipe)


def matmul(left: Recipe, right: Recipe) -> Recipe:
    return _recipe("matmul", left, right)


def add(left: Recipe, right: Recipe) -> Recipe:
    """Return a recipe that adds two tensors of equal shape."""
    return _recipe("add", left, right)


def table(**attrs: Attr) -> Recipe:
    """Return a recipe that computes a table from constants alone, such as a rotary table.

    `attrs` are the constants. The attribute `kind` selects the function in `ingot.ir.tables`.
    """
    return _recipe("table", **attrs)


def shard(recipe: Recipe, axis: str, dim: int, segments: tuple[int, ...] = ()) -> Recipe:
    """Return a recipe that takes one rank's part of a tensor, split along `dim` over the mesh axis `axis`.

    `Recipe.for_rank` sets the rank later. `segments` are the sizes of the parts of a merged tensor, such as q, k and v.
    Each of these parts is split by itself.
    """
    return _recipe("shard", recipe, axis=axis, dim=dim, segments=segments)


def cast(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    return _recipe("cast", recipe, dtype=DTYPE_NAMES[dtype])


def split(recipe: Recipe, dim: int, sizes: tuple[int, ...]) -> list[Recipe]:
    """Return a recipe for each part of a tensor that is cut along the axis `dim` into parts of `sizes`."""
    step = _recipe("split", recipe, dim=dim, sizes=sizes)
    return [replace(step, output=f"part{index}") for index in range(len(sizes))]


def quantize(recipe: Recipe, format: str, stored: Mapping[str, Recipe] | None = None) -> dict[str, Recipe]:
    """Return recipes that make the stored parts of a quantized matrix, or of a stack of matrices, by part name.

    The parts are "weight", and others such as "scales" if the format has them. `format` is a format's name, such as
    "int4_g32". If all recipes are executed with one `memo`, the matrix is quantized once.

    `stored` maps parts to recipes of tensors that were computed before, as from a calibration text. `recipe` then only
    says which matrix they quantize.
    """
    parts = find_format(format).parts
    step = _recipe("quantize", recipe, *((stored[part] for part in parts) if stored else ()), format=format)
    return {part: replace(step, output=part) for part in parts}


def dequantize(parts: Mapping[str, Recipe], format: str) -> Recipe:
    """Return a recipe that dequantizes a matrix to float32. A lossless format keeps the matrix's dtype.

    `parts` maps the names of the format's parts, such as "weight" and "scales", to recipes. `format` is the format's
    name.
    """
    return _recipe("dequantize", *(parts[name] for name in find_format(format).parts), format=format)
