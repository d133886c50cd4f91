"""Faults of the model's definition: a line of it says something else.

All that is compiled from it is as the line says: only somebody who knows what the model should be can tell.
"""

import ast
import contextlib
import inspect
import random
import re
import textwrap
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from ingot.ir.errors import IngotError
from ingot.ir.program import Program, target_name
from ingot.models import dense
from ingot.request import Request
from planted.changes import with_users
from planted.fault import Fault, NoFault, Setup, Truth, replaced


@dataclass(frozen=True)
class Misprint:
    """In `method` of the class `owner` of models/dense.py, or in the function where there is no owner, `right` reads
    `wrong`, in one layer where `layer` tells it."""

    name: str
    owner: str
    method: str
    right: str
    wrong: str
    layer: str = ""


_OF_ATTENTION, _OF_LAYER = "self.index", "self.attention.index"
_SCALED = "self._scaled(attended)"
MISPRINTS = (
    Misprint("wrong rope theta", "", "rope_table", "theta=rope.theta", "theta=rope.theta * 2"),
    Misprint("dropped offset", "", "_gains", "1.0, spec.norm_offset", "1.0, 0.0"),
    Misprint(
        "swapped gate and up",
        "",
        "_gate_and_up",
        ".split(spec.ffn, spec.ffn)",
        ".split(spec.ffn, spec.ffn)[::-1]",
    ),
    Misprint("missing residual", "Layer", "forward", f"return h + {_SCALED}", f"return {_SCALED}", _OF_LAYER),
    Misprint("missing residual", "Layer", "forward", f"= h + {_SCALED}", f"= {_SCALED}", _OF_LAYER),
    Misprint("norm twice", "Layer", "forward", '"mlp_norm", h', '"mlp_norm", self._normed("mlp_norm", h)', _OF_LAYER),
    Misprint(
        "norm twice",
        "Layer",
        "forward",
        '"attention_norm", h',
        '"attention_norm", self._normed("attention_norm", h)',
        _OF_LAYER,
    ),
    Misprint("wrong scale", "Layer", "_scaled", "x * self.spec.residual_scale", "x", _OF_LAYER),
    Misprint("wrong epsilon", "Norm", "forward", "eps=self.eps", "eps=self.eps * 4"),
    Misprint("swapped gate and up", "MLP", "forward", "ops.silu_mul(gate, up)", "ops.silu_mul(up, gate)"),
    Misprint("swapped gate and up", "MLP", "forward", "gelu_mul(gate, up,", "gelu_mul(up, gate,"),
    Misprint("wrong activation", "MLP", "forward", '"tanh" if', '"none" if'),
    Misprint(
        "wrong attention scale", "Attention", "forward", "spec.head_dim**-0.5", "spec.head_dim**-0.4", _OF_ATTENTION
    ),
    Misprint("wrong attention scale", "Attention", "forward", "else spec.attention_scale", "else 0.5", _OF_ATTENTION),
    Misprint(
        "missing soft cap",
        "Attention",
        "forward",
        '"soft_cap": spec.attention_soft_cap',
        '"soft_cap": None',
        _OF_ATTENTION,
    ),
    Misprint("missing window", "Attention", "forward", '"mask": mask', '"mask": None', _OF_ATTENTION),
    Misprint(
        "wrong mask edge",
        "Attention",
        "forward",
        'f"window_{self.layer.window}"',
        'f"window_{max(1, self.layer.window - 1)}"',
        _OF_ATTENTION,
    ),
    Misprint(
        "missing rotation",
        "Attention",
        "forward",
        "k = ops.rope(k, positions, ropes[self.layer.rope], **order)",
        "k = k",
    ),
    Misprint(
        "wrong rope table",
        "Attention",
        "forward",
        "q = ops.rope(q, positions, ropes[self.layer.rope]",
        "q = ops.rope(q, positions, ropes[self.layer.rope - 1]",
    ),
    Misprint(
        "wrong rope section",
        "Attention",
        "forward",
        '{"interleaved": True} if spec.rope_interleaved',
        '{"interleaved": True} if not spec.rope_interleaved',
    ),
    Misprint(
        "swapped norms",
        "Attention",
        "forward",
        "q, k = self.q_norm(q), self.k_norm(k)",
        "q, k = self.k_norm(q), self.q_norm(k)",
    ),
    Misprint("missing scale", "DenseDecoder", "forward", "h * self.embed_scale", "h"),
    Misprint("missing scale", "DenseDecoder", "forward", "logits * self.spec.logit_scale", "logits"),
    Misprint("missing soft cap", "DenseDecoder", "forward", "if self.spec.logit_soft_cap is None", "if True"),
)


def draw(setup: Setup, checkpoint: Path, healthy: Program, layers: int, draw: random.Random) -> Fault:
    """`healthy` is the traced program of the definition as it is."""
    misprint = draw.choice(MISPRINTS)
    layer = draw.randrange(layers) if misprint.layer else None
    code = _misprinted(misprint, layer)

    def plant() -> contextlib.AbstractContextManager[None]:
        # By its code: whoever imported the function has the misprint too.
        return replaced(_method(misprint), "__code__", code)

    try:
        with plant():
            faulty = _traced(setup, checkpoint)
    except (IngotError, TypeError, AttributeError) as error:
        raise NoFault(f"{misprint.name}: refused: {error}") from error
    nodes = tuple(dict.fromkeys([*_parted(faulty, healthy), *_parted(healthy, faulty)]))
    where = ".".join(filter(None, (misprint.owner, misprint.method)))
    where += f" of layer {layer}" if layer is not None else ""
    if not nodes:
        raise NoFault(f"{setup} does not reach {where}")
    truth = Truth("definition", "", f"{misprint.wrong} for {misprint.right} in {where}", nodes)
    return Fault(misprint.name, setup, truth, plant, oracle="transformers")


def _method(misprint: Misprint) -> FunctionType:
    found = getattr(getattr(dense, misprint.owner) if misprint.owner else dense, misprint.method)
    assert isinstance(found, FunctionType)
    return found


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
    method = _method(misprint)
    source, first = inspect.getsourcelines(method)
    text = textwrap.dedent("".join(source))
    if misprint.right not in text:
        raise NoFault(f"models/dense.py has no '{misprint.right}'")
    wrong = misprint.wrong
    if layer is not None:
        wrong = _in_one_layer(misprint, layer)
    tree = ast.parse(text.replace(misprint.right, wrong, 1))
    ast.increment_lineno(tree, first - 1)
    space: dict[str, Any] = {}
    exec(compile(tree, method.__code__.co_filename, "exec"), vars(dense), space)
    made = space[misprint.method]
    assert isinstance(made, FunctionType)
    return made.__code__


def _in_one_layer(misprint: Misprint, layer: int) -> str:
    own = misprint.layer if misprint.method != "_scaled" else "self.attention.index"
    match = re.match(r'("\w+": |"\w+", |else |= |return )(.*)', misprint.right)
    prefix, right = match.groups() if match else ("", misprint.right)
    return f"{prefix}({misprint.wrong.removeprefix(prefix)} if {own} == {layer} else {right})"


def _traced(setup: Setup, checkpoint: Path) -> Program:
    options = {name: value for name, value in setup.options.items() if name != "jobs"}
    return Request.read(checkpoint, **{"max_seq_len": 160, **options}).trace().entries["main"]
