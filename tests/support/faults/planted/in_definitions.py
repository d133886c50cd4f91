"""Faults of the model's definition: a line of it says something else.

All that is compiled from it is as the line says: only somebody who knows what the model should be can tell.
"""

import ast
import contextlib
import inspect
import random
import textwrap
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from ingot.compile.request import Request
from ingot.ir.errors import IngotError
from ingot.ir.program import Program, target_name
from ingot.models.blocks.attention import Attention
from ingot.models.blocks.embedding import Embedding
from ingot.models.blocks.feed_forward import Gated, GatedNames
from ingot.models.blocks.head import Head
from ingot.models.blocks.layer import Layer
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import RotarySpec, rope_table
from planted.changes import with_users
from planted.fault import Fault, NoFault, Setup, Truth, replaced


@dataclass(frozen=True)
class Misprint:
    """In `method`, `right` reads `wrong`; where `only` says when, in terms of a drawn {layer}, then alone."""

    name: str
    method: Any
    right: str
    wrong: str
    only: str = ""


_IN_ATTENTION, _IN_LAYER = "self.layer == {layer}", "self.attention.layer == {layer}"
_BRANCHES = tuple(_IN_LAYER + f" and one.block is self.{name}" for name in ("attention", "mlp"))
_RESULT = "self._result(one, x, at)"
_SWAPPED_NORMS = "q, k = self.k_norm(q), self.q_norm(k)"
MISPRINTS = (
    Misprint("wrong rope theta", rope_table, "theta=rope.theta", "theta=rope.theta * 2"),
    Misprint("dropped offset", NormSpec.made, "1.0, self.offset", "1.0, 0.0"),
    Misprint("swapped gate and up", GatedNames.gate_and_up, ".split(width, width)", ".split(width, width)[::-1]"),
    *(Misprint("missing residual", Layer.forward, f"h + {_RESULT}", _RESULT, only) for only in _BRANCHES),
    Misprint("missing residual", Layer._in_parallel, f"total + {_RESULT}", _RESULT, _BRANCHES[0]),
    *(Misprint("norm twice", Layer.forward, "one.norm(h)", "one.norm(one.norm(h))", only) for only in _BRANCHES),
    Misprint("norm twice", Layer._in_parallel, "one.norm(h)", "one.norm(one.norm(h))", _IN_LAYER),
    Misprint("wrong scale", Layer._result, "result * self.spec.scale", "result", _IN_LAYER),
    Misprint("wrong epsilon", Norm.forward, "eps=self.spec.eps", "eps=self.spec.eps * 4"),
    Misprint("swapped gate and up", Gated.forward, "ops.silu_mul(gate, up)", "ops.silu_mul(up, gate)"),
    Misprint("swapped gate and up", Gated.forward, "gelu_mul(gate, up,", "gelu_mul(up, gate,"),
    Misprint("wrong activation", Gated.forward, '"tanh" if', '"none" if'),
    Misprint("wrong attention scale", Attention.options, "spec.head_dim**-0.5", "spec.head_dim**-0.4", _IN_ATTENTION),
    Misprint("wrong attention scale", Attention.options, "else spec.scale", "else 0.5"),
    Misprint("missing soft cap", Attention.options, "spec.soft_cap is not None", "False", _IN_ATTENTION),
    Misprint("missing window", Attention.options, "spec.window is not None", "False", _IN_ATTENTION),
    Misprint(
        "wrong mask edge",
        Attention.options,
        'f"window_{spec.window}"',
        'f"window_{max(1, spec.window - 1)}"',
        _IN_ATTENTION,
    ),
    Misprint("missing rotation", Attention.forward, "spec.rotary.rotate(k, at)", "k"),
    Misprint("wrong rope table", RotarySpec.rotate, "at.ropes[self.table]", "at.ropes[self.table - 1]"),
    Misprint("wrong rope section", RotarySpec.rotate, "True} if self.interleaved", "True} if not self.interleaved"),
    Misprint("swapped norms", Attention.forward, "q, k = self.q_norm(q), self.k_norm(k)", _SWAPPED_NORMS),
    Misprint("missing scale", Embedding.forward, "h * self.scale", "h"),
    Misprint("missing scale", Head.forward, "logits * self.spec.scale", "logits"),
    Misprint("missing soft cap", Head.forward, "if self.spec.soft_cap is None", "if True"),
)


def draw(setup: Setup, checkpoint: Path, healthy: Program, layers: int, draw: random.Random) -> Fault:
    """`healthy` is the traced program of the definition as it is."""
    misprint = draw.choice(MISPRINTS)
    layer = draw.randrange(layers) if misprint.only else None
    code = _misprinted(misprint, layer)

    def plant() -> contextlib.AbstractContextManager[None]:
        # By its code: whoever imported the function has the misprint too.
        return replaced(misprint.method, "__code__", code)

    try:
        with plant():
            faulty = _traced(setup, checkpoint)
    except (IngotError, TypeError, AttributeError) as error:
        raise NoFault(f"{misprint.name}: refused: {error}") from error
    nodes = tuple(dict.fromkeys([*_parted(faulty, healthy), *_parted(healthy, faulty)]))
    where = misprint.method.__qualname__
    where += f" of layer {layer}" if layer is not None else ""
    if not nodes:
        raise NoFault(f"{setup} does not reach {where}")
    truth = Truth("definition", "", f"{misprint.wrong} for {misprint.right} in {where}", nodes)
    return Fault(misprint.name, setup, truth, plant, oracle="transformers")


def _parted(program: Program, other: Program) -> Iterator[str]:
    """The values that the other program lacks, although it has all that they are made of; and who reads them."""
    there = set(_meanings(other).values())
    own = _meanings(program)
    for node, meaning in own.items():
        if meaning not in there and all(own[source] in there for source in node.all_input_nodes):
            yield from with_users(node)


def _meanings(program: Program) -> dict[fx.Node, Hashable]:
    """Each value by how it is made, down to inputs and recipes, whatever it is called."""
    found: dict[fx.Node, Hashable] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = program.params.get(str(node.target))
            found[node] = hash((str(node.target), str(spec.recipe) if spec else ""))
        elif node.op == "call_function":
            made = fx.node.map_arg((node.args, node.kwargs), lambda source: found[source])
            found[node] = hash((target_name(node.target), repr(made)))
    return found


def _misprinted(misprint: Misprint, layer: int | None) -> CodeType:
    """The code of the method with other words in it, at its own line numbers."""
    method = misprint.method
    source, first = inspect.getsourcelines(method)
    text = textwrap.dedent("".join(source))
    if misprint.right not in text:
        raise NoFault(f"{method.__qualname__} has no '{misprint.right}'")
    wrong = misprint.wrong
    if layer is not None:
        wrong = f"({wrong} if {misprint.only.format(layer=layer)} else {misprint.right})"
    tree = ast.parse(text.replace(misprint.right, wrong, 1))
    ast.increment_lineno(tree, first - 1)
    space: dict[str, Any] = {}
    exec(compile(tree, method.__code__.co_filename, "exec"), method.__globals__, space)
    made = space[method.__name__]
    assert isinstance(made, FunctionType)
    return made.__code__


def _traced(setup: Setup, checkpoint: Path) -> Program:
    options = {name: value for name, value in setup.options.items() if name != "jobs"}
    return Request.read(checkpoint, **{"max_seq_len": 160, **options}).trace().entries["main"]
