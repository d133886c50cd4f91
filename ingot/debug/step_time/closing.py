"""What stands above the roofline, the most first, and what would close it: sentences made of the facts of the calls."""

from collections.abc import Sequence

from ingot.debug.step_time.device import Device
from ingot.debug.step_time.times import GAPS, CallTime, Gap, StepTime
from ingot.debug.step_time.work import Work

_SHOWN = 8
# Below this share of a step's time nobody would look for it.
_LEAST_SHARE = 0.005


def gaps_of(works: Sequence[Work], times: Sequence[CallTime], step: StepTime, device: Device) -> tuple[Gap, ...]:
    """The largest gaps of a step."""
    groups: dict[str, list[tuple[Work, CallTime]]] = {}
    for work, time in zip(works, times, strict=True):
        if work.kernels:
            groups.setdefault(work.what, []).append((work, time))
    found = [_of_calls(what, group, device) for what, group in groups.items()]
    taken = step.predicted if step.measured is None else step.measured
    between = next(one for one in step.kinds if one.kind == GAPS)
    found.append(_between(between.predicted if between.measured is None else between.measured, works, times, step))
    large = [one for one in found if one.seconds > _LEAST_SHARE * taken]
    return tuple(sorted(large, key=lambda one: -one.seconds)[:_SHOWN])


def _of_calls(what: str, group: Sequence[tuple[Work, CallTime]], device: Device) -> Gap:
    over = sum(time.taken - time.roofline for _, time in group)
    work, time = group[0]
    each = over / len(group)
    reached = f"reaches {time.roofline / time.taken:.0%} of {_limit(time)}: {_us(each)} a call above the floor"
    return Gap(what, len(group), over, f"{reached}; {_remedy(work, time, device)}")


def _limit(time: CallTime) -> str:
    return "bandwidth" if time.bound == "memory" else "the rate of products"


def _remedy(work: Work, time: CallTime, device: Device) -> str:
    match time.kind:
        case "products":
            return _of_product(work, time)
        case "attention":
            return _of_attention(work, device)
    return (
        f"its {_launches(work)} take{'s' if len(work.kernels) == 1 else ''} {_us(_latency(work, device))} whatever they"
        " move: fused into a neighbour that is saved"
    )


def _of_product(work: Work, time: CallTime) -> str:
    source = work.choice.source if work.choice is not None else None
    match source:
        case "heuristic":
            return "its tile sizes were never timed: --tune finds faster ones"
        case "table":
            return "its tile sizes are of a table of another compile: --tune may find faster ones"
        case "measured" | "given":
            return "its tile sizes were timed; smaller weights are left to try: quantize"
    if time.bound == "memory":
        return f"{work.provider} computes it; it reads its weight for few tokens: more in a step cost next to nothing"
    return f"{work.provider} computes it; longer chunks of prompts fill its tiles better"


def _of_attention(work: Work, device: Device) -> str:
    latency = _latency(work, device)
    return (
        f"its launch takes {_us(latency)} whatever it reads, and the rest is how well its tiles hide memory's latency"
    )


def _between(seconds: float, works: Sequence[Work], times: Sequence[CallTime], step: StepTime) -> Gap:
    if step.captured:
        closing = "from the last kernel of a step to the first of the next: tokens go out, and inputs come in"
    else:
        launches = sum(bool(work.kernels) for work in works)
        running = sum(time.taken for time in times)
        closing = (
            f"the host launches {launches} calls one by one, and the device runs {_us(running)} of them: a captured"
            " step would not wait for the host"
        )
    return Gap("between calls", 0, seconds, closing)


def _latency(work: Work, device: Device) -> float:
    known = device.times
    return sum(known.kernels.get(name, known.other).latency for name in work.kernels)


def _launches(work: Work) -> str:
    count = len(work.kernels)
    return "launch" if count == 1 else f"{count} launches"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
