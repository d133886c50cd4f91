"""Time an artifact's first token in this process, which `ingot.bench.startup` starts, and write the times as JSON.

python -m ingot.bench.first_token ARTIFACT TOKENS --json FILE
"""

import time

BEGUN = time.time()

import json  # noqa: E402  # the clock is read before anything is imported
import sys  # noqa: E402

from ingot.ir.errors import IngotError  # noqa: E402
from ingot.runtime.params.sampling_params import SamplingParams  # noqa: E402
from ingot.serve.llm import LLM  # noqa: E402

IMPORTED = time.time()


def main(artifact: str, tokens: str, option: str, file: str) -> None:
    assert option == "--json"
    try:
        llm = LLM(artifact)
        loaded = time.time()
        # A small id, which every vocabulary has. There is one prompt only, so the prefix cache has no hits.
        prompt = {"prompt_token_ids": [1] * int(tokens)}
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False))
    except IngotError as error:
        sys.exit(f"Error: {error}")
    first = time.time()
    clock = {"begun": BEGUN, "imported": IMPORTED, "loaded": loaded, "first": first}
    # The parts of loading. "import" and "ready" count from the start of the process, as `clock` does here.
    phases = {name: seconds for name, seconds in llm.timings.items() if name not in ("import", "ready")}
    with open(file, "w", encoding="utf-8") as out:
        json.dump({"clock": clock, "phases": phases, "pinned": _pinned()}, out)


def _pinned() -> int:
    """Return the most bytes of pinned memory that torch's allocator has held, or 0 without a GPU.

    Versions of torch differ in whether freed blocks count as allocated, so the largest number of bytes is returned.
    """
    import torch  # the engine has imported it: an import at the top would be timed apart

    stats = torch.cuda.host_memory_stats()
    return max((count for name, count in stats.items() if name.endswith("_bytes.peak")), default=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
