"""Run the commands of pages, each in a fork of a process that has imported their common modules.

Started as `python docs/tools/shell.py`, it reads a request a line from stdin, `{"argv": […], "cwd": …, "path": […],
"stderr": …}`, and answers with `{"status": …, "output": …}`; `output` includes stderr if the request says so.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICO = Path(__file__).parents[2] / "models" / "pico"


def _preload() -> None:
    import pytest  # noqa: F401
    import torch

    import ingot.runtime.loading.loader  # noqa: F401
    from ingot.compile.request import Request

    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    # The imports of torch at the first trace take most of a command's time.
    Request.read(PICO, backend="reference").trace()


def _call(argv: Sequence[str]) -> int:
    """Run a command in this process; return its exit status."""
    match argv:
        case ("ingot", *rest):
            from ingot.cli.main import INGOT, run

            return run(INGOT, rest)
        case ("compile-model", *rest):
            from ingot.cli.main import COMPILE_MODEL, run

            return run(COMPILE_MODEL, rest)
        case ("python", "-m", "pytest", *rest):
            import pytest

            # Without a plugin that writes into the checkout, and one that takes a second to import.
            return int(pytest.main(["-p", "no:cacheprovider", "-p", "no:hypothesispytest", *rest]))
        case ("python", script, *rest):
            sys.argv = [script, *rest]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
            return 0
    raise ValueError(f"pages have no command {argv[0]!r}")


def _child(request: dict[str, Any], output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output if request["stderr"] else os.open(os.devnull, os.O_WRONLY), 2)
    os.chdir(request["cwd"])
    sys.path[:0] = request["path"]
    # Installed packages are also there for processes that a command starts, such as those that compile.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*request["path"], os.environ.get("PYTHONPATH")]))
    try:
        status = _call(request["argv"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os._exit(_child(request, output.fileno()))
        _, waited = os.waitpid(child, 0)
        output.seek(0)
        return {"status": os.waitstatus_to_exitcode(waited), "output": output.read().decode()}


def main() -> None:
    _preload()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
