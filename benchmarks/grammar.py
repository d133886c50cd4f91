"""Compare decode steps of sequences that follow a JSON schema with steps of sequences without a grammar.

    python benchmarks/grammar.py ARTIFACT [--sequences 32] [--steps 96] [--rounds 5] [--json FILE.json]

The artifact needs a tokenizer (random_checkpoint.py --tokenizer). One engine serves both kinds in turns, with equal
prompts and random sampling. The schema is a list of records that does not end within the steps, so a model with
random weights follows it too. The time of a step is the median between the steps of a round, without the first
third. A figure is the median of rounds. The target is at most 1.05 times the time without a grammar for a model of
8B parameters, and 1.2 times for 1B, with 32 sequences.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from results import Figure, add_json_option, report

from ingot import LLM, SamplingParams
from ingot.runtime.engine import EngineRequest
from ingot.runtime.grammar.masks import Masks

_PROMPT = 32  # tokens
_RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "score": {"type": "number"},
        "parent": {"anyOf": [{"type": "null"}, {"type": "string", "format": "uuid"}]},
    },
    "required": ["id", "name", "kind", "tags", "score", "parent"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _RECORD, "minItems": 10_000}
_GRAMMARS: dict[str, dict[str, Any] | None] = {
    "without": None,
    "schema": {"json": _SCHEMA, "disable_any_whitespace": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--sequences", type=int, default=32, help="decoding sequences")
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    add_json_option(parser)
    options = parser.parse_args()
    llm = LLM(options.artifact)
    times: dict[str, list[float]] = {name: [] for name in _GRAMMARS}
    masks: list[float] = []
    with _timed_masks(masks):
        for turn in range(options.rounds + 1):
            for name, grammar in _GRAMMARS.items():
                if turn == 1:
                    masks.clear()
                found = _round(llm, options.sequences, options.steps, turn, grammar)
                if turn:  # the first round compiles the grammar and captures graphs
                    times[name].append(found)
    medians = {name: statistics.median(found) for name, found in times.items()}
    what = f"a decode step of {options.sequences} sequences"
    figures = {
        "without": Figure(
            value=medians["without"], unit="s", what=f"{what} without grammars", values=tuple(times["without"])
        ),
        "schema": Figure(
            value=medians["schema"], unit="s", what=f"{what} that follow a JSON schema", values=tuple(times["schema"])
        ),
        "ratio": Figure(value=medians["schema"] / medians["without"], unit="", what="with the schema over without"),
        "masks": Figure(value=statistics.median(masks), unit="s", what="the masks of a step, on the host"),
        "masks_p99": Figure(
            value=statistics.quantiles(masks, n=100)[-1], unit="s", what="the masks of a step, 99th percentile"
        ),
    }
    settings = {"artifact": options.artifact.name, "sequences": options.sequences, "steps": options.steps}
    report(options.json, settings, figures)


def _round(llm: LLM, sequences: int, steps: int, turn: int, grammar: dict[str, Any] | None) -> float:
    """Serve `sequences` sequences, each of which generates `steps` tokens and a few more. Return the median seconds
    between decode steps.

    turn      the seed of the random prompts
    grammar   the grammar of all sequences; None: they have none
    """
    draw = random.Random(turn)
    vocab = llm.loaded.limits.vocab_size
    params = SamplingParams(
        temperature=1.0, seed=turn, max_tokens=steps + 8, ignore_eos=True, detokenize=False, structured_outputs=grammar
    )
    prompts = [[draw.randrange(vocab) for _ in range(_PROMPT)] for _ in range(sequences)]
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


@contextmanager
def _timed_masks(seconds: list[float]) -> Iterator[None]:
    """Append the time of each computation of masks to `seconds` inside the block."""
    fill = Masks.fill

    def timed(self: Masks, masked: Any) -> Any:
        begin = time.perf_counter()
        found = fill(self, masked)
        seconds.append(time.perf_counter() - begin)
        return found

    Masks.fill = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Masks.fill = fill  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
