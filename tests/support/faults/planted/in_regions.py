"""Faults of compiled regions: the library on disk computes something else than the region's body."""

import functools
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from resign import sign
from torch import fx

from ingot.backends.inductor.emit import Inductor
from ingot.backends.inductor.library import LIBRARIES
from ingot.ir.errors import IngotError
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, RegionCall
from ingot.ir.verify import verify
from planted.fault import Fault, NoFault, Setup, Truth
from planted.wrong_rewrites import wrong_rewrites


def draw(setup: Setup, programs: Sequence[Program], draw: random.Random) -> Fault:
    """A library built from a body with one node changed, in the place of the right one."""
    program = draw.choice([one for one in programs if one.regions] or [None])
    if program is None:
        raise NoFault(f"{setup} has no regions")
    name = draw.choice(sorted(program.regions))
    region = program.regions[name]
    body = region.body.copy()
    inside = {node.name for node in body.graph.nodes}
    changes = wrong_rewrites(body, {node.name for node in body.calls()}, inside)
    if not changes or region.executable is None:
        raise NoFault(f"region {name} can do nothing wrong")
    label = draw.choice(sorted({change.name for change in changes}))
    change = draw.choice([one for one in changes if one.name == label])
    try:
        change.apply(body)
        verify(body)
    except (IngotError, KeyError) as error:
        raise NoFault(f"{label} in region {name}: {error}") from error
    callers = [node for node in program.calls() if node.target == RegionCall(name)]
    nodes = [name for node in callers for name in (node.name, *(user.name for user in _users(node)))]
    key = region.executable.id
    target = Target.detect("cpu")
    build = functools.cache(lambda: _built(body, key, target))

    def damage(artifact: Path) -> None:
        place = f"exe/{target.name}/{key}/{LIBRARIES['cpu']}"
        if not (artifact / place).is_file():
            raise NoFault(f"{place} is not in the artifact: the machine or its compiler changed in between")
        # Compiling has run the library: written in place, it would change under whoever has mapped it.
        (artifact / place).unlink()
        shutil.copyfile(build(), artifact / place)
        sign(artifact, place)

    truth = Truth(
        "backend",
        region.backend,
        f"region {name}: {change.what}",
        tuple(dict.fromkeys([*change.wrong, *nodes])),
        bucket=program.bucket.name if program.bucket else None,
    )
    return Fault(f"region: {label}", setup, truth, damage=damage)


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op == "call_function"]


def _built(body: Program, key: str, target: Target) -> Path:
    folder = Path(tempfile.mkdtemp())
    Inductor().emit(body, key, target, folder)
    return folder / LIBRARIES["cpu"]
