"""The figures of a decode measurement, for every engine the same."""

from decode_method import Decoded
from results import Figure


def time_figures(batch: int, decoded: Decoded) -> dict[str, Figure]:
    lengths = decoded.lengths
    return {
        f"batch_{batch}_step": Figure(
            value=decoded.step, unit="s", what=f"a decode step of {batch}, at a mean context of {lengths.context:g}"
        ),
        f"batch_{batch}_long": _tries(decoded.long, f"{batch} outputs of {lengths.long} tokens"),
        f"batch_{batch}_short": _tries(decoded.short, f"{batch} outputs of {lengths.short} tokens"),
    }


def _tries(seconds: tuple[float, ...], what: str) -> Figure:
    return Figure(value=min(seconds), unit="s", what=f"{what}, the least", values=seconds)
