"""Compare decode steps of sequences that share a prefix, with cascade attention, which reads it once, and without.

    python benchmarks/shared_prefix.py ARTIFACT [--sequences 64] [--shared 8192,2048,0] [--steps 96] [--rounds 5]
                                       [--folder FOLDER]

Two engines serve one artifact in one process, one of them with `disable_cascade_attn`. In each round both decode the
same sequences: a shared prefix of --shared tokens, then 32 tokens of their own. A step's time is the median between the
steps of a round, without the first third. A figure is the median of rounds, which alternate. With 0, nothing is shared,
and each sequence has 2048 tokens of its own.
"""

import argparse
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path

from results import Figure, print_figures, write_result

from ingot import LLM, SamplingParams
from ingot.runtime.engines.engine import EngineRequest

_OWN, _ALONE = 32, 2048  # tokens of each sequence, after a shared prefix and without one
_BOTH = {"cascade": False, "apart": True}  # `disable_cascade_attn` by name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--sequences", type=int, default=64, help="decoding sequences")
    parser.add_argument("--shared", default="8192,2048,0", help="tokens of the prefix, one figure for each")
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each engine")
    parser.add_argument("--memory", type=int, default=30 * 10**9, help="bytes for each engine")
    parser.add_argument("--folder", type=Path, help="folder for the result, instead of benchmarks/results")
    options = parser.parse_args()
    engines = {
        name: LLM(options.artifact, memory=options.memory, disable_cascade_attn=disabled)
        for name, disabled in _BOTH.items()
    }
    figures: dict[str, Figure] = {}
    for shared in map(int, options.shared.split(",")):
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(options.rounds + 1):
            for name, llm in engines.items():
                found = _round(llm, options.sequences, shared, options.steps, turn)
                if turn:  # the first round captures graphs
                    times[name].append(found)
        medians = {name: statistics.median(found) for name, found in times.items()}
        what = f"a decode step of {options.sequences} sequences that share {shared} tokens"
        for name, found in times.items():
            figures[f"{name}_{shared}"] = Figure(
                value=medians[name], unit="s", what=f"{what}, {name}", values=tuple(found)
            )
        figures[f"faster_{shared}"] = Figure(
            value=medians["apart"] / medians["cascade"], unit="", what=f"{what}: ratio"
        )
    print_figures(figures)
    captured = engines["cascade"].loaded.executor.captured
    print(f"graphs that read prefixes once, by sequences: {sorted(captured.shared)}")
    settings = {"artifact": options.artifact.name, "sequences": options.sequences, "steps": options.steps}
    print(
        write_result(
            __file__, "shared_prefix", settings, figures, **({"folder": options.folder} if options.folder else {})
        )
    )


def _round(llm: LLM, sequences: int, shared: int, steps: int, turn: int) -> float:
    """Serve sequences whose prompts begin with common tokens. Return the median seconds between decode steps.

    There are `sequences` sequences with `shared` common tokens. Each generates `steps` tokens and a few more. `turn` is
    the seed of the random prompts.
    """
    draw = random.Random(turn)
    vocab = llm.loaded.limits.vocab_size
    common = [draw.randrange(vocab) for _ in range(shared)]
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True, detokenize=False)
    own = _OWN if shared else _ALONE
    prompts = [[*common, *(draw.randrange(vocab) for _ in range(own))] for _ in range(sequences)]
    if shared:  # fill the prefix cache before the sequences arrive
        llm.generate([{"prompt_token_ids": prompts[0]}], SamplingParams(temperature=0.0, max_tokens=1))
    engine = llm._engine
    engine.add_requests(
        [EngineRequest(f"{turn}-{place}", {"prompt_token_ids": one}, params) for place, one in enumerate(prompts)]
    )
    ends: list[float] = []
    while engine.has_unfinished():
        outputs = engine.step()
        if len(outputs) == sequences:  # all sequences decode
            ends.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(ends)]
    return statistics.median(gaps[len(gaps) // 3 :])


if __name__ == "__main__":
    main()
