"""Compare decode steps of sequences that follow a JSON schema with steps of sequences without a grammar, and measure
what forced tokens save.

    python benchmarks/grammar.py ARTIFACT [--sequences 32] [--steps 96] [--rounds 5] [--json FILE.json]

The artifact needs a tokenizer (random_checkpoint.py --tokenizer). One engine serves both kinds in turns, with equal
prompts and random sampling. The schema is a list of records that does not end within the steps, so a model with
random weights follows it too. The time of a step is the median between the steps of a round, without the first
third. A figure is the median of rounds. The target is at most 1.05 times the time without a grammar for a model of
8B parameters, and 1.2 times for 1B, with 32 sequences.

CUDA graphs are captured before each round. These steps feed one token of each sequence. Then the same requests run with
several forced tokens in a step: the figures are the seconds that all requests take, and the steps.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from results import Figure, add_json_option, report

from ingot import LLM, SamplingParams
from ingot.runtime.engines.engine import EngineRequest
from ingot.runtime.grammar.masks import Masks
from ingot.runtime.scheduling.scheduler_config import DEFAULT_FORCED

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
_GRAMMAR = {"json": _SCHEMA, "disable_any_whitespace": True}
# The grammar, and the most forced tokens of a sequence in a step.
_KINDS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "without": (None, 1),
    "schema": (_GRAMMAR, 1),
    "forced": (_GRAMMAR, DEFAULT_FORCED),
}


@dataclass(frozen=True)
class _Round:
    """What a round took.

    gap       the median seconds between decode steps
    seconds   from the first step to the end of the last request
    steps     the number of steps
    """

    gap: float
    seconds: float
    steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--sequences", type=int, default=32, help="decoding sequences")
    parser.add_argument("--steps", type=int, default=96, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind")
    add_json_option(parser)
    options = parser.parse_args()
    llm = LLM(options.artifact)
    rounds: dict[str, list[_Round]] = {name: [] for name in _KINDS}
    masks: list[float] = []
    with _timed_masks(masks):
        for turn in range(options.rounds + 1):
            for name, (grammar, most) in _KINDS.items():
                if turn == 1:
                    masks.clear()
                for _ in iter(llm.idle, False):  # captures CUDA graphs, as a server does while it has no requests
                    pass
                found = _round(llm, options.sequences, options.steps, turn, grammar, most)
                if turn:  # the first round compiles the grammar
                    rounds[name].append(found)
    times = {name: [one.gap for one in found] for name, found in rounds.items()}
    medians = {name: statistics.median(found) for name, found in times.items()}
    seconds = {name: statistics.median(one.seconds for one in found) for name, found in rounds.items()}
    steps = {name: statistics.median(one.steps for one in found) for name, found in rounds.items()}
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
        "forced_gap": Figure(value=medians["forced"], unit="s", what="a step with several forced tokens of a sequence"),
        "forced": Figure(
            value=seconds["forced"] / seconds["schema"], unit="", what="all requests with them over one token a step"
        ),
        "forced_steps": Figure(value=steps["forced"] / steps["schema"], unit="", what="steps, likewise"),
    }
    settings = {"artifact": options.artifact.name, "sequences": options.sequences, "steps": options.steps}
    report(__file__, options.json, settings, figures)


def _round(llm: LLM, sequences: int, steps: int, turn: int, grammar: dict[str, Any] | None, most: int) -> _Round:
    """Serve `sequences` sequences, each of which generates `steps` tokens and a few more.

    turn      the seed of the random prompts
    grammar   the grammar of all sequences; None: they have none
    most      the most forced tokens of a sequence in a step
    """
    draw = random.Random(turn)
    vocab = llm.loaded.limits.vocab_size
    params = SamplingParams(
        temperature=1.0, seed=turn, max_tokens=steps + 8, ignore_eos=True, detokenize=False, structured_outputs=grammar
    )
    prompts = [[draw.randrange(vocab) for _ in range(_PROMPT)] for _ in range(sequences)]
    engine = llm._engine
    engine._scheduler.config = replace(engine._scheduler.config, max_forced=most)
    engine.add_requests(
        [EngineRequest(f"{turn}-{place}", {"prompt_token_ids": one}, params) for place, one in enumerate(prompts)]
    )
    ends: list[float] = []
    begin, before = time.perf_counter(), engine.steps_ended
    while engine.has_unfinished():
        outputs = engine.step()
        if len(outputs) == sequences:  # all sequences decode
            ends.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(ends)]
    took, steps = time.perf_counter() - begin, engine.steps_ended - before
    return _Round(statistics.median(gaps[len(gaps) // 3 :]), took, steps)


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
