"""The figures of what was measured of an engine, for every engine the same."""

from decode_method import Decoded
from results import Figure
from serve_method import Served


def step_figures(batch: int, decoded: Decoded) -> dict[str, Figure]:
    lengths = decoded.lengths
    return {
        f"batch_{batch}_step": Figure(
            value=decoded.step, unit="s", what=f"a decode step of {batch}, at a mean context of {lengths.context:g}"
        ),
        f"batch_{batch}_long": _tries(decoded.long, f"{batch} outputs of {lengths.long} tokens"),
        f"batch_{batch}_short": _tries(decoded.short, f"{batch} outputs of {lengths.short} tokens"),
    }


def serve_figures(served: Served) -> dict[str, Figure]:
    load = served.load
    return {
        "prompt": Figure(
            value=min(served.prompt),
            unit="s",
            what=f"the first token behind a prompt of {load.prompt}, the least",
            values=served.prompt,
        ),
        "throughput": Figure(
            value=served.throughput,
            unit="tokens/s",
            what=f"{load.requests} requests of {load.input} tokens in and {load.output} out, given at once",
        ),
    }


def _tries(seconds: tuple[float, ...], what: str) -> Figure:
    return Figure(value=min(seconds), unit="s", what=f"{what}, the least", values=seconds)
