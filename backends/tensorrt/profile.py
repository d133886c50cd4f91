"""The optimization profile of a region: the shapes of its inputs for which TensorRT builds and tunes an engine."""

from dataclasses import dataclass

from ingot.ir.errors import BackendError
from ingot.ir.program import Program


@dataclass(frozen=True)
class Shapes:
    """The least and the largest shape of an input, and the one that the engine is tuned for."""

    least: tuple[int, ...]
    tuned: tuple[int, ...]
    largest: tuple[int, ...]


def profile_of(body: Program) -> dict[str, Shapes]:
    """Return the shapes of each input of a region that has symbols, by the input's name.

    The bounds of the symbols are those of the bucket class (range of step sizes). The engine is tuned for the largest
    step: graphs of steps are captured at the upper ends of ranges, and the largest steps take the most time. Raises
    BackendError if a symbol has no bounds.
    """
    found: dict[str, Shapes] = {}
    for name, value_type in body.input_types().items():
        symbols = {size for size in value_type.shape if isinstance(size, str)}
        if unbounded := sorted(symbols - body.dims.keys()):
            raise BackendError(
                f"the size {unbounded[0]} of the input {name} has no bounds",
                where=f"region {body.name}",
                expected=f"a dim {unbounded[0]} of the program",
                hint="compile with --backend triton, and report this",
            )
        if symbols:
            low, high = (
                value_type.bind({one: getattr(body.dims[one], end) for one in symbols}) for end in ("lo", "hi")
            )
            found[name] = Shapes(tuple(low), tuple(high), tuple(high))
    return found
