"""Print which backend computes each call, the other candidates, and the refusals with their reasons."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ingot.cli.console import console, print_table, table
from ingot.cli.views.filter import Filter
from ingot.cli.views.lines import read_programs
from ingot.cli.views.programs import FINAL
from ingot.ir.artifact.backend_times import Decision
from ingot.ir.artifact.refusals import RefusalTable
from ingot.ir.artifact.tuning import Choice as TileChoice
from ingot.ir.artifact.tuning import read_choices
from ingot.ir.errors import ArtifactError, OptionError
from ingot.runtime.loading.artifact import Artifact


@dataclass(frozen=True)
class Choice:
    """A call of a final program, with the backend that computes it and the reasons.

    program      the program's title, such as "decode"
    region       the region (calls compiled together) that contains the call; "" if none does
    name         the value that the call defines
    op           the op that it calls
    layers       the decoder layers that it belongs to
    backend      the backend that computes it
    candidates   by backend that can compute the call: the cost that it offered
    decision     how the backend was chosen among several, for a call outside regions; else None
    refusals     the reasons of the other backends to refuse the call
    tiles        the tile sizes of the kernels of the call or its region
    """

    program: str
    region: str
    name: str
    op: str
    layers: frozenset[int]
    backend: str
    candidates: dict[str, float]
    decision: Decision | None
    refusals: tuple[str, ...]
    tiles: tuple[TileChoice, ...]


def choices_json(artifact: Artifact, wanted: Filter) -> Any:
    """Return the content of choices.json, the file of all backend choices. With a filter, return a list of matching
    calls."""
    if not wanted:
        return artifact.read_json("choices.json")
    return [
        {
            "program": one.program,
            "region": one.region or None,
            "node": one.name,
            "op": one.op,
            "layers": sorted(one.layers),
            "backend": one.backend,
            "candidates": one.candidates,
            "decision": one.decision and one.decision.model_dump(mode="json"),
            "refusals": list(one.refusals),
            "tiles": [tiles.model_dump(mode="json") for tiles in one.tiles],
        }
        for one in choices_of(artifact, wanted)
    ]


def choices_of(artifact: Artifact, wanted: Filter) -> list[Choice]:
    """Return the calls that match the filter, in order, with their backends. Raises OptionError if none match.

    Calls that only return a view of a tensor are left out, since no backend computes them.
    """
    stored: Any = artifact.read_json("choices.json")
    programs = read_programs(artifact.read_text(FINAL))
    wanted.check(programs)
    found: list[Choice] = []
    try:
        for program in programs:
            chosen = stored[program.title]
            refused: dict[str, list[str]] = {}
            for one in RefusalTable.model_validate(chosen["refusals"]).refusals():
                refused.setdefault(one.node, []).append(one.reason)
            compilers = {line.name: line.backend for line in program.lines if line.kind == "region"}
            for line in program.lines:
                if line.kind != "call" or line.op == "getitem" or not wanted.takes(line):
                    continue
                backend = compilers[line.region] if line.region else chosen["backends"].get(line.name, "")
                candidates = chosen["candidates"].get(line.name, {})
                contest = chosen["contests"].get(line.name)
                decision = contest and Decision.model_validate_json(json.dumps(contest))
                reasons = tuple(refused.get(line.name, ()))
                tiles = read_choices(chosen["tiles"].get(line.region or line.name, []))
                found.append(
                    Choice(
                        program.title,
                        line.region,
                        line.name,
                        line.op,
                        line.layers,
                        backend,
                        candidates,
                        decision,
                        reasons,
                        tiles,
                    )
                )
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ArtifactError(f"choices.json is malformed: {error!r}", where=str(artifact.folder)) from error
    if not found:
        raise OptionError("no call matches", where=str(wanted), expected="one that matches all that is given")
    return found


def print_choices(artifact: Artifact, wanted: Filter) -> None:
    """Print the calls that match the filter, with their backends. Then print tile sizes and weights that are stored
    twice."""
    choices = choices_of(artifact, wanted)
    rows = [
        (
            one.program + (f", region {one.region}" if one.region else ""),
            f"%{one.name}",
            one.op,
            _layers_text(one.layers),
            one.backend,
            ", ".join(f"{name} {cost:g}" for name, cost in sorted(one.candidates.items(), key=lambda item: item[1])),
            "; ".join(one.refusals),
        )
        for one in choices
    ]
    out = console()
    print_table(out, table(("program", "call", "op", "layer", "backend", "candidates", "refusals"), rows))
    out.print(
        "\ncandidates: the backends that would compute the call, with costs; the cheapest wins if they are not timed",
        style="dim",
        markup=False,
    )
    _print_decisions(choices)
    _print_tiles(choices)
    stored: Any = artifact.read_json("choices.json")
    copies = {first: second for program in stored.values() for first, second in program["second_copies"].items()}
    for first, second in sorted(copies.items()):
        out.print(f"stored twice: {first}, also as {second}", markup=False, soft_wrap=True)


def _print_decisions(choices: Sequence[Choice]) -> None:
    """Print how the backend was chosen for each call outside regions that several backends can compute.

    A row has the times of the backends. If they were not timed, it says why the backend with the lowest cost was
    chosen.
    """
    rows = [
        (
            one.program,
            f"%{one.name}",
            one.backend,
            str(one.decision),
            "; ".join(f"{name} {one.decision.of_backend(name)}" for name in one.decision.times),
        )
        for one in choices
        if one.decision is not None
    ]
    if rows:
        out = console()
        out.print()
        print_table(out, table(("program", "call", "backend", "chosen", "times"), rows))


def _print_tiles(choices: Sequence[Choice]) -> None:
    """Print the tile sizes of kernels. A row is a kernel of a region (calls compiled together) or of a single call."""
    rows = {
        (_place(one), str(tiles)): (
            _place(one),
            str(tiles),
            tiles.tiles_text(),
            "" if tiles.microseconds is None else f"{tiles.microseconds:.1f}",
            tiles.source + (f": {tiles.reason}" if tiles.reason else ""),
        )
        for one in choices
        for tiles in one.tiles
    }
    if rows:
        out = console()
        out.print()
        print_table(out, table(("program", "kernel", "tile sizes", "µs", "source"), list(rows.values())))


def _place(choice: Choice) -> str:
    """Return text that names the program and the region or call of a choice, as in "decode, region r0"."""
    return f"{choice.program}, " + (f"region {choice.region}" if choice.region else f"%{choice.name}")


def _layers_text(layers: frozenset[int]) -> str:
    if len(layers) > 2 and max(layers) - min(layers) == len(layers) - 1:
        return f"{min(layers)}–{max(layers)}"
    return ", ".join(map(str, sorted(layers)))
