"""A worker process that compiles executables, and times tile sizes and calls.

It reads one JSON request a line from stdin and writes one JSON answer a line to stdout. It is a process of its own
because compilers print, fork, leak and sometimes crash. JSON avoids pickling.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.backends.table import find_entry
from ingot.compile.executable_cache import build_executable, explained, measure_workspace
from ingot.error_text import encode_error
from ingot.ir.artifact.backend_times import Candidate
from ingot.ir.artifact.tuning import Choice, read_choices
from ingot.ir.backend import Backend, Compiler, RegionCompiler, Tunable
from ingot.ir.errors import BackendError, IngotError, InternalError
from ingot.ir.machine.target import Target
from ingot.ir.parse import parse_program
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Program


def main() -> None:
    # Compilers print to stdout. Send the answers to the original stdout, and everything else on fd 1 to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from ingot.compile.competing import backend_named  # after the redirection, because it imports torch

    load_user_ops()
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            if request.get("warm"):
                # The target is not known yet, but a backend's compile sides import the same modules for each.
                entry = find_entry(request["backend"])
                backend = backend_named(request["backend"], next(iter(entry.emit)) if entry else "cpu")
                if isinstance(backend, RegionCompiler):
                    backend.warm_up()
                answer = {"ready": True}
            else:
                answer = _answer(request)
        except (IngotError, OSError) as error:
            answer = {"error": encode_error(explained(error))}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: Mapping[str, Any]) -> dict[str, object]:
    """Carry out one request of the compile, and return its result under one key.

    The key is one of these:

    - "choice": the fastest tile sizes of a kernel
    - "times": the times of a call, by backend
    - "workspace": the peak bytes that a call of compiled code allocates
    - "executable": the description of the code that was compiled
    """
    from ingot.compile.competing import backend_named, with_choices

    target = Target.model_validate_json(json.dumps(request["target"]))
    backend = backend_named(request["backend"], target.device)
    backend = with_choices(backend, read_choices(request.get("choices", [])))
    if request.get("measure"):
        return {"choice": _measured(backend, request, target).model_dump(mode="json")}
    body = parse_program(request["program"])
    if (candidates := request.get("candidates")) is not None:
        return {"times": _timed(body, candidates, target)}
    compiler, key = _compiler(backend), request["key"]
    if (sizes := request.get("sizes")) is not None:
        return {"workspace": measure_workspace(compiler, body, key, sizes, target.cores)}
    return {"executable": build_executable(compiler, body, key, target).model_dump(mode="json")}


def _compiler(backend: Backend) -> Compiler:
    if not isinstance(backend, Compiler):
        raise InternalError(f"the backend '{backend.name}' compiles no programs", where="a worker process")
    return backend


def _timed(body: Program, candidates: Sequence[Mapping[str, Any]], target: Target) -> dict[str, Any]:
    """Return the times of the only call in `body`, by backend.

    `candidates` are the backends to time, each a `Candidate` as JSON. Raises BackendError if a backend fails.
    """
    from ingot.compile.timing.call_clock import time_call  # it imports the code loaders

    given = [Candidate.model_validate_json(json.dumps(one)) for one in candidates]
    try:
        found = time_call(body, given, target)
    except RuntimeError as error:  # torch raises it when memory runs out and when a kernel fails
        raise BackendError(f"{type(error).__name__}: {error}"[:300], where="timing a call") from error
    return {name: [one.model_dump() for one in times] for name, times in found.items()}


def _measured(backend: Backend, request: Mapping[str, Any], target: Target) -> Choice:
    """Time tile sizes of a kernel, and return the fastest. `request` names the kernel and the problem.

    A problem is the sizes and dtypes of a call.
    """
    assert isinstance(backend, Tunable)
    (choice,) = read_choices(request["choices"])
    return backend.measure(choice, target, request["measure"])


if __name__ == "__main__":
    main()
