"""Measure decode of an artifact: the time of a step, and the resulting bandwidth.

    python benchmarks/decode.py ARTIFACT [--batch 1,32] [--shape phi-2] [--json FILE]

It measures the whole engine, with sampling and scheduling, through `ingot.LLM`, by decode_method.py. traffic.py
computes the bytes that a step must move, at the mean context of the measured steps. The resulting bandwidth is compared
with that of a plain copy in the same process. Of a mixture of experts, only the chosen experts count: chosen_experts.py
records how many different ones a layer of a step needs, after the measurement.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from chosen_experts import Chosen, has_routers, record_chosen
from copy_bandwidth import copy_bandwidth
from decode_method import Decoded, Lengths, add_length_options, length_changes, lengths_of, measure_decode
from engine import device_of, generate_with, limits_of
from engine_figures import step_figures
from mixtures import MIXTURES
from random_checkpoint import FAMILIES, SHAPES
from results import Figure, add_json_option, report
from traffic import ExpertTraffic, StepTraffic, step_traffic
from units import quantity

from ingot import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--shape", choices=(*SHAPES, *FAMILIES, *MIXTURES), help="the artifact's shape, for the result")
    add_length_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    changes = length_changes(options)
    measured = {int(batch): replace(lengths_of(int(batch)), **changes) for batch in options.batch.split(",")}
    limits = limits_of(options.artifact)
    check_limits(limits, measured)
    copy = copy_bandwidth(device_of(options.artifact))  # first, while memory is free
    figures = {"copy": Figure(value=copy, unit="B/s", what="a plain copy, read and written, the best")}
    llm = LLM(options.artifact)
    mixture = has_routers(llm.loaded.executor.plan)
    for batch, lengths in measured.items():
        decoded = measure_decode(generate_with(llm), limits["vocab_size"], batch, lengths)
        # One token chooses a fixed number of experts.
        chosen = record_chosen(llm, batch, lengths) if mixture and batch > 1 else None
        traffic = step_traffic(options.artifact, batch, lengths.context, None if chosen is None else chosen.mean)
        figures |= decode_figures(batch, decoded, traffic, copy, chosen)
        print(line(figures, batch), flush=True)
    settings = {"artifact": options.artifact.name, "batch": options.batch}
    if options.shape is not None:
        settings = {"batch": options.batch, "shape": options.shape}
    report(__file__, options.json, {**settings, **changes}, figures)


def check_limits(limits: Mapping[str, int], measured: Mapping[int, Lengths]) -> None:
    """Exit if the artifact was compiled for fewer or shorter sequences than the benchmark needs.

    `limits` are the limits of the artifact, such as "max_batch". `measured` maps batch sizes to the output lengths to
    measure.
    """
    most, longest = limits["max_batch"], limits["max_seq_len"]
    for batch, lengths in measured.items():
        if lengths.short >= lengths.long:
            sys.exit(f"--short {lengths.short} is not below --long {lengths.long}")
        if batch > most or lengths.tokens > longest:
            sys.exit(
                f"{batch} sequences of {lengths.tokens} tokens are too many: the artifact was compiled for {most} of"
                f" {longest}; choose --batch, --long and --short, or compile it again"
            )


def decode_figures(
    batch: int, decoded: Decoded, traffic: StepTraffic, copy: float, chosen: Chosen | None = None
) -> dict[str, Figure]:
    bandwidth = traffic.bytes / decoded.step
    reads = "weights that a step reads"
    found = step_figures(batch, decoded)
    if traffic.experts is not None:
        reads += f"; of a layer's {traffic.experts.count} experts, {traffic.experts.different:.4g}"
        found |= expert_figures(batch, traffic.experts, chosen)
    return found | {
        f"batch_{batch}_weights": Figure(value=traffic.weights, unit="B", what=reads),
        f"batch_{batch}_cache": Figure(value=traffic.cache, unit="B", what="keys and values that a step moves"),
        f"batch_{batch}_bandwidth": Figure(value=bandwidth, unit="B/s", what=f"those bytes over the step of {batch}"),
        f"batch_{batch}_of_copy": Figure(value=bandwidth / copy, unit="", what="of the copy's bandwidth"),
    }


def expert_figures(batch: int, experts: ExpertTraffic, chosen: Chosen | None) -> dict[str, Figure]:
    """Return the figures of the experts that a layer reads, and of even choices. `chosen` are the recorded ones."""
    how = "as many as a token chooses"
    if chosen is not None:
        least, most = min(chosen.different), max(chosen.different)
        how = f"the mean of {chosen.steps} recorded steps, from {least} to {most}"
    what = f"different experts of {experts.count} that a layer of a step of {batch} reads"
    return {
        f"batch_{batch}_experts": Figure(value=experts.different, unit="", what=f"{what}: {how}"),
        f"batch_{batch}_experts_even": Figure(value=experts.even, unit="", what=f"{what} if all are equally likely"),
    }


def line(figures: dict[str, Figure], batch: int) -> str:
    step, bandwidth, share = (figures[f"batch_{batch}_{name}"] for name in ("step", "bandwidth", "of_copy"))
    return (
        f"batch {batch}: {quantity(step.value, 's')} a step, {quantity(bandwidth.value, 'B/s')},"
        f" {share.value:.1%} of a copy's {quantity(figures['copy'].value, 'B/s')}"
    )


if __name__ == "__main__":
    main()
