"""Print the measured time of a step on a mesh for `ingot explain`: by rank, and what the ranks exchange."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ingot.cli.console import console, facts, print_table, size_text, table
from ingot.cli.views.step_time import time_text
from ingot.ir.mesh import STAGES

if TYPE_CHECKING:
    from ingot.debug.mesh_time.times import Exchange, MeshTime, RankStep

_RANK_COLUMNS = ("rank", "step>", "computes>", "moves>", "waits>", "between calls>", "waits for")
_EXCHANGE_COLUMNS = ("exchange", "axis", "ranks", "calls>", "sent>", "floor>", "moves>", "of floor>", "waits>", "last")


def print_mesh_time(time: "MeshTime") -> None:
    """Print a table of the ranks, a table of what they exchange, and how both were measured."""
    out = console()
    print_table(out, table(_RANK_COLUMNS, [_rank_row(one) for one in time.ranks]))
    out.print()
    stages = {one.rank: one.stage for one in time.ranks}
    if time.exchanges:
        print_table(out, table(_EXCHANGE_COLUMNS, [_exchange_row(one, stages) for one in time.exchanges]))
        out.print()
    link = "not known for these devices: the sent bytes alone are the floor"
    if time.link is not None:
        link = f"{size_text(time.link)}/s, a measured copy between two of these devices"
    lines = [
        ("mesh", time.mesh),
        ("measured", f"{time_text(time.measured)}, a step as it is served"),
        ("recorded", f"{time_text(time.recorded)}, a step whose calls are recorded, the mean of {time.steps} steps"),
        ("link", link),
        ("moves", "the time of the rank that comes last to a collective; the rest of another rank's time is waiting"),
    ]
    print_table(out, facts(lines))
    out.print()


def _rank_row(one: "RankStep") -> tuple[object, ...]:
    parts = (one.seconds, one.computes, one.moves, one.waits, one.between)
    others = ", ".join(f"rank {rank} {time_text(seconds)}" for rank, seconds in one.waits_for.items())
    return one.name, *map(time_text, parts), others or "–"


def _exchange_row(one: "Exchange", stages: Mapping[int, int]) -> tuple[object, ...]:
    floor = "–" if one.floor is None else time_text(one.floor)
    share = "–" if not one.floor or not one.moves else f"{one.floor / one.moves:.0%}"
    ranks = ", ".join(map(str, one.ranks))
    times = (floor, time_text(one.moves), share, time_text(one.waits))
    return one.what, one.axis, ranks, one.calls, size_text(one.sent), *times, _last(one, stages)


def _last(one: "Exchange", stages: Mapping[int, int]) -> str:
    """Return as text which rank came last most often; of transfers, which stage. `stages` has the stage of each
    rank."""
    name, shares = "rank", dict(one.last)
    if one.axis == STAGES:
        name, shares = "stage", {}
        for rank, share in one.last.items():
            shares[stages[rank]] = shares.get(stages[rank], 0.0) + share
    latest = max(shares, key=lambda index: shares[index])
    return f"{name} {latest}, {shares[latest]:.0%} of the calls"
