"""Second moments of the keys and values of each layer on a calibration text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.errors import CalibrationError
from ingot.ir.numerics.harness import step_inputs
from ingot.ir.program import Program, is_call, named_arguments
from ingot.quantizing.stream import Lane, Read, Stream, Value

OnDone = Callable[[int, int], None]


@dataclass
class _Layer:
    """Sums the outer products of keys and values of all tokens. Of a lane, either may be computed first."""

    waiting: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None

    def on_keys(self, lane: int, value: torch.Tensor) -> None:
        self._on(lane, value, keys=True)

    def on_values(self, lane: int, value: torch.Tensor) -> None:
        self._on(lane, value, keys=False)

    def _on(self, lane: int, value: torch.Tensor, *, keys: bool) -> None:
        other = self.waiting.pop(lane, None)
        if other is None:
            self.waiting[lane] = value.flatten(1)
            return
        parts = (value.flatten(1), other) if keys else (other, value.flatten(1))
        both = torch.cat(parts, 1).double()
        self.total = both.T @ both if self.total is None else self.total + both.T @ both


def find_moments(
    program: Program, sequences: Sequence[Sequence[int]], read: Read, on_done: OnDone
) -> dict[int, torch.Tensor]:
    """Return for each layer the sum over tokens of the outer products of keys and values, float64 [2 * keys, 2 * keys].

    Keys are those before the rotary embedding, after norms and biases. Keys of all heads come before values of all
    heads. Raises CalibrationError if the model's numbers are not finite.
    """
    layers: dict[int, _Layer] = {}
    watched: dict[fx.Node, Callable[[int, Value], None]] = {}
    for node in program.calls(ops.attention.overload):
        bound = named_arguments(node)
        rotated = bound["k"]
        assert is_call(rotated, ops.rope.overload), f"%{rotated} is no rotary embedding"
        keys, values, layer = named_arguments(rotated)["x"], bound["v"], layers.setdefault(bound["layer"], _Layer())
        assert isinstance(keys, fx.Node) and isinstance(values, fx.Node)
        watched |= {keys: layer.on_keys, values: layer.on_values}
    types = program.input_types()
    lanes = [Lane(step_inputs(types, [sequence])[0]) for sequence in sequences]
    with torch.no_grad():
        for _ in Stream(program, read, lanes, on_done, watched).run(lambda node: {}):
            pass
    found = {index: layer.total for index, layer in layers.items() if layer.total is not None}
    if bad := [index for index, total in found.items() if not bool(total.isfinite().all())]:
        raise CalibrationError(
            f"keys or values of layer {bad[0]} are not finite on the calibration text",
            where=f"program {program.name}",
            expected="a model that computes finite numbers in float32",
        )
    return found
