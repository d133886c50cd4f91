"""Measure an artifact with a long prompt, many requests at once, requests that arrive over time, and shared prefixes.

    python benchmarks/serve.py ARTIFACT [--prompt 4000,…] [--requests 512] [--input 512] [--output 256] [--spread 256]
        [--arrivals 256] [--rate 16,…] [--sharing 64] [--prefix 2048] [--json FILE]

It measures the whole engine by serve_method.py, which describes the parts; a count of 0 leaves one out. CUDA graphs of
decode steps are captured before, as an idle engine does. Other engines (peer.py) capture theirs when they start.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from engine_figures import serve_figures
from results import Figure, add_json_option, report
from serve_method import add_load_options, load_of, load_settings, measure_serving

from ingot.bench.engine import open_engine
from ingot.bench.steps import decode_idle_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    add_load_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    load, engine = load_of(options), open_engine(options.artifact)
    limits = engine.limits
    if load.longest > limits.max_seq_len:
        sys.exit(f"the artifact was compiled for sequences of {limits.max_seq_len} tokens, not of {load.longest}")
    served = measure_serving(replace(engine, stream=False), engine, limits.vocab_size, load)
    settings = {
        "artifact": options.artifact.name,
        "max_batch": limits.max_batch,
        **load_settings(load),
    }
    idle = decode_idle_share(engine.executor.steps)
    what = "of the time between the ends of successive decode steps the GPU had nothing to do, in all of these loads"
    found = serve_figures(served) | ({} if idle is None else {"decode_idle": Figure(value=idle, unit="", what=what)})
    report(__file__, options.json, settings, found)


if __name__ == "__main__":
    main()
