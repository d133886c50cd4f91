"""A few steps of an artifact for a GPU, for NVIDIA's compute-sanitizer: prompts and decoding, in every bucket class.

    compute-sanitizer --error-exitcode 9 --tool racecheck python tests/gpu/sanitize.py ARTIFACT
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
    compute-sanitizer --error-exitcode 9 --tool memcheck --report-api-errors no \\
    python tests/gpu/sanitize.py ARTIFACT --no-graphs

Without a cache every tensor is an allocation of its own, whose ends memcheck knows; graphs cannot be captured then.
Errors of the driver's interface are left out: cuda-python asks it for functions of versions that are not there.
Take a tiny model: everything runs ten to a hundred times slower. Ends with 0, with 1 where logits are not finite or a
graph gives other bits than single launches, and with 9 where the tool objects.
"""

import argparse
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from ingot.ir.numerics.harness import scheduled
from ingot.runtime.loading.loader import load_artifact

# (sequence, tokens) of each step: all bucket classes, a chunk across pages, decoding of one and of all.
STEPS = (
    [(0, 1)],
    [(0, 4), (1, 3)],
    [(1, 20)],
    [(2, 40)],
    [(0, 30), (1, 40)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 1)],
    [(0, 1), (2, 1)],
)
LENGTHS = [sum(count for step in STEPS for sequence, count in step if sequence == one) for one in range(3)]
NUM_PAGES = 24


def logits_of(path: Path, graphs: bool) -> list[torch.Tensor]:
    """The logits of each step."""
    loaded = load_artifact(path, num_pages=NUM_PAGES, capture="need" if graphs else "none")
    limits = loaded.limits
    if limits.max_batch < len(LENGTHS) or limits.max_tokens < 70 or limits.max_seq_len < max(LENGTHS):
        sys.exit(
            f"the artifact is compiled for less than 3 sequences, 70 tokens a step or {max(LENGTHS)} of a sequence"
        )
    draw = random.Random(1)
    requests = [[draw.randrange(limits.vocab_size) for _ in range(length)] for length in LENGTHS]

    def run(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        handle = loaded.executor.launch(inputs)
        print(f"{inputs['tokens'].shape[0]} tokens: {handle.bucket}", flush=True)
        return {name: value.cpu() for name, value in handle.outputs.items()}

    steps = scheduled(loaded.executor.inputs, run, requests, STEPS, NUM_PAGES, limits.page_size, seed=1)
    return [step["logits"] for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--no-graphs", action="store_true", help="launch every instruction by itself, and nothing else")
    options = parser.parse_args()
    plain = logits_of(options.artifact, graphs=False)
    captured = plain if options.no_graphs else logits_of(options.artifact, graphs=True)
    for number, (one, other) in enumerate(zip(plain, captured, strict=True)):
        if not bool(one.isfinite().all()):
            sys.exit(f"step {number}: logits are not finite")
        if not torch.equal(one, other):
            sys.exit(f"step {number}: a captured graph gives other bits than single launches")
    print(f"{len(plain)} steps")


if __name__ == "__main__":
    main()
