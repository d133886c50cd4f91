"""The weights of a mixture's experts in any storage format, as the op `experts` takes and multiplies them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.formats import PARTS, Format, find_format
from ingot.ir.formats.stacked import matrix_of, split_stack, stack_shape, stack_types
from ingot.ir.ops.quant import quant_linear
from ingot.ir.placements import Call, Spot
from ingot.ir.types import DTYPE_NAMES, Split

PLAIN = "plain"
# The weights of the op, and its parameters for the parts of their formats besides the elements.
WEIGHTS = ("gate_up", "down")


def part_parameter(weight: str, part: str) -> str:
    """Return the op's parameter for a part of the weight "gate_up" or "down": gate_up_scales for its "scales"."""
    return weight if part == "weight" else f"{weight}_{part}"


@dataclass(frozen=True)
class ExpertWeight:
    """The matrices of one linear of all experts, with the experts on the first axis of each tensor.

    `parts` are the tensors that store them in `format`, by part name. `bias` is [E, N] or None.
    """

    name: str
    format: Format
    parts: Mapping[str, torch.Tensor]
    bias: torch.Tensor | None

    @staticmethod
    def of(name: str, format: str, bias: torch.Tensor | None, parts: tuple[torch.Tensor | None, ...]) -> "ExpertWeight":
        """Return the weight `name` from the arguments of the op. `parts` are in the order of `PARTS`."""
        given = {part: one for part, one in zip(PARTS, parts, strict=True) if one is not None}
        return ExpertWeight(name, find_format(format), given, bias)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape [E, N, K] of the matrices."""
        return stack_shape(tuple(self.parts["weight"].shape), self.format)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are given, by the op's parameter. Their first axis is that of the experts."""
        found = {part_parameter(self.name, part): one for part, one in self.parts.items()}
        return found if self.bias is None else {**found, part_parameter(self.name, "bias"): self.bias}

    def check(self, dtype: torch.dtype) -> None:
        """Raise VerifyError if the tensors do not store matrices in the format. `dtype` is that of x."""
        name, weight = self.format.name, self.parts["weight"]
        if weight.dim() != 3 + len(self.format.layout.inner):
            raise VerifyError(f"{self.name} of format {name} is {list(weight.shape)}", expected="[E, rows, columns]")
        if name == PLAIN and len(self.parts) == 1:
            return
        if problem := self.format.obstacle(self.shape[1:]):
            raise VerifyError(f"{self.name} of format {name}: {problem}")
        wanted = stack_types(self.shape, self.format, dtype if weight.is_floating_point() else weight.dtype)
        if self.parts.keys() != wanted.keys():
            raise VerifyError(
                f"{self.name} of format {name} has the parts {', '.join(self.parts)}", expected=", ".join(wanted)
            )
        for part, one in self.parts.items():
            if one.dtype != wanted[part].dtype or tuple(one.shape) != wanted[part].shape:
                raise VerifyError(
                    f"{part_parameter(self.name, part)} is {DTYPE_NAMES[one.dtype]}{list(one.shape)}",
                    expected=f"{wanted[part]}, as format {name} has it",
                )

    def linear(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Return `rows` [R, K] times the matrix of an expert, plus its bias: [R, N], rounded to the dtype of rows."""
        bias = None if self.bias is None else self.bias[expert]
        if self.format.name == PLAIN:
            return F.linear(rows, self.parts["weight"][expert], bias)
        own = matrix_of(self.parts, expert)
        weight, scales, zeros, *others = [own.get(part) for part in PARTS]
        result: torch.Tensor = quant_linear.reference(
            rows, weight, scales, zeros, bias, *others, format=self.format.name
        )
        return result


def splits_of(call: Call) -> dict[str, Spot] | None:
    """Return the placements of the parts of both weights, for a call of `experts` that a mesh axis splits by width.

    The rows of gate and up are split, each by itself, and the columns of down. None if a weight cannot be split so.
    """
    gate_up, down = (find_format(call.values[f"{name}_format"]) for name in WEIGHTS)
    if down.whole_columns():
        return None
    columns = call.size("down", 2)
    assert isinstance(columns, int)
    width = columns * down.layout.tile[1] * call.parts
    needs: dict[str, Spot] = {}
    for name, format, split in (
        ("gate_up", gate_up, Split(call.axis, 1, (width, width))),
        ("down", down, Split(call.axis, 2)),
    ):
        for part in format.parts:
            parameter = part_parameter(name, part)
            if parameter in call.types and (own := split_stack(split, part, format)) is not None:
                needs[parameter] = call.shard(own.dim, own.segments)
    if "gate_up_bias" in call.types:
        needs["gate_up_bias"] = call.shard(1, (width, width))
    return needs
