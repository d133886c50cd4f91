"""A worker process that emits executables: one JSON request a line on stdin, one JSON answer a line on stdout.

A process of its own, because compilers print, fork, leak and sometimes die; JSON, because nothing here is pickled.
"""

import json
import os
import sys

from ingot.error_text import described
from ingot.executable_cache import build_executable, explained, measure_workspace
from ingot.ir.errors import IngotError
from ingot.ir.parse import parse_program
from ingot.ir.plugins import load_user_ops
from ingot.ir.target import Target


def main() -> None:
    # Compilers print to stdout whatever they like; the answers go where stdout was, and the noise to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from ingot.providers import BACKENDS  # after the noise is redirected: it imports torch

    load_user_ops()
    for line in sys.stdin:
        request = json.loads(line)
        backend = BACKENDS[request["backend"]]()
        answer: dict[str, object]
        try:
            if request.get("warm"):
                backend.warm_up()

                answer = {"ready": True}
            else:
                body = parse_program(request["program"])
                target = Target.model_validate_json(json.dumps(request["target"]))
                if (sizes := request.get("sizes")) is not None:
                    answer = {"workspace": measure_workspace(backend, body, request["key"], sizes, target.cores)}
                else:
                    executable = build_executable(backend, body, request["key"], target)
                    answer = {"executable": executable.model_dump(mode="json")}
        except (IngotError, OSError) as error:
            answer = {"error": described(explained(error))}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
