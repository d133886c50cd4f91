"""Estimate decode steps and prompts of an 8B on four and eight GPUs from what was measured on one and on two.

    python benchmarks/more_gpus.py

It reads results/mesh_8b.json and results/collectives.json, and measures nothing. Four parts make up a time with tensor
parallelism n:

read      the bytes of a rank, at the rate of one GPU's step. A prompt has the time of one GPU, divided by n
sums      two all-reduces in each layer. Up to the kernel's limit, a GPU gets the values of each other GPU: the time of
          two GPUs, and for each further one its values at the bandwidth of a copy between GPUs. NCCL moves
          2 (n - 1) / n of the values over each link
between   what is left of the measured time of two GPUs, taken to be the same for any n: GPUs that wait for each other,
          and matmuls that are too small to be fast

So the estimate of two GPUs is what was measured. Nothing of four and eight GPUs was measured, and switches that are
shared by more GPUs may cost more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from random_checkpoint import config_of
from results import RESULTS, Figure, Result, print_figures, read_result

from ingot.backends.peer.sizes import MOST_BYTES

SIZES = (1, 2, 4, 8)
_SHAPE = "8b"
_ITEM = 2  # bytes of a bfloat16
# Sums of decode steps add the residual. In steps of many tokens, the norm after the sum adds it.
_PROVIDERS = ("peer_add", "push", "nccl")


@dataclass(frozen=True)
class Estimate:
    """A time by tensor parallelism. Element i of each is for SIZES[i] GPUs, in seconds.

    what      what takes this time
    read      reading weights and caches, or computing a prompt
    sums      all-reduces
    between   the rest
    """

    what: str
    read: tuple[float, ...]
    sums: tuple[float, ...]
    between: tuple[float, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(map(sum, zip(self.read, self.sums, self.between, strict=True)))


class SumTimes:
    """The seconds of an all-reduce by bytes and GPUs, of few bytes with the add of a residual.

    figures   those of collectives.py with two GPUs
    """

    def __init__(self, figures: Mapping[str, Figure]) -> None:
        self._copy = figures["peer_copy"].value
        self._by: dict[str, list[tuple[int, float]]] = {name: [] for name in _PROVIDERS}
        for name, figure in figures.items():
            size, _, provider = name.removeprefix("all_reduce_").partition(".")
            if provider in self._by:
                self._by[provider].append((int(size), figure.value))

    def of(self, size: int, gpus: int) -> float:
        """Return the seconds of a sum of `size` bytes by `gpus` GPUs; 0 for one GPU."""
        if gpus == 1:
            return 0.0
        if size <= MOST_BYTES[gpus]:
            return self._between("peer_add", size) + (gpus - 2) * size / self._copy
        if gpus == 2 and self._by["push"]:
            return self._between("push", size)
        return self._between("nccl", size) * 2 * (gpus - 1) / gpus

    def _between(self, provider: str, size: int) -> float:
        """Return the seconds of two GPUs: between two measured sizes, on a line. Beyond the largest, in proportion."""
        known = sorted(self._by[provider])
        largest, seconds = known[-1]
        if size >= largest:
            return seconds * size / largest
        after = next(place for place, (one, _) in enumerate(known) if one >= size)
        (one, before), (two, later) = known[max(0, after - 1)], known[after]
        return later if one == two else before + (later - before) * (size - one) / (two - one)


def estimates(mesh: Result, collectives: Result) -> Iterator[Estimate]:
    """Yield the estimates of decode steps by batch size, and of the first token of a long prompt.

    mesh          a result of mesh.py with the figures "one" and "tp", the latter of two GPUs
    collectives   a result of kernels/collectives.py with two GPUs
    """
    config, times = config_of(_SHAPE), SumTimes(collectives.figures)
    sums, row = 2 * config["num_hidden_layers"], config["hidden_size"] * _ITEM
    copy = mesh.figures["copy"].value

    def value(name: str) -> float:
        return mesh.figures[name].value

    def parts(what: str, read: tuple[float, ...], size: int, two: float) -> Estimate:
        added = tuple(sums * times.of(size, gpus) for gpus in SIZES)
        rest = two - read[1] - added[1]
        return Estimate(what, read, added, (0.0, rest, rest, rest))

    for batch in (int(text) for text in str(mesh.settings["batch"]).split(",")):
        steps = {name: value(f"{name}.batch_{batch}_step") for name in ("one", "tp")}
        moved = {name: value(f"{name}.batch_{batch}_of_copy") * copy * step for name, step in steps.items()}
        whole = 2 * moved["tp"] - moved["one"]  # what every rank reads, such as gains of norms
        bytes_of = [whole + (moved["one"] - whole) / gpus for gpus in SIZES]
        read = tuple(steps["one"] * one / moved["one"] for one in bytes_of)
        what = f"a decode step of {batch} sequence{'s' * (batch > 1)}"
        yield parts(what, read, batch * row, steps["tp"])
    tokens = int(str(mesh.settings["prompt"]))
    one, two = value("one.first_token"), value("tp.first_token")
    read = tuple(one / gpus for gpus in SIZES)
    yield parts(f"the first token after a prompt of {tokens}", read, tokens * row, two)


def main() -> None:
    found = (read_result(RESULTS / f"{name}.json") for name in ("mesh_8b", "collectives"))
    for one in estimates(*found):
        for place, gpus in enumerate(SIZES):
            parts = {name: getattr(one, name)[place] for name in ("seconds", "read", "sums", "between")}
            what = f"{one.what} with tp={gpus}"
            print_figures({name: Figure(value=took, unit="s", what=what) for name, took in parts.items()})


if __name__ == "__main__":
    main()
