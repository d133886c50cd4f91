"""Measure the memory of a model's largest step, and compare it with the plan.

    python benchmarks/memory.py [--layers 16] [--backend inductor] [--max-tokens 2048]
                                [--max-seq-len 2048] [--max-batch 64]

It makes a checkpoint of the shape of Llama 3.2 1B with random weights and compiles it. A new process loads the artifact
and launches the largest step that the scheduler could make. One sequence has all tokens except one for each other
sequence, and ends at its full length. Each sequence has a row of logits and samples at random.
activations  peak bytes of the step from torch's CPU allocator, as torch's profiler reports them call by call: values,
             temporaries, and oneDNN's scratch, which torch allocates. Exact, even on a busy machine
resident     growth of the process's anonymous memory (RssAnon in /proc/self/status, sampled every millisecond) from
             before the launch to its peak, with the KV pages already written. malloc keeps some freed memory, so this
             is up to an eighth above or below the allocations. Weights are mapped from files and not included
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from random_checkpoint import config_of, write_checkpoint
from results import Figure, print_figures, write_result

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=config_of("1b")["num_hidden_layers"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--results", type=Path, help="folder for the result, instead of benchmarks/results")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measure(options.measure)))
        return
    from ingot import compile_model

    with tempfile.TemporaryDirectory(prefix="ingot-memory-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "checkpoint", config_of("1b", num_hidden_layers=options.layers))
        artifact = Path(folder) / "model.ingot"
        compile_model(
            checkpoint,
            artifact,
            backend=options.backend,
            max_tokens=options.max_tokens,
            max_seq_len=options.max_seq_len,
            max_batch=options.max_batch,
        )
        command = [sys.executable, __file__, "--measure", str(artifact)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    figures = {
        "weights": Figure(value=found["weights"], unit="B", what="resident weights, planned"),
        "planned": Figure(value=found["planned"], unit="B", what="activations of the largest step, planned"),
        "activations": Figure(value=found["activations"], unit="B", what="activations of the largest step, allocated"),
        "resident": Figure(value=found["resident"], unit="B", what="growth of anonymous memory in that step"),
        "activations_per_planned": Figure(
            value=found["activations"] / found["planned"], unit="", what="allocated, of the plan"
        ),
        "resident_per_planned": Figure(value=found["resident"] / found["planned"], unit="", what="growth, of the plan"),
    }
    print_figures(figures)
    settings = {name: value for name, value in vars(options).items() if name not in ("results", "measure")}
    print(
        write_result(__file__, "memory", settings, figures, **({"folder": options.results} if options.results else {}))
    )


def _measure(artifact: Path) -> dict[str, int]:
    sys.path.extend(map(str, (ROOT / "tests" / "support").glob("*/")))
    from largest_step import allocated_by_step, largest_step, pages_of

    from ingot.runtime.loading.artifact import open_artifact
    from ingot.runtime.loading.loader import load_artifact

    limits = open_artifact(artifact, verify=False).manifest.model
    pages = -(-int(limits["max_seq_len"]) // int(limits["page_size"])) + int(limits["max_batch"]) - 1  # type: ignore[arg-type]
    loaded = load_artifact(artifact, num_pages=pages)
    assert pages_of(loaded.limits) == pages
    for state in loaded.executor.states.values():
        state.zero_()  # write, so that the pages have memory
    inputs = largest_step(loaded)
    loaded.executor.launch(largest_step(loaded, loaded.limits.max_batch))  # allocates one-time buffers
    resident = _growth(lambda: loaded.executor.launch(inputs))
    return {
        "weights": loaded.plan.memory.weights,
        "planned": max(bucket.memory.activations for bucket in loaded.plan.buckets),
        "resident": resident,
        "activations": allocated_by_step(loaded, inputs),
    }


def _growth(call: Callable[[], object]) -> int:
    """Run `call`. Return the largest growth of the process's anonymous memory while it ran, in bytes."""
    from ingot.bench.holdings import anonymous_memory

    before = peak = anonymous_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    done.set()
    thread.join()
    return peak - before


if __name__ == "__main__":
    main()
