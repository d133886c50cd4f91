"""Find the calls that are slowest relative to the roofline, and say from their facts what would make them faster."""

from collections.abc import Sequence
from dataclasses import replace

from ingot.backends.triton.lower.linear.problem import LINEAR
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.times import GAPS, CallTime, Gap, StepTime, total
from ingot.debug.step_time.work import Work
from ingot.ir.artifact.tuning import Choice

_SHOWN = 8
# Gaps below this share of a step's time are not worth a line.
_LEAST_SHARE = 0.005
# If waves or launch latency take more than this share of a gap, the remedy addresses them.
_MOSTLY = 0.5


def gaps_of(works: Sequence[Work], times: Sequence[CallTime], step: StepTime, device: Device) -> tuple[Gap, ...]:
    """Return the largest gaps of a step, each with advice how to close it.

    A gap is time that equal calls take above their roofline, or time between calls. `works` has the work of the step's
    calls, and `times` their times, in order.
    """
    groups: dict[str, list[tuple[Work, CallTime]]] = {}
    for work, time in zip(works, times, strict=True):
        if work.launches:
            groups.setdefault(work.what, []).append((work, time))
    found = [_of_calls(what, group, device) for what, group in groups.items()]
    taken = step.predicted if step.measured is None else step.measured
    between = next(one for one in step.kinds if one.kind == GAPS)
    above = between.predicted if between.measured is None else between.measured
    found.append(replace(_between(above, works, times, step), traced=between.traced))
    large = [one for one in found if one.seconds > _LEAST_SHARE * taken]
    return tuple(sorted(large, key=lambda one: -one.seconds)[:_SHOWN])


def _of_calls(what: str, group: Sequence[tuple[Work, CallTime]], device: Device) -> Gap:
    over = sum(time.taken - time.roofline for _, time in group)
    traced = total([None if time.traced is None else time.traced - time.roofline for _, time in group])
    work, time = group[0]
    each = over / len(group)
    latency = sum(device.times.of(one.name).latency for one in work.launches)
    waiting = sum(device.times.of(one.name).wave * one.waves for one in work.launches)
    reached = f"reaches {time.roofline / time.taken:.0%} of {_limit(time)}: {_us(each)} a call above the floor"
    launching = f"{_us(min(latency, each))} of it for launching"
    return Gap(what, len(group), over, f"{reached}, {launching}; {_remedy(work, time, latency, waiting, each)}", traced)


def _limit(time: CallTime) -> str:
    return "bandwidth" if time.bound == "memory" else "the matmul rate"


def _remedy(work: Work, time: CallTime, latency: float, waiting: float, each: float) -> str:
    if work.choice is not None and work.choice.kernel == LINEAR:
        return _of_tiles(work.choice)
    if time.kind == "attention":
        return "the rest waits for the KV cache: more or longer sequences keep more loads in flight"
    if waiting > _MOSTLY * each:
        waves = sum(one.waves for one in work.launches)
        return f"its programs run in {waves} waves, one after another: fewer and larger programs would take fewer"
    if latency > _MOSTLY * each:
        return "fusing it into a neighbour removes its launch"
    if time.kind == "products":
        if time.bound == "memory":
            return f"{work.backend} reads the weight for few tokens: more tokens cost almost nothing"
        return f"{work.backend} chooses its tiles: more tokens in a step fill them better"
    return "its inputs were just written: in a region with its neighbours they would not pass through memory"


def _of_tiles(choice: Choice) -> str:
    match choice.source:
        case "heuristic":
            return "its tile sizes were never timed: --tune finds the best ones"
        case "table":
            return "its tile sizes come from a table of measurements: --tune may find better ones"
    if choice.microseconds is None:
        return "its tile sizes were given, and not timed: --tune finds the best ones"
    return "its tile sizes were timed, so only a smaller weight helps: quantize"


def _between(seconds: float, works: Sequence[Work], times: Sequence[CallTime], step: StepTime) -> Gap:
    if step.captured:
        closing = "from the last kernel of a step to the first of the next: tokens are copied out, and inputs in"
    else:
        launches = sum(bool(work.launches) for work in works)
        running = sum(time.taken for time in times)
        closing = (
            f"the host launches {launches} calls one by one, and the device runs {_us(running)} of them: a captured"
            " step would not wait for the host"
        )
    return Gap("between calls", 0, seconds, closing)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
