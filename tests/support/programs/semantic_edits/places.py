"""Places in a program that an edit may choose among."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ingot.ir.program import Program, RegionCall

Edit = Callable[[Program, random.Random], Program | None]


def pick(found: list[Any], draw: random.Random) -> Any:
    return draw.choice(found) if found else None


def calls_of(program: Program) -> list[fx.Node]:
    return [node for node in program.calls() if isinstance(node.target, torch._ops.OpOverload)]


def region_calls(program: Program) -> list[fx.Node]:
    return [node for node in program.calls() if isinstance(node.target, RegionCall)]
