"""An artifact with a long prompt, and with many requests at once.

    python benchmarks/serve.py ARTIFACT [--prompt 4000] [--requests 512] [--input 512] [--output 256] [--json FILE]

Measured is the whole engine, through `ingot.LLM`, by serve_method.py: the time of one prompt and the token behind it,
and the tokens made in a second when all requests are given at once.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from engine import ingot_generate, limits_of
from engine_figures import serve_figures
from results import add_json_option, report
from serve_method import add_load_options, load_of, measure_serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    add_load_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    load, limits = load_of(options), limits_of(options.artifact)
    longest = max(load.prompt + 1, load.input + load.output)
    if longest > limits["max_seq_len"]:
        sys.exit(f"the artifact was compiled for sequences of {limits['max_seq_len']} tokens, and not of {longest}")
    served = measure_serving(ingot_generate(options.artifact), limits["vocab_size"], load)
    settings = {"artifact": options.artifact.name, "max_batch": limits["max_batch"], **asdict(load)}
    report(options.json, settings, serve_figures(served))


if __name__ == "__main__":
    main()
