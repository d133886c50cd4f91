"""A compile in a process of its own, that says where it is and can be stopped there.

    python compile_until.py CHECKPOINT OUTPUT BACKEND PHASE

prints each phase as it begins. In PHASE, once a step of it is done, it prints "there" and waits for a line on stdin.
It ends with "done", or with "error: " and the IngotError's text.
"""

import signal
import sys

from ingot import IngotError, compile_model


def main(checkpoint: str, output: str, backend: str, stop: str) -> None:
    current, waited = "", False

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal current, waited
        if phase != current:
            current = phase
            print(phase, flush=True)
        if phase == stop and done and not waited:
            waited = True
            print("there", flush=True)
            sys.stdin.readline()

    try:
        compile_model(checkpoint, output, backend=backend, max_batch=8, max_tokens=64, jobs=1, progress=progress)
    except IngotError as error:
        print(f"error: {error}", flush=True)
    else:
        print("done", flush=True)


if __name__ == "__main__":
    # A shell that started the tests in the background had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*sys.argv[1:])
