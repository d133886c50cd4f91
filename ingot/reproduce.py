"""Run a folder that `ingot bisect` wrote to reproduce a fault. The folders' scripts import this module: keep its
name.
"""

import sys
import traceback
from pathlib import Path

from ingot.ir.errors import IngotError

GONE, THERE, UNKNOWN = 0, 1, 2


def reproduce(folder: str | Path) -> int:
    """Run the reproducer of a fault, a folder that `ingot bisect` wrote, and print its result.

    Return an exit code: 1 while the fault is present, 0 when it is gone, and 2 when the run cannot decide.
    """
    try:
        text, there = _found(Path(folder))
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNKNOWN
    except Exception:  # an uncaught exception would exit with 1, which means "fault present"
        traceback.print_exc()
        return UNKNOWN
    print(text)
    return THERE if there else GONE


def _found(folder: Path) -> tuple[str, bool]:
    """Run the reproducer in `folder`. Return a text that describes the result, and True if the fault is present."""
    from ingot.debug.bisect.execution.rerun import rerun
    from ingot.debug.bisect.programs.replay import PASS, replay

    if (folder / PASS).exists():
        result = replay(folder)
        return str(result), bool(result.problem)
    problem = rerun(folder)
    return problem or "the instruction is right", problem is not None
