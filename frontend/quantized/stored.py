"""The parts that readers of quantized checkpoints share: the stored tensors, and the weights that they store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ingot.frontend.safetensors_header import TensorInfo
from ingot.ir.errors import CheckpointError
from ingot.ir.formats import ELEMENTS, Format
from ingot.ir.program import Model
from ingot.ir.recipe import Recipe, cast, dequantize, reshape, source
from ingot.ir.stored.recipes import check_scales, group_order

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """A weight that a checkpoint stores quantized.

    shape    its shape when it is dequantized
    recipe   how it is made from stored tensors
    uses     the stored tensors that describe it; the recipe need not read all of them
    """

    shape: Shape
    recipe: Recipe
    uses: frozenset[str]


@dataclass(frozen=True)
class Stored:
    """The stored tensors of a checkpoint, for a reader of its quantized weights.

    tensors   tensor name -> dtype, shape and location
    read      returns a tensor by its name
    where     the checkpoint's folder, for errors
    """

    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], torch.Tensor]
    where: str
    _equal: dict[tuple[str, bytes], str] = field(default_factory=dict)

    def modules(self, suffix: str) -> list[str]:
        """Return the names of the modules that have a tensor NAME.suffix."""
        return [name[: -len(suffix) - 1] for name in self.tensors if name.endswith(f".{suffix}")]

    def info(self, name: str, dtypes: Sequence[torch.dtype], shapes: Sequence[Shape]) -> TensorInfo:
        """Return the description of a stored tensor.

        Raises CheckpointError if it is missing, or if its dtype or shape is none of the expected ones. Without
        `shapes`, every shape is expected.
        """
        found = self.tensors.get(name)
        texts = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        expected = f"{' or '.join(texts)} {' or '.join(str(list(shape)) for shape in shapes)}".strip()
        if found is None:
            raise self.error(f"the checkpoint lacks {name}", f"a tensor {name} of {expected}")
        if found.dtype not in dtypes or (shapes and tuple(found.shape) not in shapes):
            is_a = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
            raise self.error(f"the tensor {name} is {is_a}", expected)
        return found

    def error(self, problem: str, expected: str) -> CheckpointError:
        return CheckpointError(
            problem,
            where=self.where,
            expected=expected,
            hint="check that config.json and the tensor files are from the same checkpoint",
        )

    def same(self, name: str) -> str:
        """Return the name of the first tensor with the same bytes, of the modules with the same parent module.

        The input scales of q, k and v are an example. So linears that read one value can share the tensor, and can be
        merged.
        """
        module, _, part = name.rpartition(".")
        data = self.read(name).contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return self._equal.setdefault((f"{module.rpartition('.')[0]}:{part}", data), name)

    def check_number(self, name: str) -> None:
        """Raise CheckpointError unless a tensor has one element, a positive and normal number."""
        self.info(name, (torch.float32, torch.bfloat16, torch.float16), ((), (1,), (1, 1)))
        value = float(self.read(name).flatten()[0])
        if not (torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max):
            raise self.error(f"the tensor {name} is {value}", "a positive number that is normal in float32")


@dataclass(frozen=True)
class Logical:
    """A quantized checkpoint as its weights.

    tensors   tensor name -> dtype and shape, as in a checkpoint of floats. Parts of quantized weights are left out.
    recipes   name of a quantized weight -> how it is made from stored tensors
    """

    tensors: Mapping[str, TensorInfo]
    recipes: Mapping[str, Recipe] = field(default_factory=dict)

    @staticmethod
    def of(stored: Stored, weights: Mapping[str, Weight]) -> "Logical":
        """Return the checkpoint with `weights` in place of the tensors that store them.

        Raises CheckpointError if a weight is stored twice: quantized and as floats.
        """
        uses = frozenset().union(*(one.uses for one in weights.values()))
        rest = {name: info for name, info in stored.tensors.items() if name not in uses}
        if twice := sorted(weights.keys() & rest.keys()):
            raise stored.error(f"the weight {twice[0]} is stored quantized and as floats", "one of the two")
        made = {}
        for name, one in weights.items():
            first = stored.tensors[min(one.uses & stored.tensors.keys())]
            made[name] = replace(first, name=name, dtype=torch.float32, shape=one.shape)
        return Logical({**rest, **made}, {name: one.recipe for name, one in weights.items()})

    def with_others(self, others: Mapping[str, "Logical"]) -> "Logical":
        """Return this checkpoint together with further ones. Their tensors are named "ALIAS:NAME".

        `others` maps aliases, such as "draft", to checkpoints.
        """
        tensors, recipes = dict(self.tensors), dict(self.recipes)
        for alias, one in others.items():
            tensors |= {f"{alias}:{name}": info for name, info in one.tensors.items()}
            for name, recipe in one.recipes.items():
                recipes[f"{alias}:{name}"] = recipe.renamed(f"{alias}:{{}}".format)
        return Logical(tensors, recipes)

    def store(self, model: Model) -> None:
        """Make the params of a model from the stored tensors: its recipes read weights as if none were quantized."""
        for program in model.entries.values():
            for name, spec in program.params.items():
                if spec.recipe.sources() & self.recipes.keys():
                    made = spec.recipe.with_sources(lambda one: self.recipes.get(one) or source(one))
                    program.params[name] = replace(spec, recipe=made)


def weight(shape: Shape, format: Format, parts: Mapping[str, Recipe], *uses: str) -> Weight:
    """Return a stored weight of `shape` in `format`. `uses` names stored tensors that its recipe does not read."""
    recipe = dequantize(parts, format.name)
    return Weight(shape, recipe, recipe.sources() | frozenset(uses))


def scales_of(stored: Stored, name: str, grid: Shape, *, wide: bool, zero: bool = False) -> tuple[Recipe, torch.dtype]:
    """Return the recipe of scales [rows, columns] and their dtype.

    A single scale and one for each row are stored in several shapes. With `wide`, scales become float32, so that
    checkpoints that differ only in this have one format. Raises CheckpointError for any other shape or dtype.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
    shapes = [grid, *([grid[:1]] if grid[1] == 1 else []), *([()] if grid == (1, 1) else [])]
    info = stored.info(name, dtypes, shapes)
    made = check_scales(source(name), zero)
    made = made if tuple(info.shape) == grid else reshape(made, grid)
    if wide and info.dtype is not torch.float32:
        return cast(made, torch.float32), torch.float32
    return made, info.dtype


def input_scale(stored: Stored, name: str) -> Recipe:
    """Return the recipe of a stored number [1] for activations, such as the scale of a static rule."""
    stored.check_number(name)
    held = stored.same(name)
    made = reshape(source(held), (1,))
    return made if stored.tensors[held].dtype is torch.float32 else cast(made, torch.float32)


def columns_order(stored: Stored, name: str, columns: int, size: int) -> Recipe | None:
    """Return the recipe of the columns of a weight, sorted by the group of `size` columns whose scale each has.

    None if the columns have the groups in order, or if the tensor `name`, the group of each column, is not stored.
    """
    if name not in stored.tensors:
        return None
    stored.info(name, (torch.int32, torch.int64), [(columns,)])
    groups = stored.read(name).long()
    if torch.equal(groups, torch.arange(columns) // (size or columns)):
        return None
    if not torch.equal(groups.bincount(minlength=1), torch.full((columns // (size or columns),), size or columns)):
        raise stored.error(f"{name} is no order of {columns} columns in groups of {size or columns}", "whole groups")
    return group_order(source(stored.same(name)), size or columns)


def packing_of(element: str) -> str:
    """Return the packing in which elements of this type are stored in an artifact."""
    return "low_first" if ELEMENTS[element].bits == 4 else "plain"
