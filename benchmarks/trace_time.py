"""Measure the CPU seconds from a config.json to a traced program, by depth.

    python benchmarks/trace_time.py [--shape 70b] [--layers 4,32,80] [--tries 5] [--json FILE]

No checkpoint is needed: modules are built without data. It measures this process's CPU time, which other work on the
machine barely affects, as the minimum of the tries. `first` is the first trace of all, in which torch imports what its
shape functions need. compile_time.py measures the passes and executables that follow.
"""

import argparse
import resource
import time
from collections.abc import Mapping
from typing import Any

from random_checkpoint import SHAPES
from results import Figure, add_json_option, report

from ingot.frontend.trace import Limits, trace
from ingot.models.architectures import read_spec

# In addition to the shapes of other benchmarks: config.json of meta-llama/Meta-Llama-3-70B.
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    **SHAPES,
    "70b": {
        **SHAPES["8b"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
}
_LIMITS = Limits(max_seq_len=8192, max_batch=256, max_tokens=8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="70b")
    parser.add_argument("--layers", default="4,32,80", help="numbers of layers, separated by commas")
    parser.add_argument("--tries", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    depths = sorted({int(layers) for layers in options.layers.split(",")})
    figures = {"first": Figure(value=seconds(options.shape, depths[0]), unit="s", what="of the first trace of all")}
    for layers in depths:
        tries = tuple(seconds(options.shape, layers) for _ in range(options.tries))
        figures[f"trace_{layers}"] = Figure(value=min(tries), unit="s", what=f"{layers} layers", values=tries)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures["peak"] = Figure(value=peak, unit="B", what="of memory of this process, its imports included")
    report(__file__, options.json, {"shape": options.shape, "layers": options.layers, "tries": options.tries}, figures)


def seconds(shape: str, layers: int) -> float:
    """Return the CPU seconds that it takes to build and trace a model.

    `shape` is the model shape, such as "8b". `layers` is the number of its layers.
    """
    spec = read_spec({**_SHAPES[shape], "num_hidden_layers": layers})
    begin = time.process_time()
    trace(spec, _LIMITS)
    return time.process_time() - begin


if __name__ == "__main__":
    main()
