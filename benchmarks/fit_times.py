"""Fit the constants of predicted times (`ingot/ir/machine/gpu_times.py`) to measured steps.

    ingot explain ARTIFACT --step T=32,context=512 --measure --json > 32.json
    python benchmarks/fit_times.py 1.json 32.json 512.json … [--leave-out] [--check OTHER.json …]

Each nonzero constant of a kernel is moved up and down by decreasing factors, as long as the predictions of the kernel's
calls improve: the mean square of log(predicted / measured), with each call weighted by the root of its share of the
step. With little data, a constant stays near its old value. The output is the new table of constants, and the errors of
predictions before and after, also for the files of --check, which are not fitted. With --leave-out, each step is
predicted by constants fitted to the other steps.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ingot.cli.console import console, print_table
from ingot.cli.console import table as console_table
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.predict import device_seconds
from ingot.debug.step_time.timed import time_step
from ingot.debug.step_time.times import GAPS, StepTime
from ingot.debug.step_time.work import KINDS, Work
from ingot.ir.errors import OptionError
from ingot.ir.machine.gpu_times import H200_TIMES, GpuTimes, KernelTime

_FIRST, _LAST = 0.3, 0.01  # range of the factor that moves a constant
_SWEEPS = 30
# The weight of a constant's distance from its old value: doubling it counts as much as an error of some 3 % in calls.
_STAYING = 0.002
# Maximum shares of the device's peak. Data that was just written comes from caches, which are faster than its memory.
_MOST = {"bandwidth": 1.25, "rate": 1.0}
_DIGITS = 2
_WORK = TypeAdapter(Work)
_STEP = TypeAdapter(StepTime)


@dataclass(frozen=True)
class Step:
    """A measured step of a model.

    `works` describes its calls, `seconds` has the measured time of each call, and `time` the times of the whole step.
    To measure a call, it was run many times in sequence.
    """

    name: str
    works: tuple[Work, ...]
    seconds: tuple[float, ...]
    time: StepTime

    def predicted(self, times: GpuTimes) -> StepTime:
        return time_step(self.works, _device(times), captured=self.time.captured)[1]


@dataclass(frozen=True)
class Sample:
    """A measured call. The predictions of kernel times are fitted to such calls.

    Equal calls of a step form one sample. `weight` is the weight of the sample in the fit.
    """

    work: Work
    seconds: float
    weight: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="FILE")
    options = parser.parse_args()
    steps = [step for path in options.files for step in read_steps(path)]
    others = [step for path in options.check for step in read_steps(path)]
    times = fitted(H200_TIMES, steps)
    print(source_of(times))
    print_errors(steps, H200_TIMES, lambda step: times, "fitted")
    if others:
        print_errors(others, H200_TIMES, lambda step: times, "not fitted")
    if options.leave_out:

        def without(step: Step) -> GpuTimes:
            return fitted(times, [one for one in steps if one is not step])

        print_errors(steps, H200_TIMES, without, "fitted to the others")


def read_steps(path: Path) -> list[Step]:
    """Return the measured steps in a file that `ingot explain --measure --json` wrote.

    Raises OptionError if it has none. Raises OptionError too if the steps ran on another kind of GPU than the constants
    are for.
    """
    try:
        buckets = json.loads(path.read_text(encoding="utf-8"))["buckets"]
        found = [_step(path.stem, bucket) for bucket in buckets if bucket["time"]["measured"] is not None]
    except (OSError, ValueError, TypeError, KeyError, ValidationError) as error:
        raise OptionError(f"{path}: {error!s:.200}", expected="output of ingot explain --measure --json") from None
    for step in found:
        if step.time.device != H200_TIMES.gpu.product:
            raise OptionError(f"{path} is of {step.time.device}", expected=f"steps of {H200_TIMES.gpu.product}")
    if not found:
        raise OptionError(f"{path} has no measured step", expected="output of ingot explain --measure --json")
    return found


def _step(name: str, bucket: Mapping[str, Any]) -> Step:
    calls = [call for call in bucket["calls"] if call["work"] is not None]
    asked = bucket["step"]
    return Step(
        f"{name} T={asked['tokens']},B={asked['sequences']},context={asked['context']}",
        tuple(_WORK.validate_json(json.dumps(call["work"])) for call in calls),
        tuple(float(call["time"]["measured"]) for call in calls),
        _STEP.validate_json(json.dumps(bucket["time"])),
    )


def samples(steps: Iterable[Step]) -> list[Sample]:
    """Return the measured calls of these steps as samples for the fit.

    Equal calls of a step form one sample, with the median of their seconds.
    """
    found = []
    for step in steps:
        whole = sum(step.seconds)
        groups: dict[str, list[tuple[Work, float]]] = {}
        for work, seconds in zip(step.works, step.seconds, strict=True):
            if work.launches and seconds > 0:
                groups.setdefault(repr(replace(work, name="")), []).append((work, seconds))
        for group in groups.values():
            taken = statistics.median(seconds for _, seconds in group)
            found.append(Sample(group[0][0], taken, math.sqrt(taken * len(group) / whole)))
    return found


def fitted(times: GpuTimes, steps: Sequence[Step]) -> GpuTimes:
    """Fit the constants that predict kernel times to the measured steps. Return the new constants.

    The search for the best predictions starts from `times`.
    """
    taken = samples(steps)
    times = replace(times, between=_rounded(max(0.0, _between(steps, times.between))))
    move, begun = _FIRST, times.kernels
    for _ in range(_SWEEPS):
        before = times
        for name in times.kernels:
            times = _nearer(times, name, begun[name], [one for one in taken if _has(one.work, name)], move)
        if times == before:
            move /= 2
        if move < _LAST:
            break
    kernels = {name: _map(kernel, _rounded) for name, kernel in times.kernels.items()}
    return replace(times, kernels=kernels)


def _between(steps: Sequence[Step], begun: float) -> float:
    """Return the median time from the last kernel of a step's CUDA graph to the first kernel of the next step.

    Times from a profiler's trace are preferred, because they do not include waiting for a busy host. Return `begun` if
    no step measured this time.
    """
    gaps = [kind for step in steps if step.time.captured for kind in step.time.kinds if kind.kind == GAPS]
    traced = [one.traced for one in gaps if one.traced is not None]
    measured = [one.measured for one in gaps if one.measured is not None]
    return statistics.median(traced or measured or [begun])


def _has(work: Work, kernel: str) -> bool:
    return any(launch.name == kernel for launch in work.launches)


def _nearer(times: GpuTimes, name: str, begun: KernelTime, taken: Sequence[Sample], move: float) -> GpuTimes:
    """Improve the constants of the kernel `name` by one step of the fit. Return the new constants of all kernels.

    Each constant is multiplied by 1 + `move`, or divided by it. The change is kept if predictions improve. `begun` are
    the kernel's constants before the fit. `taken` are the measured calls of the kernel.
    """
    least = _loss(times, name, begun, taken)
    for constant in fields(KernelTime):
        for factor in (1 + move, 1 / (1 + move)):
            kernel = times.kernels[name]
            value = getattr(kernel, constant.name) * factor
            moved = replace(kernel, **{constant.name: min(value, _MOST.get(constant.name, math.inf))})
            tried = replace(times, kernels={**times.kernels, name: moved})
            if (loss := _loss(tried, name, begun, taken)) < least:
                times, least = tried, loss
                break
    return times


def _loss(times: GpuTimes, name: str, begun: KernelTime, taken: Sequence[Sample]) -> float:
    """Return the value that the fit minimizes for the kernel `name`.

    It is the prediction error of the kernel's measured calls, `taken`, plus the distance of its constants from `begun`.
    `begun` are the constants before the fit.
    """
    if not taken:
        return 0.0
    device, kernel = _device(times), times.kernels[name]
    off = sum(one.weight * math.log(device_seconds(one.work, device) / one.seconds) ** 2 for one in taken)
    values = [(getattr(kernel, one.name), getattr(begun, one.name)) for one in fields(KernelTime)]
    moved = sum(math.log(now / then) ** 2 for now, then in values if then)
    return off / sum(one.weight for one in taken) + _STAYING * moved


def _device(times: GpuTimes) -> Device:
    assert times.gpu.bandwidth is not None
    return Device(times.gpu, times.gpu.bandwidth, times)


def _map(kernel: KernelTime, change: Callable[[float], float]) -> KernelTime:
    return replace(kernel, **{one.name: change(getattr(kernel, one.name)) for one in fields(KernelTime)})


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def source_of(times: GpuTimes) -> str:
    """Return the constants of all kernels as Python source, to paste into gpu_times.py."""
    lines = [f'"{name}": {_constants(kernel)},' for name, kernel in times.kernels.items()]
    return "\n".join([*lines, f"between={_us(times.between)},"])


def _constants(kernel: KernelTime) -> str:
    texts = [_us(kernel.latency), *(f"{value:g}" for value in (kernel.bandwidth, kernel.rate))]
    while len(texts) > 1 and texts[-1] == f"{fields(KernelTime)[len(texts) - 1].default:g}":
        texts.pop()
    named = {"wave": _us(kernel.wave), "stream": f"{kernel.stream:.3g}", "beyond": _us(kernel.beyond)}
    texts += [f"{name}={text}" for name, text in named.items() if getattr(kernel, name)]
    return f"KernelTime({', '.join(texts)})"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} * _US"


def print_errors(steps: Sequence[Step], before: GpuTimes, after: Callable[[Step], GpuTimes], name: str) -> None:
    """Print a table of prediction errors. It has a row for each step, with the error in total and by kind of call.

    Each cell has two errors: with the constants `before` the fit, and with the constants after it. `after` takes a step
    and returns the constants to use for it. `name` is the title of the column with the steps.
    """
    offs = [_offs(step, step.predicted(before), step.predicted(after(step))) for step in steps]
    kinds = [kind for kind in ("step", *KINDS) if any(kind in one for one in offs)]
    rows = [
        (step.name, f"{step.time.measured * 1e6:.1f} µs", *(_text(one.get(kind)) for kind in kinds))
        for step, one in zip(steps, offs, strict=True)
    ]
    means = [
        [statistics.fmean(abs(one[kind][side]) for one in offs if kind in one) for side in (0, 1)] for kind in kinds
    ]
    rows.append(("mean, without sign", "", *map(_text, means)))
    print_table(console(), console_table((name, "measured>", *(f"{kind}>" for kind in kinds)), rows))


def _offs(step: Step, *predicted: StepTime) -> dict[str, list[float]]:
    """Return the relative errors of several predictions of a step, as a list for each key.

    Keys are the kinds of calls, and "step" for the whole step.
    """
    measured = {"step": step.time.measured, **{kind.kind: kind.measured for kind in step.time.kinds}}
    values = [{"step": one.predicted, **{kind.kind: kind.predicted for kind in one.kinds}} for one in predicted]
    return {kind: [one[kind] / taken - 1 for one in values] for kind, taken in measured.items() if taken}


def _text(offs: Sequence[float] | None) -> str:
    return "–" if offs is None else " → ".join(f"{one:+.0%}" for one in offs)


if __name__ == "__main__":
    main()
