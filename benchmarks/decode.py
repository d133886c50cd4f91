"""Measure decode of an artifact: the time of a step, and the resulting bandwidth.

    python benchmarks/decode.py ARTIFACT [--batch 1,32] [--shape phi-2] [--json FILE]

It measures the whole engine, with sampling and scheduling, through `ingot.LLM`, by decode_method.py. traffic.py
computes the bytes that a step must move, at the mean context of the measured steps. The resulting bandwidth is compared
with that of a plain copy in the same process.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from copy_bandwidth import copy_bandwidth
from decode_method import Decoded, Lengths, add_length_options, length_changes, lengths_of, measure_decode
from engine import device_of, ingot_generate, limits_of
from engine_figures import step_figures
from random_checkpoint import FAMILIES, SHAPES
from results import Figure, add_json_option, report
from traffic import StepTraffic, step_traffic
from units import quantity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--shape", choices=(*SHAPES, *FAMILIES), help="the artifact's shape, for the result")
    add_length_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    changes = length_changes(options)
    measured = {int(batch): replace(lengths_of(int(batch)), **changes) for batch in options.batch.split(",")}
    limits = limits_of(options.artifact)
    check_limits(limits, measured)
    copy = copy_bandwidth(device_of(options.artifact))  # first, while memory is free
    figures = {"copy": Figure(value=copy, unit="B/s", what="a plain copy, read and written, the best")}
    generate = ingot_generate(options.artifact)
    for batch, lengths in measured.items():
        decoded = measure_decode(generate, limits["vocab_size"], batch, lengths)
        traffic = step_traffic(options.artifact, batch, lengths.context)
        figures |= decode_figures(batch, decoded, traffic, copy)
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


def decode_figures(batch: int, decoded: Decoded, traffic: StepTraffic, copy: float) -> dict[str, Figure]:
    bandwidth = traffic.bytes / decoded.step
    return step_figures(batch, decoded) | {
        f"batch_{batch}_weights": Figure(value=traffic.weights, unit="B", what="weights that a step reads"),
        f"batch_{batch}_cache": Figure(value=traffic.cache, unit="B", what="keys and values that a step moves"),
        f"batch_{batch}_bandwidth": Figure(value=bandwidth, unit="B/s", what=f"those bytes over the step of {batch}"),
        f"batch_{batch}_of_copy": Figure(value=bandwidth / copy, unit="", what="of the copy's bandwidth"),
    }


def line(figures: dict[str, Figure], batch: int) -> str:
    step, bandwidth, share = (figures[f"batch_{batch}_{name}"] for name in ("step", "bandwidth", "of_copy"))
    return (
        f"batch {batch}: {quantity(step.value, 's')} a step, {quantity(bandwidth.value, 'B/s')},"
        f" {share.value:.1%} of a copy's {quantity(figures['copy'].value, 'B/s')}"
    )


if __name__ == "__main__":
    main()
