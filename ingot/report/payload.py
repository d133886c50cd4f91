"""What the page is given: one JSON value, compressed, in which each line of all the programs stands once."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from difflib import SequenceMatcher
from typing import Any

from ingot.report import data
from ingot.report.lines import ProgramLine, program_lines
from ingot.runtime.artifact import Artifact


def report_value(artifact: Artifact, start_up: Mapping[str, float]) -> dict[str, Any]:
    """All that the page shows, as one JSON value. Sizes in bytes, times in seconds, null where nothing was recorded.

    lines      every distinct line of the programs, as the fields of ProgramLine in order
    steps      the passes; `delta` turns the lines of the step `before` into those of the pass: [begin, end, lines]
    start_up   [part, seconds] as measured; empty where nobody did
    memory     one for each bucket class
    nodes      rows of the node table
    """
    steps, plans = data.steps(artifact), data.plans(artifact)
    table: dict[ProgramLine, int] = {}
    programs = [[table.setdefault(line, len(table)) for line in program_lines(step.text)] for step in steps]
    return {
        "model": {**artifact.manifest.model, "name": artifact.manifest.name},
        "lines": [astuple(line) for line in table],
        "steps": [
            {
                **{key: value for key, value in vars(step).items() if key != "text"},
                "delta": delta([] if step.before is None else programs[step.before], programs[number]),
            }
            for number, step in enumerate(steps)
        ],
        "times": asdict(data.times(artifact)),
        "start_up": list(start_up.items()),
        "resident": asdict(data.resident(plans)),
        "memory": [
            {**asdict(one), "storages": [astuple(storage) for storage in one.storages]}
            for one in data.step_memories(plans)
        ],
        "nodes": [astuple(one) for one in data.node_costs(artifact, steps)],
    }


def delta(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """What turns one list into another: for each place from `begin` up to `end` of the first, what stands there now."""
    changes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(begin, end, list(after[at:to])) for kind, begin, end, at, to in changes if kind != "equal"]


def compressed(value: Any) -> str:
    """The value as JSON, gzip and base64: no character of it means anything in HTML. Equal values give equal text."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
