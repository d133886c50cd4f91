"""Faults of the weights on disk, signed anew: what a packer that goes wrong would have written."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resign import edit_json, sign

from ingot.ir.types import DTYPES
from planted.fault import Fault, NoFault, Setup, Truth

_INDEX = "weights.json"


def draw(setup: Setup, artifact: Path, draw: random.Random) -> Fault:
    index: dict[str, Any] = json.loads((artifact / _INDEX).read_text())
    own = {name: entry for name, entry in index.items() if entry.get("file")}
    if not own:
        raise NoFault(f"{setup} has no weights of one file")
    label = draw.choice(sorted(_DAMAGES))
    return _DAMAGES[label](setup, label, own, index, draw)


def _sharing(index: dict[str, Any], *names: str) -> tuple[str, ...]:
    return (*names, *(name for name, entry in index.items() if entry.get("same_as") in names))


def _changed_byte(setup: Setup, label: str, own: dict[str, Any], index: dict[str, Any], draw: random.Random) -> Fault:
    name = draw.choice(sorted(own))
    entry, size = own[name], DTYPES[own[name]["dtype"]].itemsize
    count = 1
    for length in entry["shape"]:
        count *= length
    at = entry["offset"] + draw.randrange(count) * size + size - 1  # the byte of sign and exponent

    def damage(artifact: Path) -> None:
        file = artifact / entry["file"]
        data = bytearray(file.read_bytes())
        data[at] ^= 0xC0
        file.write_bytes(data)
        sign(artifact, entry["file"])

    truth = Truth("weights", "", f"a byte of {name} is another", _sharing(index, name))
    return Fault(label, setup, truth, damage=damage)


def _swapped(setup: Setup, label: str, own: dict[str, Any], index: dict[str, Any], draw: random.Random) -> Fault:
    alike = [
        (one, other)
        for one in sorted(own)
        for other in sorted(own)
        if one < other and all(own[one][key] == own[other][key] for key in ("dtype", "shape"))
    ]
    if not alike:
        raise NoFault(f"no two weights of {setup} are alike")
    one, other = draw.choice(alike)

    def edit(found: Any) -> None:
        for key in ("file", "offset"):
            found[one][key], found[other][key] = found[other][key], found[one][key]

    truth = Truth("weights", "", f"{one} and {other} are mixed up", _sharing(index, one, other))
    return Fault(label, setup, truth, damage=_indexed(edit))


def _moved(setup: Setup, label: str, own: dict[str, Any], index: dict[str, Any], draw: random.Random) -> Fault:
    movable = [name for name in sorted(own) if own[name]["offset"] > 4096]
    if not movable:
        raise NoFault(f"no weight of {setup} can be moved")
    name = draw.choice(movable)
    size = DTYPES[own[name]["dtype"]].itemsize

    def edit(found: Any) -> None:
        found[name]["offset"] -= size

    truth = Truth("weights", "", f"{name} is read one element early", _sharing(index, name))
    return Fault(label, setup, truth, damage=_indexed(edit))


def _indexed(edit: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda artifact: edit_json(artifact, _INDEX, edit)


_DAMAGES = {"changed byte": _changed_byte, "swapped tensors": _swapped, "wrong offset": _moved}
