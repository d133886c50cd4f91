"""Faults of the model's definition: a line of it says something else.

All that is compiled from it is as the line says: only somebody who knows what the model should be can tell.
"""

import ast
import contextlib
import inspect
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from ingot.compiler import Request
from ingot.ir.errors import IngotError
from ingot.ir.program import Program
from ingot.models import dense
from planted.changes import with_users
from planted.fault import Fault, NoFault, Setup, Truth, replaced


@dataclass(frozen=True)
class Misprint:
    """In the method `owner.method` of models/dense.py `right` reads `wrong`, in one layer where `layer` tells it."""

    name: str
    owner: str
    method: str
    right: str
    wrong: str
    layer: str = ""


_OF_ATTENTION, _OF_LAYER = "self.index", "self.attention.index"
_SCALED = "self._scaled(attended)"
MISPRINTS = (
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
    Misprint("missing window", "Attention", "forward", '"window": self.layer.window', '"window": None', _OF_ATTENTION),
    Misprint(
        "wrong mask edge",
        "Attention",
        "forward",
        '"window": self.layer.window',
        '"window": self.layer.window and self.layer.window - 1',
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
    for misprint in draw.sample(MISPRINTS, len(MISPRINTS)):
        layer = draw.randrange(layers) if misprint.layer else None
        function, lines = _misprinted(misprint, layer)
        if set(_at(healthy, lines, layer)):
            break
    else:
        raise NoFault(f"{setup} has no line to misprint")

    def plant() -> contextlib.AbstractContextManager[None]:
        return replaced(getattr(dense, misprint.owner), misprint.method, function)

    try:
        with plant():
            faulty = _traced(setup, checkpoint)
    except IngotError as error:
        raise NoFault(f"{misprint.name}: refused: {error}") from error
    nodes = tuple(dict.fromkeys([*_at(faulty, lines, layer), *_at(healthy, lines, layer)]))
    where = f"{misprint.owner}.{misprint.method}" + (f" of layer {layer}" if layer is not None else "")
    truth = Truth("definition", "", f"{misprint.wrong} for {misprint.right} in {where}", nodes)
    return Fault(misprint.name, setup, truth, plant, oracle="transformers")


def _misprinted(misprint: Misprint, layer: int | None) -> tuple[FunctionType, range]:
    """The method with other words in it and its own line numbers; and the lines where they stand."""
    method = inspect.unwrap(getattr(getattr(dense, misprint.owner), misprint.method))
    source, first = inspect.getsourcelines(method)
    text = textwrap.dedent("".join(source))
    if misprint.right not in text:
        raise NoFault(f"models/dense.py has no '{misprint.right}'")
    wrong = misprint.wrong
    line = 1 + text[: text.index(misprint.right)].count("\n")
    spans = [
        (one.lineno, one.end_lineno or one.lineno) for one in ast.walk(ast.parse(text)) if isinstance(one, ast.stmt)
    ]
    begin, end = max(span for span in spans if span[0] <= line <= span[1])
    if layer is not None:
        wrong = _in_one_layer(misprint, layer)
    tree = ast.parse(text.replace(misprint.right, wrong, 1))
    ast.increment_lineno(tree, first - 1)
    space: dict[str, Any] = {}
    exec(compile(tree, method.__code__.co_filename, "exec"), vars(dense), space)
    # A constant stands in front of the call that it is for.
    return space[misprint.method], range(first + begin - 1, first + end + 1)


def _in_one_layer(misprint: Misprint, layer: int) -> str:
    own = misprint.layer if misprint.method != "_scaled" else "self.attention.index"
    match = re.match(r'("\w+": |"\w+", |else |= |return )(.*)', misprint.right)
    prefix, right = match.groups() if match else ("", misprint.right)
    return f"{prefix}({misprint.wrong.removeprefix(prefix)} if {own} == {layer} else {right})"


def _traced(setup: Setup, checkpoint: Path) -> Program:
    options = {name: value for name, value in setup.options.items() if name != "jobs"}
    return Request.read(checkpoint, **{"max_seq_len": 160, **options}).trace().entries["main"]


def _at(program: Program, lines: range, layer: int | None) -> Iterator[str]:
    """What is computed at these lines of the definition, and who reads it."""
    for node in program.calls():
        origin = node.meta.get("origin", "")
        found = re.search(r"models/dense\.py:(\d+)", origin)
        own = layer is None or f"layer {layer}," in origin
        if found and own and int(found.group(1)) in lines:
            yield from with_users(node)
