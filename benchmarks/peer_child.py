"""Run the measurements of another engine in a child process that peer.py starts: start, decode, serving. Write JSON.

    PYTHONPATH=SITE python benchmarks/NAME_child.py CHECKPOINT [--load-format dummy] [--batch 1,32] --json FILE

It needs only the engine and plain Python: the modules next to this file, and those of ingot.bench that need no more.
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from decode_method import (
    PROMPT_TOKENS,
    Prompts,
    add_length_options,
    length_changes,
    lengths_of,
    measure_decode,
)
from serve_method import add_load_options, load_of, measure_serving

from ingot.bench.drive import DrivenEngine

MAX_MODEL_LEN = 4096  # tokens of a sequence, or more if the load needs them


@dataclass(frozen=True)
class Opening:
    """The options with which to start another engine. Sequences have up to `longest` positions.

    `tensor_parallel` is the number of GPUs that share each layer. `memory_share` is the share of a GPU's memory that
    the engine may use. Engines count different things as this memory.
    """

    checkpoint: Path
    load_format: str
    longest: int
    prefix_caching: bool
    tensor_parallel: int = 1
    memory_share: float = 0.85  # the rest is for other uses of the GPU


class OpenedPeer(Protocol):
    """Another engine that has loaded its model. It decodes greedily, ignores end tokens, and does not detokenize."""

    def generate(self, prompts: Prompts, count: int) -> object:
        """Generate exactly `count` tokens for each prompt."""
        ...

    def driven(self, *, by_token: bool) -> DrivenEngine:
        """Return the engine with the interface that the load generator `ingot.bench.drive` uses.

        With `by_token`, the engine reports each request at every token. Otherwise it reports a request only when it
        ends.
        """
        ...


def measure_peer(
    begun: float, package: str, settings: Mapping[str, str], open_peer: Callable[[Opening], OpenedPeer]
) -> None:
    """Run the measurements of another engine that the command line requests. Write the results as JSON.

    begun       the time at which this process began to run its own code
    package     the name of the engine's package
    settings    environment variables to set before importing the package
    open_peer   a function that starts the engine and loads the model
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--batch", default="", help="batch sizes, separated by commas; none: only start")
    add_length_options(parser)
    parser.add_argument("--serve", action="store_true", help="also measure serving by serve_method.py")
    parser.add_argument("--prefix-caching", action="store_true", help="turn on the peer's prefix cache")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each layer")
    add_load_options(parser)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(settings)
    version = importlib.import_module(package).__version__
    imported = time.time()
    load = load_of(options)
    longest = max(MAX_MODEL_LEN, load.longest)
    sizes = longest, options.prefix_caching, options.tensor_parallel
    peer = open_peer(Opening(options.checkpoint, options.load_format, *sizes))
    loaded = time.time()
    peer.generate([list(range(1, PROMPT_TOKENS + 1))], 1)
    clock = {"begun": begun, "imported": imported, "loaded": loaded, "first": time.time()}
    changes = length_changes(options)
    vocab = json.loads((options.checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    decoded = {}
    for batch in map(int, filter(None, options.batch.split(","))):
        measured = measure_decode(peer.generate, vocab, batch, replace(lengths_of(batch), **changes))
        decoded[batch] = asdict(measured)
    engines = (peer.driven(by_token=by_token) for by_token in (False, True))
    served = asdict(measure_serving(*engines, vocab, load)) if options.serve else None
    answer = {"clock": clock, "version": version, "decode": decoded, "served": served}
    options.json.write_text(json.dumps(answer), encoding="utf-8")
