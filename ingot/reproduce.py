"""What the scripts that `ingot bisect` writes call. Folders are kept: this name stays, whatever else moves."""

import sys
import traceback
from pathlib import Path

from ingot.ir.errors import IngotError

GONE, THERE, UNKNOWN = 0, 1, 2


def reproduce(folder: str | Path) -> int:
    """Run the reproducer in `folder` and print what it finds: 1 while the fault is there, 0 when it is gone, and 2 when
    that cannot be told."""
    try:
        text, there = _found(Path(folder))
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNKNOWN
    except Exception:  # Python would end with 1, as if the fault were there
        traceback.print_exc()
        return UNKNOWN
    print(text)
    return THERE if there else GONE


def _found(folder: Path) -> tuple[str, bool]:
    """What the reproducer finds in words, and whether that is a fault."""
    from ingot.debug.bisect.execution.rerun import rerun
    from ingot.debug.bisect.programs.replay import PASS, replay

    if (folder / PASS).exists():
        result = replay(folder)
        return str(result), bool(result.problem)
    problem = rerun(folder)
    return problem or "the instruction is right", problem is not None
