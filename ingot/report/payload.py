"""Encode the data of the report's page: one compressed JSON value, in which each distinct line of all programs occurs
once."""

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple
from difflib import SequenceMatcher
from typing import Any

from ingot.report.data import Report
from ingot.report.lines import ProgramLine, program_lines


def report_value(report: Report) -> dict[str, Any]:
    """Return the data of the page as one JSON value. Sizes are in bytes and times in seconds.

    Data that was not recorded is null.

    - `lines`: each distinct line of all programs, as a list of the fields of ProgramLine
    - `steps`: the runs of passes. `delta` has the edits to the lines of the step `before`, as [begin, end, new lines]
    - `start_up`: pairs of a part of a start of serving and its seconds
    - `caches`: the groups of KV caches that share page numbers (`ingot.ir.cache.summary`)
    - `memory`: the memory of the largest step of each bucket class (range of step sizes)
    - `nodes`: the table of calls of each bucket class. A row is a list of the fields of NodeRow
    - `step_times`: the time of a step of each bucket class, on a GPU only. A call is a list of the fields of DrawnCall
    """
    table: dict[ProgramLine, int] = {}
    programs = [[table.setdefault(line, len(table)) for line in program_lines(step.text)] for step in report.steps]
    return {
        "model": {**report.model, "name": report.title},
        "lines": [astuple(line) for line in table],
        "steps": [
            {
                **{key: value for key, value in vars(step).items() if key != "text"},
                "delta": delta([] if step.before is None else programs[step.before], programs[number]),
            }
            for number, step in enumerate(report.steps)
        ],
        "times": asdict(report.times),
        "start_up": list(report.start_up.items()),
        "resident": asdict(report.resident),
        "caches": report.caches.to_json(),
        "memory": [
            {**asdict(one), "storages": [astuple(storage) for storage in one.storages]} for one in report.memories
        ],
        "nodes": [{**vars(table), "rows": [astuple(row) for row in table.rows]} for table in report.nodes],
        "step_times": [
            {"step": one.step, "basis": one.basis, "time": asdict(one.time), "calls": list(map(list, one.calls))}
            for one in report.step_times
        ],
    }


def delta(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Return the edits that turn the list `before` into `after`, each as (begin, end, new items).

    The range [begin, end) of `before` is replaced by the new items.
    """
    changes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(begin, end, list(after[at:to])) for kind, begin, end, at, to in changes if kind != "equal"]


def compressed(value: Any) -> str:
    """Return a value as JSON text, compressed by gzip and encoded in base64. Equal values yield equal text.

    HTML needs no escapes for base64.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
